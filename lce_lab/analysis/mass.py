"""True attention mass: each key's share of full attention, computed slowly, to judge the choices of methods.

Full attention at true distances fails beyond the window, so there are two definitions of true mass, called judges.
`true` is full attention at the distances `i - j`. `constant` is full attention at the distances `min(i - j, W // 2)`,
as in `rerope`: the model knows all of these distances, however long the text. The judges are equal up to `W // 2 + 1`
tokens. Both use the RoPE scaling that the model was loaded with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from lce.methods import LayerCache, Method, Step, rotate
from lce.methods.full import OwnWindow
from lce.methods.turned_keys import pieces, unrotated_keys

Judge = Literal["true", "constant"]
# The numbers of queries and of scores at a time.
ROWS, SCORES_AT_ONCE = 128, 1 << 24
JUDGES: tuple[Judge, ...] = ("true", "constant")


class TrueMass:
    """Full attention of a layer's queries to all keys in the cache, at whatever positions the method caches keys.

    Arithmetic is float32, over pieces of the keys whose sizes do not depend on memory budgets, so that no budget
    changes the bits of a result. Time: O(H · T · N · D) per call. Memory: the result, and the scores of one slice.

    In a layer with a sliding window of its own, both judges are the attention of that window.
    """

    def __init__(self, method: Method, cache: LayerCache, step: Step, judge: Judge) -> None:
        self.method, self.cache, self.step = method, cache, step
        self.reach = method.size if isinstance(method, OwnWindow) else None
        self.cap = None if judge == "true" or self.reach else max(1, step.window // 2)

    def slices(self, n_queries: int, n_heads: int) -> Iterator[slice]:
        """Yield slices of the block's queries, small enough to bound the memory for the scores of all keys."""
        rows = max(1, min(ROWS, SCORES_AT_ONCE // (n_heads * self.step.stop)))
        for start in range(0, n_queries, rows):
            yield slice(start, min(start + rows, n_queries))

    def weights(self, q: Tensor, positions: Tensor) -> Tensor:
        """Return the softmax weights `[H, T, N]` of all keys for unrotated queries `q [H, T, D]` at `positions [T]`."""
        scores = [self._scores(q, positions, a, b) for a, b in pieces(self.cache, 0, self.step.stop, 1)]
        return torch.cat(scores, dim=-1).softmax(-1)

    def of_chunks(self, q: Tensor, positions: Tensor, size: int, n_chunks: int) -> Tensor:
        """Return the logarithm of the mass of each of the first `n_chunks` chunks of `size` tokens: `[H, T, n_chunks]`.

        A mass is a share of the query's attention to all keys up to the query's own. Chunks after the query get -inf.
        """
        border = n_chunks * size
        scores = (self._scores(q, positions, *piece) for piece in pieces(self.cache, 0, border, size))
        chunks = [some.unflatten(-1, (-1, size)).logsumexp(-1) for some in scores]
        after = pieces(self.cache, border, self.step.stop, 1)
        rest = [self._scores(q, positions, *piece).logsumexp(-1, keepdim=True) for piece in after]
        total = torch.cat([*chunks, *rest], dim=-1).logsumexp(-1, keepdim=True)
        return torch.cat(chunks, dim=-1) - total

    def of_tokens(self, q: Tensor, positions: Tensor) -> Tensor:
        """Return the attention mass of each token, summed over heads and queries: `[N]`."""
        found = torch.zeros(self.step.stop, dtype=torch.float32, device=q.device)
        for some in self.slices(q.shape[1], len(q)):
            found += self.weights(q[:, some], positions[some]).sum(dim=(0, 1))
        return found

    def attend(self, q: Tensor) -> Tensor:
        """Return the outputs `[H, T, D]` of full attention for the block's unrotated queries `q [H, T, D]`."""
        positions, outs = self.step.positions(q.device), []
        values = self.cache.span(0, self.step.stop)[1].float()
        for some in self.slices(q.shape[1], len(q)):
            weights = self.weights(q[:, some], positions[some])
            grouped = weights.reshape(len(values), -1, weights.shape[-1]) @ values
            outs.append(grouped.view(len(q), -1, q.shape[-1]))
        return torch.cat(outs, dim=1).to(q.dtype)

    def _scores(self, q: Tensor, positions: Tensor, start: int, stop: int) -> Tensor:
        """Return the logits of queries `[H, T, D]` with tokens `start..stop-1`: `[H, T, n]`, -inf for later tokens."""
        q, k = q.float(), unrotated_keys(self.method, self.cache, self.step, start, stop)
        index = torch.arange(start, stop, device=q.device)
        least, most = self.step.start - stop + 1, self.step.stop - 1 - start  # the smallest and the largest distance
        near = self.cap is None or least < self.cap
        turn = self.step.rope.turn
        placed = (rotate(x, turn(at, torch.float32)) for x, at in ((q, positions), (k, index)))
        scores = _products(*placed) if near else self._far(q, k)
        if near and self.cap is not None and most >= self.cap:
            scores = torch.where(positions[:, None] - index < self.cap, scores, self._far(q, k))
        if self.reach is not None:
            scores.masked_fill_(positions[:, None] - index >= self.reach, -torch.inf)
        return scores.masked_fill_(positions[:, None] < index, -torch.inf) if least < 0 else scores

    def _far(self, q: Tensor, k: Tensor) -> Tensor:
        assert self.cap is not None, "there is a far distance"
        distance = torch.full((1,), self.cap, device=q.device)
        return _products(rotate(q, self.step.far_turn(distance, q)), k)


def _products(q: Tensor, k: Tensor) -> Tensor:
    grouped = (q / math.sqrt(q.shape[-1])).reshape(len(k), -1, q.shape[-1]) @ k.mT
    return grouped.view(len(q), -1, k.shape[1])
