"""Methods whose queries choose together: one choice of tokens for a block of queries and all heads of a layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from lce.attention import Attended, first_best, rotate, spread
from lce.cache.layer import LayerCache
from lce.methods.attending import PlacedPart
from lce.methods.base import LocalMethod, resolved
from lce.methods.step import Step
from lce.methods.top_p import enough


class JointSelection(LocalMethod, ABC):
    """A method whose blocks choose `top_k` candidates, and see them at the constant distance `far`.

    Candidate m is the run of `size` tokens from `sinks + m·size` on, where `size` is that of `choices`.
    """

    top_k: int | None  # knobs of each derived class
    far: int | None
    top_p: float | None
    eps = 0  # a candidate counts as the best one at most so many away

    def resolve(self, window: int) -> Self:
        made = self.filled(local=max(1, window // 2), top_k=max(1, window // 4))
        return made.filled(far=made.local)

    @abstractmethod
    def n_candidates(self, start: int) -> int:
        """Return how many candidates a block of queries from token `start` on has; below 1: none."""

    @abstractmethod
    def relevance(self, q: Tensor, far: Tensor, cache: LayerCache, step: Step) -> Tensor:
        """Score all candidates for the queries `[H, T, D]` together: `[M]`; `far` are the queries, placed at `far`."""

    @abstractmethod
    def log_mass(self, relevance: Tensor, n_heads: int, head_dim: int) -> Tensor:
        """Turn the relevance into logarithms of attention mass, up to a constant."""

    def select(self, q: Tensor, far: Tensor, cache: LayerCache, step: Step) -> Tensor:
        """Choose the `top_k` best candidates, or fewer with `top_p`, ascending."""
        n_candidates, first, size = self.n_candidates(step.start), *self.choices
        n, before = (
            min(resolved(self.top_k), n_candidates),
            (self.sinks - first) // size,
        )  # the first candidate's choice
        if n == n_candidates and self.top_p is None and not step.note_scores:
            chosen = torch.arange(n, device=q.device)
        else:
            scores = self.relevance(q, far, cache, step)
            if self.top_p is not None:
                order = spread(scores.float(), self.eps).argsort(descending=True, stable=True)[:n]
                n = enough(self.log_mass(scores, len(q), q.shape[-1]), order, self.top_p)
            chosen = first_best(scores, n, self.eps)
            if step.note_scores:
                all_scores = pad(scores.float(), (before, 0), value=-torch.inf)
                step.note_scores(step, cache.index, all_scores.expand(1, q.shape[1], -1))
        if step.note:
            step.note(cache.index, (before + chosen).expand(*q.shape[:2], -1))
        return chosen

    def tokens_of(self, chosen: Tensor) -> Tensor:
        """Return the tokens of chosen candidates `[K]`, and those to attend with them: `[n]`, ascending."""
        size = self.choices[1]
        return (self.sinks + chosen[:, None] * size + torch.arange(size, device=chosen.device)).flatten()

    def attend_chosen(self, q: Tensor, placed: PlacedPart, cache: LayerCache, step: Step) -> Attended | None:
        """Attend copies of the chosen keys and values, made for every layer in the same memory."""
        far = rotate(q, placed.turn)
        tokens = self.tokens_of(self.select(q, far, cache, step))
        n = 2 * cache.layout.n_kv_heads * len(tokens) * cache.layout.head_dim
        buffer = step.once(f"{len(tokens)} tokens", lambda: q.new_empty(n))
        return step.attention.dense(far, *cache.tokens(tokens, buffer), causal=False)
