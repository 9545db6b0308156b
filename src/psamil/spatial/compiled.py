"""The compiled path: posterior attention in C, built on this computer when it is first needed.

Nothing is asked of an installation. Where there is a C compiler (``$CC``, or ``cc``, ``gcc``, ``clang``),
``compiled.c`` beside this file is built for the processor at hand, once per decay and width of a head, and kept in the
user's cache (``$PSAMIL_CACHE``, by default ``psamil`` in ``$XDG_CACHE_HOME`` or ``~/.cache``). Where there is none, or
the result fails a first trial, the paths in PyTorch do the same work. ``PSAMIL_COMPILED=0`` switches it off.

It serves float32 on the CPU, at any positions and radii, for small bags and large ones. Heads and bags are worked on in
parallel by as many threads as torch uses; every head of a bag is computed by one thread, so that results do not depend
on their number.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import math
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from psamil.spatial.decays import Decay
from psamil.spatial.reference import posterior_attention_reference, squared_radius

QUERIES = 16  # tiles of a block: as in compiled.c
STRIPS_PER_BAND = 8
MAX_HEAD_DIM = 256
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-std=gnu11", "-shared", "-fPIC")
COMPILE_SECONDS = 120

_SOURCE = Path(__file__).with_name("compiled.c")
_LOG = logging.getLogger(__name__)


class SortedTiles(NamedTuple):
    """The tiles of one bag as compiled.c looks them up: in rows, by x inside a row, and packed into blocks."""

    order: Tensor  # (n,) sorted tile -> tile
    x: Tensor  # (n,) of the sorted tiles
    y: Tensor  # (n,)
    row_start: Tensor  # (rows + 1,)
    row_low: Tensor  # (rows,) smallest y in the row
    row_high: Tensor  # (rows,)
    packed: Tensor  # (n,) sorted tiles; every 16 are close together

    @staticmethod
    def build(xy: Tensor) -> SortedTiles:
        """From positions (n, 2) that begin at 0. Rows are a step high where that holds few tiles, else about a tile."""
        n = len(xy)
        width, height = xy.amax(0).tolist()
        pitch = max(math.sqrt(width * height / n), height / (4 * math.sqrt(n)))
        pitch = 1.0 if 0.5 < pitch < 2 or pitch == 0 else pitch
        row = (xy[:, 1] / pitch).floor()
        order = xy[:, 0].argsort(stable=True)
        order = order[row[order].argsort(stable=True)]
        x, y = xy[order].T.contiguous()
        counts = torch.unique_consecutive(row[order], return_counts=True)[1]
        row_start = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
        of_row = torch.repeat_interleave(torch.arange(len(counts)), counts)
        row_low = torch.full((len(counts),), math.inf, dtype=torch.float64).scatter_reduce_(0, of_row, y, "amin")
        row_high = torch.full_like(row_low, -math.inf).scatter_reduce_(0, of_row, y, "amax")
        return SortedTiles(order, x, y, row_start, row_low, row_high, _packed(x, y, of_row, width, height))

    def as_struct(self) -> _Bag:
        """Pointers into these tensors, which must outlive it."""
        n_rows = len(self.row_low)
        return _Bag(len(self.order), n_rows, *(tensor.data_ptr() for tensor in self))


def _packed(x: Tensor, y: Tensor, row: Tensor, width: float, height: float) -> Tensor:
    """Sorted tiles in the order of queries.

    Vertical strips as wide as a block of 16 is high are walked through like a field that is ploughed: every second
    strip upwards, every second row of it backwards, so that no block spans a gap at a turn. Blocks are then taken band
    by band, some strips at a time, so that the keys of a block are still in the cache from those before.
    """
    n = len(x)
    strips = max(1, round(math.sqrt(n / QUERIES * (width + 1) / (height + 1))))
    sorted_x = x.sort().values
    bounds = sorted_x[torch.linspace(0, n, strips + 1).long()[1:-1]]  # tiles of one column stay in one strip
    strip = torch.bucketize(x, bounds, right=True)
    upwards = strip % 2 == 1
    packed = torch.where((row % 2 == 1) != upwards, -x, x).argsort(stable=True)
    packed = packed[torch.where(upwards, -row, row)[packed].argsort(stable=True)]
    packed = packed[strip[packed].argsort(stable=True)]
    full = n // QUERIES * QUERIES  # the last block, if it is not full, stays the last
    blocks = packed[:full].view(-1, QUERIES)
    step = math.sqrt(QUERIES * (width + 1) * (height + 1) / n)  # side of a block
    order = (strip[blocks[:, 0]] % STRIPS_PER_BAND).argsort(stable=True)
    order = order[(y[blocks].mean(1) / step).floor()[order].argsort(stable=True)]
    order = order[(strip[blocks[:, 0]] // STRIPS_PER_BAND)[order].argsort(stable=True)]
    return torch.cat((blocks[order].view(-1), packed[full:]))


class _Bag(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("n", "rows")),
        *((name, ctypes.c_void_p) for name in ("order", "x", "y", "row_start", "row_low", "row_high", "packed")),
    )


class _Head(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("d", "tile", "key_tile", "value_tile", "out_tile", "lse_tile")),
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "lse", "grad", "dq", "dk", "dv", "dtheta")),
        ("theta", ctypes.c_float),
        ("keep_d2", ctypes.c_double),
    )


def kernel_for(q: Tensor, decay: Decay) -> ctypes.CDLL | None:
    """The kernel that can do this work on this computer, if there is one."""
    served = q.device.type == "cpu" and q.dtype == torch.float32 and q.shape[2] <= MAX_HEAD_DIM
    return _kernel_of(decay, q.shape[2]) if served else None


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    bags: Sequence[SortedTiles],
    keep_d2: Sequence[float],
    kernel: ctypes.CDLL,
) -> tuple[Tensor, Tensor]:
    """Output (n, heads, d) and log2 of the softmax denominator (n, heads)."""
    q, k, v = (_rows(t) for t in (q, k, v))
    out, lse = torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:2])
    _run("forward", q, k, v, theta, bags, keep_d2, kernel, out=out, lse=lse)
    return out, lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    out: Tensor,
    lse: Tensor,
    bags: Sequence[SortedTiles],
    keep_d2: Sequence[float],
    kernel: ctypes.CDLL,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and theta."""
    q, k, v = (_rows(t) for t in (q, k, v))
    dq, dk, dv = (torch.empty_like(out) for _ in range(3))
    dtheta = torch.zeros(len(bags), len(theta), dtype=torch.float64)
    results = {"out": out, "lse": lse, "grad": grad.contiguous(), "dq": dq, "dk": dk, "dv": dv}
    _run("backward", q, k, v, theta, bags, keep_d2, kernel, dtheta=dtheta, **results)
    return dq, dk, dv, dtheta.sum(0).to(theta)


def _rows(tensor: Tensor) -> Tensor:
    """With the features of a tile and head next to each other."""
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


def _run(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    bags: Sequence[SortedTiles],
    keep_d2: Sequence[float],
    kernel: ctypes.CDLL,
    **results: Tensor,
) -> None:
    """Calls the function for every bag and head; tensors are addressed at the first tile of the bag."""
    function = getattr(kernel, name)
    inputs = {"q": q, "k": k, "v": v, **results}
    offsets = [0]
    for bag in bags:
        offsets.append(offsets[-1] + len(bag.order))
    structs = [bag.as_struct() for bag in bags]
    thetas = theta.tolist()

    def call(task: tuple[int, int]) -> int:
        b, h = task
        pointers = {key: (t[b, h] if key == "dtheta" else t[offsets[b], h]).data_ptr() for key, t in inputs.items()}
        head = _Head(
            d=q.shape[2],
            tile=q.stride(0),
            key_tile=k.stride(0),
            value_tile=v.stride(0),
            out_tile=results["out"].stride(0),
            lse_tile=results["lse"].stride(0),
            theta=thetas[h],
            keep_d2=keep_d2[h],
            **pointers,
        )
        return int(function(ctypes.byref(structs[b]), ctypes.byref(head)))

    tasks = sorted(
        ((b, h) for b in range(len(bags)) for h in range(len(thetas))),
        key=lambda task: -len(bags[task[0]].order) * keep_d2[task[1]],  # long ones first, so that threads end together
    )
    threads = min(len(tasks), torch.get_num_threads())
    if threads == 1:
        codes = [call(task) for task in tasks]
    else:
        with ThreadPoolExecutor(threads) as pool:
            codes = list(pool.map(call, tasks))
    if any(codes):
        raise MemoryError("no memory for the sorted keys and values of a slide")


_LOADED: dict[tuple[str, str, int], ctypes.CDLL | None] = {}


def _kernel_of(decay: Decay, d: int) -> ctypes.CDLL | None:
    """Loaded once per process."""
    log_prior, slope = getattr(decay, "c_log_prior", None), getattr(decay, "c_slope", None)
    if log_prior is None or slope is None or os.environ.get("PSAMIL_COMPILED") == "0":
        return None
    width = math.ceil(d / QUERIES) * QUERIES
    case = (log_prior, slope, width)
    if case not in _LOADED:
        with ThreadPoolExecutor(1) as fresh:  # a thread of its own: no autograd mode or FLOP counter of the caller
            _LOADED[case] = fresh.submit(_load, decay, *case).result()
    return _LOADED[case]


def _load(decay: Decay, log_prior: str, slope: str, width: int) -> ctypes.CDLL | None:
    """The library for this decay and width, built if need be; None where that cannot be done."""
    try:
        kernel = ctypes.CDLL(str(_build(log_prior, slope, width)))
    except (OSError, subprocess.SubprocessError) as error:
        _LOG.info("no compiled attention, PyTorch does it: %s", error)
        return None
    if not _agrees(kernel, decay, width):
        _LOG.warning("the compiled attention is wrong on this computer, PyTorch does it")
        return None
    return kernel


def _agrees(kernel: ctypes.CDLL, decay: Decay, d: int) -> bool:
    """A first trial against the definition: a wrong compiler, or a C expression that is not the decay's, shows here."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(40, 1, d, generator=generator) for _ in range(4))
    xy = torch.rand(40, 2, generator=generator, dtype=torch.float64) * 6
    bags = [SortedTiles.build(xy - xy.amin(0))]
    theta = decay.theta_of_radius(torch.tensor([3.0]), 1e-2)
    keep_d2 = squared_radius(decay, theta, 1e-2)
    leaves = [t.double().requires_grad_() for t in (q, k, v, theta)]
    expected = posterior_attention_reference(leaves[0], leaves[1], leaves[2], xy, leaves[3], decay=decay, tau=1e-2)
    gradients = torch.autograd.grad(expected, leaves, grad.double())
    out, lse = forward(q, k, v, theta, bags, keep_d2.tolist(), kernel)
    actual = backward(grad, q, k, v, theta, out, lse, bags, keep_d2.tolist(), kernel)
    pairs = zip((out, *actual), (expected, *gradients), strict=True)
    return all(bool((a - e).abs().amax() <= 1e-4 * e.abs().amax()) for a, e in pairs)


def _build(log_prior: str, slope: str, width: int) -> Path:
    compiler = _compiler()
    macros = [f"-DD={width}", f"-DLOG_PRIOR(d2, theta)=({log_prior})", f"-DSLOPE(d2, theta)=({slope})"]
    # what the compiler defines tells the compiler and the processor apart: a home folder may serve different computers
    target = subprocess.run(
        [*compiler, "-march=native", "-dM", "-E", "-x", "c", os.devnull],
        check=True,
        capture_output=True,
        timeout=COMPILE_SECONDS,
    ).stdout
    parts = (_SOURCE.read_bytes(), target, repr((FLAGS, macros)).encode())
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]
    folder = _cache_folder()
    library = folder / f"attention-{key}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / library.name
            command = [*compiler, *FLAGS, *macros, str(_SOURCE), "-o", str(built), "-lm"]
            subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_SECONDS)
            built.replace(library)  # at once: another process may look for it
    return library


def _compiler() -> list[str]:
    chosen = os.environ.get("CC")
    if chosen:
        return shlex.split(chosen)
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    raise FileNotFoundError("no C compiler among cc, gcc, clang")


@functools.cache
def _cache_folder() -> Path:
    """A folder of this user alone, since code is loaded from it."""
    base = os.environ.get("PSAMIL_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "psamil"
    folder = Path(base) / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            pass
        if hasattr(os, "getuid") and (folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022):
            raise PermissionError(f"{folder} can be written by others")
    except OSError as error:
        _LOG.info("%s; a temporary folder serves this process", error)
        return Path(tempfile.mkdtemp(prefix="psamil-"))
    return folder
