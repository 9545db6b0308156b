"""Numbers with their uncertainty: intervals, comparison of runs, calibration, survival curves, localisation.

Plain functions over arrays. Metrics themselves are in :mod:`psamil.training.metrics`.
"""

from psamil.evaluation.calibration import ReliabilityCurve, calibrated_probabilities, fit_temperature, reliability_curve
from psamil.evaluation.comparison import (
    Comparison,
    corrected_t_test,
    delong_covariance,
    delong_test,
    holm,
    paired_bootstrap,
    paired_t_test,
)
from psamil.evaluation.froc import FrocCurve, froc_curve
from psamil.evaluation.intervals import FoldSummary, Interval, bootstrap_interval, fold_summary
from psamil.evaluation.lesions import label_lesions, lesion_lengths_um, local_maxima
from psamil.evaluation.localisation import ScoredSlide, lesion_froc, patch_auc, patch_f1, tile_froc
from psamil.evaluation.patients import patient_predictions, predicted_columns
from psamil.evaluation.resampling import (
    Patients,
    Statistic,
    auc_statistic,
    concordance_statistic,
    mean_over_folds,
    statistic_of_rows,
)
from psamil.evaluation.survival_curves import LogRank, SurvivalCurve, high_risk, kaplan_meier, log_rank

__all__ = [
    "Comparison",
    "FoldSummary",
    "FrocCurve",
    "Interval",
    "LogRank",
    "Patients",
    "ReliabilityCurve",
    "ScoredSlide",
    "Statistic",
    "SurvivalCurve",
    "auc_statistic",
    "bootstrap_interval",
    "calibrated_probabilities",
    "concordance_statistic",
    "corrected_t_test",
    "delong_covariance",
    "delong_test",
    "fit_temperature",
    "fold_summary",
    "froc_curve",
    "high_risk",
    "holm",
    "kaplan_meier",
    "label_lesions",
    "lesion_froc",
    "lesion_lengths_um",
    "local_maxima",
    "log_rank",
    "mean_over_folds",
    "paired_bootstrap",
    "paired_t_test",
    "patch_auc",
    "patch_f1",
    "patient_predictions",
    "predicted_columns",
    "reliability_curve",
    "statistic_of_rows",
    "tile_froc",
]
