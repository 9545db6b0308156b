"""Tables and report: the numbers of the summaries, and texts that stay texts."""

import re
import shutil
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest

from psamil.evaluation.run_comparison import FinishedRun, compare_runs
from psamil.files import read_json, write_json
from psamil.report import run_report
from psamil.report.class_figures import confusion_matrix, precision_on_grid, roc_on_grid
from psamil.report.run_figures import figures_of, risk_groups
from psamil.report.run_report import write_report
from psamil.report.tables import cells_of_results, escape_latex, latex_table, marks_of_tests, ranks, save_tables
from psamil.training.metrics import average_precision, roc_auc
from psamil.training.settings import TrainingSettings
from tests.evaluation.made_runs import make_run, make_splits

NASTY = ['<script>alert("1")</script> & $x_1$', r"_100% #{} ~^ \input{secret} 你好"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder, splits = tmp_path_factory.mktemp("runs"), make_splits()
    psa = TrainingSettings(model="psa", model_options={"heads": 2, "head_dim": 4})
    first = make_run(folder / "psa", splits, signal=3.0, settings=psa, radii=True, headline="<b>60</b> slides")
    return [first, make_run(folder / "mean", splits, signal=0.0, seed=1)]


def page_of(comparison, path, **options) -> str:
    write_report(comparison, path / "index.html", **options)
    return (path / "index.html").read_text(encoding="utf-8")


def test_numbers_of_the_csv_are_those_of_the_summaries(folders, tmp_path):
    save_tables(compare_runs(folders), tmp_path)
    table = pd.read_csv(tmp_path / "table.csv", float_precision="round_trip")
    assert table["run"].tolist() == ["psa", "mean"]
    for i, folder in enumerate(folders):
        metrics = read_json(folder / "summary.json")["metrics"]
        for name, numbers in metrics.items():
            assert table.loc[i, f"{name}_mean"] == numbers["mean"]
            assert table.loc[i, f"{name}_sd"] == numbers["sd"]
        assert table.loc[i, "auc_low"] == metrics["auc"]["low"]
        assert table.loc[i, "auc_high"] == metrics["auc"]["high"]
    tests = pd.read_csv(tmp_path / "tests.csv")
    means = table["auc_mean"]
    assert tests["difference"].to_numpy() == pytest.approx(means[1] - means[0])
    assert (tests["p_holm"] >= tests["p_value"]).all()


def test_cells_that_a_spreadsheet_would_run_are_escaped(folders, tmp_path):
    save_tables(compare_runs(folders, names=["=cmd()", "b"]), tmp_path)
    assert (tmp_path / "table.csv").read_text().splitlines()[1].startswith("'=cmd()")


def test_latex_prints_any_name_as_it_is(folders):
    text = latex_table(compare_runs(folders, names=NASTY))
    assert r"\$x\_1\$" in text
    assert r"\_100\% \#\{\} \textasciitilde{}\textasciicircum{} \textbackslash{}input\{secret\}" in text
    assert r"\input" not in text
    for table in re.findall(r"\\begin\{tabular\}\{(\w+)\}(.*?)\\end\{tabular\}", text, re.DOTALL):
        columns, body = table
        rows = [line for line in body.splitlines() if line.endswith(r"\\")]
        assert len(rows) > 2
        assert {len(re.findall(r"(?<!\\)&", row)) + 1 for row in rows} == {len(columns)}
    assert escape_latex("a\nb") == "a b"


class Tags(HTMLParser):
    """Tags in order, texts and attributes of a page; and which tags are not closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.texts, self.attributes, self.open = set(), [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += [(tag, name, value or "") for name, value in attributes]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_names_stay_text_and_nothing_is_loaded(folders, tmp_path):
    page = page_of(compare_runs(folders, names=NASTY), tmp_path, planted_steps=(3.0, 5.0), notes=["<i>note</i>"])
    seen = Tags(page)
    assert seen.open == []
    assert not seen.tags & {"script", "link", "img", "iframe", "object", "i", "b", "image"}
    assert any(NASTY[0] in text for text in seen.texts)
    assert "<b>60</b> slides; fingerprint ffffffffffffffff" in seen.texts
    assert "<i>note</i>" in seen.texts
    assert not re.search(r"https?:|//www|@import|xmlns", page)
    references = [value for _, name, value in seen.attributes if name in ("href", "src", "xlink:href")]
    references += re.findall(r"url\(([^)]*)\)", page)
    assert references
    assert all(value.startswith("#") for value in references)
    ids = [value for _, name, value in seen.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert {value[1:] for value in references} <= set(ids)


def test_figures_of_classes(folders, tmp_path):
    comparison = compare_runs(folders)
    titles = [figure.title for figure in figures_of(comparison.runs)]
    assert titles == [
        "ROC curves",
        "Precision and recall",
        "Calibration",
        "Confusion",
        "Learned radii",
        "Similarity of heads in training",
        "Training",
    ]
    assert page_of(comparison, tmp_path) == page_of(comparison, tmp_path)  # the same bytes each time


def test_one_run_alone(folders, tmp_path):
    page = page_of(compare_runs(folders[1:]), tmp_path)
    assert "Differences" not in page
    assert "Learned radii" not in page
    assert "Similarity of heads" not in page


def test_survival_by_risk_group(tmp_path):
    folder = make_run(tmp_path / "run", make_splits(), signal=3.0, kind="survival")
    page = page_of(compare_runs([folder]), tmp_path)
    assert "log-rank p" in page
    assert "ROC" not in page
    run = FinishedRun.load(folder)
    high = risk_groups(run)
    fold = run.patients["fold"].to_numpy() == 1
    validation = run.validation(1)
    assert len(validation) == 10
    assert (high[fold] == (run.patients["risk"][fold] > validation["risk"].median())).all()


def test_without_matplotlib_the_page_says_what_is_missing(folders, tmp_path, monkeypatch):
    from psamil.errors import MissingExtraError

    def missing(*args, **options):
        raise MissingExtraError("matplotlib", "plot", "a report with figures")

    monkeypatch.setattr(run_report, "figures_of", missing)
    page = page_of(compare_runs(folders), tmp_path)
    assert "pip install" in page
    assert "<svg" not in page


def test_area_under_the_drawn_curve():
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, 400)
    scores = (labels + random.standard_normal(400)).round(1)  # with ties
    area = np.trapezoid(roc_on_grid(labels, scores), dx=0.01)
    assert area == pytest.approx(roc_auc(labels, scores), abs=2e-3)
    area = np.trapezoid(precision_on_grid(labels, scores), dx=0.01)
    assert area == pytest.approx(average_precision(labels, scores), abs=5e-3)


def test_precision_at_each_recall():
    labels, scores = np.array([1, 0, 1, 1, 0]), np.array([0.9, 0.8, 0.7, 0.3, 0.1])
    curve = precision_on_grid(labels, scores)
    assert curve[[0, 33, 34, 66, 67, 100]] == pytest.approx([1, 1, 2 / 3, 2 / 3, 3 / 4, 3 / 4])


@pytest.mark.parametrize("kind", ["binary", "three"])
def test_the_confusion_has_the_accuracy_of_the_summary(kind, tmp_path):
    """Folds are of the same size; thresholds are those of the metrics."""
    run = FinishedRun.load(make_run(tmp_path / "run", make_splits(), signal=1.0, kind=kind))
    counts = confusion_matrix(run)
    assert counts.sum() == len(run.patients)
    assert counts.sum(1).tolist() == [int((run.patients["truth"] == name).sum()) for name in run.task.classes]
    assert np.trace(counts) / counts.sum() == pytest.approx(run.summary["metrics"]["accuracy"]["mean"])


def test_best_and_second_best(tmp_path):
    splits = make_splits()
    folders = [make_run(tmp_path / f"run{i}", splits, signal=s, seed=i) for i, s in enumerate((0.0, 4.0, 1.0))]
    comparison = compare_runs(folders, names=["a", "b", "c"])
    means = [read_json(folder / "summary.json")["metrics"]["auc"]["mean"] for folder in folders]
    assert means[1] > means[2] > means[0]
    rank = ranks(comparison, comparison.metric_names)
    assert [rank.get((i, "auc")) for i in range(3)] == [None, 0, 1]
    assert [rank.get((i, "brier")) for i in range(3)] == [None, 0, 1]  # less is better
    assert rf"\textbf{{{means[1]:.3f}" in latex_table(comparison)
    assert rf"\underline{{{means[2]:.3f}" in latex_table(comparison)
    page = page_of(comparison, tmp_path)
    assert f"<strong>{means[1]:.3f}" in page
    assert f"<u>{means[2]:.3f}" in page
    equal = compare_runs([folders[1], folders[1], folders[0]], names=["b", "b again", "a"])
    rank = ranks(equal, equal.metric_names)
    assert [rank.get((i, "auc")) for i in range(3)] == [0, 0, None]


def test_marks_are_of_the_adjusted_test(tmp_path):
    splits = make_splits()
    folders = [make_run(tmp_path / f"run{i}", splits, signal=s, seed=i) for i, s in enumerate((4.0, 0.0, 3.9))]
    comparison = compare_runs(folders, names=["a", "b", "c"])
    p = {t.run: t.p_holm for t in comparison.tests if t.comparison.test.startswith("paired bootstrap")}
    assert p["b"] < 0.05 < p["c"]
    marks = marks_of_tests(comparison)
    assert marks["c"] == ""
    assert marks["b"] in ("*", "**", "***")
    _, rows = cells_of_results(comparison, comparison.metric_names)
    assert rows[1][1].splitlines()[0].endswith(marks["b"])
    assert "*" not in rows[1][2]  # the tests are of the headline metric
    page = page_of(comparison, tmp_path)
    assert "Stars: differs from a" in page


def test_localisation_has_a_table_of_its_own(folders, tmp_path):
    first = shutil.copytree(folders[0], tmp_path / "first")
    summary = read_json(first / "summary.json")
    summary["metrics"] |= {"patch_auc": {"mean": 0.8125, "sd": 0.01}, "froc_lesion": {"mean": 0.4375, "sd": 0.02}}
    write_json(first / "summary.json", summary)
    comparison = compare_runs([first, folders[1]])
    assert "patch_auc" not in comparison.metric_names
    assert comparison.localisation_names == ["patch_auc", "froc_lesion"]
    page = page_of(comparison, tmp_path)
    assert "<h2>Localisation</h2>" in page
    assert "0.812 ± 0.010" in page.partition("<h2>Localisation</h2>")[2]
    assert "0.812 ± 0.010" not in page.partition("<h2>Localisation</h2>")[0]
    save_tables(comparison, tmp_path)
    assert pd.read_csv(tmp_path / "table.csv")["froc_lesion_mean"][0] == 0.4375
    assert "Localisation" not in page_of(compare_runs(folders), tmp_path)


@pytest.mark.parametrize(("kind", "title"), [("three", "ROC curves"), ("regression", "Predicted and true values")])
def test_other_outcomes_have_their_figures(kind, title, tmp_path):
    splits = make_splits()
    folders = [make_run(tmp_path / f"run{i}", splits, signal=s, kind=kind) for i, s in enumerate((1.0, 4.0))]
    assert title in page_of(compare_runs(folders), tmp_path)
