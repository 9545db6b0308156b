"""Pictures of heads: what is in them, by what their SVG says."""

import pytest

from psamil.explain import explain_bag
from psamil.report.head_figures import save_posterior, save_priors
from tests.explain.cases import bag_of, explained_model


@pytest.mark.parametrize("kind", ["psa", "psa, two layers"])
def test_priors_name_their_radii(kind, tmp_path):
    explanation = explain_bag(explained_model(kind), bag_of("lattice"))
    save_priors(explanation, tmp_path / "heads.svg")
    drawn = (tmp_path / "heads.svg").read_text()
    for head in explanation.heads:
        assert f"radius {head.radius_steps:.1f} steps = {112 * head.radius_steps:.0f} µm" in drawn
    assert ("layer 2" in drawn) == (kind != "psa")


def test_one_head_alone(tmp_path):
    from tests.explain.cases import saved_model

    explanation = explain_bag(saved_model("psa", heads=1, head_dim=4), bag_of("lattice"))
    save_priors(explanation, tmp_path / "heads.png")
    assert (tmp_path / "heads.png").stat().st_size > 1000


def test_the_posterior_of_a_tile(tmp_path):
    explanation = explain_bag(explained_model("psa"), bag_of("lattice", "continuous"))
    save_posterior(explanation, 45, tmp_path / "posterior.svg")
    drawn = (tmp_path / "posterior.svg").read_text()
    assert "a bag, tile 45" in drawn
    for head, row in zip(explanation.heads, explanation.rows(45), strict=True):
        assert f"{head.name}: radius" in drawn
        assert f"{len(row.neighbours)} tiles inside, effectively {row.perplexity:.1f}" in drawn
        for part in ("prior", "likelihood", "posterior"):
            assert f"{part}, up to {100 * getattr(row, part).max():.2g} %" in drawn
