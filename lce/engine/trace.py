"""What a method chose, and by which scores, for study."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from lce.errors import UsageError


@dataclass(frozen=True)
class Trace:
    """What a method chose: `chosen[layer]` `[H, T, K]`, ascending, -1 for none.

    Choice c stands for the `chunk_size` tokens from `first + c · chunk_size` on. Tokens that every query attends, such
    as its own chunk or its local window, are not listed. K is 0 for a method that chooses nothing.

    `scores[layer]` `[H, T, K]` is what each choice scored, NaN for none, and `ranks[layer]` `[H, T, K]` its place among
    all that the query could choose, 0 for the best, -1 for none. A choice that was made whatever it scored has the
    rank of its score. `all_scores[layer]` `[C, T, M]`, where they were asked for, are the scores of all choices, -inf
    for those that a query does not have; C is H, or fewer where heads choose together.
    """

    chunk_size: int
    chosen: list[Tensor]
    first: int = 0
    scores: list[Tensor] = field(default_factory=list)
    ranks: list[Tensor] = field(default_factory=list)
    all_scores: list[Tensor] | None = None

    def hits(self, start: int, stop: int) -> list[Tensor]:
        """Whether a choice has one of the tokens `start..stop-1`, for each layer `[H, T]` bool.

        Example: `trace.hits(*fact)[layer][:, -1].float().mean()` is the share of heads that chose a fact for the last
        token.
        """
        a, b = self._choices_of(start, stop)
        return [((chosen >= a) & (chosen < b) & (chosen >= 0)).any(-1) for chosen in self.chosen]

    def best_ranks(self, start: int, stop: int) -> list[Tensor]:
        """The best rank by score of the choices with the tokens `start..stop-1`, for each layer `[C, T]`.

        0 is the best of all; -1 where a query could choose none of them. Needs `engine.trace(..., scores=True)`.
        """
        if self.all_scores is None:
            raise UsageError(
                "this trace has no scores but those of the choices; expected engine.trace(..., scores=True)"
            )
        a, b = self._choices_of(start, stop)
        found = []
        for scores in self.all_scores:
            known, most = scores[..., a:b] > -torch.inf, scores.shape[-1] + 1
            places = ranks_of(scores)[..., a:b].masked_fill(~known, most)
            best = places.amin(-1) if places.shape[-1] else torch.full(scores.shape[:2], most)
            found.append(best.masked_fill(best == most, -1))
        return found

    def _choices_of(self, start: int, stop: int) -> tuple[int, int]:
        """The choices `a..b-1` that have a part of some tokens."""
        a = max(0, (start - self.first) // self.chunk_size)
        return a, max(a, -(-(stop - self.first) // self.chunk_size))


class TraceRecorder:
    """Collects the choices of a prefill: `note_scores` and `note` are called by the method, `end_block` after a block.

    With `keep_all`, all scores are kept and not those of the choices alone.
    """

    def __init__(self, n_layers: int, n_heads: int, *, keep_all: bool = False) -> None:
        self.n_heads = n_heads
        self.keep_all = keep_all
        self._chosen: dict[int, Tensor] = {}  # what each layer chose in this block
        self._scores: dict[int, Tensor] = {}  # and by which scores
        self._parts: list[list[tuple[Tensor, ...]]] = [[] for _ in range(n_layers)]  # a part a block

    def note(self, layer: int, chosen: Tensor) -> None:
        """Record what a layer chose in this block, `[H, T, K]`."""
        self._chosen[layer] = chosen

    def note_scores(self, layer: int, scores: Tensor) -> None:
        """Record the scores `[C, T, M]` that a layer chooses by in this block."""
        self._scores[layer] = scores

    def end_block(self, n_tokens: int) -> None:
        """Keep the choices of this block of `n_tokens`; an empty one for a layer that chose nothing."""
        nothing = torch.empty(self.n_heads, n_tokens, 0, dtype=torch.int64)
        for layer, parts in enumerate(self._parts):
            chosen = self._chosen.pop(layer, nothing)
            scores = self._scores.pop(layer, chosen.new_full((1, n_tokens, 0), -torch.inf, dtype=torch.float32))
            part = (chosen, *_of_choices(chosen, scores), scores)
            parts.append(tuple(x.cpu() for x in (part if self.keep_all else part[:3])))

    def trace(self, choices: tuple[int, int]) -> Trace:
        """The choices of all blocks; `choices` is `Method.choices`."""
        first, size = choices
        chosen, scores, ranks = ([_joined([part[i] for part in parts], fill) for parts in self._parts] for i, fill in
                                 ((0, -1), (1, torch.nan), (2, -1)))  # fmt: skip
        every = [_joined([part[3] for part in parts], -torch.inf) for parts in self._parts] if self.keep_all else None
        return Trace(size, chosen, first, scores, ranks, every)


def ranks_of(scores: Tensor) -> Tensor:
    """The place of each of `scores [C, T, M]` among its query's, 0 for the largest, of equal ones the first."""
    if scores.shape[1] > 1 and scores.stride(1) == 0:  # one block of queries chose together
        return ranks_of(scores[:, :1].clone()).expand(scores.shape)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(scores.shape[-1], device=scores.device).expand(scores.shape)
    return torch.empty_like(order).scatter_(-1, order, places)


def _of_choices(chosen: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """The scores and the ranks of the choices `[H, T, K]`; NaN and -1 for none, and where no scores are known."""
    none = chosen < 0
    if not scores.shape[-1]:
        return none.float().fill_(torch.nan), none.long().fill_(-1)
    together = chosen.clamp(min=0).unflatten(0, (len(scores), -1)).transpose(1, 2)  # [C, T, H / C, K]
    found, ranks = (
        x.gather(-1, together.flatten(2)).view(together.shape).transpose(1, 2).flatten(0, 1)
        for x in (scores, ranks_of(scores))
    )
    return found.masked_fill(none, torch.nan), ranks.masked_fill(none, -1)


def _joined(parts: list[Tensor], fill: float) -> Tensor:
    """What was kept of several blocks, `[H, T, K]` each, padded to the largest K; of fewer heads, repeated."""
    widest, most = max(part.shape[-1] for part in parts), max(len(part) for part in parts)
    same = (part.repeat_interleave(most // len(part), 0) for part in parts)
    return torch.cat([pad(part, (0, widest - part.shape[-1]), value=fill) for part in same], dim=1)
