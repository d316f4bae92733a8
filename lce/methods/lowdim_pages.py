"""The selector `LowDim`: pages scored by the best of their tokens, with ESA's low-dimensional keys."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from lce.attention import rotate, token_scores
from lce.cache.layer import LayerCache
from lce.cache.layout import CacheLayout
from lce.cache.method_state import FileTensor, MethodState, Staged, Summaries
from lce.errors import UsageError
from lce.methods.base import Method, is_like, resolved
from lce.methods.costs import Cost, QueryBlock
from lce.methods.knobs import knob
from lce.methods.lowdim import BASIS, LowDimMaps, concat_heads, layer_maps, principal
from lce.methods.map_file import check_maps, maps_for
from lce.methods.selection import Selection, Share, Sizes
from lce.methods.selectors import SUMMARIES, ContextSelector
from lce.methods.step import ModelFacts, Step
from lce.methods.turned_keys import unrotated_keys

OTHERWISE = "-o select.compress=pca"


@dataclass(frozen=True)
class LowDim(ContextSelector, name="lowdim"):
    """ESA's low-dim scores: `f(m) = Σ_h q_h · k_h` over query heads, for the query at `W // 2` and token m unrotated.

    f is computed by `maps` (Eq. 5-7), or with `compress=pca` by the principal components of the text's first tokens, as
    many as the budget has in whole pages. A page keeps the low-dim key of each token, and scores the largest f of its
    tokens. All heads choose together.
    """

    compress: Literal["calibrated", "pca"] = knob("calibrated", "low-dim keys by learned maps, or by PCA")
    low_dim: int = knob(128, "numbers in a low-dimensional key", least=1)
    maps: str | LowDimMaps | None = knob(None, "file of lce calibrate; none is the one beside the model")
    usual_share: ClassVar[Share] = "layer"

    def for_model(self, label: str, model: ModelFacts) -> Self:
        return replace(self, **maps_for(self, label, max(1, model.window // 2), model, OTHERWISE))

    def check(self, label: str, selection: Selection, window: int) -> None:
        super().check(label, selection, window)
        if selection.share != "layer":
            raise UsageError(f"{label}: low-dim keys have the sum of all heads' scores alone; give share=layer")
        if self.compress == "pca" and self.maps is not None:
            raise UsageError(f"{label}: select.compress=pca computes its own maps from the text; drop select.maps")
        if self.compress == "pca" and selection.budget.top_p is not None:
            raise UsageError(
                f"{label}: budget.top_p needs scores from the first page on, and select.compress=pca has none before "
                "budget tokens; drop budget.top_p, or give select.compress=calibrated"
            )
        check_maps(self, label, max(1, window // 2), window, OTHERWISE)

    def sample(self, selection: Selection) -> int:
        """Return the number of tokens whose principal components are taken."""
        return resolved(selection.budget.tokens) // selection.size * selection.size

    def shape(self, sizes: Sizes, selection: Selection) -> tuple[int, ...]:
        low_dim, n_numbers = self.low_dim, sizes.n_kv_heads * sizes.head_dim
        if self.compress == "pca":
            low_dim = min(low_dim, n_numbers, max(1, self.sample(selection) - 1))
        return 1, selection.size, low_dim

    def state(self, layout: CacheLayout, selection: Selection) -> Mapping[str, MethodState]:
        n_bytes = layout.key_bytes * self.shape(layout, selection)[-1]
        return {BASIS: Staged(lambda n_tokens, block: n_bytes)} if self.compress == "pca" else {}

    def could_keep(self, kept: Mapping[str, FileTensor], layout: CacheLayout, selection: Selection) -> bool:
        basis, shape = kept.get(BASIS), (layout.n_kv_heads * layout.head_dim, self.shape(layout, selection)[-1])
        return self.compress == "calibrated" or (
            (basis is None) == (SUMMARIES not in kept) and (basis is None or is_like(basis, shape, layout.dtype))
        )

    def keep(self, method: Method, selection: Selection, like: Tensor, cache: LayerCache, step: Step) -> None:
        """Write the low-dim keys of the pages that this block completes, or of all pages once there are components."""
        size, sample = selection.size, self.sample(selection)
        first, stop = step.start // size, step.stop // size
        if layer_maps(self.maps, cache, like) is None and step.stop >= sample:
            keys = unrotated_keys(method, cache, step, 0, sample).to(like.dtype)
            cache.kept(Staged, BASIS).stage(principal(keys, self.low_dim))
            first = 0
        maps = layer_maps(self.maps, cache, like)
        if maps is not None and first < stop:
            keys = unrotated_keys(method, cache, step, first * size, stop * size).to(like.dtype)
            low_keys = maps.low_keys(concat_heads(keys)).unflatten(0, (-1, size))
            cache.kept(Summaries, SUMMARIES).write(low_keys[None], first)

    def scores(
        self, method: Method, q: Tensor, n_chunks: int, selection: Selection, cache: LayerCache, step: Step
    ) -> Tensor:
        """Return the scores `[1, T, n_chunks]`; zeros before there are components, when all pages are taken."""
        maps = layer_maps(self.maps, cache, q)
        if maps is None:
            return q.new_zeros(1, q.shape[1], n_chunks, dtype=torch.float32)
        far = rotate(q, step.far_turn(max(1, step.window // 2), q))
        if self.compress == "pca":
            far = far.unflatten(0, (step.n_kv_heads, -1)).sum(dim=1)
        low_keys = cache.kept(Summaries, SUMMARIES).span(0, n_chunks).flatten(0, 2)  # [n_chunks * L, R]
        f = token_scores(maps.low_queries(concat_heads(far)), low_keys).float()
        return f.view(1, -1, n_chunks, selection.size).amax(-1)

    def cost(self, block: QueryBlock, selection: Selection) -> Cost:
        """Return the cost of choosing, without the principal components. A low-dim key counts in its page's block."""
        size, low_dim, key_size = selection.size, self.shape(block, selection)[-1], block.n_kv_heads * block.head_dim
        n_tokens = block.stop // size * size if block.stop > size else 0
        n_new = (block.stop // size - block.start // size) * size
        query_size = key_size if self.compress == "pca" else block.n_heads * block.head_dim
        low = (n_new * key_size + (len(block) * query_size if n_tokens else 0)) * low_dim
        return Cost(0, len(block) * n_tokens * low_dim, low_dim=low, state_read=n_tokens * low_dim)
