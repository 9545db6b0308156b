"""Tables and report: the numbers of the summaries, and texts that stay texts."""

import re
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest

from psamil.evaluation.run_comparison import FinishedRun, compare_runs
from psamil.files import read_json
from psamil.report import run_report
from psamil.report.run_figures import figures_of, risk_groups, roc_on_grid
from psamil.report.run_report import write_report
from psamil.report.tables import escape_latex, latex_table, save_tables
from psamil.training.metrics import roc_auc
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
    assert titles == ["ROC curves", "Calibration", "Learned radii", "Training"]
    assert page_of(comparison, tmp_path) == page_of(comparison, tmp_path)  # the same bytes each time


def test_one_run_alone(folders, tmp_path):
    page = page_of(compare_runs(folders[1:]), tmp_path)
    assert "Differences" not in page
    assert "Learned radii" not in page


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


@pytest.mark.parametrize(("kind", "title"), [("three", "ROC curves"), ("regression", "Predicted and true values")])
def test_other_outcomes_have_their_figures(kind, title, tmp_path):
    splits = make_splits()
    folders = [make_run(tmp_path / f"run{i}", splits, signal=s, kind=kind) for i, s in enumerate((1.0, 4.0))]
    assert title in page_of(compare_runs(folders), tmp_path)
