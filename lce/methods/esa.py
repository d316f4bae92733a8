"""ESA: a block of queries chooses tokens together, by low-dimensional keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from lce.attention import (
    Attended,
    Order,
    best_tokens,
    merge,
    products,
    rotate,
    scores_size,
    spread,
    sum_heads,
    token_scores,
)
from lce.cache.layer import LayerCache
from lce.cache.layout import CacheLayout
from lce.cache.method_state import FileTensor, MethodState, Staged, TokenRows
from lce.errors import UsageError
from lce.methods import lowdim
from lce.methods.attending import PlacedPart
from lce.methods.base import Example, is_like, knob, resolved
from lce.methods.budget import TOP_P
from lce.methods.costs import Cost, PaperFigure, QueryBlock, paper_figures
from lce.methods.decoding import Span, decode_recent
from lce.methods.joint import HOOKS, PROMISES, JointSelection
from lce.methods.lowdim import BASIS, LOW_DIM_KEYS, LowDimMap, LowDimMaps, concat_heads, layer_maps, principal
from lce.methods.map_file import check_maps, maps_for
from lce.methods.parts import CHOSEN, LayerFacts, Part
from lce.methods.registry import register
from lce.methods.step import DeviceStep, ModelFacts, Step, is_recorded

OTHERWISE = "-o compress=pca or -o compress=none"


@register("esa")
@dataclass(frozen=True)
class ESA(JointSelection, promises=dict.fromkeys((*PROMISES, "recorded"), HOOKS)):
    """ESA (Wang et al., 2025, "Unshackling Context Length: An Efficient Selective Attention Approach through Query-Key
    Compression").

    The queries of a block `[a, b)` choose together. While `a - local <= sinks`, attention is plain and causal. Later
    blocks attend the tokens from `a - local` on at their true distance, and at the constant distance `far` the first
    `sinks` tokens and the `top_k` best tokens between sinks and local tokens. One softmax covers all tokens.

    The score of token m for query c is `f(m;c) = Σ_h q_h · k_h`, summed over query heads, with the query rotated to the
    distance `far`. The score for the block is `F(m) = max_c (f(m;c) - max_m' f(m';c))` (Eq. 3-4). Then `F(m)` becomes
    the maximum over `m ± eps`, so that the neighbours of a good token are selected too (Eq. 8; eps = 3 in the paper's
    main results).

    `compress` says how `f` is computed. `none`: exactly. `calibrated`: as `(q A + a)·(k B + b)`, with `low_dim` numbers
    per token (Eq. 5-7), by maps that `lce calibrate` learns on text; `maps` is their file, by default the one in the
    model's folder. Maps are learned for one `far`, window and RoPE scaling, and refused for others. `pca`: as
    `(q A)·(k A)`, where A are the principal components of the prompt's first keys.

    `heads` is the paper's ablation (Table 6): with `max`, `f(m;c) = max_h q_h · k_h`, which low-dim keys cannot give.
    With `top_p`, the best of the `top_k` tokens are chosen until their estimated attention reaches that share of the
    attention to all candidates. The estimate takes `F / H` as a token's logit.

    Cost: scoring n tokens for a block of T queries takes O(T · n · R), R = `low_dim`, or O(T · n · H · D) exactly. The
    block attends `sinks + top_k + local + T` keys. The state is R numbers per token and layer.
    """

    sinks: int = knob(128, "first tokens, always attended", least=0)
    local: int | None = knob(None, "last tokens, at exact distances; none is half of the window", least=1)
    top_k: int | None = knob(None, "tokens between that a block chooses; none is a quarter of the window", least=1)
    eps: int = knob(3, "a token's score becomes the best score at most so many tokens away", least=0)
    low_dim: int = knob(128, "numbers in a low-dimensional key", least=1)
    compress: Literal["calibrated", "pca", "none"] = knob("calibrated", "low-dim keys by learned maps, by PCA, or none")
    far: int | None = knob(None, "distance of the sinks and the chosen tokens; none is local", least=0)
    maps: str | LowDimMaps | None = knob(None, "file of lce calibrate; none is the one beside the model")
    heads: Literal["sum", "max"] = knob(
        "sum", "a token's score: the sum over all heads, or its best head's, with compress=none alone", kw_only=True
    )
    top_p: float | None = knob(None, TOP_P, is_share=True, kw_only=True)
    example: ClassVar = Example({"sinks": 2, "local": 5, "top_k": 4, "eps": 1, "compress": "none"}, block=3)

    choices = 0, 1
    presets: ClassVar = {"paper": {"sinks": 128, "local": 4096, "top_k": 2048, "eps": 3, "low_dim": 128}}  # window 8192

    def for_model(self, model: ModelFacts) -> Self:
        far = resolved(self.sized(model.window).far)
        return replace(self, **maps_for(self, self.name, far, model, OTHERWISE))

    def sized(self, window: int) -> Self:
        """Return this method with all knobs filled in; the maps are not checked."""
        made = super().resolve(window)
        if made.heads == "max" and made.compress != "none":
            raise UsageError(
                f"esa: heads=max needs each head's score, and compress={made.compress} has their sum alone; "
                "give compress=none too"
            )
        return made

    def resolve(self, window: int) -> Self:
        made = self.sized(window)
        check_maps(made, self.name, resolved(made.far), window, OTHERWISE)
        return made

    @property
    def block(self) -> int:
        return max(1, min(512, self.n_local // 2))  # small, because local keys are up to `local + block` away

    @property
    def learned(self) -> LowDimMaps | None:
        """The maps in use, if they are learned ones."""
        return self.maps if isinstance(self.maps, LowDimMaps) and self.compress == "calibrated" else None

    @property
    def n_recent(self) -> int:
        return self.sinks + self.n_local

    def state(self, layout: CacheLayout) -> Mapping[str, MethodState]:
        if self.learned is not None:
            self.learned.check_shapes(layout.acting_layers, layout.n_heads, layout.n_kv_heads, layout.head_dim)
        kept = dict(super().state(layout))
        if self.compress != "none":
            kept[LOW_DIM_KEYS] = TokenRows(self.low_dim * layout.dtype.itemsize)
        if self.compress == "pca":
            kept[BASIS] = Staged(lambda n_tokens, block: layout.key_bytes * self.low_dim)
        return kept

    def could_keep(self, layer: int, kept: Mapping[str, FileTensor], layout: CacheLayout, n_tokens: int) -> bool:
        keys, basis = kept.get(LOW_DIM_KEYS), kept.get(BASIS)
        low_dim = self.low_dim if basis is None else min(basis.shape[-1] if basis.shape else 0, self.low_dim)
        return (
            super().could_keep(layer, kept, layout, n_tokens)
            and (keys is None) == (self.compress == "none" or (self.compress == "pca" and basis is None))
            and (keys is None or is_like(keys, (n_tokens, low_dim), layout.dtype))
            and (basis is None or is_like(basis, (layout.n_kv_heads * layout.head_dim, low_dim), layout.dtype))
        )

    def keep(self, k: Tensor, v: Tensor, cache: LayerCache, step: Step) -> None:
        super().keep(k, v, cache, step)
        if self.compress != "none" and (maps := layer_maps(self.learned, cache, k)) is not None:
            rows, kept = maps.low_keys(concat_heads(k)), cache.kept(TokenRows, LOW_DIM_KEYS)
            if step.at is None:
                kept.write(rows, step.start)
            else:
                kept.write_on_device(rows, step.at)

    def bound(self, stop: int) -> int | None:
        """Return the bound of a recorded step; None while a token attends all candidates, and with some knobs."""
        able = self.heads == "sum" and self.top_p is None and self.n_candidates(stop - 1) > resolved(self.top_k)
        return super().bound(stop) if able else None

    def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        if not is_recorded(step):
            return super().attend(q, cache, step)
        far = rotate(q, step.far_turn(resolved(self.far), q))
        scores = recorded_scores(self, far, cache, step)
        n, n_local = len(scores), self.n_local
        later = step.once("later", lambda: torch.arange(n, device=q.device) >= step.at - n_local - self.sinks)
        scores = spread(scores.masked_fill(later, -torch.inf), self.eps).masked_fill(later, -torch.inf)
        tokens = self.tokens_of(best_tokens(scores, resolved(self.top_k)))
        k, v = (x.index_select(1, tokens) for x in cache.whole)
        near = Span(step.at - n_local, step.at + 1, n_local + 1, step.true_turn(q))
        spans = step.once("near", lambda: [near])
        own = decode_recent(q, spans, cache, step)
        return merge([own, step.attention.dense(far, k, v, causal=False, order=Order(True))])

    def parts_of(self, i: Tensor, layer: LayerFacts) -> Iterator[Part]:
        border, far = int(i[0]) - self.n_local, resolved(self.far)
        if border <= self.sinks:
            yield Part(keys=(0, i + 1), query_at=i, exact=True)
        else:
            yield Part(keys=(0, self.sinks), query_at=far)
            yield Part(keys=CHOSEN, query_at=far)
            yield Part(keys=(border, i + 1), query_at=i, exact=True)

    def attend_part(self, q: Tensor, placed: PlacedPart, cache: LayerCache, step: Step) -> Attended | None:
        """Return the attention to the local span, or to the chosen tokens and the sinks together."""
        if placed.part.keys == CHOSEN:
            find_basis(self, cache, step)
        elif not placed.part.exact:
            return None  # sinks
        return super().attend_part(q, placed, cache, step)

    def tokens_of(self, chosen: Tensor) -> Tensor:
        return torch.cat((torch.arange(self.sinks, device=chosen.device), chosen + self.sinks))

    def n_candidates(self, start: int) -> int:
        return start - self.n_local - self.sinks

    def choice_cost(self, block: QueryBlock) -> Cost:
        """Return the cost of choosing and attending, except `find_basis`. A low-dim key counts in its token's block."""
        query_size, key_size = block.n_heads * block.head_dim, block.n_kv_heads * block.head_dim
        size = {"calibrated": self.low_dim, "pca": min(self.low_dim, key_size), "none": 0}[self.compress]
        low_keys = Cost(0, low_dim=len(block) * key_size * size)
        n_middle, top_k = max(0, self.n_candidates(block.start)), resolved(self.top_k)
        seen = block.tokens(min(top_k, n_middle))
        if n_middle <= top_k:
            return low_keys + seen
        compared = size or key_size  # exact scores use queries summed over a KV head's query heads
        low_queries = len(block) * size * (query_size if self.compress == "calibrated" else key_size)
        scores = len(block) * n_middle * (query_size if self.heads == "max" else compared)
        scored = Cost(0, scores, low_dim=low_queries, state_read=n_middle * compared)
        return low_keys + seen + scored

    def relevance(self, q: Tensor, far: Tensor, cache: LayerCache, step: Step) -> Tensor:
        score, row_size = scorer(self, far, cache, step)
        if q.shape[1] == 1:  # one query needs no comparison with other queries
            return score(slice(None))[0]
        return lowdim.block_scores(score, q.shape[1], row_size)

    def log_mass(self, relevance: Tensor, n_heads: int, head_dim: int) -> Tensor:
        return relevance.float() / ((1 if self.heads == "max" else n_heads) * math.sqrt(head_dim))


@paper_figures.register(ESA)
def _(method: ESA, block: QueryBlock) -> Sequence[PaperFigure]:
    if method.compress == "none":
        return ()
    figures = (
        ("operations to score a token, beside those to attend it, R / 2HD", block.n_heads),
        ("numbers of a low-dim key, beside its keys and values, R / 2GD", block.n_kv_heads),
    )
    return [
        PaperFigure(text, "Eq. 9-18", method.low_dim / (2 * n * block.head_dim), is_share=True) for text, n in figures
    ]


def recorded_scores(method: ESA, far: Tensor, cache: LayerCache, step: DeviceStep) -> Tensor:
    """Return the scores `[n]` of all tokens behind the sinks within the bound, for a query `far [H, 1, D]`."""
    groups = far.unflatten(0, (step.n_kv_heads, -1))
    if method.compress == "none":
        keys = cache.whole[0][:, method.sinks : step.bound]
        return sum_heads(products(groups.sum(dim=1), keys.mT, True), len(groups))[0, 0]
    maps = layer_maps(method.learned, cache, far)
    assert maps is not None, "found before a step is recorded"
    low_q = maps.low_queries(concat_heads(groups.sum(dim=1) if method.compress == "pca" else far))
    low_k = cache.kept(TokenRows, LOW_DIM_KEYS).allocated(step.bound)[method.sinks :]
    return token_scores(low_q, low_k, generated=True)[0]


def find_basis(method: ESA, cache: LayerCache, step: Step) -> None:
    """With `compress=pca`, compute the cached keys' principal components and low-dim keys, once per text."""
    if method.compress == "pca" and cache.kept(Staged, BASIS).latest is None:
        basis = principal(cache.span(0, step.start)[0], method.low_dim)
        cache.kept(Staged, BASIS).stage(basis)
        low_keys = LowDimMap.unbiased(basis, basis).low_keys(concat_heads(cache.span(0, cache.stop)[0]))
        cache.kept(TokenRows, LOW_DIM_KEYS).write(low_keys, 0)


def scorer(method: ESA, q: Tensor, cache: LayerCache, step: Step) -> tuple[Callable[[slice], Tensor], int]:
    """Return a function that computes `f(m; c)` (Eq. 3), and how many numbers per query the function stores.

    The function maps a slice of t queries to scores `[t, n]`. `q [H, T, D]` are rotated to the distance `far`.
    """
    first, stop = method.sinks, step.start - method.n_local
    groups = q.unflatten(0, (step.n_kv_heads, -1))  # [G, H/G, T, D]
    if method.compress == "none":
        shared = groups.sum(dim=1)  # [G, T, D]

        def exact(rows: slice) -> Tensor:
            keys = (cache.span(*some)[0] for some in cache.segments(first, stop))
            if method.heads == "max":
                some = groups[:, :, rows].flatten(1, 2)
                by_head = (products(some, k.mT, step.decoding) for k in keys)  # [G, H/G·t, n]
                return torch.cat([x.unflatten(1, (groups.shape[1], -1)).amax(dim=(0, 1)) for x in by_head], dim=1)
            parts = [products(shared[:, rows], k.mT, step.decoding) for k in keys]
            return torch.cat([sum_heads(part, len(shared))[0] for part in parts], dim=1)

        return exact, (stop - first) * (len(q) if method.heads == "max" else len(groups))
    maps = layer_maps(method.learned, cache, q)
    assert maps is not None, "found before it is used"
    low_q = maps.low_queries(concat_heads(groups.sum(dim=1) if method.compress == "pca" else q))
    low_k = cache.kept(TokenRows, LOW_DIM_KEYS).span(first, stop)
    size = scores_size(lowdim.slice_rows(len(low_q), len(low_k)), len(low_k))
    buffer = step.once(f"scores {size}", lambda: low_q.new_empty(size, dtype=torch.float32))
    return lambda rows: token_scores(low_q[rows], low_k, buffer, step.decoding), len(low_k)
