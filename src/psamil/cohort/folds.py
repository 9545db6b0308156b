"""Makes splits: k-fold with a validation part, repeated, nested, by site.

The parts share the outcome evenly: classes; for survival, events and censored by quartile of time. The result depends
on the names of the patients, the outcome and the seed; not on the order of rows or the machine.
"""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence

from psamil.cohort.allocation import deal, place_groups, whole_weights
from psamil.cohort.splits import Split, Splits, Splittable
from psamil.errors import OptionError


def k_fold(
    cohort: Splittable, k: int = 5, *, val: float = 0.2, repeats: int = 1, seed: int = 0, by_site: bool = False
) -> Splits:
    """Every patient is in the test part once per repeat.

    Args:
        cohort: what is split.
        k: number of folds.
        val: share of the patients outside the test part that choose the model; 0 for none.
        repeats: how often everything is split anew.
        seed: other seeds give other splits.
        by_site: all patients of a site stay in one part, as balanced as the sizes of the sites allow.
    """
    _check_shares(k, val, repeats)
    people = _People(cohort, by_site)
    people.warn_of_small_classes(k)
    folds = []
    for repeat in range(repeats):
        part_of = people.divide(people.names, [1] * k, f"{seed}/{repeat}/test")
        for fold in range(k):
            test = {name for name in people.names if part_of[name] == fold}
            chosen = people.share(people.names - test, val, f"{seed}/{repeat}/{fold}/val")
            name = f"repeat {repeat}, fold {fold}" if repeats > 1 else f"fold {fold}"
            folds.append(people.split(chosen, test, name))
    kind = f"{k}-fold" + (f" x {repeats}" if repeats > 1 else "") + (" by site" if by_site else "")
    return Splits(tuple(folds), f"{kind}, seed {seed}")


def nested(cohort: Splittable, k: int = 5, inner: int = 4, *, seed: int = 0, by_site: bool = False) -> Splits:
    """k test parts; for each of them, the other patients are in the validation part once: k x inner folds."""
    _check_shares(k, 0.0, 1)
    _check_shares(inner, 0.0, 1)
    people = _People(cohort, by_site)
    people.warn_of_small_classes(k)
    part_of = people.divide(people.names, [1] * k, f"{seed}/0/test")
    folds = []
    for fold in range(k):
        test = {name for name in people.names if part_of[name] == fold}
        inner_part = people.divide(people.names - test, [1] * inner, f"{seed}/0/{fold}/inner")
        for i in range(inner):
            chosen = {name for name, part in inner_part.items() if part == i}
            folds.append(people.split(chosen, test, f"fold {fold}, inner {i}"))
    kind = f"nested {k} x {inner}" + (" by site" if by_site else "")
    return Splits(tuple(folds), f"{kind}, seed {seed}")


def with_validation(
    splits: Splits, cohort: Splittable, val: float = 0.2, *, seed: int = 0, by_site: bool = False
) -> Splits:
    """Takes a validation part out of the training part of the folds that have none."""
    _check_shares(2, val, 1)
    splits.check(cohort)
    people = _People(cohort, by_site)
    folds = []
    for fold in splits.folds:
        if fold.val:
            folds.append(fold)
            continue
        chosen = people.share(people.of(fold.train), val, f"{seed}/{fold.name}/val")
        samples = [sample for sample in fold.train if people.patient_of[sample] in chosen]
        folds.append(Split(tuple(set(fold.train) - set(samples)), tuple(samples), fold.test, fold.name))
    return Splits(tuple(folds), splits.name)


class _People:
    """The patients of a cohort, each with one stratum and, where asked for, one site."""

    def __init__(self, cohort: Splittable, by_site: bool) -> None:
        self.outcome = cohort.outcome
        self.patient_of = dict(zip(cohort.ids, cohort.patients, strict=True))
        self.samples_of: dict[str, list[str]] = defaultdict(list)
        for sample, patient in self.patient_of.items():
            self.samples_of[patient].append(sample)
        self.names = set(self.samples_of)
        self.stratum_of = _rarest(cohort.patients, cohort.outcome.strata().tolist())
        self.site_of = _sites(cohort) if by_site else None

    def of(self, samples: Sequence[str]) -> set[str]:
        return {self.patient_of[sample] for sample in samples}

    def divide(self, names: set[str], weights: Sequence[int], salt: str) -> dict[str, int]:
        """The part of each patient; no part is empty."""
        strata = {name: self.stratum_of[name] for name in sorted(names)}
        units = len({self.site_of[name] for name in names}) if self.site_of else len(names)
        what = "sites" if self.site_of else "patients"
        if self.site_of is None:
            part_of = deal(strata, weights, salt)
        else:
            part_of = place_groups(strata, {name: self.site_of[name] for name in names}, weights, salt)
        if len(set(part_of.values())) < len(weights):
            parts = f"{len(weights)} parts in the ratio {' : '.join(map(str, weights))}"
            raise OptionError(f"{units} {what} are too few for {parts}; use fewer folds or another val")
        return part_of

    def share(self, names: set[str], share: float, salt: str) -> set[str]:
        """The patients of about this share."""
        if not share:
            return set()
        part_of = self.divide(names, whole_weights([share, 1 - share]), salt)
        return {name for name, part in part_of.items() if part == 0}

    def split(self, val: set[str], test: set[str], name: str) -> Split:
        people = {"train": self.names - val - test, "val": val, "test": test}
        split = Split.of(
            {part: [s for one in some for s in self.samples_of[one]] for part, some in people.items()}, name
        )
        split.check_patients(self.patient_of)
        return split

    def warn_of_small_classes(self, k: int) -> None:
        names, of_sample = self.outcome.categories()
        pairs = set(zip(self.patient_of.values(), of_sample.tolist(), strict=True))
        counts = Counter(category for _, category in pairs)
        small = [f"{name!r} has {counts[i]}" for i, name in enumerate(names) if 0 < counts[i] < k]
        if small and k <= len(self.names):
            text = f"fewer patients than the {k} folds: {', '.join(small)}; some test parts will have none of them"
            warnings.warn(text, stacklevel=3)


def _rarest(patients: Sequence[str], strata: Sequence[int]) -> dict[str, int]:
    """One stratum per patient: of slides that differ, the one that fewest patients have."""
    strata_of: dict[str, set[int]] = defaultdict(set)
    for patient, stratum in zip(patients, strata, strict=True):
        strata_of[patient].add(stratum)
    counts = Counter(stratum for found in strata_of.values() for stratum in found)
    return {patient: min(found, key=lambda one: (counts[one], one)) for patient, found in strata_of.items()}


def _sites(cohort: Splittable) -> dict[str, str]:
    site_of: dict[str, str] = {}
    for patient, site in zip(cohort.patients, cohort.sites, strict=True):
        if site is None:
            raise OptionError(f"patient {patient!r} has no site; splitting by site needs one for every patient")
        if site_of.setdefault(patient, site) != site:
            raise OptionError(f"patient {patient!r} is of two sites, {site_of[patient]!r} and {site!r}")
    return site_of


def _check_shares(k: int, val: float, repeats: int) -> None:
    if k < 2:
        raise OptionError(f"splitting needs at least 2 folds, got {k}")
    if not 0 <= val < 1:
        raise OptionError(f"val is a share of the patients between 0 and 1, got {val}")
    if repeats < 1:
        raise OptionError(f"repeats must be at least 1, got {repeats}")
