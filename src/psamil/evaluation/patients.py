"""From predictions of slides to predictions of patients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from psamil.errors import OptionError

PLACES = ("fold", "part")  # predictions of different models, or for different purposes, are kept apart


def patient_predictions(
    predictions: pd.DataFrame, outcome: Sequence[str], predicted: Sequence[str] | None = None
) -> pd.DataFrame:
    """One row per patient (and fold and part, where the table has them), sorted, with the mean over its slides.

    Args:
        predictions: one row per sample, with the columns ``patient``, the outcome and what was predicted.
        outcome: columns of the truth, which all slides of a patient share.
        predicted: columns to average; if not given, ``prob_*`` and ``risk``.

    Returns:
        The columns ``fold``, ``part`` (if any), ``patient``, ``slides`` (how many), the outcome, the predictions.
    """
    columns = list(predicted) if predicted is not None else predicted_columns(predictions)
    missing = [name for name in ("patient", *outcome, *columns) if name not in predictions]
    if missing or not columns:
        raise OptionError(f"predictions need the column {missing[0] if missing else 'prob_... or risk'!r}")
    _refuse_gaps(predictions, columns)
    keys = [*(place for place in PLACES if place in predictions), "patient"]
    groups = predictions.groupby(keys, sort=True, dropna=False)
    for name in outcome:
        differing = groups[name].nunique(dropna=False) > 1
        if differing.any():
            patient = predictions.groupby(keys, sort=True, dropna=False)["patient"].first()[differing].iloc[0]
            raise OptionError(
                f"slides of patient {patient!r} differ in {name!r}; evaluate by slide, or correct the labels"
            )
    table = pd.concat([groups.size().rename("slides"), groups[[*outcome]].first(), groups[columns].mean()], axis=1)
    return table.reset_index()


def predicted_columns(predictions: pd.DataFrame) -> list[str]:
    """The columns that hold probabilities or risks."""
    return [str(name) for name in predictions.columns if str(name).startswith("prob_") or name == "risk"]


def _refuse_gaps(predictions: pd.DataFrame, columns: list[str]) -> None:
    """A missing prediction must not vanish in a mean."""
    finite = np.isfinite(predictions[columns].to_numpy(dtype=np.float64)).all(axis=1)
    whole = finite & predictions["patient"].notna().to_numpy()
    if not whole.all():
        row = int(np.flatnonzero(~whole)[0])
        sample = predictions["sample"].iloc[row] if "sample" in predictions else row
        raise OptionError(f"sample {sample!r} has no patient or no finite prediction in {', '.join(columns)}")
