"""Slides per second of whole training steps of PSA-MIL, beside the authors' recipe.

    python benchmarks/training.py                                       # 8 slides x 10,000 tiles x 1024, float16
    python benchmarks/training.py --slides 2 --tiles 2000 --rounds 2    # a small part of it, to try it out

Both train the model of a preset (``paper-demo``: 3 heads x 32; ``paper-crc``: 3 heads x 96; both an adapter of two
layers, a Gaussian prior, radii of 6.5, 7 and 7.5 tile steps) in float32 on one thread, with the same loss and Adam. A
batch is 8 slides, which pass one by one while gradients add up: on a CPU that is faster than one pass of all, as it
needs less memory.

- ``psamil``: :func:`psamil.training.fold.train_fold` as it is. Slides come from the cache, layouts are kept after the
  first epoch, the state is written after each.
- ``authors``: their recipe, re-expressed from its description. Each visit computes all distances of the slide and sorts
  every row of them (their data loader keeps nothing from one epoch to the next); each head gathers the keys and values
  of its pi K^2 nearest tiles. Everything else of the model is ours, and features are read from our cache too, which is
  faster than their files.

How it is measured:

- Time is CPU time of the process, so that what a loader does in a thread of its own counts for both. The contenders
  take turns in one process. A round is an epoch of psamil and ``--visits`` slides of the authors, whose optimiser step
  counts by its share of a batch of 8. The first round is not counted. Ratios are of one round, and their median.
- Parts of a step are told apart by hooks that read the CPU time of the thread: on the adapter, and around the
  attention, between the layer that makes queries, keys and values and the one that takes its output. Hooks on tensors
  do the same for the backward pass. Loading is what other threads do, the distances and their order, and the conversion
  to float32. The rest is the linear layers and norms of the block, pooling, loss, optimiser and, for psamil, the
  writing of its state, here after every 8 slides.
- One claim is checked: psamil is faster by ``LEAST_SPEEDUP`` with ``paper-demo``, the size of heads that the other
  benchmarks have. ``paper-crc``, the default of the model, misses it: wider models spend most of their time in linear
  layers, which cost both the same. That both compute
  the same, but for the rule of pruning, is seen from the logits of the first slide before any training.
"""

import argparse
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from attention import cpu_name, progress
from contenders import Slide, gathered_attention
from loading import build, claim
from torch import Tensor, nn

from psamil import register_model
from psamil.bag import PackedBags
from psamil.cohort import BagCache, Cohort, Split
from psamil.cohort.simulation import STEP_PX0, write_trident_bag
from psamil.files import write_json
from psamil.models.psa import PRESETS, PSAMIL, SpatialAttention, psa
from psamil.spatial import Layout, parameter_groups
from psamil.training.fold import new_model, train_fold
from psamil.training.settings import TrainingSettings
from psamil.training.tasks import Task

BATCH = 8  # slides
DIM = 1024
LEAST_SPEEDUP, CLAIMED_PRESET = 20.0, "paper-demo"
PARTS = ("loading", "adapter", "attention", "rest")

Seconds = dict[str, float]  # per slide: those of each part, and "total"


class Clock:
    """CPU seconds of this thread in the parts of a model, forward and backward."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._began: dict[str, float] = {}

    def begin(self, part: str) -> None:
        self._began[part] = time.thread_time()

    def end(self, part: str) -> None:
        self.seconds[part] += time.thread_time() - self._began[part]

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        self.begin(part)
        yield
        self.end(part)

    def watch(self, model: PSAMIL) -> None:
        """Hooks: of layers in the forward pass, of the tensors between them in the backward pass, which goes back."""
        (block,) = model.blocks
        assert isinstance(block.attention, SpatialAttention | GatheredAttention)
        model.register_forward_pre_hook(lambda *_: self.begin("loading"))  # the features become float32
        model.adapter.register_forward_pre_hook(self._before_adapter)
        model.adapter.register_forward_hook(self._after_adapter)
        model.adapter.project.weight.register_post_accumulate_grad_hook(lambda _: self.end("adapter"))  # the last one
        block.attention.qkv.register_forward_hook(self._before_attention)
        block.attention.proj.register_forward_pre_hook(self._after_attention)

    def _before_adapter(self, layer: nn.Module, inputs: object) -> None:
        self.end("loading")
        self.begin("adapter")

    def _after_adapter(self, layer: nn.Module, inputs: object, out: Tensor) -> None:
        self.end("adapter")
        if out.requires_grad:
            out.register_hook(lambda grad: self.begin("adapter"))

    def _before_attention(self, layer: nn.Module, inputs: object, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda grad: self.end("attention"))
        self.begin("attention")

    def _after_attention(self, layer: nn.Module, inputs: tuple[Tensor]) -> None:
        self.end("attention")
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda grad: self.begin("attention"))


CLOCK = Clock()


@register_model
def watched_psa(in_dim: int, n_out: int, **options: Any) -> PSAMIL:
    """The model under the clock, by a name that training can be given."""
    model = psa(in_dim, n_out, **options)
    CLOCK.watch(model)
    return model


SETTINGS = TrainingSettings(
    model="watched_psa",
    batch_samples=BATCH,
    samples_per_pass=1,
    prior_lr_scale=1.0,  # radii stay near those of the start, as the cost of both depends on them
    accelerator="cpu",
)


class GatheredAttention(nn.Module):
    """The layers of our attention around the authors' way to attend. ``order`` is made by whoever loads the slide."""

    def __init__(self, ours: SpatialAttention) -> None:
        super().__init__()
        self.qkv, self.proj, self.prior = ours.qkv, ours.proj, ours.prior
        self.heads, self.head_dim = ours.heads, ours.head_dim
        self.order: tuple[Tensor, Tensor] = torch.empty(0), torch.empty(0)  # distances, and tiles from near to far

    def forward(self, x: Tensor, xy: Tensor, layout: Layout) -> Tensor:
        qkv = self.qkv(x).unflatten(1, (3, self.heads, self.head_dim))
        q, k, v = qkv.permute(1, 2, 0, 3).contiguous()  # (heads, n, d) each: what serves gathering best
        out = gathered_attention(q, k, v, *self.order, self.prior.theta)
        return self.proj(out.transpose(0, 1).flatten(1))


class Authors:
    """Their recipe: one slide after the other, everything about its geometry anew at every visit."""

    def __init__(self, cohort: Cohort, settings: TrainingSettings) -> None:
        self.cohort, self.task = cohort, Task.fit(cohort.outcome)
        self.targets = self.task.targets(cohort.outcome)
        model = new_model(settings, DIM, self.task.n_out)
        assert isinstance(model, PSAMIL)
        self.model, (block,) = model, model.blocks
        block.attention = self.attention = GatheredAttention(block.attention)  # type: ignore[arg-type]
        self.optimizer = torch.optim.Adam(
            parameter_groups(model, settings.lr, settings.weight_decay, settings.prior_lr_scale)
        )
        self.visits = 0

    def load(self, number: int) -> PackedBags:
        batch = PackedBags.of(self.cohort.load(self.cohort.samples[number]))
        xy = batch.xy.float()
        self.attention.order = torch.empty(0), torch.empty(0)  # one slide at a time in memory
        distance = torch.cdist(xy, xy)
        self.attention.order = distance, distance.argsort(1)
        return batch

    def train(self, visits: int) -> Seconds:
        CLOCK.seconds = dict.fromkeys(PARTS, 0.0)
        begin = time.process_time()
        for _ in range(visits):
            progress(f"authors: visit {self.visits + 1}")
            number = self.visits % len(self.cohort)
            with CLOCK.time("loading"):
                batch = self.load(number)
            output = self.model(batch)
            loss = self.task.loss(output.logits, self.targets[[number]]) + output.auxiliary_losses["diversity"]
            (loss / BATCH).backward()
            self.visits += 1
        per_slide = (time.process_time() - begin) / visits
        begin = time.process_time()
        self.optimizer.step()
        self.optimizer.zero_grad()
        per_slide += (time.process_time() - begin) / BATCH
        return parts(per_slide, {part: seconds / visits for part, seconds in CLOCK.seconds.items()})


def parts(total: float, known: Seconds) -> Seconds:
    """All seconds of a slide; those that are of no part are the rest."""
    told = {part: known[part] for part in PARTS[:-1]}
    return {**told, "rest": total - sum(told.values()), "total": total}


def take_turns(
    cohort: Cohort, settings: TrainingSettings, folder: Path, visits: int
) -> tuple[dict[str, list[Seconds]], list[float]]:
    """Seconds per slide of both in each round, and the radii of psamil at the end.

    The authors have their turn when psamil reports the end of an epoch: nothing of it is under way then.
    """
    authors = Authors(cohort, settings)
    taken: dict[str, list[Seconds]] = {"psamil": [], "authors": []}
    radii: list[float] = []
    clock: dict[str, float] = {}

    def start() -> None:
        CLOCK.seconds = dict.fromkeys(PARTS, 0.0)
        clock["process"], clock["thread"] = time.process_time(), time.thread_time()

    def end_of_round(record: dict[str, Any]) -> None:
        total, thread = time.process_time() - clock["process"], time.thread_time() - clock["thread"]
        CLOCK.seconds["loading"] += total - thread
        ours = parts(total / len(cohort), {part: s / len(cohort) for part, s in CLOCK.seconds.items()})
        theirs = authors.train(visits if record["epoch"] else 1)
        if record["epoch"]:
            taken["psamil"].append(ours)
            taken["authors"].append(theirs)
        radii[:] = record["radii_steps"][0]
        if record["epoch"] + 1 < settings.epochs:
            progress(f"round {record['epoch'] + 1} of {settings.epochs - 1}: psamil")
        start()

    progress("first round, which is not counted")
    start()
    train_fold(cohort, Split(cohort.ids), settings, folder, end_of_round)
    return taken, radii


@torch.no_grad()
def difference_of_logits(cohort: Cohort, settings: TrainingSettings) -> float:
    """Between ours and theirs on the first slide, for the same initial weights, over the size of ours."""
    authors, ours = Authors(cohort, settings), new_model(settings, DIM, 1)
    batch = authors.load(0)
    expected = ours(batch).logits
    return float((authors.model(batch).logits - expected).norm() / expected.norm())


def write_cohort(folder: Path, slides: int, tiles: int) -> Cohort:
    rows, files = [], []
    for i in range(slides):
        progress(f"writing slide {i + 1} of {slides}")
        random = np.random.default_rng(i)
        features = random.standard_normal((tiles, DIM), dtype=np.float32).astype(np.float16)
        coords = Slide.random(tiles, seed=i).xy.long().numpy() * STEP_PX0
        name = f"slide_{i:03d}"
        files.append(write_trident_bag(folder / "job", "benchmark", name, features, coords))
        rows.append({"slide_id": name, "case_id": name, "label": ("negative", "positive")[i % 2]})
    cache = BagCache(folder / "cache")
    build(cache, files)
    return Cohort.open(folder / "job", pd.DataFrame(rows), target="label", cache=cache)


def median_of(rounds: Sequence[Seconds], part: str) -> float:
    return statistics.median(seconds[part] for seconds in rounds)


def share_of(rounds: Sequence[Seconds], part: str) -> float:
    return statistics.median(seconds[part] / seconds["total"] for seconds in rounds)


def table(taken: dict[str, list[Seconds]]) -> str:
    """Of the documentation."""
    lines = [
        "| | slides per second | seconds per slide (lowest to highest round) | " + " | ".join(PARTS) + " |",
        "|---" * (3 + len(PARTS)) + "|",
    ]
    for name, rounds in taken.items():
        totals = [seconds["total"] for seconds in rounds]
        median = statistics.median(totals)
        shares = [f"{share_of(rounds, part):.1%}" for part in PARTS]
        spread = f"{median:.3f} ({min(totals):.3f} to {max(totals):.3f})"
        lines.append(f"| {name} | {1 / median:.3g} | {spread} | " + " | ".join(shares) + " |")
    return "\n".join(lines)


def main() -> None:
    example = "example: python benchmarks/training.py --slides 2 --tiles 2000 --rounds 2 --out quick-results"
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], epilog=example)
    parser.add_argument("--slides", type=int, default=8, help="2 or more")
    parser.add_argument("--tiles", type=int, default=10_000, help="of each slide")
    parser.add_argument("--rounds", type=int, default=5, help="that are counted")
    parser.add_argument("--preset", nargs="+", choices=PRESETS, default=["paper-demo", "paper-crc"], help="of sizes")
    parser.add_argument("--visits", type=int, default=2, help="slides that the authors' recipe visits in each round")
    parser.add_argument("--folder", type=Path, help="of the files, twice the bytes of all features; default: temporary")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    results: dict[str, Any] = {
        "machine": {"cpu": cpu_name(), "torch": torch.__version__, "python": platform.python_version()},
        "setting": {
            "command": " ".join(["python", "benchmarks/training.py", *sys.argv[1:]]),
            **{key: value for key, value in vars(args).items() if key not in ("folder", "out")},
            **{"dim": DIM, "batch": BATCH, "threads": 1, "dtype": "float32"},
        },
        "presets": {},
        "requirements": [],
    }
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        cohort = write_cohort(Path(folder), args.slides, args.tiles)
        print(f"{args.slides} slides x {args.tiles:,} tiles x {DIM} float16, batches of {BATCH}, one thread")
        for preset in args.preset:
            result = measure(cohort, preset, Path(folder) / preset, args.rounds, args.visits)
            results["presets"][preset] = result
            if preset == CLAIMED_PRESET:
                what = f"times faster than the authors, {preset}"
                results["requirements"].append(claim(what, result["ratio"]["median"], ">=", LEAST_SPEEDUP))
    write_json(args.out / "training.json", results)
    print(f"saved {args.out / 'training.json'}")


def measure(cohort: Cohort, preset: str, folder: Path, rounds: int, visits: int) -> dict[str, Any]:
    """Trains with both, and prints what was seen."""
    settings = replace(SETTINGS, model_options={"preset": preset}, epochs=rounds + 1)
    difference = difference_of_logits(cohort, settings)
    taken, radii = take_turns(cohort, settings, folder, visits)
    progress("")
    ratios = [t["total"] / o["total"] for o, t in zip(taken["psamil"], taken["authors"], strict=True)]
    sizes = PRESETS[preset]
    print(f"\n{preset}, {sizes['heads']} heads x {sizes['head_dim']}; ", end="")
    print("radii at the end: " + ", ".join(f"{k:.2f}" for k in radii) + " tile steps")
    print(f"logits of one slide differ by {difference:.1e} (relative), for the rule of pruning\n")
    print(table(taken))
    spread = f"{min(ratios):.1f} to {max(ratios):.1f} in single rounds"
    print(f"\npsamil trains {statistics.median(ratios):.1f} times as fast as the authors' recipe ({spread}).\n")
    return {
        **sizes,
        "radii_steps": radii,
        "ratio": {"median": statistics.median(ratios), "rounds": ratios},
        "seconds_per_slide": {
            name: {part: median_of(of_name, part) for part in (*PARTS, "total")} for name, of_name in taken.items()
        },
        "shares": {name: {part: share_of(of_name, part) for part in PARTS} for name, of_name in taken.items()},
        "rounds": taken,
        "difference_of_logits": difference,
    }


if __name__ == "__main__":
    main()
