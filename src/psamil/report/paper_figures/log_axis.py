"""Powers of ten on a logarithmic axis in plain text: our style does not read TeX, since names may hold dollar signs."""

from __future__ import annotations

import math
from typing import Any

SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def write_powers(axis: Any) -> None:
    """10⁹ at the ticks of an x- or y-axis."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: power_of_ten(value)))
    axis.set_minor_formatter(NullFormatter())


def power_of_ten(value: float) -> str:
    """The nearest, as text."""
    return "10" + str(round(math.log10(value))).translate(SUPERSCRIPTS)
