"""What the three forms of the diversity loss do to the radii of the heads: tables in Markdown, and a picture.

python benchmarks/diversity.py    # two tables, and results/diversity.png: 3 heads, step by step
"""

import argparse
from pathlib import Path

import torch

from psamil.spatial import DistancePrior, diversity_entropy
from psamil.spatial.diversity import FORMS

HEADS = (2, 3, 4, 8)
STEPS = 600
DRAWN_HEADS = 3  # as in all published configurations
NAMES = {"quadrature": "quadrature", "monte-carlo": "monte-carlo (paper)", "binning": "binning (authors' code)"}


def gradient_at_start(heads: int, form: str) -> torch.Tensor:
    """d entropy / d rate at the initial radii, Gaussian decay."""
    rates = DistancePrior(heads).double().rate.detach().requires_grad_()
    entropy = diversity_entropy(rates, form, samples=1_000_000, generator=torch.Generator().manual_seed(0))
    return torch.autograd.grad(entropy, rates)[0]


def radii_in_descent(heads: int, form: str) -> list[list[float]]:
    """Radii at the start and after each step of Adam on the diversity loss alone."""
    prior = DistancePrior(heads)
    radii = [prior.radius_steps.tolist()]
    optimizer = torch.optim.Adam(prior.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (-diversity_entropy(prior.rate, form, generator=generator)).backward()
        optimizer.step()
        radii.append(prior.radius_steps.tolist())
    return radii


def draw(radii: dict[str, list[list[float]]], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(radii), figsize=(3.6 * len(radii), 3), sharey=True, layout="constrained")
    for axis, (form, curves) in zip(axes, radii.items(), strict=True):
        for head, curve in enumerate(zip(*curves, strict=True), start=1):
            axis.plot(curve, label=f"head {head}")
        axis.set(title=NAMES[form], xlabel="steps on the diversity loss alone")
        axis.grid(True, color="0.88")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set(ylabel="radius K (tile steps)", ylim=(0, None))
    axes[-1].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the picture")
    args = parser.parse_args()
    print("| heads | " + " | ".join(FORMS) + " |")
    print("|---" * (len(FORMS) + 1) + "|")
    for heads in HEADS:
        gradients = [gradient_at_start(heads, form).tolist() for form in FORMS]
        print(f"| {heads} | " + " | ".join(", ".join(f"{g:+.2g}" for g in gradient) for gradient in gradients) + " |")
    print(f"\n| heads | radii at the start | {' | '.join(f'after {STEPS} steps, {form}' for form in FORMS)} |")
    print("|---" * (len(FORMS) + 2) + "|")
    for heads in HEADS:
        descents = [radii_in_descent(heads, form) for form in FORMS]
        rows = [descents[0][0], *(radii[-1] for radii in descents)]
        print(f"| {heads} | " + " | ".join(", ".join(f"{k:.1f}" for k in radii) for radii in rows) + " |")
        if heads == DRAWN_HEADS:
            draw(dict(zip(FORMS, descents, strict=True)), args.out / "diversity.png")
    print(f"\nsaved {args.out / 'diversity.png'}")


if __name__ == "__main__":
    main()
