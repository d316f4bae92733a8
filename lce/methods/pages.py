"""Pages: selection and placement as two knobs. Each query attends pages that any selector chose, at any placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from torch import Tensor

from lce.attention import Attended, join
from lce.cache.layer import LayerCache
from lce.cache.layout import AccessPattern, CacheLayout
from lce.cache.method_state import FileTensor, MethodState
from lce.errors import UsageError
from lce.methods.attending import PlacedPart
from lce.methods.base import Example, filled, knob, resolved
from lce.methods.costs import Cost, QueryBlock
from lce.methods.joint_pages import attend_whole_pages, pooled, whole_pages
from lce.methods.lowdim import LowDimMaps
from lce.methods.lowdim_pages import LowDim
from lce.methods.map_file import check_maps, maps_for
from lce.methods.mass import Judge
from lce.methods.placement import PLACEMENTS, ConstantDistance, DualPositions, GroupedPositions, Placement
from lce.methods.promises import Promise
from lce.methods.registry import register
from lce.methods.selective import SELECTING, ChunkSelection, block_of, choosers, slot_turns
from lce.methods.selectors import (
    BEST_KEY,
    BY_NUMBER,
    SELECTORS,
    ContextSelector,
    Mass,
    Random,
    Representatives,
    Scorer,
    Selector,
    Sizes,
    SummarySelector,
)
from lce.methods.step import ModelFacts, Step
from lce.methods.top_p import top_p_knob

Select = Literal["summary", "bounds", "mean", "representatives", "lowdim", "best_key", "oracle", "random"]
Place = Literal["side_by_side", "true", "constant", "grouped", "dual"]
OTHERWISE = "-o compress=pca"
# The knobs that mean something beside some values of another knob alone: the other knob, and these values.
KNOBS_OF: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "repr_tokens": ("select", ("representatives",)),
    "judge": ("select", ("oracle",)),
    "seed": ("select", ("random",)),
    "compress": ("select", ("lowdim",)),
    "low_dim": ("select", ("lowdim",)),
    "maps": ("select", ("lowdim",)),
    "group": ("place", ("grouped",)),
    "chunk_size": ("place", ("dual",)),
    "far": ("place", ("constant", "dual")),
    "grows_from": ("growth", ("sqrt", "linear")),
    "grows_to": ("growth", ("sqrt", "linear")),
}
DEFAULTS: Mapping[str, Any] = {
    "repr_tokens": 4,
    "judge": "constant",
    "seed": 0,
    "compress": "calibrated",
    "low_dim": 128,
    "group": 8,
}


@register("pages")
@dataclass(frozen=True)
class Pages(ChunkSelection, promises=SELECTING):
    """Attention to pages of tokens, with the selector and the placement as knobs.

    Each query attends its own page up to itself, the first `sinks` and the last `local` tokens (in whole pages, rounded
    up), and the best of the other complete pages: `budget` tokens in all. Each head chooses alone; with `share` the
    query heads of a KV head, or all heads of a layer, choose together.

    `select` says what is kept of a page and how a page is scored; keys and queries are rotated as `place` says.
    `summary` is the summary of LongHeads, `bounds` are Quest's bounds of keys, `mean` is the mean of the page's keys,
    `representatives` is the sum of the `repr_tokens` keys that received most attention from the page's own queries, an
    idea of InfLLM. `lowdim` takes the page's best token by ESA's low-dim scores, all heads together, and `best_key` by
    `q · k` without positions, as ReAttention does. For analysis, `oracle` chooses by true attention mass (`judge`), and
    `random` by `seed`.

    `place` says where chosen pages are seen. `side_by_side`: in their order right before the own page, from position 0.
    `true`: at their true distances. `constant`: at the distance `far`, by default the least that no local token has.
    `grouped`: at the distances of Self-Extend, whose tokens far away share a position with `group - 1` neighbours.
    `dual`: at the distances of Dual Chunk Attention, by large chunks of `chunk_size` tokens. Local tokens are seen at
    true distances, under `dual` in the own large chunk and across its border.

    With `queries=page` the queries of a page choose together, by their summed scores, where one pass has all of them.
    Their keys are gathered once, which takes less time in prefill. Queries of a page that a pass cuts choose alone:
    decode steps, and the last tokens of a prompt. In passes of whole pages the result is the same whatever the number
    of pages.

    With `growth` the budget grows with the text: from index `grows_from` on, W, the query i attends `budget` times
    `sqrt(i / W)` or `i / W` tokens, and `grows_to` at most, by default W. The Sparse Frontier (Nawrot et al., 2025,
    arXiv:2504.17768) finds fixed budgets to lose with length. The budget is a function of i alone.

    Published methods are points of this plane: `select=summary place=side_by_side` with `page`, `sinks` and `local` all
    L is `longheads`, `select=bounds place=true` without sinks and local tokens is `quest` without dense layers.

    Cost: a token attends at most `budget` keys. Scoring depends on `select`.
    """

    select: Select = knob("bounds", "how pages are chosen")  # type: ignore[assignment]  # a hook: `pick` replaces it
    place: Place = knob("side_by_side", "where chosen pages are seen")
    page: int | None = knob(None, "tokens of a page; none is 16, fewer in a window below 512", least=1)
    budget: int | None = knob(None, "tokens that a query attends; none is half of the window", least=1)
    sinks: int | None = knob(None, "first tokens, always attended, in whole pages; none is a page", least=0)
    local: int | None = knob(None, "last tokens before the own page, in whole pages; none is a page", least=0)
    share: Literal["head", "group", "layer"] | None = knob(
        None, "which heads choose together: none, a KV head's, or all; none is head, with lowdim layer"
    )
    queries: Literal["alone", "page"] = knob("alone", "which queries choose together in prefill: none, or a page's")
    repr_tokens: int | None = knob(None, "keys that represent a page, for representatives; none is 4", least=1)
    compress: Literal["calibrated", "pca"] | None = knob(None, "low-dim keys of lowdim; none is calibrated maps")
    low_dim: int | None = knob(None, "numbers in a low-dimensional key of lowdim; none is 128", least=1)
    maps: str | LowDimMaps | None = knob(None, "file of lce calibrate, for lowdim; none is the one beside the model")
    judge: Judge | None = knob(None, "true attention, for oracle; none is constant")
    seed: int | None = knob(None, "another seed draws other pages, for random; none is 0")
    group: int | None = knob(None, "tokens that share a position, for grouped; none is 8", least=1)
    chunk_size: int | None = knob(None, "tokens of a large chunk, for dual; none is 3/4 of the window", least=1)
    far: int | None = knob(
        None, "distance of pages: constant, none is the least beyond local; dual, none is W - 1", least=1
    )
    growth: Literal["sqrt", "linear"] | None = knob(None, "how the budget grows with the text; none is not at all")
    grows_from: int | None = knob(None, "with growth: index from which the budget grows; none is the window", least=1)
    grows_to: int | None = knob(None, "with growth: largest budget in tokens; none is the window", least=1)
    top_p: float | None = top_p_knob()
    example: ClassVar = Example({"page": 2, "budget": 10, "sinks": 2, "local": 2})

    def for_model(self, model: ModelFacts) -> Self:
        if self.select != "lowdim" or self.compress == "pca":
            return self
        if model.plan_only:
            return replace(self, compress="pca", maps=None, top_p=None)  # needs no maps; as many low-dim keys
        low_dim, far = self.low_dim or DEFAULTS["low_dim"], max(1, model.window // 2)
        return replace(self, maps=maps_for(self.name, self.maps, low_dim, far, model, OTHERWISE))

    def resolve(self, window: int) -> Self:
        self._check_meanings()
        made = filled(self, page=min(16, max(1, window // 32)), share="layer" if self.select == "lowdim" else "head")
        made = filled(made, sinks=made.size, local=made.size)
        n_least = 1 + made.n_near + max(1, made.n_first + made.n_last)
        made = filled(made, budget=max(window // 2, n_least * made.size))
        if resolved(made.budget) < n_least * made.size:
            raise UsageError(
                f"{self.label}: budget is {made.budget}; expected {n_least * made.size} or more, {n_least} pages of "
                f"{made.size} tokens: lower page, sinks or local"
            )
        if made.growth is not None:
            made = filled(made, grows_from=window, grows_to=max(window, resolved(made.budget)))
            if resolved(made.grows_to) < resolved(made.budget):
                raise UsageError(f"{self.label}: grows_to is {made.grows_to}; expected budget, {made.budget}, or more")
        given = {
            each: value for each, value in DEFAULTS.items() if getattr(made, KNOBS_OF[each][0]) in KNOBS_OF[each][1]
        }
        if made.place == "constant":
            given["far"] = made.reach
        if made.place == "dual":
            given |= {"far": window - 1, "chunk_size": max(1, 3 * window // 4 // made.size) * made.size}
        made = filled(made, **given)
        if made.place == "dual":
            made._check_dual(window)
        if made.compress == "calibrated":
            check_maps(self.label, made.maps, resolved(made.low_dim), max(1, window // 2), window, OTHERWISE)
        return made

    def _check_meanings(self) -> None:
        """Raise `UsageError` for a knob that means nothing beside the others."""
        for name, (other, values) in KNOBS_OF.items():
            if getattr(self, name) is not None and getattr(self, other) not in values:
                means = f"{name} is a knob of {other}={' and '.join(values)} alone"
                raise UsageError(f"{self.label}: {means}, and {other} is {getattr(self, other)}; drop {name}")
        if self.select == "lowdim" and self.share in ("head", "group"):
            raise UsageError(f"{self.label}: low-dim keys have the sum of all heads' scores alone; give share=layer")
        if self.queries == "page" and (self.growth is not None or self.top_p is not None):
            other = "top_p" if self.growth is None else "growth"
            raise UsageError(
                f"{self.label}: with queries=page all queries of a page attend as many pages; drop {other}"
            )
        if self.compress == "pca" and self.maps is not None:
            raise UsageError(f"{self.label}: compress=pca computes its own maps from the text; drop maps")
        if self.compress == "pca" and self.top_p is not None:
            raise UsageError(
                f"{self.label}: top_p needs scores from the first page on, and compress=pca has none before budget "
                "tokens; drop top_p, or give compress=calibrated"
            )

    def _check_dual(self, window: int) -> None:
        """Raise `UsageError` for a large chunk that is not of whole pages, or has a distance below 0 or too large."""
        size, far = resolved(self.chunk_size), resolved(self.far)
        if size % self.size or size > window:
            expected = f"a multiple of page, {self.size}, and at most the window, {window}"
            raise UsageError(f"{self.label}: chunk_size is {size}; expected {expected}")
        if far < size - 1:  # a query at a smaller position would be before some keys
            raise UsageError(f"{self.label}: far is {far}; expected {size - 1} or more, or a smaller chunk_size")

    @property
    def size(self) -> int:
        return resolved(self.page)

    @property
    def n_choices(self) -> int:
        most = resolved(self.budget if self.growth is None else self.grows_to)
        return most // self.size - 1 - self.n_near

    def n_chosen(self, i: Tensor) -> Tensor | None:
        if self.growth is None:
            return None
        ratio = i.double() / resolved(self.grows_from)
        ratio = (ratio.sqrt() if self.growth == "sqrt" else ratio).clamp(min=1)
        n_pages = (resolved(self.budget) * ratio).long() // self.size
        return (n_pages - 1 - self.n_near).clamp(max=self.n_choices)

    @property
    def n_first(self) -> int:
        return -(-resolved(self.sinks) // self.size)

    @property
    def n_last(self) -> int:
        return self._n_local - self.n_near

    @property
    def n_near(self) -> int:
        return self._n_local if self.place in ("constant", "grouped") else 0

    @property
    def reach(self) -> int:
        """The most tokens that a query sees with its own page: those of the near pages, and its page's."""
        return (self.n_near + 1) * self.size

    @property
    def _n_local(self) -> int:
        return -(-resolved(self.local) // self.size)

    @property
    def couples_heads(self) -> str | None:
        return BY_NUMBER if self.select == "random" else super().couples_heads

    def n_choosers(self, n_heads: int, n_kv_heads: int) -> int:
        return choosers(resolved(self.share), n_heads, n_kv_heads)

    @property
    def least_rows(self) -> int:
        return self.size if self.queries == "page" else 1

    @property
    def block(self) -> int:
        return -(-block_of(self.n_choices) // self.least_rows) * self.least_rows

    @property
    def access(self) -> AccessPattern:
        sinks, local = self.n_first * self.size, (self._n_local + 1) * self.size
        return AccessPattern(self.size, sinks=sinks, local=local, per_head=self.share != "layer")

    def limit(self, window: int, sliding_window: int | None = None) -> int | None:
        """Return the window if a longer text has larger distances: true ones, or those of a budget or `far` beyond."""
        match self.place:
            case "true":
                return window
            case "constant":
                return window if resolved(self.far) >= window else None
            case "side_by_side":
                return window if (self.n_choices + 1) * self.size > window else None
            case "grouped":  # the length at which the largest distance is `window - 1`
                group = resolved(self.group)
                return max(window, (window - self.reach + self.reach // group) * group)
            case "dual":
                return window if resolved(self.far) >= window else None

    @property
    def placed(self) -> Placement:
        match self.place:
            case "constant":
                return ConstantDistance(self.far)
            case "grouped":
                return GroupedPositions(resolved(self.group), self.reach)
            case "dual":
                return DualPositions(resolved(self.chunk_size), resolved(self.far))
            case _:
                return PLACEMENTS[self.place]

    @property
    def selector(self) -> Selector:
        """The selector, with its knobs."""
        match self.select:
            case "representatives":
                return Representatives(min(resolved(self.repr_tokens), self.size))
            case "lowdim":
                sample = resolved(self.budget) // self.size * self.size
                maps = self.maps if isinstance(self.maps, LowDimMaps) else None
                return LowDim(resolved(self.low_dim), self.size, sample, maps)
            case "best_key":
                return BEST_KEY
            case "oracle":
                return Mass(resolved(self.judge))
            case "random":
                return Random(resolved(self.seed))
            case _:
                return SELECTORS[self.select]

    @property
    def uses_queries(self) -> bool:
        return self.selector.uses_queries

    def summary_shape(self, sizes: Sizes) -> tuple[int, ...]:
        return self.selector.shape(sizes)

    def state(self, layout: CacheLayout) -> Mapping[str, MethodState]:
        more = self.selector.state(layout) if isinstance(self.selector, LowDim) else {}
        return {**super().state(layout), **more}

    def could_keep(self, layer: int, kept: Mapping[str, FileTensor], layout: CacheLayout, n_tokens: int) -> bool:
        fits = self.selector.could_keep(kept, layout) if isinstance(self.selector, LowDim) else True
        return fits and super().could_keep(layer, kept, layout, n_tokens)

    def keep_queries(self, q: Tensor, cache: LayerCache, step: Step) -> None:
        if isinstance(self.selector, LowDim):
            self.selector.keep(self, q, cache, step)
        else:
            super().keep_queries(q, cache, step)

    def summarise(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        assert isinstance(self.selector, SummarySelector), "pages are summarised"
        return self.selector.summarise(q, k, v, step)

    def score(self, q: Tensor, summary: Tensor, step: Step, layer: int) -> Tensor:
        assert isinstance(self.selector, SummarySelector), "pages have summaries"
        return self.selector.score(q, summary, len(q) // self.n_choosers(len(q), step.n_kv_heads))

    def pooled(self, scores: Tensor, step: Step) -> Tensor:
        return scores if self.queries == "alone" else pooled(scores, step.start, self.size, self.selector)

    def pick(self, scores: Tensor, step: Step) -> Tensor:
        return ChunkSelection.select(self, scores, step)

    def attend_pages(self, q: Tensor, chosen: Tensor, placed: PlacedPart, cache: LayerCache, step: Step) -> Attended:
        first, n_pages = whole_pages(step.start, q.shape[1], self.size)
        stop, n_slots = first + n_pages * self.size, chosen.shape[-1]
        first = max(first, (n_slots + self.n_near) * self.size - step.start)  # earlier pages choose all that there are
        lists = chosen[:, first : stop : self.size]
        if self.queries == "alone" or placed.part.bands is not None or first >= stop or not bool((lists >= 0).all()):
            return super().attend_pages(q, chosen, placed, cache, step)
        turns = slot_turns(placed, n_slots, q, step)

        def alone(here: slice) -> list[Attended]:
            queries, few = q[:, here], chosen[:, here]
            return [step.attention.routed(queries, turns.at(here), few, cache.tiles(few))] if queries.shape[1] else []

        n_lists, inner = max(self.n_choosers(len(q), step.n_kv_heads), step.n_kv_heads), slice(first, stop)
        whole = attend_whole_pages(q[:, inner], turns.at(inner), lists, n_lists, self.size, cache, step)
        return join([*alone(slice(first)), whole, *alone(slice(stop, None))], 1)

    def log_mass(self, scores: Tensor, n_heads: int, head_dim: int) -> Tensor:
        return self.selector.log_mass(scores, n_heads, head_dim)

    def scorer(self, q: Tensor, cache: LayerCache, step: Step) -> tuple[Scorer, int]:
        if not isinstance(self.selector, ContextSelector):
            return super().scorer(q, cache, step)
        return self.selector.scorer(self, q, self.n_choosers(len(q), step.n_kv_heads), self.size, cache, step)

    def choice_cost(self, block: QueryBlock) -> Cost:
        choosing = self.selector.cost(block, self.size)
        if self.place == "dual" and isinstance(self.selector, SummarySelector):
            choosing = replace(choosing, scores=3 * resolved(choosing.scores))  # a page is scored for each band
        return self.seen_cost(block, together=self.share != "head") + choosing

    def promised(self, what: Promise) -> bool:
        """Return whether the class promises `what`; steps are `recorded` with summaries of a fixed shape alone."""
        return super().promised(what) and (what != "recorded" or isinstance(self.selector, SummarySelector))

    @property
    def plain_choice(self) -> Literal["best", "worst"] | None:
        return "best"

    def replaced(self, **knobs: Any) -> Self:
        """Return this method with another `select` or `place`: knobs that only the old one has are dropped."""
        dropped = {
            name: None for name, (other, values) in KNOBS_OF.items() if knobs.get(other, values[0]) not in values
        }
        return replace(self, **{**dropped, **knobs})
