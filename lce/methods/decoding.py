"""Computes attention in decode steps that are recorded as a CUDA graph.

A `DeviceStep` reads its token's index on the device, so shapes depend only on an upper bound of the text's length. A
span of keys is cut into as many runs (slices) as the longest possible span needs; runs beyond the span are empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lce.attention import Attended, Runs, Turn, merge
from lce.cache.kv import KVCache
from lce.cache.layer import LayerCache
from lce.cache.method_state import Summaries
from lce.methods.attending import declared, turn_of
from lce.methods.parts import CHOSEN, RECENT, Declaring
from lce.methods.step import DeviceStep

RUN = 1024  # the largest number of tokens in a run
LEAST_BOUND = 1024  # the smallest upper bound of the text's length for which a step is recorded, in tokens
EVALUATED_AT_ONCE = 1 << 16  # the number of queries in one call of `Method.parts_of`


@dataclass(frozen=True)
class Span:
    """Tokens `first..stop-1`, which the query, rotated by `turn [1, D/2]`, attends.

    `first` and `stop` are `[B]` int64 on the device, for the tokens of B contexts; the turn of all of them may be
    `[1, D/2]`. The host knows only that the span has at most `most` tokens.
    """

    first: Tensor
    stop: Tensor
    most: int
    turn: Turn


def bound_for(n_tokens: int) -> int:
    """Round a text's length up to 1, 1.25, 1.5 or 1.75 times a power of two, and to at least `LEAST_BOUND`."""
    if n_tokens <= LEAST_BOUND:
        return LEAST_BOUND
    quarter = 1 << ((n_tokens - 1).bit_length() - 3)
    return -(-n_tokens // quarter) * quarter


def completes(cache: KVCache, start: int) -> bool:
    """Return whether a method summarises a chunk as soon as the token at index `start` completes it."""
    states = (state for layer in reversed(cache.layers) for state in layer.state.values())
    return next((state.completes(start) for state in states if isinstance(state, Summaries)), False)


def decode_parts(method: Declaring, q: Tensor, cache: LayerCache, step: DeviceStep) -> Tensor:
    """Return the output `[H, B, D]` of one softmax over the keys of all parts, for unrotated queries `q [H, B, D]`."""
    kind = method.layer_kind(cache.index)
    cached, recent, chosen = step.once(f"parts {kind}", lambda: device_parts(method, q, cache, step))
    found = []
    if chosen is not None:
        found.append(method.decode_chosen(q, chosen, cached, cache, step))
    elif cached:
        found.append(step.attention.decode(q, *cache.whole, step.once(f"runs {kind}", lambda: runs_of(cached))))
    if recent:
        found.append(decode_recent(q, recent, cache, step))
    return merge(found)


def device_parts(
    method: Declaring, q: Tensor, cache: LayerCache, step: DeviceStep
) -> tuple[Sequence[Span], Sequence[Span], Turn | None]:
    """Return the token's parts: spans of cached keys, spans of recent keys, and the query's rotation for chosen keys.

    Parts that are empty for all tokens up to the bound are left out. The rotation is `[B, K, D/2]` or broadcastable;
    None: the method chooses no keys.
    """
    cached, recent, chosen = list[Span](), list[Span](), None
    parts = declared(method, step.at, cache.index, step.bound, step.sliding_window)
    for part, (most, before, beyond) in zip(parts, _limits(method, cache.index, step), strict=True):
        if part.keys == CHOSEN:
            chosen = turn_of(method, part, step.at, q, step)
        elif most > 0:
            first, stop = (x if isinstance(x, Tensor) else torch.full_like(step.at, x) for x in part.keys)
            first = first.clamp(min=0) if before > 0 else first
            stop = torch.minimum(stop, step.at + 1) if beyond > 0 else stop
            span = Span(first, stop, most, turn_of(method, part, step.at, q, step))
            (recent if part.exact and RECENT in cache.state else cached).append(span)
    return cached, recent, chosen


def _limits(method: Declaring, layer: int, step: DeviceStep) -> list[list[int]]:
    """Return `[size, before, beyond]` for each part: upper limits for all queries i within the bound.

    The part's span has at most `size` tokens, starts at most `before` tokens before token 0, and stops at most `beyond`
    tokens after `i + 1`. The limits of a part of chosen keys are not used.
    """
    found = []
    for i in torch.arange(step.bound).split(EVALUATED_AT_ONCE):
        parts = declared(method, i, layer, step.bound, step.sliding_window)
        spans = [(0, i) if part.keys == CHOSEN else part.keys for part in parts]
        first, stop = (
            torch.stack([torch.as_tensor(x).expand(len(i)) for x in edges]) for edges in zip(*spans, strict=True)
        )
        sizes = torch.minimum(stop, i + 1) - first.clamp(min=0)
        found.append(torch.stack((sizes, -first, stop - i - 1), dim=1).amax(dim=2))
    limits: list[list[int]] = torch.stack(found).amax(dim=0).tolist()
    return limits


def runs_of(spans: Sequence[Span]) -> Runs:
    """Cut spans into runs of tokens of equal size. All heads attend the same runs."""
    longest, device = max(span.most for span in spans), spans[0].first.device
    size = min(RUN, longest)
    n_runs = [-(-span.most // size) for span in spans]
    offsets, numbers = torch.arange(0, longest, size, device=device), torch.arange(len(spans), device=device)
    first = torch.cat([span.first[:, None] + offsets[:n] for span, n in zip(spans, n_runs, strict=True)], dim=1)
    stop = torch.cat([span.stop[:, None].expand(-1, n) for span, n in zip(spans, n_runs, strict=True)], dim=1)
    turn = torch.cat([number.expand(n) for number, n in zip(numbers.split(1), n_runs, strict=True)])
    found = [[x.expand(len(first), -1) for x in span.turn] for span in spans]
    turns = Turn(*(torch.stack(each, dim=1) for each in zip(*found, strict=True)))
    return Runs(first[None], (stop - first).clamp(min=0, max=size)[None], turn, turns, size)


def decode_recent(q: Tensor, spans: Sequence[Span], cache: LayerCache, step: DeviceStep) -> Attended:
    """Return the attention of unrotated queries `[H, B, D]` to spans of recent keys, at their absolute positions."""
    keys, values, before = cache.recent(RECENT)

    def make() -> Runs:
        return runs_of([replace(span, first=span.first - before, stop=span.stop - before) for span in spans])

    runs = step.once(f"runs from {before} {id(spans)}", make)
    return step.attention.decode(q, keys, values, runs)
