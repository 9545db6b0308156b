"""What the three forms of the diversity loss do to the radii of the heads: tables in Markdown.

python benchmarks/diversity.py
"""

import torch

from psamil.spatial import DistancePrior, diversity_entropy
from psamil.spatial.diversity import FORMS

HEADS = (2, 3, 4, 8)
STEPS = 600


def gradient_at_start(heads: int, form: str) -> torch.Tensor:
    """d entropy / d rate at the initial radii, Gaussian decay."""
    rates = DistancePrior(heads).double().rate.detach().requires_grad_()
    entropy = diversity_entropy(rates, form, samples=1_000_000, generator=torch.Generator().manual_seed(0))
    return torch.autograd.grad(entropy, rates)[0]


def radii_after_descent(heads: int, form: str) -> list[float]:
    """Radii after some steps of Adam on the diversity loss alone."""
    prior = DistancePrior(heads)
    optimizer = torch.optim.Adam(prior.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (-diversity_entropy(prior.rate, form, generator=generator)).backward()
        optimizer.step()
    return prior.radius_steps.tolist()


def main() -> None:
    print("| heads | " + " | ".join(FORMS) + " |")
    print("|---" * (len(FORMS) + 1) + "|")
    for heads in HEADS:
        gradients = [gradient_at_start(heads, form).tolist() for form in FORMS]
        print(f"| {heads} | " + " | ".join(", ".join(f"{g:+.2g}" for g in gradient) for gradient in gradients) + " |")
    print(f"\n| heads | radii at the start | {' | '.join(f'after {STEPS} steps, {form}' for form in FORMS)} |")
    print("|---" * (len(FORMS) + 2) + "|")
    for heads in HEADS:
        rows = [DistancePrior(heads).radius_steps.tolist(), *(radii_after_descent(heads, form) for form in FORMS)]
        print(f"| {heads} | " + " | ".join(", ".join(f"{k:.1f}" for k in radii) for radii in rows) + " |")


if __name__ == "__main__":
    main()
