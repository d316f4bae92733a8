"""The selector `LowDim`: pages scored by the best of their tokens, with ESA's low-dimensional keys."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from lce.attention import rotate, token_scores
from lce.cache.layer import LayerCache
from lce.cache.layout import CacheLayout
from lce.cache.method_state import FileTensor, GrowingRows, MethodState, Staged, TokenRows
from lce.errors import UsageError
from lce.methods.base import Method, is_like, resolved
from lce.methods.costs import Cost, QueryBlock
from lce.methods.knobs import knob
from lce.methods.lowdim import BASIS, LOW_DIM_KEYS, LowDimMap, LowDimMaps, concat_heads, layer_maps, principal
from lce.methods.map_file import check_maps, maps_for
from lce.methods.selection import Selection, Share, Sizes
from lce.methods.selectors import ContextSelector
from lce.methods.step import ModelFacts, Step

OTHERWISE = "-o select.compress=pca"
FIRST_KEYS = "first keys"  # the name of the state


class FirstKeys(GrowingRows):
    """A state with the unrotated keys `[G, n, D]` of the first tokens, at most `most`, until there are components."""

    axis = 1

    def __init__(self, row_bytes: int, most: int) -> None:
        super().__init__(row_bytes)
        self.most = most

    def most_bytes(self, n_tokens: int, block: int) -> int:
        return super().most_bytes(min(n_tokens, self.most), block)


@dataclass(frozen=True)
class LowDim(ContextSelector, name="lowdim"):
    """ESA's low-dim scores: `f(m) = Σ_h q_h · k_h` over query heads, for the query at `W // 2` and token m unrotated.

    f is computed by `maps` (Eq. 5-7), or with `compress=pca` by the principal components of the text's first tokens, as
    many as the budget has in whole pages. Low-dim keys are made of keys before their rotation, so equal tokens tie. A
    page scores the largest f of its tokens. All heads choose together.
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

    def dims(self, sizes: Sizes, selection: Selection) -> int:
        """Return the number of dimensions of a low-dim key: of components no more than a sample of keys has."""
        if self.compress != "pca":
            return self.low_dim
        return min(self.low_dim, sizes.n_kv_heads * sizes.head_dim, max(1, self.sample(selection) - 1))

    def state(self, layout: CacheLayout, selection: Selection) -> Mapping[str, MethodState]:
        low_dim = self.dims(layout, selection)
        kept: dict[str, MethodState] = {LOW_DIM_KEYS: TokenRows(low_dim * layout.dtype.itemsize)}
        if self.compress == "pca":
            kept[FIRST_KEYS] = FirstKeys(layout.key_bytes, self.sample(selection))
            kept[BASIS] = Staged(lambda n_tokens, block: layout.key_bytes * low_dim)
        return kept

    def could_keep(
        self, kept: Mapping[str, FileTensor], layout: CacheLayout, selection: Selection, n_tokens: int
    ) -> bool:
        basis, keys, first = (kept.get(name) for name in (BASIS, LOW_DIM_KEYS, FIRST_KEYS))
        low_dim, n_numbers = self.dims(layout, selection), layout.n_kv_heads * layout.head_dim
        sampled = (layout.n_kv_heads, min(n_tokens, self.sample(selection)), layout.head_dim)
        return (
            (keys is None) == (self.compress == "pca" and basis is None)
            and (first is None) == (self.compress == "calibrated")
            and (keys is None or is_like(keys, (n_tokens, low_dim), layout.dtype))
            and (basis is None or is_like(basis, (n_numbers, low_dim), layout.dtype))
            and (first is None or is_like(first, sampled, layout.dtype))
        )

    def keep_keys(self, selection: Selection, k: Tensor, cache: LayerCache, step: Step) -> None:
        """Write the low-dim keys of this block, or of all tokens as soon as there are components."""
        maps, start = layer_maps(self.maps, cache, k), step.start
        if maps is None:
            sample, first = self.sample(selection), cache.kept(FirstKeys, FIRST_KEYS)
            first.write(k[:, : sample - start], start)
            if step.stop < sample:
                return
            k, start = torch.cat((first.span(0, sample), k[:, sample - start :]), dim=1), 0
            basis = principal(k[:, :sample], self.low_dim)
            cache.kept(Staged, BASIS).stage(basis)
            maps = LowDimMap.unbiased(basis, basis)
        cache.kept(TokenRows, LOW_DIM_KEYS).write(maps.low_keys(concat_heads(k)), start)

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
        low_keys = cache.kept(TokenRows, LOW_DIM_KEYS).span(0, n_chunks * selection.size)
        f = token_scores(maps.low_queries(concat_heads(far)), low_keys, generated=step.decoding).float()
        return f.view(1, -1, n_chunks, selection.size).amax(-1)

    def cost(self, block: QueryBlock, selection: Selection) -> Cost:
        """Return the cost of choosing, without the principal components. A low-dim key counts in its token's block."""
        size, low_dim, key_size = selection.size, self.dims(block, selection), block.n_kv_heads * block.head_dim
        n_tokens = block.stop // size * size if block.stop > size else 0
        query_size = key_size if self.compress == "pca" else block.n_heads * block.head_dim
        low = (len(block) * key_size + (len(block) * query_size if n_tokens else 0)) * low_dim
        return Cost(0, len(block) * n_tokens * low_dim, low_dim=low, state_read=n_tokens * low_dim)
