"""Traces: the chunks or tokens that a method chose, and their scores."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from lce.attention import best_first
from lce.engine.arguments import Prompt
from lce.engine.context import new_context
from lce.engine.running import append, blocks, prompt_ids
from lce.engine.setup import Setup
from lce.errors import UsageError, shown
from lce.methods.step import Step
from lce.methods.wrapped import Observation, Observed


@dataclass(frozen=True)
class Trace:
    """The chunks that a method chose for T queries. `chosen[layer]` `[H, T, K]` has chunk ids, ascending, -1 for none.

    Chunk id c stands for the `chunk_size` tokens from `first + c · chunk_size` on. Tokens that every query sees without
    choosing them, such as those of the query's own chunk, are not listed. K is 0 for a method that chooses nothing.

    `scores[layer]` `[H, T, K]` are the chosen chunks' scores, NaN for none. `ranks[layer]` `[H, T, K]` are the chosen
    chunks' ranks by score among all M chunks, 0 for the best, -1 for none. `all_scores[layer]` `[C, T, M]`, if
    requested, are the scores of all M chunks, -inf for chunks that a query cannot choose. C is H, or less if several
    heads choose together. A chunk that is always chosen has its score's rank, too.
    """

    chunk_size: int
    chosen: list[Tensor]
    first: int = 0
    scores: list[Tensor] = field(default_factory=list)
    ranks: list[Tensor] = field(default_factory=list)
    all_scores: list[Tensor] | None = None


class TraceObserver:
    """A collector of the chunks chosen in a prefill, with their scores; with `keep_all`, of all chunks' scores too."""

    def __init__(self, *, keep_all: bool = False) -> None:
        self.keep_all = keep_all
        self._parts: dict[int, list[tuple[Tensor, ...]]] = {}  # by layer, one tuple of tensors per block of queries

    def rows(self, step: Step) -> None:
        """Return None, which means that all queries of the block are observed."""

    def observe(self, seen: Observation, out: Tensor) -> Tensor:
        """Record the chunks that a layer's heads chose for a block of queries; return `out` unchanged."""
        n_heads, n_tokens = seen.q.shape[:2]
        chosen = torch.empty(n_heads, n_tokens, 0, dtype=torch.int64) if seen.chosen is None else seen.chosen
        scores = chosen.new_empty(1, n_tokens, 0, dtype=torch.float32) if seen.scores is None else seen.scores
        part = (chosen, *_of_choices(chosen, scores), *([scores] if self.keep_all else []))
        self._parts.setdefault(seen.layer, []).append(tuple(x.cpu() for x in part))
        return out

    def trace(self, choices: tuple[int, int]) -> Trace:
        """Return the trace of all blocks. `choices` is `Method.choices`: chunk 0's first token, and the chunk size."""
        first, size = choices
        fills = (-1, torch.nan, -1, -torch.inf)[: 4 if self.keep_all else 3]
        layers = [self._parts[layer] for layer in sorted(self._parts)]
        chosen, scores, ranks, *every = (
            [_joined([part[i] for part in parts], fill) for parts in layers] for i, fill in enumerate(fills)
        )
        return Trace(size, chosen, first, scores, ranks, every[0] if every else None)


@torch.inference_mode()
def trace(setup: Setup, token_ids: Prompt, scores: bool = False) -> Trace:
    """Prefill a text; return what each head chose: see `Engine.trace`."""
    if not isinstance(scores, bool):
        raise UsageError(f"scores is {shown(scores)}; expected True or False")
    setup.check_undivided("a trace", "load the model without ranks")
    ids = prompt_ids(setup, token_ids)
    setup.warn(len(ids))
    context, observer = new_context(setup, len(ids)), TraceObserver(keep_all=scores)
    driver = replace(setup.driver, method=Observed(setup.method, observer))
    append(setup, context, blocks(ids, setup.block), driver)
    return observer.trace(setup.method.choices)


def ranks_of(scores: Tensor) -> Tensor:
    """Return the rank of each of `scores [C, T, M]` along M: 0 for the largest, and first the later of equals."""
    if scores.shape[1] > 1 and scores.stride(1) == 0:  # all queries of the block share one row of scores
        return ranks_of(scores[:, :1].clone()).expand(scores.shape)
    order = best_first(scores, scores.shape[-1])
    places = torch.arange(scores.shape[-1], device=scores.device).expand(scores.shape)
    return torch.empty_like(order).scatter_(-1, order, places)


def _of_choices(chosen: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores and ranks `[H, T, K]` of the chosen chunks; NaN and -1 where a chunk or its score is missing."""
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
    """Join tensors `[H, T, K]` of several blocks along T. Pads K with `fill`; repeats rows that several heads share."""
    widest, most = max(part.shape[-1] for part in parts), max(len(part) for part in parts)
    same = (part.repeat_interleave(most // len(part), 0) for part in parts)
    return torch.cat([pad(part, (0, widest - part.shape[-1]), value=fill) for part in same], dim=1)
