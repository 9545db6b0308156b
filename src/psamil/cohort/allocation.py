"""Who goes into which part of a split: single patients dealt like cards, or whole sites placed to balance.

Only whole numbers and hashes of names are used, so the same names, strata and seed give the same parts on every
machine, with every version of every library, and in whatever order the names come.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

MOST_IMPROVEMENTS = 10_000
MOST_SHARE_DENOMINATOR = 100


def shuffled(names: Sequence[str], salt: str) -> list[str]:
    """The names in an order that depends on the salt and on nothing else."""
    return sorted(names, key=lambda name: (hashlib.sha256(f"{salt}\0{name}".encode()).digest(), name))


def whole_weights(shares: Sequence[float]) -> list[int]:
    """Whole numbers in the ratio of the shares, which are rounded to a hundredth."""
    fractions = [Fraction(share).limit_denominator(MOST_SHARE_DENOMINATOR) for share in shares]
    common = int(np.lcm.reduce([fraction.denominator for fraction in fractions]))
    return [int(fraction * common) for fraction in fractions]


def deal(stratum_of: dict[str, int], weights: Sequence[int], salt: str) -> dict[str, int]:
    """The part of each name, so that the parts share every stratum, and every run of strata, in the given ratio.

    Names are laid in a row, stratum after stratum and shuffled inside, and each goes to the part that is furthest
    behind its share. With k equal weights the parts of a stratum differ by at most one name, and so do the wholes.
    """
    row = sorted(shuffled(list(stratum_of), salt), key=lambda name: stratum_of[name])
    given, total = [0] * len(weights), sum(weights)
    part_of = {}
    for dealt, name in enumerate(row, start=1):
        behind = [weight * dealt - total * has for weight, has in zip(weights, given, strict=True)]
        part = behind.index(max(behind))
        given[part] += 1
        part_of[name] = part
    return part_of


def place_groups(
    stratum_of: dict[str, int], group_of: dict[str, str], weights: Sequence[int], salt: str
) -> dict[str, int]:
    """As :func:`deal`, but a group of names (a site) stays in one part; as balanced as groups allow.

    Imbalance is the sum over parts and strata of squared deviations from the fair count, each stratum weighed by its
    rarity, the size of the part counting as a stratum of its own. Groups are placed one by one, large ones first, where
    they add least; then the move or exchange that helps most is made until none helps. A part that would be best left
    empty still gets a group, as long as there are as many groups as parts.
    """
    groups = shuffled(sorted(set(group_of.values())), salt)
    counts = _counts(groups, stratum_of, group_of)
    total = counts.sum(0)
    rarity = total[-1] // total
    fair = np.outer(weights, total)  # (parts, strata), all times the sum of the weights
    counts = counts * sum(weights)
    part = np.zeros(len(groups), dtype=np.int64)
    excess = -fair
    for group in np.argsort(-counts[:, -1], kind="stable"):
        added = (rarity * ((excess + counts[group]) ** 2 - excess**2)).sum(1)
        part[group] = added.argmin()
        excess[part[group]] += counts[group]
    _improve(part, counts, excess, rarity)
    _fill_empty_parts(part, counts, excess, rarity)
    place = dict(zip(groups, part.tolist(), strict=True))
    return {name: place[group_of[name]] for name in stratum_of}


def _counts(groups: Sequence[str], stratum_of: dict[str, int], group_of: dict[str, str]) -> NDArray[np.int64]:
    """(groups, strata + 1) names of each group in each stratum, and in all."""
    row = {group: index for index, group in enumerate(groups)}
    column = {stratum: index for index, stratum in enumerate(sorted(set(stratum_of.values())))}
    counts = np.zeros((len(row), len(column) + 1), dtype=np.int64)
    for name, stratum in stratum_of.items():
        counts[row[group_of[name]], column[stratum]] += 1
    counts[:, -1] = counts.sum(1)
    return counts


def _improve(
    part: NDArray[np.int64], counts: NDArray[np.int64], excess: NDArray[np.int64], rarity: NDArray[np.int64]
) -> None:
    """Moves and exchanges groups, in place, as long as the imbalance falls."""
    n, parts = len(part), len(excess)
    partner = np.concatenate([counts, np.zeros((parts, counts.shape[1]), dtype=np.int64)])  # nobody: a move
    for _ in range(MOST_IMPROVEMENTS):
        where = np.concatenate([part, np.arange(parts)])
        best = (0, 0, 0)
        for group in range(n):
            change = partner - counts[group]  # (partners, strata) what the group's part gains
            gap = excess[part[group]] - excess[where]
            gain = (rarity * (2 * change * gap + 2 * change**2)).sum(1)
            gain[where == part[group]] = 0
            other = int(gain.argmin())
            best = min(best, (int(gain[other]), group, other))
        gain_of_best, group, other = best
        if gain_of_best == 0:
            return
        change = partner[other] - counts[group]
        here, there = int(part[group]), int(where[other])
        excess[here] += change
        excess[there] -= change
        part[group] = there
        if other < n:
            part[other] = here


def _fill_empty_parts(
    part: NDArray[np.int64], counts: NDArray[np.int64], excess: NDArray[np.int64], rarity: NDArray[np.int64]
) -> None:
    """Moves into each empty part, in place, the group that does least harm and leaves no other part empty."""
    for empty in sorted(set(range(len(excess))) - set(part.tolist())):
        harm = (rarity * 2 * counts * (counts + excess[empty] - excess[part])).sum(1)
        alone = np.bincount(part, minlength=len(excess))[part] == 1
        if alone.all():
            return
        group = min(np.flatnonzero(~alone).tolist(), key=lambda one: (int(harm[one]), one))
        excess[part[group]] -= counts[group]
        excess[empty] += counts[group]
        part[group] = empty
