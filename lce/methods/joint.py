"""Methods whose queries choose together: one choice of tokens for a block of queries and all heads of a layer."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from lce.attention import Attended, Order, best_first, best_tokens, rotate, spread
from lce.cache.layer import LayerCache
from lce.cache.layout import CacheLayout
from lce.cache.method_state import MethodState
from lce.methods.attending import PlacedPart
from lce.methods.base import ATTENTION, LocalMethod, Promise, filled, resolved
from lce.methods.budget import enough
from lce.methods.parts import CHOSEN
from lce.methods.step import Step
from lce.methods.turned_keys import recent_keys

PROMISES: tuple[Promise, ...] = "alike", "counted", "noted", "kept"
HOOKS = (*ATTENTION, "relevance", "log_mass", "select", "tokens_of")  # on which these promises stand


class JointSelection(LocalMethod, ABC, promises=dict.fromkeys(PROMISES, HOOKS)):
    """A method by which all queries of a block choose the same `top_k` candidates, seen at the distance `far`.

    Candidate m is the `size` tokens from `sinks + m·size` on, where `size` is the second number of `choices`.
    """

    top_k: int | None  # each derived class declares this and the next two knobs
    far: int | None
    top_p: float | None
    eps = 0  # a candidate's score becomes the best score of all candidates at most `eps` away

    def resolve(self, window: int) -> Self:
        made = filled(self, local=max(1, window // 2), top_k=max(1, window // 4))
        return filled(made, far=made.local)

    def state(self, layout: CacheLayout) -> Mapping[str, MethodState]:
        return recent_keys(self, self.n_recent, layout, grid=layout.block)  # the queries of a block choose together

    @property
    def couples_heads(self) -> str | None:
        return "all heads make one choice; take a method whose heads choose alone, such as longheads"

    @abstractmethod
    def n_candidates(self, start: int) -> int:
        """Return the number of candidates for the block that begins at token `start`; 0 or less means none."""

    @abstractmethod
    def relevance(self, q: Tensor, far: Tensor, cache: LayerCache, step: Step) -> Tensor:
        """Return the scores `[n]` of the n candidates, one score for all queries of the block together.

        `q [H, T, D]` are the unrotated queries. `far [H, T, D]` are the same queries rotated to the distance `far`.
        """

    @abstractmethod
    def log_mass(self, relevance: Tensor, n_heads: int, head_dim: int) -> Tensor:
        """Estimate the logarithms of the candidates' attention mass, up to a constant, from their scores `[n]`."""

    def select(self, q: Tensor, far: Tensor, cache: LayerCache, step: Step) -> Tensor:
        """Return the `top_k` best candidates, or fewer with `top_p`, ascending: `[K]`."""
        n_candidates, first, size = self.n_candidates(step.start), *self.choices
        n, before = min(resolved(self.top_k), n_candidates), (self.sinks - first) // size  # ids before candidate 0's
        if n == n_candidates and self.top_p is None and not step.note_scores:
            chosen = torch.arange(n, device=q.device)
        else:
            scores = self.relevance(q, far, cache, step)
            if self.top_p is not None:
                order = best_first(spread(scores, self.eps), n)
                n = enough(self.log_mass(scores, len(q), q.shape[-1]), order, self.top_p)
            chosen = best_tokens(scores, n, self.eps)
            if step.note_scores:
                all_scores = pad(scores.float(), (before, 0), value=-torch.inf)
                step.note_scores(step, cache.index, all_scores.expand(1, q.shape[1], -1))
        if step.note:
            step.note(cache.index, (before + chosen).expand(*q.shape[:2], -1))
        return chosen

    def tokens_of(self, chosen: Tensor) -> Tensor:
        """Return the tokens of chosen candidates `[K]`, plus tokens to attend in the same call: `[n]`, ascending."""
        size = self.choices[1]
        return (self.sinks + chosen[:, None] * size + torch.arange(size, device=chosen.device)).flatten()

    def attend_part(self, q: Tensor, placed: PlacedPart, cache: LayerCache, step: Step) -> Attended | None:
        """Return the attention to a part. Chosen keys and values are copied to a buffer that all layers share."""
        if placed.part.keys != CHOSEN:
            return super().attend_part(q, placed, cache, step)
        far = rotate(q, placed.turn)
        tokens = self.tokens_of(self.select(q, far, cache, step))
        n = 2 * cache.layout.n_kv_heads * len(tokens) * cache.layout.head_dim
        buffer = step.once(f"{len(tokens)} tokens", lambda: q.new_empty(n))
        order = Order(step.decoding)
        return step.attention.dense(far, *cache.tokens(tokens, buffer), causal=False, order=order)
