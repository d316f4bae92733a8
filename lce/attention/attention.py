"""`Attention`: the functions from which methods are composed. Each backend is a subclass in a file of its own.

With `dense` all queries of a head see the same keys. With `routed` each query of each head has its own list of chunks.
`merge` merges several results into one softmax over all keys, by the results' log-sum-exps.
"""

import importlib
import math
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from lce import gpu
from lce.attention.tiles import AT_ONCE, Runs, SlotQueries, Tiles
from lce.attention.turn import SlotTurns, Turn, rotate
from lce.errors import UsageError, nearest, shown
from lce.kernels.dense.attention import LaneQueries
from lce.kernels.merge.merging import merged
from lce.kernels.runtime.kernel import DTYPES
from lce.kernels.runtime.launching import Rows
from lce.kernels.runtime.shared import ALIGNED, READ_PIECE
from lce.profiling import count_dense, count_routed, section

Attended = tuple[Tensor, Tensor]  # outputs [..., T, D], and log-sum-exps [..., T] (float32, natural logarithm)


@dataclass(frozen=True)
class Order:
    """What decides the order of sums on a CPU, besides what a query sees: its bits depend on nothing else.

    `generated` says whether queries are of generated tokens, or of read ones. Key 0 has index `first` in its text, for
    read tokens a multiple of `ALIGNED`; no query sees the first `unseen` keys.
    """

    generated: bool = False
    first: int = 0
    unseen: int = 0

    @classmethod
    def of_keys(cls, start: int, generated: bool) -> "Order":
        """Return the order of sums over keys from index `start` on; for read tokens `first` is 0 to 31 before it."""
        unseen = 0 if generated else start % ALIGNED
        return cls(generated, start - unseen, unseen)


READ = Order()


def folds(size: int) -> bool:
    """Return whether sums over a chunk of `size` keys at a multiple of `size` have the order of those at 0."""
    return READ_PIECE % size == 0 or size % READ_PIECE == 0


def fold_chunks(x: Tensor, n_kv_heads: int) -> Tensor:
    """Reshape `[H, m, …]`, m chunks, to `[G·m·(H/G), …]`: `dense` then treats each chunk of a KV head as a KV head."""
    return torch.unflatten(x, 0, (n_kv_heads, -1)).transpose(1, 2).flatten(0, 2)


def unfold_chunks(x: Tensor, n_kv_heads: int, n_chunks: int) -> Tensor:
    """Undo `fold_chunks`: `[G·m·(H/G), …]` to `[H, m, …]`."""
    return torch.unflatten(x, 0, (n_kv_heads, n_chunks, -1)).transpose(1, 2).flatten(0, 1)


class Attention(ABC):
    """A backend of attention. A subclass defines `softmax`, and overrides the methods for which it has faster kernels.

    Every result is an output and its log-sum-exp: `out [H, T, D]`, `lse [H, T]` (float32, natural logarithm).
    """

    name: ClassVar[str]
    speed: ClassVar[int] = 0  # `auto` takes the fastest backend that suits the machine
    for_gpus: ClassVar[bool] = False  # whether the backend suits only machines with a GPU

    @staticmethod
    def choose(name: object = "auto") -> "Attention":
        """Return a backend by name, or raise `UsageError`; `auto` or None is the fastest that this machine has."""
        if not isinstance(name, str | None):
            raise UsageError(f"attention is {shown(name)}; expected the name of a backend, or 'auto'")
        known = backends()
        if name in (None, "auto"):
            usable = [each for each in known.values() if torch.cuda.is_available() or not each.for_gpus]
            return max((each for each in usable if each.missing() is None), key=lambda backend: backend.speed)()
        if name not in known:
            raise UsageError(f"unknown attention backend {shown(name)}; {nearest(name, ['auto', *known])}")
        if (missing := known[name].missing()) is not None:
            raise UsageError(f"attention backend {name!r} needs {missing}")
        return known[name]()

    @classmethod
    def missing(cls) -> str | None:
        """Return what must be installed to use this backend; None: nothing."""
        return None

    def dense(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        window: int | None = None,
        turn: Turn | None = None,
        order: Order = READ,
    ) -> Attended:
        """Compute attention where all T queries of a head see the same N keys, in an `order` of sums on CPUs.

        `q [H, T, D]`, `k v [G, N, D]` to `out [H, T, D]`, `lse [H, T]`. Keys and values may be rows of 8 bits
        (`lce.attention.int8_rows`), `[G, N, row_bytes]`. Causal: the last query sees the last key, and with `window` no
        query sees a key `window` or more tokens before it. With `turn [m · T, D/2]` the queries are rotated first: m
        neighbouring KV heads, which `fold_chunks` made of one, take T rows each. Time: O(H · T · N · D). Keys are never
        repeated for query heads that share keys.
        """
        n = q.shape[1]
        if n == 0 or k.shape[1] == 0:
            return torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf, dtype=torch.float32)
        with section("attention", count_dense, q, k, v, causal, window, order.unseen):
            if turn is not None and len(turn.cos) > n:
                n_chunks = len(turn.cos) // n
                whole = unfold_chunks(q, len(k) // n_chunks, n_chunks).flatten(1, 2)
                q, turn = fold_chunks(rotate(whole, turn).unflatten(1, (n_chunks, n)), len(k) // n_chunks), None
            return self.softmax(q, k[:, order.unseen :], v[:, order.unseen :], causal=causal, window=window, turn=turn)

    def lanes(self, q: Tensor, turn: Turn, spans: Sequence[tuple[int, int]]) -> LaneQueries | None:
        """Return what attends a generated token of each of several texts, or None: see `LaneQueries`."""
        return None

    @abstractmethod
    def softmax(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None = None, turn: Turn | None = None
    ) -> Attended:
        """Compute what `dense` returns, for at least one query and one key, and N ≥ T if causal, in any order."""

    def routed(
        self, q: Tensor, turns: SlotTurns, chunk_ids: Tensor, tiles: Iterable[Tiles], generated: bool = False
    ) -> Attended:
        """Compute attention where each query of each head sees its own list of whole chunks.

        `q [H, T, D]`, unrotated; `chunk_ids [H, T, K]`, -1 for none, no chunk twice in a list. For slot s of the list,
        query t is rotated by entry `turns.rows[t, s]` of `turns.table`. `tiles` are the chunks' keys and values, in
        one or more rounds: a round has later chunks of a KV head than the rounds before.
        Returns `out [H, T, D]`, `lse [H, T]`.

        Time: O(H · T · K · L · D). `generated` is that of `Order`.
        """
        n_heads, n_queries, n_slots = chunk_ids.shape
        with section("attention", count_routed, q, chunk_ids):
            queries, spread = None, turns.table.at(turns.rows)  # [T, K, D/2]
            out = q.new_empty(chunk_ids.numel(), q.shape[-1])
            lse = q.new_full((chunk_ids.numel(),), -torch.inf, dtype=torch.float32)
            for some in tiles:  # every chosen chunk is in exactly one round
                queries = queries or SlotQueries(q, spread, n_slots, n_heads // len(some.index))
                self.dispatch(queries, some.chosen(chunk_ids), some.k, some.v, (out, lse))
            return self.merge_slots(out.view(n_heads, n_queries, n_slots, q.shape[-1]), lse.view(chunk_ids.shape))

    def decodes(self, dtype: torch.dtype, head_dim: int) -> bool:
        """Return whether a kernel can `decode` keys of this dtype and size, as the CUDA graph of a step requires."""
        return False

    def decode(self, q: Tensor, k: Rows, v: Rows, runs: Runs) -> Attended:
        """Attend unrotated queries `q [H, B, D]` of B contexts to runs of the contexts' rows, bounded on the device."""
        raise NotImplementedError

    def merge_slots(self, out: Tensor, lse: Tensor) -> Attended:
        """Merge the results of K slots, `out [H, T, K, D]` and `lse [H, T, K]`; where lse is -inf, out is ignored."""
        out.masked_fill_(lse[..., None] == -torch.inf, 0.0)
        total = lse.logsumexp(-1)
        weights = (lse - total.masked_fill(total == -torch.inf, 0.0)[..., None]).exp()
        return (weights[..., None, :].to(out.dtype) @ out).squeeze(-2), total

    def dispatch(self, queries: SlotQueries, tile: Tensor, k: Tensor, v: Tensor, into: Attended) -> None:
        """Compute the attention of each query row a to tile `tile[a]` of `k v [E, L, D]`; -1 in `tile [A]` is no tile.

        Results are written to the same rows of `into`: `out [A, D]`, `lse [A]`. Rows without a tile stay unchanged.
        """
        # A stable sort keeps the rows of a tile in order, wherever the tile's keys are stored.
        sorted_tiles, order = tile.masked_fill(tile < 0, len(k)).sort(stable=True)
        counts = torch.zeros(len(k) + 1, dtype=torch.int64, device=k.device)
        counts = counts.scatter_add_(0, sorted_tiles, torch.ones_like(sorted_tiles))[:-1]
        self.grouped(queries, counts, order, k, v, into)

    def grouped(self, queries: SlotQueries, count: Tensor, order: Tensor, k: Tensor, v: Tensor, into: Attended) -> None:
        """Do what `dispatch` does. `order [A]` has the rows sorted by tile: `count[e]` of tile e; rows of no tile last.

        Tiles with similar numbers of rows share a batched call, padded by a quarter at most, so that about a dozen
        calls suffice. Time: O(A · L · D). Memory: about `AT_ONCE` bytes of queries and keys.
        """
        (out, lse), starts = into, count.cumsum(0) - count
        step = 2 ** (torch.log2(count.clamp(min=4).double()).floor().long() - 2)
        load = -(-count // step) * step  # rounded up to 1, 1.25, 1.5 or 1.75 times a power of two
        for size in load.unique().tolist():
            if not size:
                continue
            columns = torch.arange(size, device=k.device)
            at_once = max(1, AT_ONCE // ((2 * k.shape[1] + 2 * size) * k.shape[2] * queries.q.element_size()))
            for some in (load == size).nonzero().squeeze(1).split(at_once):
                # Padding repeats the last row of a tile; the result of that row is written several times.
                rows = order[starts[some, None] + torch.minimum(columns, count[some, None] - 1)].flatten()
                q = queries.take(rows).view(len(some), size, -1)
                part = self.softmax_of_tiles(q, k.index_select(0, some), v.index_select(0, some))
                out.index_copy_(0, rows, part[0].flatten(0, 1))
                lse.index_copy_(0, rows, part[1].flatten())

    def softmax_of_tiles(self, q: Tensor, k: Tensor, v: Tensor) -> Attended:
        """Compute the attention of T queries per tile, `q [E, T, D]`, to E tiles `k v [E, L, D]`.

        Memory budgets decide which tiles share a call, so a result's bits must not depend on the others, nor on the
        threads. PyTorch may use another routine for a batch of one, so on the CPU a single tile is computed twice.
        """
        if len(q) > 1 or q.is_cuda:
            return self.softmax(q, k, v, causal=False)
        out, lse = self.softmax_of_tiles(*(x.expand(2, *x.shape[1:]) for x in (q, k, v)))
        return out[:1], lse[:1]


@cache
def backends() -> dict[str, type[Attention]]:
    """Return all backends by name, as the files of this folder define them."""
    files = pkgutil.iter_modules([str(Path(__file__).parent)])
    named = [x for file in files for x in vars(importlib.import_module(f"lce.attention.{file.name}")).values()]
    found = {x for x in named if isinstance(x, type) and issubclass(x, Attention) and x is not Attention}
    return {cls.name: cls for cls in sorted(found, key=lambda cls: cls.name)}


def merge(parts: Sequence[Attended]) -> Tensor:
    """Return the outputs `[H, T, D]` of one softmax over the keys of all parts. Every query must see some key."""
    return combine(parts)[0]


def combine(parts: Sequence[Attended]) -> Attended:
    """Return the result of one softmax over the keys of all parts, exactly; no key may be in two parts.

    Each part is `out [..., T, D]`, `lse [..., T]`; a query that saw no key has lse -inf. Time: O(parts · T · D).
    """
    if len(parts) == 1:
        return parts[0]
    out, lse = parts[0]
    with section("attention"):
        if out.device.type == "cpu" and out.dtype in DTYPES and lse.dtype == torch.float32:
            return merged(parts)
        if gpu.launching.runs_on(out) and lse.dtype == torch.float32:
            return gpu.merging.combined(parts)
        lses = torch.stack([lse for _, lse in parts])
        total = lses.logsumexp(0)
        weights = (lses - total.masked_fill(total == -math.inf, 0.0)).exp()
        out = parts[0][0].float() * weights[0, ..., None]
        for (part, _), weight in zip(parts[1:], weights[1:], strict=True):
            out.addcmul_(part.float(), weight[..., None])
        return out.to(parts[0][0].dtype), total


def join(parts: Sequence[Attended], dim: int) -> Attended:
    """Join the results of different queries, or of different heads, along a dimension."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([out for out, _ in parts], dim=dim), torch.cat([lse for _, lse in parts], dim=dim)


def causal_mask(n_queries: int, n_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return `[T, N]`, true where a query sees a key, less than `window` back; the last query sees the last key."""
    distance = torch.arange(n_keys - n_queries, n_keys, device=device)[:, None] - torch.arange(n_keys, device=device)
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)
