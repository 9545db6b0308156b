"""What is said about a bag equals what dense arrays say."""

import math

import pytest
import torch

from psamil import Bag, PackedBags, create_model, list_models
from psamil.errors import DataError, OptionError
from psamil.explain import explain_bag
from psamil.explain.explaining import percentiles
from psamil.training.saved_model import SavedModel
from tests.explain.cases import (
    IN_DIM,
    LABELS,
    MODELS,
    THREE_CLASSES,
    TWO_CLASSES,
    bag_of,
    dense_posterior,
    explained_model,
    saved_model,
    tokens_of,
)

BAGS = {
    "lattice": ("lattice",),
    "continuous": ("continuous",),
    "duplicates": ("duplicates",),
    "three slides": ("lattice", "continuous", "duplicates"),
}


@pytest.mark.parametrize("places", BAGS)
@pytest.mark.parametrize("kind", MODELS)
def test_heads_equal_dense_arrays(kind, places):
    saved, bag = explained_model(kind), bag_of(*BAGS[places])
    explanation = explain_bag(saved, bag)
    caught = tokens_of(saved.model, PackedBags.of(bag))
    heads = iter(explanation.heads)
    for layer, (attention, tokens, out) in enumerate(caught):
        q, k, v = attention.project(tokens)
        prior, outputs = attention.prior, []
        for h in range(attention.heads):
            p = dense_posterior(q[:, h], k[:, h], bag.xy, bag.slides, prior.theta[h], prior.decay, prior.tau)
            head = next(heads)
            assert (head.layer, head.head) == (layer, h)
            torch.testing.assert_close(head.received, p.sum(0).detach())
            entropy = -(p * p.clamp_min(1e-300).log()).sum(1)
            torch.testing.assert_close(head.neighbourhood, entropy.exp().detach())
            outputs.append(p @ v[:, h])
        torch.testing.assert_close(attention.proj(torch.cat(outputs, 1)), out)  # the arrays are those of the model
        for a in range(attention.heads):
            for b in range(attention.heads):
                expected = 1 / (outputs[a] - outputs[b]).norm(dim=1).mean()
                torch.testing.assert_close(explanation.similarity[layer, a, b], expected.detach())
    assert next(heads, None) is None


@pytest.mark.parametrize("kind", MODELS)
def test_rows_of_a_tile_equal_dense_arrays(kind):
    saved, bag = explained_model(kind), bag_of("lattice", "continuous", "duplicates", n=150)
    explanation = explain_bag(saved, bag)
    caught = tokens_of(saved.model, PackedBags.of(bag))
    for tile in (0, 149, 150, 333, 449):
        rows = iter(explanation.rows(tile))
        for attention, tokens, _ in caught:
            q, k, _ = attention.project(tokens)
            prior = attention.prior
            for h in range(attention.heads):
                p = dense_posterior(q[:, h], k[:, h], bag.xy, bag.slides, prior.theta[h], prior.decay, prior.tau)[tile]
                row = next(rows)
                assert (row.query, row.head) == (tile, h)
                assert row.neighbours.tolist() == p.nonzero()[:, 0].tolist()
                torch.testing.assert_close(row.posterior, p[row.neighbours].detach())
        assert next(rows, None) is None


def test_received_is_one_on_average_and_neighbourhoods_fit_into_slides():
    bag = bag_of("lattice", "continuous")
    for head in explain_bag(explained_model("psa"), bag).heads:
        assert head.received.mean().item() == pytest.approx(1)
        assert 1 <= head.neighbourhood.min() <= head.neighbourhood.max() <= 40


def test_heads_say_who_they_are():
    bag = bag_of("lattice")
    one, two = explain_bag(explained_model("psa"), bag), explain_bag(explained_model("psa, two layers"), bag)
    assert [head.name for head in one.heads] == ["head 1", "head 2", "head 3"]
    assert [head.name for head in two.heads] == [f"layer {a} head {b}" for a in (1, 2) for b in (1, 2)]
    head = one.heads[1]
    assert head.radius_um(bag.step_um) == pytest.approx(112 * head.radius_steps)
    assert head.radius_um(None) is None
    at = torch.tensor([0.0, head.radius_steps * (1 - 1e-9), head.radius_steps * 1.01])
    assert head.prior_curve(at).tolist() == pytest.approx([1, head.tau, 0])


@pytest.mark.parametrize("name", list_models())
def test_every_model_has_tile_scores_and_a_prediction(name):
    torch.manual_seed(0)
    saved = SavedModel(create_model(name, IN_DIM, 1).eval(), TWO_CLASSES, {"settings": {"model": name}})
    bag = bag_of("lattice", n=60)
    bag = Bag(bag.features.float(), bag.xy.float())
    explanation = explain_bag(saved, bag, temperature=2.0)
    output = saved.model(PackedBags.of(bag))
    torch.testing.assert_close(explanation.tile_scores, output.tile_scores.detach())
    assert explanation.values["prob_positive"] == pytest.approx((output.logits / 2).sigmoid().item(), abs=1e-5)
    assert explanation.model == name
    if explanation.shares is not None:
        assert explanation.shares.sum().item() == pytest.approx(1)
    if not name.startswith("psa"):
        assert explanation.heads == ()
        assert explanation.similarity is None
        assert explanation.rows(3) == []


def test_heads_that_look_at_the_nearest_tiles_are_not_shown_as_discs():
    saved, bag = saved_model("psa", **MODELS["psa"], neighbours="nearest"), bag_of("lattice")
    explanation = explain_bag(saved, bag)
    assert explanation.heads == ()
    assert explanation.similarity is None
    assert explanation.rows(3) == []
    torch.testing.assert_close(explanation.tile_scores, saved.model(PackedBags.of(bag)).tile_scores.detach())


@pytest.mark.parametrize("task", [TWO_CLASSES, THREE_CLASSES, LABELS], ids=["two", "three", "labels"])
@pytest.mark.parametrize("name", ["psa", "abmil", "psa_evidence"])
def test_the_prediction_is_the_evidence_by_shares(name, task):
    """Shares are the weights of the tiles in the logits, wherever there are both."""
    saved, bag = saved_model(name, task), bag_of("lattice", "continuous")
    explanation = explain_bag(saved, bag)
    assert (explanation.shares is None) == (name == "psa_evidence" and task.n_out > 1)
    if explanation.shares is not None:
        logits = explanation.shares @ explanation.evidence.double()
        torch.testing.assert_close(logits, saved.model(PackedBags.of(bag)).logits[0].detach())


@pytest.mark.parametrize("task", [TWO_CLASSES, THREE_CLASSES], ids=["two", "three"])
def test_shares_of_pooling_by_evidence(task):
    saved, bag = saved_model("psa", task, **MODELS["psa"], pooling="evidence"), bag_of("lattice", "continuous")
    explanation = explain_bag(saved, bag)
    assert (explanation.shares is None) == (task.n_out > 1)  # each output has its own
    if explanation.shares is not None:
        logits = explanation.shares @ explanation.evidence.double()
        torch.testing.assert_close(logits, saved.model(PackedBags.of(bag)).logits[0].detach())


def test_two_weights_for_each_tile_are_no_shares():
    saved = saved_model("psa", TWO_CLASSES, **MODELS["psa"], pooling="opposed")
    explanation = explain_bag(saved, bag_of("lattice", "continuous"))
    assert explanation.shares is None
    assert explanation.evidence.shape == (len(explanation.tile_scores), 1)


def test_percentiles_and_top_tiles():
    scores = torch.tensor([3.0, 1.0, 2.0, 2.0, 5.0])
    assert percentiles(scores).tolist() == [75, 0, 37.5, 37.5, 100]
    assert percentiles(torch.zeros(4)).tolist() == [50] * 4
    assert percentiles(torch.ones(1)).tolist() == [50]
    explanation = explain_bag(explained_model("psa"), bag_of("lattice"))
    best = explanation.top_tiles(3)
    assert explanation.tile_scores[best].tolist() == sorted(explanation.tile_scores.tolist())[:-4:-1]
    assert explanation.percentiles[best[0]] == 100


def test_a_single_tile():
    explanation = explain_bag(explained_model("psa"), bag_of("lattice", n=1))
    assert [(head.received.item(), head.neighbourhood.item()) for head in explanation.heads] == [(1, 1)] * 3
    assert explanation.shares.tolist() == [1]
    assert [row.posterior.tolist() for row in explanation.rows(0)] == [[1.0]] * 3


def test_what_cannot_be_explained():
    saved = explained_model("psa")
    with pytest.raises(DataError, match="'nothing': has no tiles"):
        explain_bag(saved, Bag(torch.empty(0, IN_DIM), torch.empty(0, 2), "nothing"))
    explanation = explain_bag(saved, bag_of("lattice"))
    for tile in (-1, 40):
        with pytest.raises(OptionError, match="from 0 to 39"):
            explanation.rows(tile)


def test_infinite_likelihoods_do_not_break_sums():
    """A tile that is far from all others in the likelihood looks at itself alone."""
    saved, bag = explained_model("psa"), bag_of("lattice")
    bag.features[7] *= 1e4
    for head in explain_bag(saved, bag).heads:
        assert head.received.isfinite().all()
        assert head.received.sum().item() == pytest.approx(40)
        assert not math.isnan(head.neighbourhood.sum().item())
