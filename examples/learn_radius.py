"""Learns from slide labels alone how far two kinds of tiles interact.

Every slide holds the same number of tiles of kind A and of kind B among others. In positive slides each B lies within r
steps of an A; in negative slides it lies 2r to 4r steps away. Only the arrangement tells them apart: the model has to
find the radius, which starts at 7 steps. (tau = 0.1: the radius is where the prior has fallen to a tenth.)

    python examples/learn_radius.py --ranges 2 4 --out demo-report
"""

import argparse
from pathlib import Path

import torch

from psamil import Bag, PackedBags, create_model
from psamil.spatial import parameter_groups

SIDE, PAIRS, DIM = 24, 12, 8  # lattice side, tiles of kind A (and of B) per slide, feature width


def make_slide(positive: bool, r: float) -> Bag:
    xy = torch.cartesian_prod(torch.arange(SIDE), torch.arange(SIDE)).double()
    a = torch.randperm(len(xy))[:PAIRS]
    distance = torch.cdist(xy, xy[a])  # of every tile to every A
    near = (distance <= r) & (distance > 0)
    far = (distance <= 4 * r) & (distance.amin(1, keepdim=True) >= 2 * r)
    b = torch.multinomial((near if positive else far).T.double() + 1e-9, 1).squeeze(1)  # a B for every A
    features = 0.3 * torch.randn(len(xy), DIM)
    features[a, 0] += 2
    features[b, 1] += 2
    return Bag(features, xy)


def train(r: float, steps: int = 300, seed: int = 0) -> tuple[list[float], list[list[float]]]:
    """Loss and radii of the two heads at every step."""
    torch.manual_seed(seed)
    model = create_model("psa", DIM, 1, heads=2, head_dim=16, tau=0.1, alpha=0.0)  # labels alone move radii
    optimizer = torch.optim.Adam(parameter_groups(model, lr=3e-3, prior_lr_scale=10))
    labels = torch.tensor([0.0, 1.0] * 4)
    losses, radii = [], []
    for step in range(steps):
        output = model(PackedBags.of([make_slide(label > 0, r) for label in labels.tolist()]))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(output.logits[:, 0], labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        radii.append(output.radii_steps[0].tolist())
        if step % 25 == 24:
            recent = sum(losses[-25:]) / 25
            print(f"r = {r:g}   step {step + 1:3d}   loss {recent:.3f}   K = {radii[-1][0]:.1f}, {radii[-1][1]:.1f}")
    return losses, radii


def report(runs: dict[float, tuple[list[float], list[list[float]]]], out: Path) -> None:
    """A picture of both curves for every range."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for i, (r, (losses, radii)) in enumerate(runs.items()):
        smooth = torch.tensor(losses).unfold(0, 20, 1).mean(1)
        left.plot(range(19, len(losses)), smooth, color=f"C{i}", label=f"r = {r:g}")
        right.plot(radii, color=f"C{i}")
        right.axhline(r, color=f"C{i}", linestyle=":")
        right.text(len(losses), r, f"r = {r:g}", color=f"C{i}", va="bottom", ha="right")
    left.set(xlabel="step", ylabel="loss (mean of 20 steps)", ylim=(0, None))
    left.legend(frameon=False)
    right.set(xlabel="step", ylabel="radius K of each head (tile steps)", ylim=(0, None))
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "learn_radius.png", dpi=150)
    print(f"wrote {out / 'learn_radius.png'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranges", type=float, nargs="+", default=[2.0, 4.0], help="planted ranges r, in tile steps")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("demo-report"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # tensors this small are fastest on one thread
    runs = {r: train(r, arguments.steps) for r in arguments.ranges}
    for r, (_, radii) in runs.items():
        first, last = (", ".join(f"{k:.1f}" for k in step) for step in (radii[0], radii[-1]))
        print(f"planted range {r:g} steps: radii {first} -> {last}")
    report(runs, arguments.out)
