"""The attention hook: what a method is, and the selective kind that most of them are.

A pass runs a block of queries `start..stop-1` through every layer. Before each layer's `attend` its keys are in the
cache, placed as the method declared; `attend` says which of them each query sees, at which positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from lce.cache.kv import LayerCache
from lce.engine.attention import Attention, merge
from lce.engine.backends import Part
from lce.errors import UsageError
from lce.models.rope import Rope, Table, rotate


@dataclass(frozen=True)
class Step:
    """One pass of a block through the model: what is the same in every layer.

    Example: the second block of a prefill by 512 has `start=512, stop=1024`; the decode step after 1,500 tokens has
    `start=1500, stop=1501`. `memo` lives as long as the pass: `once` computes a table for the first layer and hands
    it to the others. `note`, where given, is told what each layer chose: `note(layer, chunk_ids [H, T, K])`.
    """

    start: int
    stop: int
    rope: Rope
    attention: Attention
    window: int
    n_kv_heads: int
    sliding_window: int | None = None
    note: Callable[[int, Tensor], None] | None = None
    memo: dict[str, Any] = field(default_factory=dict)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """`make()`, the first time it is asked for in this pass."""
        if name not in self.memo:
            self.memo[name] = make()
        return self.memo[name]

    def positions(self, device: torch.device) -> Tensor:
        """The block's indices `[T]`."""
        return torch.arange(self.start, self.stop, device=device)


@dataclass(frozen=True)
class Method(ABC):
    """A strategy behind the attention hook; its fields are its knobs, `None` where the window decides."""

    name: ClassVar[str] = ""
    block: ClassVar[int] = 512  # tokens best prefilled in one step

    def resolve(self, window: int) -> Self:
        """This method with every `None` filled in for a model that can be trusted on `window` positions.

        Raises `UsageError` for knobs that cannot work.
        """
        return self

    @property
    def cache_chunk(self) -> int:
        """Tokens in a chunk of the cache."""
        return 256

    def key_positions(self, indices: Tensor) -> Tensor | None:
        """Where the keys of tokens `indices` `[T]` are rotated to before they are cached; None: left unrotated."""
        return indices

    def place_keys(self, k: Tensor, step: Step) -> Tensor:
        """`k [G, T, D]` of the block as it is to be cached."""
        positions = self.key_positions(step.positions(k.device))
        if positions is None:
            return k
        table: Table = step.once("positions", lambda: step.rope.table(positions, k.dtype))
        return rotate(k, table)

    @abstractmethod
    def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        """The block's unrotated queries `[H, T, D]` to their outputs `[H, T, D]`; `cache` holds the block's keys."""


@dataclass(frozen=True)
class SelectiveMethod(Method):
    """A method by which every query chooses chunks: keep, score, select, place.

    A new selector overrides what is new. `summarise`: what to keep of a complete chunk. `score`: how well chunks
    answer queries. `select`: which are taken. `place`: where they are seen. As it stands, a query of chunk `o` attends
    the first chunk, the best scoring ones, chunk `o-1` and its own part of chunk `o`: `chunks` in all, in their order,
    placed side by side from position 0, so that nothing is seen at a distance the window does not have.
    """

    chunk_size: int | None = None
    chunks: int | None = None

    def resolve(self, window: int) -> Self:
        size = self.chunk_size if self.chunk_size is not None else 256 if window >= 4096 else max(1, window // 32)
        if size < 1:
            raise UsageError(f"{self.name}: chunk_size is {size}; expected 1 or more tokens")
        chunks = self.chunks if self.chunks is not None else window // size
        if chunks < 3:
            raise UsageError(
                f"{self.name}: {chunks} chunks of {size} tokens; expected 3 or more: lower chunk_size (window {window})"
            )
        return replace(self, chunk_size=size, chunks=chunks)

    @property
    def cache_chunk(self) -> int:
        assert self.chunk_size is not None, "resolved before use"
        return self.chunk_size

    @property
    def n_choices(self) -> int:
        """How many whole chunks a query sees besides its own."""
        assert self.chunks is not None, "resolved before use"
        return self.chunks - 1

    def key_positions(self, indices: Tensor) -> Tensor | None:
        return indices % self.cache_chunk

    @abstractmethod
    def summarise(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """What to keep of m complete chunks: `q [H, m, L, D]`, `k v [G, m, L, D]`, rotated at offsets 0..L-1.

        Returns `[H, m, …]`.
        """

    @abstractmethod
    def score(self, q: Tensor, summary: Tensor, step: Step, layer: int) -> Tensor:
        """How well each chunk answers each unrotated query: `q [H, T, D]`, `summary [H, M, …]` to `[S, T, M]`.

        S is how many choose on their own: H, or fewer where heads share a choice (S divides H).
        """

    def forced(self, chunk_ids: Tensor, own: Tensor) -> Tensor:
        """`[T, M]`, True where a chunk is taken whatever its score; `own [T, 1]` is the query's chunk."""
        return (chunk_ids == 0) | (chunk_ids == own - 1)

    def select(self, scores: Tensor, step: Step) -> Tensor:
        """Scores `[S, T, M]` to the chosen chunks `[S, T, K]`, ascending, -1 behind the last. Time: O(S · T · M)."""
        chunk_ids = torch.arange(scores.shape[-1], device=scores.device)
        own = (step.positions(scores.device) // self.cache_chunk)[:, None]
        bias = torch.zeros(own.shape[0], len(chunk_ids), device=scores.device)
        bias = bias.masked_fill_(self.forced(chunk_ids, own), torch.inf).masked_fill_(chunk_ids >= own, -torch.inf)
        scores = scores.float() + bias
        best = scores.topk(min(self.n_choices, scores.shape[-1]), dim=-1, sorted=False)
        none = torch.iinfo(torch.int64).max
        chosen = best.indices.masked_fill(best.values == -torch.inf, none).sort(dim=-1).values
        return chosen.masked_fill(chosen == none, -1)

    def place(self, indices: Tensor) -> Tensor:
        """Where queries `indices` `[T]` stand, counted from the start of each choice and their own chunk: `[T, K+1]`.

        A chunk cached at offsets 0..L-1 is seen at slot s by turning the query back by s·L.
        Example: L = 4, K = 2, index 13 (own chunk 3, offset 1): 9 from slot 0, 5 from slot 1, 1 from its own.
        """
        size = self.cache_chunk
        slots = torch.arange(self.n_choices + 1, device=indices.device)
        taken = (indices // size).clamp(max=self.n_choices)[:, None]
        behind = (taken - slots).clamp(min=0) * size + (indices % size)[:, None]
        behind[:, -1] = indices % size
        return behind

    def choose(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor | None:
        """The chunks that each query of each head attends, `[H, T, K]`; None while there is nothing to choose from."""
        summary = cache.chunks.summary
        if summary is None or step.stop <= self.cache_chunk:
            return None
        chosen = self.select(self.score(q, summary, step, cache.index), step)
        return chosen.repeat_interleave(q.shape[0] // chosen.shape[0], 0) if len(chosen) < len(q) else chosen

    def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        self._summarise_complete(q, cache, step)
        table: Table = step.once("places", lambda: step.rope.table(self.place(step.positions(q.device)), q.dtype))
        chosen = self.choose(q, cache, step)
        own = within_chunk(rotate(q, (table[0][:, -1], table[1][:, -1])), cache, step)
        if chosen is None:
            return merge([own])
        cache.chunks.note_use(chosen, step.stop)
        if step.note:
            step.note(cache.index, chosen)
        n_choices = chosen.shape[-1]
        placed = rotate(q[:, :, None], (table[0][:, :n_choices], table[1][:, :n_choices]))  # [H, T, K, D]
        chunks = cache.chunked(0, cache.chunks.n_summaries)
        return merge([step.attention.routed(placed, chosen, chunks), own])

    def _summarise_complete(self, q: Tensor, cache: LayerCache, step: Step) -> None:
        """Summarise the chunks that this block completes; keep the queries of the one it leaves open."""
        size = self.cache_chunk
        offset = step.start % size
        pending = cache.state.get("queries")
        if offset + q.shape[1] < size:
            if pending is None:
                pending = q.new_zeros(q.shape[0], size, q.shape[2])
                cache.stage("queries", pending)
            pending[:, offset : offset + q.shape[1]] = q
            return
        known = q if offset == 0 or pending is None else torch.cat((pending[:, :offset], q), dim=1)
        n_complete = known.shape[1] // size
        complete = known[:, : n_complete * size].unflatten(1, (n_complete, size))  # [H, m, L, D]
        table: Table = step.once("offsets", lambda: step.rope.table(torch.arange(size, device=q.device), q.dtype))
        first = step.start // size
        k, v = cache.chunked(first, first + n_complete)
        cache.chunks.add_summaries(self.summarise(rotate(complete, table), k, v, step))
        left = q.new_zeros(q.shape[0], size, q.shape[2])
        left[:, : known.shape[1] - n_complete * size] = known[:, n_complete * size :]
        cache.stage("queries", left)


def within_chunk(q: Tensor, cache: LayerCache, step: Step) -> Part:
    """Causal attention of each query to its own chunk alone: `q [H, T, D]` rotated at in-chunk offsets.

    The block is cut at chunk borders: an end, whole chunks side by side, and a beginning. Time: O(H · T · L · D).
    """
    size = cache.chunks.chunk_size
    first_border = min(-(-step.start // size) * size, step.stop)
    last_border = max(step.stop // size * size, first_border)
    parts = []
    for start, stop in ((step.start, first_border), (first_border, last_border), (last_border, step.stop)):
        if start == stop:
            continue
        queries = q[:, start - step.start : stop - step.start]
        if start == first_border and stop == last_border:
            n_chunks = (stop - start) // size
            k, v = cache.chunked(start // size, stop // size)
            folded = fold_chunks(queries.unflatten(1, (n_chunks, size)), k.shape[0])
            out, lse = step.attention.dense(folded, k.flatten(0, 1), v.flatten(0, 1), causal=True)
            out = unfold_chunks(out, k.shape[0], n_chunks).flatten(1, 2)
            parts.append((out, unfold_chunks(lse, k.shape[0], n_chunks).flatten(1, 2)))
        else:
            keys = slice(start // size * size, stop)
            parts.append(step.attention.dense(queries, cache.k[:, keys], cache.v[:, keys], causal=True))
    if len(parts) == 1:
        return parts[0]
    return torch.cat([out for out, _ in parts], dim=1), torch.cat([lse for _, lse in parts], dim=1)


def fold_chunks(x: Tensor, n_kv_heads: int) -> Tensor:
    """`[H, m, …]` to `[G·m·R, …]`: chunks beside KV heads, so that each is a problem of its own to `dense`."""
    folded: Tensor = x.unflatten(0, (n_kv_heads, -1)).transpose(1, 2).flatten(0, 2)
    return folded


def unfold_chunks(x: Tensor, n_kv_heads: int, n_chunks: int) -> Tensor:
    """`fold_chunks` undone: `[G·m·R, …]` to `[H, m, …]`."""
    unfolded: Tensor = x.unflatten(0, (n_kv_heads, n_chunks, -1)).transpose(1, 2).flatten(0, 1)
    return unfolded
