"""Choices by scores: the best chunks of each query, the best tokens of a block, and the runs of a decode step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lce.attention.scores import spread
from lce.kernels.cpu import choices as on_cpu
from lce.kernels.cpu.scores import compiled_for
from lce.kernels.cuda import launching


def best_chunks(scores: Tensor, forced: Tensor, n: int, start: int | Tensor, size: int) -> Tensor:
    """Return the n best of the chunks before each query's own chunk: `[C, T, min(n, M)]`, ascending, then -1.

    Row t of `scores [C, T, M]` is the query at index `start + t`, whose own chunk is `(start + t) // size`. `start` is
    a number, or one int64 on the device. The chunks `forced [T, M]` (bool) are taken first; other chunks whose score is
    -inf are never taken. Time: O(C · T · M).
    """
    if compiled_for(scores) and not isinstance(start, Tensor):
        return on_cpu.best_chunks(scores.contiguous(), forced, n, start, size)
    if launching.runs_on(scores) and scores.shape[-1] <= launching.MOST_CHUNKS:
        from lce.kernels.cuda import choices

        return choices.best_chunks(scores.contiguous(), forced, n, start, size)
    own = ((start + torch.arange(scores.shape[1], device=scores.device)) // size)[:, None]
    unseen = torch.arange(scores.shape[-1], device=scores.device) >= own
    scores = scores.float().masked_fill(forced, torch.inf).masked_fill_(unseen, -torch.inf)
    best = scores.topk(min(n, scores.shape[-1]), dim=-1, sorted=False)
    none = torch.iinfo(torch.int64).max
    chosen = best.indices.masked_fill(best.values == -torch.inf, none).sort(dim=-1).values
    return chosen.masked_fill(chosen == none, -1)


def first_best(scores: Tensor, n: int, eps: int = 0) -> Tensor:
    """Return indices `[n]`, ascending, of the largest scores `[M]` after `spread`; among equal scores the first."""
    if compiled_for(scores):
        return on_cpu.best_tokens(scores.float().contiguous(), n, eps)
    scores = spread(scores, eps)
    least = scores.topk(n).values[-1]
    above, equal = scores > least, scores == least
    taken = above | (equal & (equal.cumsum(0) <= n - above.sum()))
    return torch.nonzero_static(taken, size=n).squeeze(1)


def best_runs(
    q: Tensor, summaries: Tensor, at: Tensor, size: int, n: int, **options: Any
) -> tuple[Tensor, Tensor] | None:
    """Choose chunks by a GPU kernel, as runs: see `lce.kernels.cuda.choices.best_runs`. None: no kernel suits."""
    if not launching.runs_on(summaries) or summaries.shape[1] > launching.MOST_CHUNKS:
        return None
    from lce.kernels.cuda import choices

    return choices.best_runs(q, summaries, at, size, n, **options)


def runs_of_chunks(chosen: Tensor, size: int, at: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return chosen chunks `[C, K]`, -1 for none, as runs of tokens: first tokens and counts, `[C, K]` each.

    If the query's index `at [1]` is given, one more run at the end is the query's own chunk up to the query. `like` has
    the dtype and device of the keys.
    """
    if launching.runs_on(like):
        from lce.kernels.cuda import choices

        return choices.runs_of_chunks(chosen, size, at)
    first, counts = chosen * size, (chosen >= 0) * size
    if at is not None:
        begin = at // size * size
        first = torch.cat((first, begin.expand(len(chosen), 1)), dim=1)
        counts = torch.cat((counts, (at + 1 - begin).expand(len(chosen), 1)), dim=1)
    return first, counts
