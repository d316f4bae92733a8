"""The attention hook: what a method is, and the selective kind that most of them are.

A pass runs a block of queries `start..stop-1` through every layer. Before each layer's `attend` its keys are in the
cache, placed as the method declared; `attend` says which of them each query sees, at which positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from lce.attention.attention import merge
from lce.cache.growth import recent_keys, summary_rows, table_bytes
from lce.cache.layer import LayerCache
from lce.cache.tiering import CacheShape
from lce.errors import UsageError
from lce.methods.parts import keep_recent, within_chunk
from lce.methods.step import Step, Surroundings
from lce.models.rope import Table, rotate

SCORES_AT_ONCE = 1 << 24  # bounds the scores of a slice of queries: 64 MiB in float32


@dataclass(frozen=True)
class Method(ABC):
    """A strategy behind the attention hook; its fields are its knobs, `None` where the window decides."""

    name: ClassVar[str] = ""
    by_block: ClassVar[bool] = False  # whether the queries of a block choose together: other blocks, other choices

    def for_model(self, model: Surroundings) -> Self:
        """This method with what a model's own files hold for it; called once, before `resolve`."""
        return self

    def resolve(self, window: int) -> Self:
        """This method with every `None` filled in for a model that can be trusted on `window` positions.

        Raises `UsageError` for knobs that cannot work.
        """
        return self

    def expect(self, **least: int) -> None:
        """Raise `UsageError` for a knob below its least value."""
        for knob, value in least.items():
            if getattr(self, knob) < value:
                raise UsageError(f"{self.name}: {knob} is {getattr(self, knob)}; expected {value} or more")

    @property
    def block(self) -> int:
        """Tokens best prefilled in one step."""
        return 512

    def exact_length(self, window: int) -> int | None:
        """How many tokens a text may have and be read as under full attention, once resolved; None: any number."""
        return 1

    @property
    def cache_chunk(self) -> int:
        """Tokens in a chunk of the cache."""
        return 256

    @property
    def choices(self) -> tuple[int, int]:
        """What `step.note` is told: choice c stands for the `size` tokens from `first + c·size` on; (first, size)."""
        return 0, self.cache_chunk

    @property
    def n_recent(self) -> int:
        """How many tokens before a block are also kept with their keys at their absolute positions (`parts.near`)."""
        return 0

    @property
    def pinned(self) -> tuple[int, int]:
        """How many of the first tokens, and of those before a block, every query sees: they never leave the device."""
        return 0, self.n_recent

    @property
    def apart(self) -> bool:
        """Whether heads choose apart from each other, so that keys are wanted of some KV heads and not of others."""
        return False

    def unlearned(self) -> Self:
        """A method that keeps as much and needs no file beside config.json, to plan with."""
        return self

    def kept_bytes(self, n_tokens: int, block: int, n_heads: int, shape: CacheShape) -> int:
        """The most that is kept on the device of `n_tokens` read in blocks of `block`, besides keys and values.

        As it stands the chunk table and the recent keys; a method that keeps more adds it.
        """
        row = shape.n_kv_heads * shape.head_dim * shape.dtype.itemsize
        recent = recent_keys(self.n_recent, n_tokens, block) if self.n_recent else 0
        return shape.n_layers * (table_bytes(n_tokens, shape) + recent * row)

    def key_positions(self, indices: Tensor) -> Tensor | None:
        """Where the keys of tokens `indices` `[T]` are rotated to before they are cached; None: left unrotated."""
        return indices

    def keep(self, k: Tensor, v: Tensor, cache: LayerCache, step: Step) -> None:
        """Put the block's unrotated keys and its values `[G, T, D]` into the cache."""
        positions = self.key_positions(step.positions(k.device))
        if positions is None:
            cache.write(k, v)
        else:
            cache.write(rotate(k, step.once("key places", lambda: step.rope.table(positions, k.dtype))), v)
        if self.n_recent:
            keep_recent(k, self.n_recent, cache, step)

    @abstractmethod
    def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        """The block's unrotated queries `[H, T, D]` to their outputs `[H, T, D]`; `keep` has been called."""


class LocalMethod(Method):
    """A method that sees the last `local` tokens at their true distance and farther ones from where it likes.

    Keys are cached unrotated, to be seen from one place; the last `n_recent` are also kept at their own.
    """

    local: int | None  # a knob of whoever derives from this, and so is `sinks` where there are some
    sinks = 0

    @property
    def n_local(self) -> int:
        """`local`, once it is resolved."""
        assert self.local is not None, "resolved before use"
        return self.local

    @property
    def n_recent(self) -> int:
        return self.n_local

    @property
    def pinned(self) -> tuple[int, int]:
        return self.sinks, self.n_recent

    def key_positions(self, indices: Tensor) -> Tensor | None:
        return None


@dataclass(frozen=True)
class SelectiveMethod(Method):
    """A method by which every query chooses chunks: keep, score, select, place.

    A new selector overrides what is new. `summarise`: what to keep of a complete chunk. `score`: how well chunks
    answer queries; by their summaries' dot products, unless overridden. `select`: which are taken. `place`: where they
    are seen. As it stands, a query of chunk `o` attends the first chunk, the best scoring ones, chunk `o-1` and its own
    part of chunk `o`: `chunks` in all, in their order, placed side by side from position 0, so that nothing is seen at
    a distance the window does not have.
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
    def pinned(self) -> tuple[int, int]:
        return self.cache_chunk, self.cache_chunk

    @property
    def apart(self) -> bool:
        return True

    def kept_bytes(self, n_tokens: int, block: int, n_heads: int, shape: CacheShape) -> int:
        row = n_heads * shape.head_dim * shape.dtype.itemsize
        more = (summary_rows(n_tokens, shape) + shape.chunk_size) * row  # vectors `[H, M, D]`, and pending queries
        return super().kept_bytes(n_tokens, block, n_heads, shape) + shape.n_layers * more

    def exact_length(self, window: int) -> int | None:
        return (self.n_choices + 1) * self.cache_chunk

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

        Returns `[H, m, …]`; for `score` as it stands one vector a chunk, `[H, m, D]`. What KV heads have in common
        comes to query heads by `x.repeat_interleave(len(q) // len(k), dim=0)`.
        """

    def score(self, q: Tensor, summary: Tensor, step: Step, layer: int) -> Tensor:
        """How well each chunk answers each unrotated query: `q [H, T, D]`, `summary [H, M, …]` to `[S, T, M]`.

        S is how many choose on their own: H, or fewer where heads share a choice (S divides H).
        """
        return q @ summary.mT

    def forced(self, chunk_ids: Tensor, own: Tensor) -> Tensor:
        """`[T, M]`, True where a chunk is taken whatever its score; `own [T, 1]` is the query's chunk."""
        return (chunk_ids == 0) | (chunk_ids == own - 1)

    def select(self, scores: Tensor, step: Step) -> Tensor:
        """Scores `[S, T, M]` to the chosen chunks `[S, T, K]`, ascending, -1 behind the last. Time: O(S · T · M).

        Whatever the scores, infinite and NaN ones too, no query is given its own chunk or one after it.
        """
        chunk_ids = torch.arange(scores.shape[-1], device=scores.device)
        own = (step.positions(scores.device) // self.cache_chunk)[:, None]
        bias = torch.zeros(own.shape[0], len(chunk_ids), device=scores.device)
        bias = bias.masked_fill_(self.forced(chunk_ids, own), torch.inf).masked_fill_(chunk_ids >= own, -torch.inf)
        scores = scores.float() + bias
        best = scores.topk(min(self.n_choices, scores.shape[-1]), dim=-1, sorted=False)
        none = torch.iinfo(torch.int64).max
        barred = (best.values == -torch.inf) | (best.indices >= own)  # the second where scores overflowed
        chosen = best.indices.masked_fill(barred, none).sort(dim=-1).values
        return chosen.masked_fill(chosen == none, -1)

    def place(self, indices: Tensor, n_slots: int) -> Tensor:
        """Where queries `indices` `[T]` stand, from the start of each of `n_slots` choices and of their own chunk.

        Returns `[T, n_slots + 1]`. A chunk cached at offsets 0..L-1 is seen at slot s by turning the query back by s·L.
        Example: L = 4, two slots, index 13 (own chunk 3, offset 1): 9 from slot 0, 5 from slot 1, 1 from its own.
        """
        size = self.cache_chunk
        slots = torch.arange(n_slots + 1, device=indices.device)
        taken = (indices // size).clamp(max=self.n_choices)[:, None]
        behind = (taken - slots).clamp(min=0) * size + (indices % size)[:, None]
        behind[:, -1] = indices % size
        return behind

    def choose(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor | None:
        """The chunks that each query of each head attends, `[H, T, K]`; None while there is nothing to choose from."""
        summary = cache.chunks.summary
        if summary is None or step.stop <= self.cache_chunk:
            return None
        rows = max(1, SCORES_AT_ONCE // (summary.shape[0] * summary.shape[1]))
        parts = []
        for start in range(0, q.shape[1], rows):
            some = step.part(start, min(start + rows, q.shape[1]))
            here = slice(some.start - step.start, some.stop - step.start)
            parts.append(self.select(self.score(q[:, here], summary, some, cache.index), some))
        chosen = torch.cat(parts, dim=1)
        return chosen.repeat_interleave(q.shape[0] // chosen.shape[0], 0) if len(chosen) < len(q) else chosen

    def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        self._summarise_complete(q, cache, step)
        table: Table = step.once("places", lambda: self._places(q, step))
        chosen = self.choose(q, cache, step)
        own = within_chunk(rotate(q, (table[0][:, -1], table[1][:, -1])), cache, step)
        if chosen is None:
            return merge([own])
        cache.chunks.note_use(chosen, step.stop)
        if step.note:
            step.note(cache.index, chosen)
        n_choices = chosen.shape[-1]
        placed = rotate(q[:, :, None], (table[0][:, :n_choices], table[1][:, :n_choices]))  # [H, T, K, D]
        return merge([step.attention.routed(placed, chosen, cache.rounds(chosen)), own])

    def _places(self, q: Tensor, step: Step) -> Table:
        n_slots = min(self.n_choices, step.stop // self.cache_chunk)
        return step.rope.table(self.place(step.positions(q.device), n_slots), q.dtype)

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
        k, v = (x.unflatten(1, (-1, size)) for x in cache.span(first * size, (first + n_complete) * size))
        cache.chunks.add_summaries(self.summarise(rotate(complete, table), k, v, step))
        left = q.new_zeros(q.shape[0], size, q.shape[2])
        left[:, : known.shape[1] - n_complete * size] = known[:, n_complete * size :]
        cache.stage("queries", left)
