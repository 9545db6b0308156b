"""Cohorts: bags joined with labels, split into parts, cached and simulated.

>>> cohort = Cohort.open("features", "labels.csv", target="subtype")
>>> splits = k_fold(cohort, k=5, seed=0)
>>> train = cohort.select(splits[0].train)
"""

from psamil.cohort.cache import BagCache, sample_tiles
from psamil.cohort.cohort import Cohort, Sample, join_slides
from psamil.cohort.folds import k_fold, nested, with_validation
from psamil.cohort.matching import MatchReport
from psamil.cohort.outcome_columns import OutcomeColumns, read_outcome
from psamil.cohort.outcomes import Classification, MultiLabel, Outcome, Regression, Survival
from psamil.cohort.simulation import simulate
from psamil.cohort.split_files import FittedSplits, fit_to_cohort, read_splits, write_splits
from psamil.cohort.splits import Split, Splits, splits_from_columns
from psamil.cohort.tables import Table, read_table

__all__ = [
    "BagCache",
    "Classification",
    "Cohort",
    "FittedSplits",
    "MatchReport",
    "MultiLabel",
    "Outcome",
    "OutcomeColumns",
    "Regression",
    "Sample",
    "Split",
    "Splits",
    "Survival",
    "Table",
    "fit_to_cohort",
    "join_slides",
    "k_fold",
    "nested",
    "read_outcome",
    "read_splits",
    "read_table",
    "sample_tiles",
    "simulate",
    "splits_from_columns",
    "with_validation",
    "write_splits",
]
