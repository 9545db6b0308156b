r"""The arithmetic of posterior attention: streaming kernels in plain PyTorch, O(n) memory, any device.

Both kernels compute, for a group of queries i and a group of keys j, scores in base 2

    S_ji = log2(e) ( q_i . k_j / sqrt d  -  ||k_j||^2 / (2 sqrt d)  +  log f(d_ij | theta) ),

which differ from the definition by a term in ||q_i||^2 that cancels in the softmax over j. What makes them fast:

- the term in ||k||^2 rides along as one more column of the matrix product, and so does -lse_i in the backward pass;
- scores are laid out (keys, queries), so that on a lattice adding the prior is a gather of table rows;
- a chunk of scores stays in the L2 cache, and the backward pass recomputes it instead of storing it;
- ``exp2``, never ``exp``, which takes a slow path on the large negative scores of pruned pairs;
- products *into* outputs and gradients have exactly d columns (one more would waste half a vector register): sums
  over keys are taken apart.

``block_*`` serves blocks of queries with gathered keys (lattice or scattered), ``dense_*`` one small bag, all heads at
once. theta is one number per head, so its gradient is the sum over pairs of dL/dS_ij times d log f_ij / d theta.
"""

import contextlib
import functools
import math
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from psamil.spatial.blocks import BLOCK_SIDE, SLOTS, Blocks
from psamil.spatial.decays import Decay
from psamil.spatial.plan import Chunk, Plan

PRUNED = -1e30  # score of a pair that is not there; finite, so that no row can become NaN
PRUNED_PER_D2 = -1e36  # sinks a pair that is beyond the squared radius by one rounding error
LOG2_E = math.log2(math.e)
PAIRS_PER_CHUNK_CPU = 192 * 1024  # per thread
PAIRS_PER_CHUNK_GPU = 16 * 1024 * 1024


def pairs_per_chunk(device: torch.device) -> int:
    return PAIRS_PER_CHUNK_CPU * torch.get_num_threads() if device.type == "cpu" else PAIRS_PER_CHUNK_GPU


class Scratch:
    """Memory that is used again in every chunk: fresh memory would cost more time than the arithmetic on it.

    ``with Scratch.of(tensor) as scratch`` borrows the scratch of this thread, which stays for the next call if small.
    """

    KEPT_BYTES = 32 * 2**20
    _of_thread = threading.local()

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._flat: dict[str, Tensor] = {}
        self._views: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    @staticmethod
    @contextlib.contextmanager
    def of(like: Tensor) -> Iterator["Scratch"]:
        kind = f"{like.dtype} {like.device} {torch.is_inference_mode_enabled()}"
        kept = Scratch._of_thread.__dict__
        scratch = kept.pop(kind, None) or Scratch(like.new_empty(0))  # popped: a nested call gets its own
        yield scratch
        if sum(flat.nbytes for flat in scratch._flat.values()) <= Scratch.KEPT_BYTES:
            kept[kind] = scratch

    def __call__(self, name: str, *shape: int) -> Tensor:
        view = self._views.get((name, shape))
        if view is None:
            size = math.prod(shape)
            flat = self._flat.get(name)
            if flat is None or flat.numel() < size:
                flat = self._flat[name] = self._like.new_empty(size)
                self._views = {key: kept for key, kept in self._views.items() if key[0] != name}
            view = self._views[name, shape] = flat[:size].view(shape)
        return view


class HeadPlan:
    """What one head needs of the geometry: its plan and, on a lattice, its prior as a table.

    The table holds log2 f between every cell of the window around a block and every slot of it, PRUNED outside the
    disc; its last row stands for padding.
    """

    def __init__(self, blocks: Blocks, decay: Decay, theta: Tensor, keep_d2: float, lattice: bool) -> None:
        self.decay, self.theta, self.keep_d2 = decay, theta, keep_d2
        margin = math.floor(math.sqrt(keep_d2)) if lattice else 0
        self.plan = Plan(blocks, math.sqrt(keep_d2), window=BLOCK_SIDE + 2 * margin if lattice else 0)
        self.table: Tensor | None = None
        if lattice:
            self._cells_d2 = _window_d2(margin, theta.device)
            self._whole = torch.arange(int(self._cells_d2[-1, 0]) + 1, device=theta.device).to(theta.dtype)
            pruned = self._whole > keep_d2
            pruned[-1] = True
            self.table = self._tabulate(decay.log_prior(self._whole, theta).mul_(LOG2_E).masked_fill_(pruned, PRUNED))

    def _tabulate(self, values: Tensor) -> Tensor:
        """(window^2 + 1, SLOTS) from a value per squared distance: whole numbers on a lattice, so there are few."""
        return values.index_select(0, self._cells_d2.view(-1)).view(self._cells_d2.shape)

    def slope_table(self) -> Tensor | None:
        """d log f / d theta like the table, but of any finite value where pruned."""
        return None if self.table is None else self._tabulate(self.decay.slope(self._whole, self.theta))


@functools.lru_cache(maxsize=32)
def _window_d2(margin: int, device: torch.device) -> Tensor:
    """(window^2 + 1, SLOTS) squared distance from a cell of the window to a slot of the block; last row: padding."""
    cells = torch.arange(-margin, BLOCK_SIDE + margin, device=device)
    slots = torch.arange(BLOCK_SIDE, device=device)
    along = (cells[:, None] - slots).square()  # (window, BLOCK_SIDE)
    d2 = along[:, None, :, None] + along[None, :, None, :]  # (y, x) of the cell, (y, x) of the slot
    d2 = d2.reshape(-1, SLOTS)
    return torch.nn.functional.pad(d2, (0, 0, 0, 1), value=int(d2.amax()) + 1)


def block_forward(
    q: Tensor, k: Tensor, v: Tensor, plans: Sequence[HeadPlan], blocks: Blocks, scratch: Scratch
) -> tuple[Tensor, Tensor]:
    """Output (n, heads, d) and log2 of the softmax denominator (n, heads)."""
    n, heads, d = q.shape
    out, lse = q.new_empty(heads, n, d), q.new_empty(heads, n)
    pairs = pairs_per_chunk(q.device)
    for h, head in enumerate(plans):
        keys, queries = _tables(q[:, h], k[:, h], v[:, h], scratch, order=blocks.order, query_columns=d + 1)
        o, log_sum = scratch("o", len(blocks.bag), SLOTS, d), scratch("log_sum", len(blocks.bag), SLOTS)
        for chunk in head.plan.chunks(pairs):
            key, query = _gather(keys, queries, head.plan, chunk, scratch)
            score = _log_prior(head, chunk, scratch).baddbmm_(key[..., : d + 1], query.mT)
            top = score.amax(1, keepdim=True)
            p = score.sub_(top).exp2_()
            total = p.sum(1)
            torch.bmm(p.mT, key[..., d + 2 :], out=o[chunk.first : chunk.last]).div_(total[..., None])
            torch.add(top[:, 0], total.log2_(), out=log_sum[chunk.first : chunk.last])
        torch.index_select(o.view(-1, d), 0, head.plan.place, out=out[h])
        torch.index_select(log_sum.view(-1), 0, head.plan.place, out=lse[h])
    return out.transpose(0, 1), lse.T


def block_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    plans: Sequence[HeadPlan],
    blocks: Blocks,
    scratch: Scratch,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and theta, with P = exp2(S - lse) recomputed and dS_ji = P_ji (v_j . dO_i - O_i . dO_i)."""
    n, heads, d = q.shape
    scale = LOG2_E / math.sqrt(d)
    dq, dk, dv = (q.new_empty(heads, n, d) for _ in range(3))
    dtheta = q.new_zeros(heads)
    pairs = pairs_per_chunk(q.device)
    for h, head in enumerate(plans):
        slopes = head.slope_table()
        keys, queries = _tables(q[:, h], k[:, h], v[:, h], scratch, order=blocks.order, query_columns=2 * d + 3)
        torch.neg(lse[:, h], out=queries[:n, d + 1])  # after [q, 1]: [-lse, -O.dO, dO]
        queries[n, d + 1] = PRUNED  # an empty slot attends to nothing
        torch.mul(out[:, h], grad[:, h], out=queries[:n, d + 3 :])
        torch.neg(queries[:n, d + 3 :].sum(-1), out=queries[:n, d + 2])
        queries[:n, d + 3 :] = grad[:, h]
        dq_slots = scratch("dq", len(blocks.bag), SLOTS, d)
        dk_sorted, dv_sorted = scratch("dk", n + 1, d).zero_(), scratch("dv", n + 1, d).zero_()
        for chunk in head.plan.chunks(pairs):
            key, query = _gather(keys, queries, head.plan, chunk, scratch)
            p = _log_prior(head, chunk, scratch).baddbmm_(key[..., : d + 2], query[..., : d + 2].mT).exp2_()
            ds = torch.bmm(key[..., d + 1 :], query[..., d + 2 :].mT, out=scratch("ds", *p.shape)).mul_(p)
            dtheta[h] += torch.dot(ds.view(-1), _slope(head, slopes, chunk, scratch).view(-1))
            torch.bmm(ds.mT, key[..., :d], out=dq_slots[chunk.first : chunk.last])
            d_key = scratch("d_key", *key.shape[:2], d)
            torch.mul(key[..., :d], ds.sum(-1, keepdim=True).mul_(-scale), out=d_key).baddbmm_(ds, query[..., :d])
            dk_sorted.index_add_(0, chunk.keys, d_key.view(-1, d))
            torch.bmm(p, query[..., d + 3 :], out=d_key)
            dv_sorted.index_add_(0, chunk.keys, d_key.view(-1, d))
        torch.index_select(dq_slots.view(-1, d), 0, head.plan.place, out=dq[h])
        torch.index_select(dk_sorted, 0, blocks.inverse, out=dk[h])
        torch.index_select(dv_sorted, 0, blocks.inverse, out=dv[h])
    dq.mul_(1 / math.sqrt(d))
    dk.mul_(1 / LOG2_E)
    return dq.transpose(0, 1), dk.transpose(0, 1), dv.transpose(0, 1), dtheta


def _tables(
    q: Tensor, k: Tensor, v: Tensor, scratch: Scratch, *, order: Tensor, query_columns: int
) -> tuple[Tensor, Tensor]:
    """What the kernels gather from, for one head; each with one more row.

    - keys (n + 1, 2 d + 2), sorted: [k, -log2(e) ||k||^2 / (2 sqrt d), 1, v]; last row: nobody attends to it;
    - queries (n + 1, query_columns): [q log2(e) / sqrt d, 1, room for more]; last row: an empty slot.

    The mean of the keys is taken out of both: a common shift changes no distance, but improves rounding.
    """
    n, d = k.shape
    mean = k.mean(0)
    keys = scratch("keys", n + 1, 2 * d + 2)
    rows = torch.index_select(k, 0, order, out=scratch("rows", n, d)).sub_(mean)
    keys[:n, :d] = rows
    torch.mul(rows.square_().sum(-1), -0.5 * LOG2_E / math.sqrt(d), out=keys[:n, d])
    keys[:n, d + 2 :] = torch.index_select(v, 0, order, out=rows)
    keys[n] = 0
    keys[n, d] = PRUNED
    keys[:, d + 1] = 1
    queries = scratch("queries", n + 1, query_columns)
    torch.sub(q, mean, out=queries[:n, :d]).mul_(LOG2_E / math.sqrt(d))
    queries[n] = 0
    queries[:, d] = 1
    return keys, queries


def _gather(keys: Tensor, queries: Tensor, plan: Plan, chunk: Chunk, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """The rows of the key table (c, L, .) and of the query table (c, SLOTS, .) that a chunk needs."""
    key = torch.index_select(keys, 0, chunk.keys, out=scratch("key", len(chunk.keys), keys.shape[1]))
    slots = plan.queries[chunk.first : chunk.last].view(-1)
    query = torch.index_select(queries, 0, slots, out=scratch("query", len(slots), queries.shape[1]))
    return key.view(-1, chunk.length, keys.shape[1]), query.view(-1, SLOTS, queries.shape[1])


def _log_prior(head: HeadPlan, chunk: Chunk, scratch: Scratch) -> Tensor:
    """(c, L, SLOTS) log2 f, PRUNED outside the disc."""
    if head.table is not None:
        value = torch.index_select(head.table, 0, chunk.cells, out=scratch("score", len(chunk.cells), SLOTS))
        return value.view(-1, chunk.length, SLOTS)
    d2 = _scattered_d2(head.plan, chunk, scratch)
    return _prune(head.decay.log_prior(d2, head.theta).mul_(LOG2_E), d2, head.keep_d2, scratch)


def _slope(head: HeadPlan, table: Tensor | None, chunk: Chunk, scratch: Scratch) -> Tensor:
    """As many values of d log f / d theta, of any finite value where pruned. To be called after _log_prior."""
    if table is not None:
        return torch.index_select(table, 0, chunk.cells, out=scratch("slope", len(chunk.cells), SLOTS))
    d2 = scratch("d2", chunk.last - chunk.first, chunk.length, SLOTS)  # still holds the distances
    return head.decay.slope(d2, head.theta)


def _prune(log_prior: Tensor, d2: Tensor, keep_d2: float, scratch: Scratch) -> Tensor:
    """Sinks, in place, the log-prior of pairs beyond the radius: several times faster than a boolean mask."""
    beyond = torch.sub(d2, keep_d2, out=scratch("beyond", *d2.shape)).clamp_min_(0)
    return log_prior.add_(beyond, alpha=PRUNED_PER_D2)


def _scattered_d2(plan: Plan, chunk: Chunk, scratch: Scratch) -> Tensor:
    """(c, L, SLOTS) squared distances. Positions are taken relative to the block first: accurate also in float32."""
    blocks, c = plan.order[chunk.first : chunk.last], chunk.last - chunk.first
    centre = plan.blocks.origin[blocks][:, None]
    anywhere = plan.blocks.xy[:1]  # position of padding, which the key table rules out already
    key_xy = torch.cat((plan.blocks.xy, anywhere)).index_select(0, chunk.keys).view(c, chunk.length, 2)
    d2, dy = scratch("d2", c, chunk.length, SLOTS), scratch("dy", c, chunk.length, SLOTS)
    precision = torch.float64 if plan.wide and key_xy.dtype == torch.float64 else d2.dtype
    key_x, key_y = (key_xy - centre).to(precision).unbind(-1)
    query_x, query_y = (plan.blocks.query_xy[blocks] - centre).to(precision).unbind(-1)
    if precision != d2.dtype:
        d2.copy_(key_x[:, :, None] - query_x[:, None, :])
        dy.copy_(key_y[:, :, None] - query_y[:, None, :])
    else:
        torch.sub(key_x[:, :, None], query_x[:, None, :], out=d2)
        torch.sub(key_y[:, :, None], query_y[:, None, :], out=dy)
    return d2.square_().addcmul_(dy, dy)


def dense_forward(
    q: Tensor, k: Tensor, v: Tensor, xy: Tensor, theta: Tensor, keep_d2: Tensor, decay: Decay
) -> tuple[Tensor, Tensor]:
    """The same for one bag in which every query looks at every key, all heads at once."""
    n, heads, d = q.shape
    keys, queries = _stacked_tables(q, k, v, query_columns=d + 1)
    out, lse = q.new_empty(heads, n, d), q.new_empty(heads, n)
    scratch = Scratch(q)
    for part in _dense_parts(q):
        score = _dense_log_prior(_dense_d2(xy, part, scratch), theta, keep_d2, decay, scratch)
        score.baddbmm_(keys[:, :n, : d + 1], queries[:, part].mT)
        top = score.amax(1, keepdim=True)
        p = score.sub_(top).exp2_()
        total = p.sum(1)
        out[:, part] = torch.bmm(p.mT, keys[:, :n, d + 2 :]).div_(total[..., None])
        torch.add(top[:, 0], total.log2_(), out=lse[:, part])
    return out.transpose(0, 1), lse.T


def dense_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    xy: Tensor,
    theta: Tensor,
    keep_d2: Tensor,
    decay: Decay,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, heads, d = q.shape
    keys, queries = _stacked_tables(q, k, v, query_columns=d + 2)
    queries[:, :n, d + 1] = -lse.T
    values = keys[:, :n, d + 1 :]  # [1, v]
    grads = torch.cat((-(out * grad).sum(-1, keepdim=True), grad), -1).transpose(0, 1).contiguous()  # [-O.dO, dO]
    dq = q.new_empty(heads, n, d)
    dk, dv, ds_sum = q.new_zeros(heads, n, d), q.new_zeros(heads, n, d), q.new_zeros(heads, n, 1)
    dtheta = q.new_zeros(heads)
    scratch = Scratch(q)
    for part in _dense_parts(q):
        d2 = _dense_d2(xy, part, scratch)
        p = _dense_log_prior(d2, theta, keep_d2, decay, scratch)
        p.baddbmm_(keys[:, :n, : d + 2], queries[:, part].mT).exp2_()
        ds = torch.bmm(values, grads[:, part].mT, out=scratch("ds", *p.shape)).mul_(p)
        for h in range(heads):
            dtheta[h] += torch.dot(ds[h].view(-1), decay.slope(d2, theta[h]).view(-1))
        dq[:, part] = torch.bmm(ds.mT, keys[:, :n, :d])
        dk.baddbmm_(ds, queries[:, part, :d])
        dv.baddbmm_(p, grads[:, part, 1:])
        ds_sum += ds.sum(-1, keepdim=True)
    dk.addcmul_(keys[:, :n, :d], ds_sum, value=-LOG2_E / math.sqrt(d))
    dq.mul_(1 / math.sqrt(d))
    dk.mul_(1 / LOG2_E)
    return dq.transpose(0, 1), dk.transpose(0, 1), dv.transpose(0, 1), dtheta


def _stacked_tables(q: Tensor, k: Tensor, v: Tensor, query_columns: int) -> tuple[Tensor, Tensor]:
    """The tables of all heads, (heads, n + 1, .), in the order of the tiles."""
    order = torch.arange(len(q), device=q.device)
    heads = zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=True)
    tables = [_tables(*qkv, Scratch(q), order=order, query_columns=query_columns) for qkv in heads]
    return torch.stack([keys for keys, _ in tables]), torch.stack([queries for _, queries in tables])


def pruning_mask(xy: Tensor, keep_d2: Tensor) -> Tensor:
    """(1, heads, n, n) to be added to scores: 0 within the radius, very negative beyond."""
    x, y = xy.T.contiguous()
    d2 = (x[:, None] - x).square_()
    dy = y[:, None] - y
    d2.addcmul_(dy, dy)
    return (d2 - keep_d2.to(d2)[:, None, None]).clamp_min_(0).mul_(PRUNED_PER_D2)[None]


def _dense_parts(q: Tensor) -> Iterator[slice]:
    """Slices of queries that make a chunk together with all keys."""
    n, heads, _ = q.shape
    size = max(16, pairs_per_chunk(q.device) // (heads * n) // 16 * 16)
    return (slice(start, min(n, start + size)) for start in range(0, n, size))


def _dense_d2(xy: Tensor, part: slice, scratch: Scratch) -> Tensor:
    """(n, queries) squared distances of all keys to a slice of queries."""
    x, y = xy.T.contiguous()  # float64: the distances serve all heads
    dy = y[:, None] - y[part]
    d2 = (x[:, None] - x[part]).square_().addcmul_(dy, dy)
    return scratch("d2", *d2.shape).copy_(d2)


def _dense_log_prior(d2: Tensor, theta: Tensor, keep_d2: Tensor, decay: Decay, scratch: Scratch) -> Tensor:
    """(heads, n, queries) log2 f, PRUNED outside the disc."""
    score = scratch("score", len(theta), *d2.shape)
    for h, keep in enumerate(keep_d2.tolist()):
        _prune(torch.mul(decay.log_prior(d2, theta[h]), LOG2_E, out=score[h]), d2, keep, scratch)
    return score
