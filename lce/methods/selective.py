"""Methods whose queries choose chunks: `ChunkMethod`, and `SelectiveMethod`, the base of a user's own selector."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal, Self, cast

import torch
from torch import Tensor

from lce.attention import Attended, Turn
from lce.cache.layer import LayerCache
from lce.cache.layout import AccessPattern, CacheLayout, query_bytes
from lce.cache.method_state import FileTensor, MethodState, OpenChunk, Summaries
from lce.errors import UsageError
from lce.methods import choosing
from lce.methods.attending import PlacedPart, attend_all, attend_parts, attend_spans, placed_parts, prepare, scaled
from lce.methods.base import ATTENDING, ATTENTION, Example, Method, Promise, Promises, filled, is_like, knob, resolved
from lce.methods.budget import TOP_P, Budget
from lce.methods.costs import Cost, QueryBlock
from lce.methods.decoding import Span
from lce.methods.parts import CHOSEN, LayerFacts, Part
from lce.methods.placement import OneDistance, TruePositions
from lce.methods.selection import Placement, Selection, Selector, SideBySide, Sizes
from lce.methods.selectors import OPEN_QUERIES, SUMMARIES, Summary, SummarySelector
from lce.methods.step import DeviceStep, Step
from lce.methods.turned_keys import recent_keys, seen_keys, unrotated

KINDS: Mapping[str, Placement] = {"side_by_side": SideBySide(), "true": TruePositions()}  # and one distance

TURNED_ROWS = 64  # the fewest queries of a pass on a GPU for which turning a copy of all keys costs little beside them
CHOOSING: Promises = {  # of methods whose choice depends on `choose`
    **dict.fromkeys(("alike", "by_head", "by_row"), (*ATTENTION, "choose")),
    **dict.fromkeys(("recorded", "noted", "kept"), ATTENDING),
    "counted": (*ATTENDING, "choose"),
    "dense": ("attend_part", "parts_of", "key_positions", "choose"),
    "complete": (),
    "kernel": ("choose",),
}
SCORED = ("score", "select", "forced")
HOOKS = ("summarise", "log_mass", "uses_queries", "summary_vectors", *SCORED)  # of a `SelectiveMethod`
BY_HOOKS: Promises = {
    **CHOOSING,
    **dict.fromkeys(("alike", "by_head", "by_row"), (*ATTENTION, "choose", *HOOKS)),
    "dense": (*CHOOSING["dense"], "select"),
    "complete": SCORED,
    "kernel": ("choose", *SCORED),
    "hookless": (*HOOKS, "choose"),
    "vectors": ("score",),
    "best": ("select",),
}


class ChunkMethod(Method, ABC, promises=CHOOSING):
    """A method whose queries choose chunks. `selection` says which chunks, and where queries see them."""

    @property
    @abstractmethod
    def selection(self) -> Selection:
        """The method's selection. Before `resolve`, some of its knobs are None."""

    @property
    def access(self) -> AccessPattern:
        return self.selection.access

    @property
    def couples_heads(self) -> str | None:
        if self.selection.selector.by_number:
            return "random choices depend on a head's number among all heads; choose in another way"
        together = "all heads make one choice; give share=head or share=group, without fix_head"
        return super().couples_heads or (None if self.access.per_head else together)

    def state(self, layout: CacheLayout) -> Mapping[str, MethodState]:
        c = self.selection
        n_bytes = c.selector.summary_bytes(layout, c)
        kept: dict[str, MethodState] = {SUMMARIES: Summaries(n_bytes, c.size)} if n_bytes else {}
        if c.selector.uses_queries:
            kept[OPEN_QUERIES] = OpenChunk(c.size, query_bytes(layout))
        n_recent = c.reach if (unrotated(self) or c.placement.exact) and not c.access.turned else 0
        return {**kept, **recent_keys(self, n_recent, layout), **c.selector.state(layout, c)}

    def could_keep(self, layer: int, kept: Mapping[str, FileTensor], layout: CacheLayout, n_tokens: int) -> bool:
        c = self.selection
        summaries, n_chunks, shape = kept.get(SUMMARIES), n_tokens // c.size, c.selector.shape(layout, c)
        fits = summaries is None or summaries.shape[1] == n_chunks  # some layers keep none
        if summaries is not None and shape is not None:
            fits = is_like(summaries, (shape[0], n_chunks, *shape[1:]), layout.dtype)
        return fits and c.selector.could_keep(kept, layout, c, n_tokens)

    def limit(self, window: int, sliding_window: int | None = None) -> int | None:
        return self.selection.placement.limit(self.selection, window)

    def key_positions(self, indices: Tensor) -> Tensor | None:
        return self.selection.placement.key_positions(indices, self.selection.size)

    def layer_kind(self, layer: int) -> str:
        return "dense" if layer < self.selection.dense_layers else ""

    def parts_of(self, i: Tensor, layer: LayerFacts) -> Iterable[Part]:
        if layer.kind == "dense":
            return [Part(keys=(0, i + 1), query_at=i)]
        c = self.selection
        own = None if c.placement.exact else self.key_positions(i)
        near = Part(((i // c.size - c.n_near) * c.size, i + 1), i if own is None else own, exact=own is None)
        return [near, c.placement.part(i, c, min(c.n_choices, layer.longest // c.size))]

    def keep(self, k: Tensor, v: Tensor, cache: LayerCache, step: Step) -> None:
        super().keep(k, v, cache, step)
        if cache.index >= self.selection.dense_layers:
            self.selection.selector.keep_keys(self.selection, k, cache, step)

    def keep_queries(self, q: Tensor, cache: LayerCache, step: Step) -> None:
        if cache.index >= self.selection.dense_layers:
            self.selection.selector.keep(self, self.selection, q, cache, step)

    choose = choosing.choose

    def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        if step.at is not None:
            return super().attend(q, cache, step)
        self.keep_queries(q, cache, step)
        q = scaled(self, q, step)
        dense = self.promised("dense") and not step.decoding and (q.is_cpu or q.shape[1] >= TURNED_ROWS)
        n, n_queries = choosing.n_seeing_all(self.selection, step) if dense else 0, q.shape[1]
        if not n:
            return attend_parts(self, q, cache, step)
        if (step.note or step.note_scores) and any(x.part.keys == CHOSEN for x in placed_parts(self, q, cache, step)):
            chosen = self.choose(q, cache, step)
            if chosen is not None and step.note:
                step.note(cache.index, chosen)
        if n == n_queries:
            return attend_all(self, q, cache, step)
        first, rest = step.once(
            "first and rest",
            lambda: [replace(step.part(*ends), note=None, note_scores=None) for ends in ((0, n), (n, n_queries))],
        )
        rest = replace(rest, all_devices=step.all_devices.setdefault("rest", {}))
        return torch.cat((attend_all(self, q[:, :n], cache, first), attend_parts(self, q[:, n:], cache, rest)), dim=1)

    def attend_part(self, q: Tensor, placed: PlacedPart, cache: LayerCache, step: Step) -> Attended | None:
        if placed.part.keys != CHOSEN:
            return attend_spans(q, placed, seen_keys(self, placed.part, cache, step), step)
        if (chosen := self.choose(q, cache, step)) is None:
            return None
        if step.note:
            step.note(cache.index, chosen)
        return choosing.attend_chosen(
            self.selection, chosen, q, placed, seen_keys(self, placed.part, cache, step), step
        )

    def decode_chosen(
        self, q: Tensor, turn: Turn, others: Sequence[Span], cache: LayerCache, step: DeviceStep
    ) -> Attended:
        own = others[0].turn if others else None
        return choosing.decode(
            self.selection, lambda: self.choose(q, cache, cast(Step, step)), q, turn, own, cache, step
        )

    def bound(self, stop: int) -> int | None:
        """Return the bound, without `complete` in the own chunk of the step; None if such a step completes a chunk."""
        size = self.selection.size
        if stop > size and self.promised("complete"):
            return super().bound(stop)
        return (stop // size + 1) * size - 1 if stop > size and stop % size else None

    def promised(self, what: Promise) -> bool:
        if what == "recorded" and (self.selection.varies or not isinstance(self.selection.selector, SummarySelector)):
            return False
        return super().promised(what)

    def choice_cost(self, block: QueryBlock) -> Cost:
        return choosing.cost(self.selection, block)


@prepare.register(ChunkMethod)
def _(method: ChunkMethod, like: Tensor, cache: LayerCache, step: Step) -> None:
    if not method.selection.one_layer:  # else the first layer's kernels would choose in others, too
        prepare.dispatch(object)(method, like, cache, step)
        method.selection.all_forced(step.stop // method.selection.size, step, like.device)


@dataclass(frozen=True)
class SelectiveMethod(ChunkMethod, promises=BY_HOOKS):
    """A method by which every query chooses chunks, with knobs for chunk size, budget and placement.

    A new method overrides hooks. `summarise` returns what to keep of a complete chunk, by default the summary of
    LongHeads. `score` scores chunks for queries, by default by dot products with summaries. `select` takes chunks by
    score. By default, a query of chunk `o` attends the first chunk, the best scoring chunks, chunk `o-1`, and chunk `o`
    up to itself: `chunks` in all.

    `placement` says where chosen chunks are seen: `side_by_side` in their order from position 0, so that all distances
    are within the window; `true` at their own positions; `constant` at the distance `chunk_size`. A query's own chunk
    is always seen at its true distances.

    With `top_p`, a query takes only as many of its `chunks` as reach that share of attention, as `log_mass` estimates.
    """

    uses_queries: ClassVar[bool] = True  # whether `summarise` needs queries, which are kept until then
    summary_vectors: ClassVar[int] = 1  # the number of vectors `[D]` in a chunk's summary, for each query head

    chunk_size: int | None = knob(None, "tokens of a chunk; none is 32, or 1/32 of a window below 1024", least=1)
    chunks: int | None = knob(None, "chunks that a query attends, its own one too; none is what the window holds")
    placement: Literal["side_by_side", "true", "constant"] = knob(
        "side_by_side", "where chosen chunks are seen: side by side, at true positions, or at one distance"
    )
    top_p: float | None = knob(None, TOP_P, is_share=True, kw_only=True)
    example: ClassVar = Example({"chunk_size": 2})

    def resolve(self, window: int) -> Self:
        made = filled(self, chunk_size=min(32, max(1, window // 32)))
        made = filled(made, chunks=window // resolved(made.chunk_size))
        if resolved(made.chunks) < 3:
            few = f"{made.chunks} chunks of {made.chunk_size} tokens"
            raise UsageError(f"{self.label}: {few}; expected 3 or more: lower chunk_size (window {window})")
        return made

    @cached_property
    def selection(self) -> Selection:
        """The first chunk, the best ones and the last complete one. A class with hooks of its own chooses by them."""
        size, n, placement = self.chunk_size or 1, self.chunks, KINDS.get(self.placement)
        selector = self.selector if self.promised("hookless") else Hooks(self)
        budget = Budget(None if n is None else n * size, sinks=size, local=size, top_p=self.top_p)
        return Selection(size, selector, placement or OneDistance(size), budget)

    @property
    def selector(self) -> Selector:  # of a class without hooks of its own
        return Summary()

    @property
    def block(self) -> int:
        """Half of the tokens that a query attends, 512 to 2,048. In larger blocks more queries share a chosen chunk."""
        return max(512, min(2048, resolved(self.chunks) * self.selection.size // 2))

    @property
    def access(self) -> AccessPattern:
        return replace(super().access, local=self.selection.size)

    def limit(self, window: int, sliding_window: int | None = None) -> int | None:
        return window if self.placement == "true" else None

    def summarise(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """Return summaries `[S, m, …]` of m complete chunks, S = H or G; for the default `score`, vectors `[H, m, D]`.

        `q [H, m, L, D]` (without `uses_queries` `[H, m, 0, D]`) and `k [G, m, L, D]` are rotated as keys are cached.
        `x.repeat_interleave(len(q) // len(k), dim=0)` repeats a tensor of KV heads for their query heads.
        """
        assert isinstance(self.selector, SummarySelector), "chunks are summarised"
        found = self.selector.summarise(q, k, v, step)
        return found.repeat_interleave(len(q) // len(found), dim=0)

    def score(self, q: Tensor, summary: Tensor, step: Step, layer: int) -> Tensor:
        """Return the scores `[C, T, M]` of chunks with `summary [S, M, …]` for queries `q [H, T, D]`; larger is better.

        C is H, or a divisor of H if heads choose together. For the placement `side_by_side` queries are unrotated, for
        `true` rotated to their true positions, for `constant` to the constant distance.
        """
        assert isinstance(self.selector, SummarySelector), "chunks have summaries"
        return self.selector.scores(q, summary, self.selection.n_choosers(len(q), step.n_kv_heads), step, layer)

    def log_mass(self, scores: Tensor, n_heads: int, head_dim: int) -> Tensor:
        """Estimate the logarithms of the chunks' attention mass for `top_p`: see `Selector.log_mass`."""
        return self.selector.log_mass(scores, n_heads, head_dim, self.selection.size)

    def forced(self, chunk_ids: Tensor, own: Tensor) -> Tensor:
        """Return which of `chunk_ids [M]` are always taken: see `Selection.forced`."""
        return self.selection.forced(chunk_ids, own)

    def select(self, scores: Tensor, step: Step) -> Tensor:
        """Return chosen chunks by scores: see `Selection.best`."""
        return self.selection.best(scores, step)


@dataclass(frozen=True, eq=False, repr=False)
class Hooks(SummarySelector):
    """The hooks of a `SelectiveMethod` as a selector."""

    method: SelectiveMethod

    @property
    def has_vectors(self) -> bool:
        return self.method.promised("vectors")

    @property
    def uses_queries(self) -> bool:  # type: ignore[override]
        return self.method.uses_queries

    @property
    def takes_best(self) -> bool:  # type: ignore[override]
        return self.method.promised("best")

    @property
    def plain(self) -> Literal["best", "worst"] | None:
        inner = self.method.selector
        return inner.plain if isinstance(inner, SummarySelector) and self.method.promised("kernel") else None

    def shape(self, sizes: Sizes, selection: Selection) -> tuple[int, ...] | None:
        return (sizes.n_heads, sizes.head_dim) if self.has_vectors else None

    def summary_bytes(self, layout: CacheLayout, selection: Selection) -> int:
        vectors = self.method.summary_vectors * query_bytes(layout)
        return super().summary_bytes(layout, selection) if self.has_vectors else vectors

    def summarise(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        return self.method.summarise(q, k, v, step)

    def scores(self, q: Tensor, summary: Tensor, n_choosers: int, step: Step, layer: int) -> Tensor:
        return self.method.score(q, summary, step, layer)

    def log_mass(self, scores: Tensor, n_heads: int, head_dim: int, size: int) -> Tensor:
        return self.method.log_mass(scores, n_heads, head_dim)

    def forced(self, selection: Selection, chunk_ids: Tensor, own: Tensor) -> Tensor:
        return self.method.forced(chunk_ids, own)

    def select(self, selection: Selection, scores: Tensor, step: Step) -> Tensor:
        return self.method.select(scores, step)

    def cost(self, block: QueryBlock, selection: Selection) -> Cost:
        size = selection.size
        numbers = block.n_heads * block.head_dim * (block.stop // size if block.stop > size else 0)
        scores = len(block) * numbers if self.has_vectors else None
        return Cost(0, scores, summaries=None, state_read=numbers * self.method.summary_vectors)
