"""The code in the documentation runs as it stands, and its links lead somewhere."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from psamil.cli import VERBS
from psamil.models import registry
from psamil.training.settings import TrainingSettings
from psamil.training.tasks import TaskOptions

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SNIPPETS = [
    pytest.param(code, id=f"{page.name}-{i}")
    for page in PAGES
    for i, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("code", SNIPPETS)
def test_snippets_run(code, monkeypatch, capsys):
    monkeypatch.setattr(registry, "_BUILDERS", dict(registry._BUILDERS))
    exec(compile(code, "<documentation>", "exec"), {"__name__": "documentation"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_reference_has_every_setting_and_verb():
    text = (ROOT / "docs" / "reference.md").read_text()
    settings = [setting.name for setting in fields(TrainingSettings) if setting.name != "task"]
    options = [f"task.{option.name}" for option in fields(TaskOptions)]
    for name in [*settings, *options, *VERBS]:
        assert f"| `{name}` |" in text, f"docs/reference.md has no row for {name}"
