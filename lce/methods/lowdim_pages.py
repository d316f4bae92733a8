"""The selector `LowDim`: pages scored by the best of their tokens, with ESA's low-dimensional keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lce.attention import rotate, token_scores
from lce.cache.layer import LayerCache
from lce.cache.layout import CacheLayout
from lce.cache.method_state import FileTensor, MethodState, Staged, Summaries
from lce.methods.base import Method, is_like
from lce.methods.costs import Cost, QueryBlock
from lce.methods.lowdim import LowDimMap, LowDimMaps, concat_heads, principal
from lce.methods.mass import unrotated
from lce.methods.selective import SUMMARIES
from lce.methods.selectors import ContextSelector, Sizes
from lce.methods.step import Step

BASIS = "principal components"


@dataclass(frozen=True)
class LowDim(ContextSelector):
    """ESA's low-dim scores: `f(m) = Σ_h q_h · k_h` over query heads, for the query at `W // 2` and token m unrotated.

    f is computed by `maps` (Eq. 5-7), or with None by the principal components of the text's first `sample` tokens. A
    page of `size` tokens keeps the low-dim key of each token, and scores the largest f of its tokens. All heads choose
    together.
    """

    low_dim: int
    size: int
    sample: int
    maps: LowDimMaps | None

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        n_numbers = sizes.n_kv_heads * sizes.head_dim
        low_dim = self.low_dim if self.maps else min(self.low_dim, n_numbers, max(1, self.sample - 1))
        return 1, self.size, low_dim

    def state(self, layout: CacheLayout) -> Mapping[str, MethodState]:
        """Return the store of the principal components, if they are used."""
        n_bytes = layout.key_bytes * self.shape(layout)[-1]
        return {} if self.maps else {BASIS: Staged(lambda n_tokens, block: n_bytes)}

    def could_keep(self, kept: Mapping[str, FileTensor], layout: CacheLayout) -> bool:
        """Return whether a file's components can be those of this selector, and belong to its low-dim keys."""
        basis, shape = kept.get(BASIS), (layout.n_kv_heads * layout.head_dim, self.shape(layout)[-1])
        return bool(self.maps) or (
            (basis is None) == (SUMMARIES not in kept) and (basis is None or is_like(basis, shape, layout.dtype))
        )

    def keep(self, method: Method, like: Tensor, cache: LayerCache, step: Step) -> None:
        """Write the low-dim keys of the pages that this block completes, or of all pages once there are components."""
        first, stop = step.start // self.size, step.stop // self.size
        if self._maps(cache, like) is None and step.stop >= self.sample:
            keys = unrotated(method, cache, step, 0, self.sample).to(like.dtype)
            cache.kept(Staged, BASIS).stage(principal(keys, self.low_dim))
            first = 0
        maps = self._maps(cache, like)
        if maps is not None and first < stop:
            keys = unrotated(method, cache, step, first * self.size, stop * self.size).to(like.dtype)
            low_keys = maps.low_keys(concat_heads(keys)).unflatten(0, (-1, self.size))
            cache.kept(Summaries, SUMMARIES).write(low_keys[None], first)

    def scores(self, method: Method, q: Tensor, n_chunks: int, size: int, cache: LayerCache, step: Step) -> Tensor:
        """Return the scores `[1, T, n_chunks]`; zeros before there are components, when all pages are taken."""
        maps = self._maps(cache, q)
        if maps is None:
            return q.new_zeros(1, q.shape[1], n_chunks, dtype=torch.float32)
        far = rotate(q, step.far_turn(max(1, step.window // 2), q))
        if not self.maps:
            far = far.unflatten(0, (step.n_kv_heads, -1)).sum(dim=1)
        low_keys = cache.kept(Summaries, SUMMARIES).span(0, n_chunks).flatten(0, 2)  # [n_chunks * L, R]
        f = token_scores(maps.low_queries(concat_heads(far)), low_keys).float()
        return f.view(1, -1, n_chunks, size).amax(-1)

    def cost(self, block: QueryBlock, size: int) -> Cost:
        """Return the cost of choosing, without the principal components. A low-dim key counts in its page's block."""
        low_dim, key_size = self.shape(block)[-1], block.n_kv_heads * block.head_dim
        n_tokens = block.stop // size * size if block.stop > size else 0
        n_new = (block.stop // size - block.start // size) * size
        query_size = block.n_heads * block.head_dim if self.maps else key_size
        low = (n_new * key_size + (len(block) * query_size if n_tokens else 0)) * low_dim
        return Cost(0, len(block) * n_tokens * low_dim, low_dim=low, state_read=n_tokens * low_dim)

    def _maps(self, cache: LayerCache, like: Tensor) -> LowDimMap | None:
        """Return the layer's maps; None: the components are not computed yet."""
        if self.maps:
            return self.maps.layer(cache.index, like)
        basis = cache.kept(Staged, BASIS).latest
        return None if basis is None else LowDimMap.unbiased(basis, basis)
