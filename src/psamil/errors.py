"""Errors a user can cause. Their message says what is wrong, where, and what to do; a traceback is for our bugs."""


class PsamilError(Exception):
    """Base of every error that psamil raises on purpose."""


class ShapeError(PsamilError, ValueError):
    """Tensors whose shapes do not fit together."""


class OptionError(PsamilError, ValueError):
    """An option outside what the product offers."""


def one_of(what: str, value: object, allowed: object) -> OptionError:
    """The error for an unknown name, with the known ones listed: ``raise one_of("decay", "gauss", DECAYS)``."""
    names = ", ".join(repr(name) for name in sorted(allowed))  # type: ignore[call-overload]
    return OptionError(f"unknown {what} {value!r}; known: {names}")
