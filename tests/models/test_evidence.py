"""The evidence of tiles: a readable loop, whitening, what the model can learn that plain pooling cannot."""

import pytest
import torch

from psamil import Bag, PackedBags, check_model, create_model
from psamil.errors import OptionError
from psamil.models.evidence import FLOOR, Whitening
from psamil.spatial.reference import posterior_attention_reference


def bags(*sizes, in_dim=10, dtype=torch.float32):
    torch.manual_seed(0)
    lattice = torch.cartesian_prod(torch.arange(9), torch.arange(9)).to(dtype)
    return [Bag(torch.randn(n, in_dim, dtype=dtype) * torch.arange(1, in_dim + 1), lattice[:n]) for n in sizes]


def trained(n_out=1, **options):
    """A model that has seen its training bags, in float64, with weights that are nothing special."""
    model = create_model("psa_evidence", in_dim=10, n_out=n_out, components=4, head_dim=4, **options).double()
    model.start_epoch(0, 3, lambda: [PackedBags.of(bags(50, 60, dtype=torch.float64))])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


@pytest.mark.parametrize("n_out", [1, 3])
def test_against_a_loop(n_out):
    model, several = trained(n_out), bags(40, 1, 70, dtype=torch.float64)
    output = model(PackedBags.of(several))
    scores = []
    for bag, logits in zip(several, output.logits, strict=True):
        x = model.embedding((bag.features - model.whitening.mean) @ model.whitening.matrix.T)
        q, k, v = model.attention.qkv(x).unflatten(1, (3, 3, 4)).unbind(1)
        prior = model.attention.prior
        around = posterior_attention_reference(q, k, v, bag.xy, prior.theta, decay=prior.decay, tau=prior.tau).flatten(
            1
        )
        forms = model.forms(model.attention.proj(around))
        evidence = (model.evidence.weight[None] * forms[:, None] ** 2).sum(2) + model.evidence.bias  # (n, n_out)
        weights = (model.log_sharpness.exp() * evidence).softmax(0)
        torch.testing.assert_close(logits, model.bias + (weights * evidence).sum(0), rtol=1e-9, atol=1e-9)
        best = evidence.max(1).values
        scores.append(best - evidence.mean(1) if n_out > 1 else best)
    torch.testing.assert_close(output.tile_scores, torch.cat(scores), rtol=1e-9, atol=1e-9)


def test_whitening_is_that_of_the_covariance():
    several = bags(80, 70, dtype=torch.float64)
    whitening = Whitening(10, 4).double()
    whitening.fit([PackedBags.of(bag) for bag in several])
    tiles = torch.cat([bag.features for bag in several])
    values, vectors = torch.linalg.eigh(torch.cov(tiles.T, correction=0))
    deviation = values.flip(0).sqrt()[:4]
    expected = (tiles - tiles.mean(0)) @ vectors.flip(1)[:, :4] / (deviation + FLOOR * deviation[0])
    torch.testing.assert_close(whitening(tiles).abs(), expected.abs())
    assert (
        whitening.matrix.gather(1, whitening.matrix.abs().argmax(1, keepdim=True)) > 0
    ).all()  # one of the two signs


def test_whitening_of_nothing_and_of_constant_tiles_changes_nothing():
    whitening = Whitening(3, 2)
    before = whitening.matrix.clone()
    whitening.fit([])
    whitening.fit([PackedBags.of(Bag(torch.ones(5, 3), torch.zeros(5, 2)))])
    assert torch.equal(whitening.matrix, before)


def test_whitens_once_and_saves_it_with_the_weights():
    model = create_model("psa_evidence", in_dim=10, n_out=1)
    assert model.whitening.matrix.shape == (10, 10)  # no more components than features
    batch = PackedBags.of(bags(50))
    model.start_epoch(0, 3, lambda: [batch])
    found = model.whitening.matrix.clone()
    model.start_epoch(1, 3, lambda: pytest.fail("asks for the training bags again"))
    other = create_model("psa_evidence", in_dim=10, n_out=1)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.whitening.matrix, found)


@pytest.mark.parametrize("context", ["psa", "none"])
def test_contract(context):
    check_model("psa_evidence", context=context)


def arranged(together: bool, generator: torch.Generator) -> Bag:
    """Twelve tiles of a kind on a lattice of 15 x 15: side by side, or anywhere."""
    features = torch.randn(225, 6, generator=generator)
    places = torch.arange(225).reshape(15, 15)
    if together:
        x, y = torch.randint(0, 11, (2,), generator=generator).tolist()
        chosen = places[x : x + 4, y : y + 3].flatten()
    else:
        chosen = torch.randperm(225, generator=generator)[:12]
    features[chosen, 0] += 4
    return Bag(features, torch.cartesian_prod(torch.arange(15), torch.arange(15)).float())


@pytest.mark.parametrize(("context", "learns"), [("psa", True), ("none", False)])
def test_learns_an_arrangement_and_where_it_is(context, learns):
    """The same number of tiles of a kind in all slides; without context nothing can be learned."""
    random = torch.Generator().manual_seed(1)
    labels = torch.arange(60) % 2
    slides = [arranged(bool(label), random) for label in labels]
    torch.manual_seed(0)
    model = create_model("psa_evidence", in_dim=6, n_out=1, k_init=3.0, context=context)
    train, test = PackedBags.of(slides[:40]), PackedBags.of(slides[40:])
    model.start_epoch(0, 1, lambda: [train])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2)
    for _ in range(60):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(train).logits[:, 0], labels[:40].float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        output = model.eval()(test)
    logits, truth = output.logits[:, 0], labels[40:] == 1
    auc = (logits[truth, None] > logits[None, ~truth]).float().mean()
    assert (auc > 0.9) == learns
    if learns:
        top = output.tile_scores[:0]
        for score, bag, label in zip(test.split(output.tile_scores), slides[40:], truth, strict=True):
            if label:
                top = torch.cat((top, bag.features[score.topk(6).indices, 0]))
        assert top.mean() > 2.5  # of 4 in the planted tiles, 0 elsewhere


@pytest.mark.parametrize("wrong", [{"components": 0}, {"rank": 0}, {"context": "near"}])
def test_wrong_options(wrong):
    with pytest.raises(OptionError):
        create_model("psa_evidence", in_dim=4, n_out=1, **wrong)
