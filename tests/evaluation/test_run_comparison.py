"""Runs side by side: only those that can be compared, and tests that agree with the functions they are made of."""

import numpy as np
import pytest
from scipy import stats

from psamil.errors import DataError, OptionError
from psamil.evaluation import delong_test, holm
from psamil.evaluation.experiment import summarise
from psamil.evaluation.run_comparison import FinishedRun, compare_runs, statistic_of
from psamil.files import read_json
from psamil.training.settings import TrainingSettings
from tests.evaluation.made_runs import make_run, make_splits


@pytest.fixture
def splits():
    return make_splits()


def test_tests_agree_with_their_functions_and_are_adjusted_over_runs(splits, tmp_path):
    folders = [make_run(tmp_path / f"run{i}", splits, signal=s, seed=i) for i, s in enumerate((3.0, 1.0, 0.0))]
    comparison = compare_runs(folders, names=["a", "b", "c"])
    tests = {(tested.run, tested.comparison.test): tested for tested in comparison.tests}
    names = list(dict.fromkeys(test for _, test in tests))
    assert len(names) == 4  # t-test, corrected, bootstrap, DeLong
    for name in names:
        raw = [tests[run, name].comparison.p_value for run in ("b", "c")]
        adjusted = [tests[run, name].p_holm for run in ("b", "c")]
        assert adjusted == pytest.approx(holm(raw))
        assert adjusted != raw
    a, c = (np.array(read_json(folders[i] / "summary.json")["metrics"]["auc"]["per_fold"]) for i in (0, 2))
    t_test = tests["c", names[0]].comparison
    assert t_test.p_value == pytest.approx(stats.ttest_rel(c, a).pvalue)
    assert t_test.difference == pytest.approx((c - a).mean())
    assert tests["c", names[1]].comparison.p_value > t_test.p_value  # shared training data count
    first, second = comparison.runs[2].patients, comparison.runs[0].patients
    labels = (first["truth"] == "positive").astype(int)
    expected = delong_test(labels, first["prob_positive"], second["prob_positive"], first["fold"])
    assert tests["c", names[3]].comparison == expected
    assert tests["c", names[2]].comparison.difference == pytest.approx(expected.difference)


def test_the_resampled_statistic_is_the_metric_of_the_summary(splits, tmp_path):
    metrics = {"binary": "auc", "three": "macro_auc", "survival": "c_index", "regression": "mae"}
    for kind, metric in metrics.items():
        run = FinishedRun.load(make_run(tmp_path / kind, splits, signal=1.0, kind=kind))
        assert run.headline == metric
        value = statistic_of(run)(np.ones((1, len(run.patients))))[0]
        assert value == pytest.approx(run.summary["metrics"][metric]["mean"])


def test_survival_is_compared_by_bootstrap(splits, tmp_path):
    folders = [
        make_run(tmp_path / f"run{i}", splits, signal=s, kind="survival", seed=i) for i, s in enumerate((3.0, 0.0))
    ]
    comparison = compare_runs(folders)
    assert {tested.metric for tested in comparison.tests} == {"c_index"}
    assert "DeLong" not in " ".join(tested.comparison.test for tested in comparison.tests)


def test_the_best_run_is_the_reference_if_wanted(splits, tmp_path):
    folders = [make_run(tmp_path / f"run{i}", splits, signal=s) for i, s in enumerate((0.0, 3.0))]
    comparison = compare_runs(folders, names=["poor", "good"], reference="best")
    assert comparison.reference.name == "good"
    assert all(tested.run == "poor" and tested.comparison.difference < 0 for tested in comparison.tests)
    with pytest.raises(OptionError, match="unknown reference 'worst'"):
        compare_runs(folders, reference="worst")


def test_other_splits_folds_or_labels_are_refused(splits, tmp_path):
    first = make_run(tmp_path / "first", splits, signal=1.0)
    with pytest.raises(DataError, match=r"other: has other splits than .*first"):
        compare_runs([first, make_run(tmp_path / "other", make_splits(seed=1), signal=1.0)])
    with pytest.raises(DataError, match="predicts something else"):
        compare_runs([first, make_run(tmp_path / "survival", splits, signal=1.0, kind="survival")])
    relabelled = make_run(tmp_path / "relabelled", splits, signal=1.0)
    text = (relabelled / "predictions.csv").read_text()
    (relabelled / "predictions.csv").write_text(text.replace("test,positive", "test,negative", 1))
    with pytest.raises(DataError, match="other patients or labels"):
        compare_runs([first, relabelled])
    partial = make_run(tmp_path / "partial", splits, signal=1.0)
    (partial / "folds" / "2" / "seed-0" / "metrics.json").unlink()
    with pytest.raises(DataError, match=r"finished the folds \[0, 1\], and its summary is of \[0, 1, 2\]"):
        compare_runs([partial])
    (partial / "summary.json").unlink()
    with pytest.raises(DataError, match=r"finished the folds \[0, 1\], and no summary of them"):
        compare_runs([partial])
    summarise(partial)
    with pytest.raises(DataError, match=r"finished folds \[0, 1\]"):
        compare_runs([first, partial])
    with pytest.raises(DataError, match="is no run directory"):
        compare_runs([tmp_path])


def test_runs_are_named_by_what_differs(splits, tmp_path):
    def run(folder, **settings):
        return make_run(tmp_path / folder, splits, signal=1.0, settings=TrainingSettings(**settings))

    folders = [
        run("one", model="mean", model_options={"hidden": 4}),
        run("two", model="mean", model_options={"hidden": 8}, lr=0.01),
        run("three", model="max", model_options={"hidden": 4}),
        run("four", model="max", model_options={"hidden": 4}),
    ]
    names = [run.name for run in compare_runs(folders).runs]
    assert names == ["mean (hidden 4, lr 0.0001)", "mean (hidden 8, lr 0.01)", "max [three]", "max [four]"]
    with pytest.raises(OptionError, match="as many names"):
        compare_runs(folders, names=["a"])
    with pytest.raises(OptionError, match="must differ"):
        compare_runs(folders, names=["a", "b", "c", "a"])


def test_the_best_of_an_error_is_the_lowest(splits, tmp_path):
    folders = [make_run(tmp_path / f"run{i}", splits, signal=s, kind="regression") for i, s in enumerate((1.0, 5.0))]
    comparison = compare_runs(folders, names=["poor", "good"], reference="best")
    assert comparison.reference.name == "good"
    assert {tested.metric for tested in comparison.tests} == {"mae"}
    assert all(tested.comparison.difference > 0 for tested in comparison.tests)


def test_runs_with_other_numbers_of_trainings_are_told(splits, tmp_path):
    one, other, three = (make_run(tmp_path / f"{i}", splits, signal=1.0, seeds=n) for i, n in enumerate((1, 1, 3)))
    assert compare_runs([one, other], names=["a", "b"]).caveats == []
    (told,) = compare_runs([one, three], names=["a", "b"]).caveats
    assert told.startswith("Trainings per fold are not the same")
    assert told.endswith("a 1, b 3.")


def test_folds_of_which_a_seed_is_missing_do_not_count(splits, tmp_path):
    folder = make_run(tmp_path / "run", splits, signal=1.0, seeds=2)
    (folder / "folds" / "1" / "seed-1" / "metrics.json").unlink()
    summarise(folder)
    comparison = compare_runs([folder], names=["a"])
    run = comparison.runs[0]
    assert [fold for fold, _ in run.jobs()] == [0, 0, 2, 2]
    assert set(run.patients["fold"]) == {0, 2}
    assert comparison.caveats == ["Fold 1 of a is left out: 1 of its 2 seeds are finished."]
    for fold in (0, 2):
        (folder / "folds" / str(fold) / "seed-0" / "metrics.json").unlink()
    summarise(folder)
    with pytest.raises(DataError, match="no fold of which every seed is finished"):
        compare_runs([folder])
