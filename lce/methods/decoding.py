"""Attention of a decode step that can be recorded: which runs of tokens, seen how, by numbers on the device.

A `DeviceStep` reads its token's index on the device, so shapes may depend on nothing but a bound of the text's length.
A span of tokens is cut into runs, as many as the longest span that the bound allows; those behind its end are empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lce.attention import Part, Runs, Turn
from lce.cache.layer import LayerCache
from lce.cache.method_state import RecentRows
from lce.methods.parts import RECENT
from lce.methods.step import DeviceStep

RUN = 1024  # tokens of a run at most
LEAST_BOUND = 1024


@dataclass(frozen=True)
class Span:
    """Tokens `first..stop-1`, at most `most` of them, seen under `turn [1, D/2]`; none if `stop` is not behind `first`.

    `first` and `stop` are `[1]`, int64, on the device.
    """

    first: Tensor
    stop: Tensor
    most: int
    turn: Turn


def bucket(n_tokens: int) -> int:
    """`n_tokens` rounded up to 1, 1.25, 1.5 or 1.75 times a power of two: a step is recorded anew for each bucket."""
    if n_tokens <= LEAST_BOUND:
        return LEAST_BOUND
    quarter = 1 << ((n_tokens - 1).bit_length() - 3)
    return -(-n_tokens // quarter) * quarter


def runs_of(spans: Sequence[Span]) -> Runs:
    """Spans as runs of one size, the same for all heads."""
    longest, device = max(span.most for span in spans), spans[0].first.device
    size = min(RUN, longest)
    n_runs = [-(-span.most // size) for span in spans]
    offsets, numbers = torch.arange(0, longest, size, device=device), torch.arange(len(spans), device=device)
    first = torch.cat([span.first + offsets[:n] for span, n in zip(spans, n_runs, strict=True)])
    stop = torch.cat([span.stop.expand(n) for span, n in zip(spans, n_runs, strict=True)])
    turn = torch.cat([number.expand(n) for number, n in zip(numbers.split(1), n_runs, strict=True)])
    turns = Turn(torch.cat([span.turn.cos for span in spans]), torch.cat([span.turn.sin for span in spans]))
    return Runs(first[None], (stop - first).clamp(min=0, max=size)[None], turn, turns, size)


def decode_spans(
    q: Tensor, cache: LayerCache, step: DeviceStep, name: str, spans: Callable[[], Sequence[Span]]
) -> Part:
    """The query `[H, 1, D]`, unrotated, attends spans of tokens as they are cached.

    `spans` is called once a pass and `name`: every layer attends the same.
    """
    runs: Runs = step.once(name, lambda: runs_of(spans()))
    return step.attention.decode(q, *cache.whole, runs)


def recent_span(step: DeviceStep, window: int | None, like: Tensor) -> Span:
    """The last `window` tokens at their true distances, the query's own included; all of them with None."""
    stop = step.at + 1
    if window is None:
        return Span(torch.zeros_like(stop), stop, step.bound, step.true_turn(like))
    return Span((stop - window).clamp(min=0), stop, min(window, step.bound), step.true_turn(like))


def decode_recent(q: Tensor, cache: LayerCache, step: DeviceStep, span: Callable[[], Span]) -> Part:
    """The query `[H, 1, D]`, unrotated, attends a span of tokens whose keys are kept at their absolute positions too.

    These rows begin at some token; the values of the tokens from there on are in the buffer.
    """
    (keys, before), values = cache.kept(RecentRows, RECENT).held_from, cache.whole[1]

    def make() -> Runs:
        here = span()
        return runs_of([Span(here.first - before, here.stop - before, here.most, here.turn)])

    n = min(keys.shape[1], values.shape[1] - before)
    runs: Runs = step.once(f"runs from {before}", make)
    return step.attention.decode(q, keys[:, :n], values[:, before : before + n], runs)


def decode_far(
    q: Tensor, cache: LayerCache, step: DeviceStep, gap: int, turn: Callable[[], Turn], stop: int | None = None
) -> Part:
    """The query `[H, 1, D]`, unrotated, attends the tokens before `stop` that are at least `gap` behind it."""

    def spans() -> list[Span]:
        end = (step.at + 1 - gap).clamp(min=0, max=stop)
        return [Span(torch.zeros_like(end), end, step.bound if stop is None else min(stop, step.bound), turn())]

    return decode_spans(q, cache, step, "far runs", spans)
