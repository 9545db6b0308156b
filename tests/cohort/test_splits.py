"""Splits: nobody in two parts, everybody tested once, classes shared evenly, the same from any order of rows."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from psamil.cohort.allocation import deal, place_groups, shuffled, whole_weights
from psamil.cohort.folds import k_fold, nested, with_validation
from psamil.cohort.outcomes import Classification, Outcome, Regression, Survival
from psamil.cohort.splits import Split, Splits, splits_from_columns
from psamil.errors import DataError, OptionError


@dataclass
class People:
    """The least that can be split."""

    ids: Sequence[str]
    patients: Sequence[str]
    outcome: Outcome
    sites: Sequence[str | None] = ()
    columns: dict[str, Sequence[str | None]] = field(default_factory=dict)

    @property
    def column_names(self) -> Sequence[str]:
        return list(self.columns)

    def column(self, name: str) -> Sequence[str | None]:
        return self.columns[name]

    def reordered(self, order: Sequence[int]) -> People:
        def take(values: Sequence[str]) -> list[str]:
            return [values[i] for i in order]

        return People(take(self.ids), take(self.patients), self.outcome.take(order), take(self.sites))  # type: ignore[arg-type]


def people(labels: Sequence[int], slides: int = 1, sites: int = 7, classes: int = 2) -> People:
    """Patients with these labels and this many slides each."""
    patients = [f"p{i:03}" for i in range(len(labels)) for _ in range(slides)]
    outcome = Classification("y", tuple(f"class {c}" for c in range(classes)), np.repeat(labels, slides))
    ids = [f"{patient}-{i}" for i, patient in enumerate(patients)]
    return People(ids, patients, outcome, [f"s{int(patient[1:]) % sites}" for patient in patients])


@st.composite
def cohorts(draw: st.DrawFn) -> People:
    """12 to 60 patients with 1 to 3 slides and one of three kinds of outcome."""
    n = draw(st.integers(12, 60))
    slides = draw(st.lists(st.integers(1, 3), min_size=n, max_size=n))
    patients = [f"p{i}" for i, count in enumerate(slides) for _ in range(count)]
    seeded = np.random.default_rng(draw(st.integers(0, 1000)))
    kind = draw(st.sampled_from(["classes", "survival", "regression"]))
    values, flags = seeded.exponential(size=n).repeat(slides), (seeded.random(n) < 0.4).repeat(slides)
    outcome: Outcome = Regression("y", values)
    if kind == "classes":
        outcome = Classification("y", ("a", "b", "c"), seeded.integers(0, 3, n).repeat(slides))
    if kind == "survival":
        outcome = Survival("t", "e", values, flags)
    sites = [f"s{i}" for i in seeded.integers(0, 9, n).repeat(slides)]
    return People([f"{patient}/{i}" for i, patient in enumerate(patients)], patients, outcome, sites)


def quiet(make: Callable[[], Splits]) -> Splits:
    """Small classes are warned of; that is another test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


@settings(deadline=None)
@given(cohorts(), st.integers(2, 6), st.sampled_from([0, 0.2, 0.5]), st.integers(1, 2), st.integers(0, 5))
def test_k_fold_tests_everybody_once_and_leaks_nobody(
    cohort: People, k: int, val: float, repeats: int, seed: int
) -> None:
    splits = quiet(lambda: k_fold(cohort, k, val=val, repeats=repeats, seed=seed))
    splits.check(cohort)
    assert len(splits) == k * repeats
    for repeat in range(repeats):
        tested = Counter(id for fold in splits.folds[repeat * k : (repeat + 1) * k] for id in fold.test)
        assert tested == Counter(cohort.ids)
    patient_of = dict(zip(cohort.ids, cohort.patients, strict=True))
    for fold in splits.folds:
        assert sorted(fold.ids) == sorted(cohort.ids)
        patients = [{patient_of[id] for id in part} for part in (fold.train, fold.val, fold.test)]
        assert sum(map(len, patients)) == len(set(cohort.patients))
        assert bool(fold.val) == (val > 0)
        assert abs(len(patients[1]) - val * (len(patients[0]) + len(patients[1]))) <= 1


@settings(deadline=None)
@given(cohorts(), st.integers(2, 6), st.integers(0, 5))
def test_k_fold_shares_every_stratum_evenly(cohort: People, k: int, seed: int) -> None:
    splits = quiet(lambda: k_fold(cohort, k, seed=seed))
    patient_of = dict(zip(cohort.ids, cohort.patients, strict=True))
    for groups in (cohort.outcome.strata(), cohort.outcome.categories()[1], np.zeros(len(cohort.ids), int)):
        group_of = dict(zip(cohort.patients, groups.tolist(), strict=True))
        for group in set(group_of.values()):
            members = {patient for patient in group_of if group_of[patient] == group}
            counts = [len({patient_of[id] for id in fold.test} & members) for fold in splits.folds]
            assert max(counts) - min(counts) <= 1, f"group {group}: {counts}"
            for fold in splits.folds:
                test = {patient_of[id] for id in fold.test}
                val = {patient_of[id] for id in fold.val}
                assert abs(len(val & members) - 0.2 * len(members - test)) < 2


@settings(deadline=None)
@given(cohorts(), st.randoms(use_true_random=False), st.booleans())
def test_splits_do_not_depend_on_the_order_of_rows(cohort: People, order: random.Random, by_site: bool) -> None:
    rows = list(range(len(cohort.ids)))
    order.shuffle(rows)
    other = cohort.reordered(rows)
    try:
        splits = quiet(lambda: k_fold(cohort, 3, by_site=by_site, val=0.3))
    except OptionError:  # too few sites
        with pytest.raises(OptionError):
            quiet(lambda: k_fold(other, 3, by_site=by_site, val=0.3))
        return
    again = quiet(lambda: k_fold(other, 3, by_site=by_site, val=0.3))
    assert again == splits
    assert again.hash == splits.hash


def test_splits_are_the_same_on_every_machine() -> None:
    """Frozen: experiments that name this hash must stay reproducible."""
    cohort = people([0, 1, 1] * 10, slides=2)
    assert k_fold(cohort, 5, seed=1).hash == "c9ab741f4f16618117aa7b3df09029aeb69c6358b542bc8b7f890b9e94de07bc"
    assert (
        k_fold(cohort, 3, seed=1, by_site=True).hash
        == "b23e460d4604db7c2ee42e97795f08ce5a634dabae811a20ae2ed36a22f5d464"
    )


def test_seeds_and_repeats_differ() -> None:
    cohort = people([0, 1] * 20)
    assert len({k_fold(cohort, 4, seed=seed).hash for seed in range(5)}) == 5
    folds = k_fold(cohort, 4, repeats=3).folds
    assert len({fold.test for fold in folds}) == 12
    assert folds[5].name == "repeat 1, fold 1"


@settings(deadline=None)
@given(cohorts(), st.integers(2, 4), st.integers(2, 4))
def test_nested_validates_everybody_outside_the_test_part_once(cohort: People, k: int, inner: int) -> None:
    splits = quiet(lambda: nested(cohort, k, inner))
    splits.check(cohort)
    assert len(splits) == k * inner
    for first in range(0, k * inner, inner):
        folds = splits.folds[first : first + inner]
        assert len({fold.test for fold in folds}) == 1
        assert Counter(id for fold in folds for id in fold.val) == Counter(set(cohort.ids) - set(folds[0].test))
    assert Counter(id for fold in splits.folds[::inner] for id in fold.test) == Counter(cohort.ids)


@settings(deadline=None)
@given(cohorts(), st.integers(2, 3), st.integers(0, 3))
def test_sites_stay_whole(cohort: People, k: int, seed: int) -> None:
    assume(len(set(cohort.sites)) > 6)
    try:
        splits = quiet(lambda: k_fold(cohort, k, seed=seed, by_site=True, val=0.3))
    except OptionError as error:  # all small sites are tested, and the rest is one large site
        if str(error).startswith("1 sites are too few for 2 parts"):
            return
        raise
    site_of = dict(zip(cohort.ids, cohort.sites, strict=True))
    for fold in splits.folds:
        sites = [{site_of[id] for id in part} for part in (fold.train, fold.val, fold.test)]
        assert all(sites)
        assert sum(map(len, sites)) == len(set.union(*sites))
        assert sorted(fold.ids) == sorted(cohort.ids)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), min_size=1, max_size=30),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
)
def test_no_part_is_empty_while_there_are_sites_for_all(people: list[tuple[int, int]], weights: list[int]) -> None:
    group_of = {str(i): f"s{site}" for i, (site, _) in enumerate(people)}
    part_of = place_groups({str(i): stratum for i, (_, stratum) in enumerate(people)}, group_of, weights, "x")
    assert len(set(part_of.values())) == min(len(weights), len(set(group_of.values())))
    assert all(part_of[a] == part_of[b] for a in group_of for b in group_of if group_of[a] == group_of[b])


def imbalance(part_of: dict[str, int], stratum_of: dict[str, int], parts: int) -> float:
    """Of parts of equal shares, as documented; weights of strata are whole numbers."""
    n, cost = len(part_of), 0.0
    for members in [[name for name in part_of if stratum_of[name] == s] for s in set(stratum_of.values())] + [
        list(part_of)
    ]:
        counts = np.bincount([part_of[name] for name in members], minlength=parts)
        cost += n // len(members) * float(((counts - len(members) / parts) ** 2).sum())
    return cost


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=4, max_size=7), st.integers(0, 100))
def test_sites_are_placed_nearly_as_well_as_possible(sizes: list[int], seed: int) -> None:
    """Against all ways to place up to seven sites into two parts."""
    group_of = {f"p{site}.{i}": f"s{site}" for site, size in enumerate(sizes) for i in range(size)}
    labels = np.random.default_rng(seed).integers(0, 2, len(group_of)).tolist()
    stratum_of = dict(zip(group_of, labels, strict=True))
    found = imbalance(place_groups(stratum_of, group_of, [1, 1], "x"), stratum_of, 2)
    sites = sorted(set(group_of.values()))
    every = []
    for code in range(2 ** (len(sites) - 1)):
        place = {site: code >> i & 1 for i, site in enumerate(sites)}
        every.append(imbalance({name: place[site] for name, site in group_of.items()}, stratum_of, 2))
    assert found <= min(every) + 0.05 * max(every), (found, min(every))


def test_sites_are_balanced_where_they_can_be() -> None:
    """Site 0 holds most of the rare class; the others must make up for its size."""
    labels = [1] * 12 + [0] * 60
    cohort = people(labels, sites=72)
    cohort.sites = ["big"] * 6 + [f"s{i // 6}" for i in range(66)]
    splits = k_fold(cohort, 2, val=0.0, by_site=True)
    positive = set(cohort.ids[:12])
    assert sorted(len(positive & set(fold.test)) for fold in splits.folds) == [6, 6]
    assert [len(fold.test) for fold in splits.folds] == [36, 36]


def test_too_few_sites_patients_or_known_sites() -> None:
    with pytest.raises(OptionError, match="3 sites are too few for 4 parts"):
        k_fold(people([0, 1] * 10, sites=3), 4, by_site=True)
    with pytest.raises(OptionError, match="3 patients are too few for 5 parts"):
        k_fold(people([0, 1, 1]), 5)
    nowhere = people([0, 1] * 5)
    nowhere.sites = [None, *nowhere.sites[1:]]
    with pytest.raises(OptionError, match="'p000' has no site"):
        k_fold(nowhere, 2, by_site=True)
    twice = people([0, 1] * 5, slides=2)
    twice.sites = ["other", *twice.sites[1:]]
    with pytest.raises(OptionError, match="'p000' is of two sites, 'other' and 's0'"):
        k_fold(twice, 2, by_site=True)


def test_small_classes_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="fewer patients than the 5 folds: 'class 1' has 3"):
        splits = k_fold(people([1] * 3 + [0] * 30, slides=4), 5)
    assert sum(any(id < "p003" for id in fold.test) for fold in splits.folds) == 3
    censored = People([str(i) for i in range(20)], [str(i) for i in range(20)],
                      Survival("t", "e", np.arange(20.0), np.arange(20) < 2))  # fmt: skip
    with pytest.warns(UserWarning, match="'event' has 2"):
        k_fold(censored, 4)


def test_a_patient_whose_slides_differ_counts_for_the_rarer_class() -> None:
    cohort = people([0] * 40, slides=2)
    labels = np.zeros(80, dtype=np.int64)
    labels[:20:2] = 1  # one of two slides of ten patients
    cohort.outcome = Classification("y", ("a", "b"), labels)
    splits = k_fold(cohort, 5)
    assert [sum(id < "p010" for id in fold.test) for fold in splits.folds] == [4] * 5  # two patients, two slides each


@pytest.mark.parametrize("options", [{"k": 1}, {"val": 1.0}, {"val": -0.1}, {"repeats": 0}])
def test_options_out_of_range(options: dict[str, int]) -> None:
    with pytest.raises(OptionError):
        k_fold(people([0, 1] * 10), **options)  # type: ignore[arg-type]


def test_a_patient_in_two_parts_is_an_error() -> None:
    cohort = people([0, 1, 0, 1], slides=2)
    leak = Splits((Split(cohort.ids[:3], (), cohort.ids[3:], "published"),))  # two slides of p001
    with pytest.raises(OptionError, match="'published': train and test share 'p001'"):
        leak.check(cohort)
    with pytest.raises(OptionError, match="share 'a'"):
        Split(("a", "b"), ("a",))
    with pytest.raises(OptionError, match="'a' stands twice in test"):
        Split(("b",), (), ("a", "a"))
    with pytest.raises(OptionError, match="nobody to train on"):
        Split((), (), ("a",))
    with pytest.raises(OptionError, match="'x', which the cohort does not have"):
        Splits((Split(("x",)),)).check(cohort)


def test_validation_out_of_the_training_part_alone() -> None:
    cohort = people([0, 1] * 20, slides=2)
    ours = k_fold(cohort, 4, val=0)
    filled = with_validation(ours, cohort, 0.25)
    filled.check(cohort)
    for before, after in zip(ours.folds, filled.folds, strict=True):
        assert after.test == before.test
        assert sorted(after.train + after.val) == list(before.train)
        assert 14 <= len(after.val) <= 16
    assert with_validation(filled, cohort, 0.5) == filled  # what is there stays


def test_splits_from_columns() -> None:
    cohort = people([0, 1, 0, 1])
    cohort.columns = {"fold_10": ["train", "train", "val", "test"], "fold_2": ["Test", "TRAINING", None, "validation"]}
    splits = splits_from_columns(cohort)
    assert [fold.name for fold in splits.folds] == ["fold_2", "fold_10"]
    assert splits[0] == Split((cohort.ids[1],), (cohort.ids[3],), (cohort.ids[0],), "fold_2")
    cohort.columns = {"Split": ["train", "train", "test", "test"]}
    assert splits_from_columns(cohort)[0].test == tuple(cohort.ids[2:])
    cohort.columns = {"Split": ["train", "train", "tset", "test"]}
    with pytest.raises(OptionError, match="column 'Split' says 'tset' for 'p002-2'"):
        splits_from_columns(cohort)
    cohort.columns = {"label": ["train"] * 4}
    with pytest.raises(OptionError, match="no columns fold_0"):
        splits_from_columns(cohort)


def test_a_leak_in_columns_is_an_error() -> None:
    cohort = people([0, 1], slides=2)
    cohort.columns = {"split": ["train", "test", "train", "train"]}
    with pytest.raises(OptionError, match="share 'p000'"):
        splits_from_columns(cohort)
    dropped = splits_from_columns(cohort, leaks="drop")[0]
    assert (dropped.train, dropped.test) == (tuple(cohort.ids[2:]), (cohort.ids[1],))
    with pytest.raises(OptionError, match="policy for leaks"):
        splits_from_columns(cohort, leaks="ignore")


@settings(deadline=None)
@given(cohorts(), st.randoms(use_true_random=False))
def test_leaks_are_dropped_from_training_first(cohort: People, chance: random.Random) -> None:
    cells = [chance.choice(["train", "val", "test"]) for _ in cohort.ids]
    cells[0] = "train"
    cohort.columns = {
        "split": ["train" if p == cohort.patients[0] else c for p, c in zip(cohort.patients, cells, strict=True)]
    }
    fold = splits_from_columns(cohort, leaks="drop")[0]
    patient_of = dict(zip(cohort.ids, cohort.patients, strict=True))
    assert fold.test == tuple(
        sorted(i for i, c in zip(cohort.ids, cohort.columns["split"], strict=True) if c == "test")
    )
    in_val = {i for i, c in zip(cohort.ids, cohort.columns["split"], strict=True) if c == "val"}
    tested = {patient_of[id] for id in fold.test}
    assert set(fold.val) == {id for id in in_val if patient_of[id] not in tested}


@settings(deadline=None)
@given(cohorts())
def test_saved_splits_are_the_same(tmp_path_factory: pytest.TempPathFactory, cohort: People) -> None:
    path = tmp_path_factory.mktemp("splits") / "splits.json"
    splits = quiet(lambda: k_fold(cohort, 3))
    splits.save(path)
    assert Splits.load(path) == splits


def test_changed_and_foreign_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "splits.json"
    k_fold(people([0, 1] * 10), 2).save(path)
    path.write_text(path.read_text().replace("p003-3", "p999-3"))
    with pytest.raises(DataError, match="was changed after it was saved"):
        Splits.load(path)
    for content in ('{"folds": 3}', "[]", "{", '{"name": "x", "folds": [{"name": "", "train": ["a"]}]}'):
        path.write_text(content)
        with pytest.raises(DataError, match=str(path)):
            Splits.load(path)


@settings(deadline=None)
@given(
    st.dictionaries(st.text(min_size=1), st.integers(0, 3), min_size=1),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
)
def test_dealing_keeps_to_the_weights(stratum_of: dict[str, int], weights: list[int]) -> None:
    part_of = deal(stratum_of, weights, "salt")
    assert part_of.keys() == stratum_of.keys()
    counts = np.bincount(list(part_of.values()), minlength=len(weights))
    assert (np.abs(counts - len(part_of) * np.array(weights) / sum(weights)) <= len(weights) / 2).all()


def test_shuffling_and_weights() -> None:
    names = [f"n{i}" for i in range(50)]
    assert shuffled(names, "a") == shuffled(names[::-1], "a") != shuffled(names, "b")
    assert whole_weights([0.2, 0.8]) == [1, 4]
    assert whole_weights([1 / 3, 2 / 3]) == [1, 2]
