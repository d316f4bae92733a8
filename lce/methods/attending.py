"""Computes a block's attention: groups spans of keys into calls of `Attention.dense`, and merges the results.

A method's parts (`lce.methods.parts`) say which span of keys each query sees. Spans are computed once per pass, on the
host. Neighbouring queries share a call if their spans are equal (dense), if the spans' stops grow by 1 from query to
query (causal), or if both starts and stops grow by 1 (a causal window).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial, singledispatch
from typing import Any

import torch
from torch import Tensor

from lce.attention import Attended, Order, Turn, combine, fold_chunks, folds, join, merge, rotate, unfold_chunks
from lce.cache.layer import LayerCache
from lce.cache.layout import segment_of
from lce.cache.method_state import RecentRows
from lce.errors import UsageError
from lce.methods.parts import CHOSEN, RECENT, Declaring, Index, LayerFacts, Part
from lce.methods.step import PassFacts, Step
from lce.methods.turned_keys import TurnedKeys, grouped, unrotated

NONE_SEEN = -2  # replaces the start and the stop of an empty span, so that the query is in no call


@dataclass(frozen=True)
class DenseCall:
    """One call of `Attention.dense`: the block's queries `first..last-1` (0 is the first) attend keys `start..stop-1`.

    `causal` and `window` are the arguments of `dense`. If `n_chunks` is above 1, queries and keys are both cut into
    `n_chunks` chunks of equal size, and each query attends the keys of its own chunk causally.
    """

    first: int
    last: int
    start: int
    stop: int
    causal: bool = False
    window: int | None = None
    n_chunks: int = 1

    @property
    def is_chunks(self) -> bool:
        """Whether queries and keys belong to the same tokens, and attention is causal without a window."""
        return self.causal and self.window is None and self.last - self.first == self.stop - self.start

    def takes(self, call: DenseCall) -> bool:
        """Return whether the next call, `call`, can be merged into this call as one more chunk."""
        follows, size = (self.last, self.stop) == (call.first, call.start), call.stop - call.start
        same_size = self.stop - self.start == self.n_chunks * size and call.start % size == 0 and folds(size)
        return follows and same_size and self.is_chunks and call.is_chunks


@dataclass(frozen=True)
class PlacedPart:
    """A `Part` in one pass: the rotation of queries to `part.query_at`, and the `dense` calls for the part's spans.

    `turn` is `[T, D/2]`. For chosen keys with a position for each slot or band, `turn` is a table `[P, D/2]`, and
    `slots [T, K]` are the rows of the table for each slot or band. A part of chosen keys has no calls; its `part` is
    declared for indices on the device.
    """

    part: Part
    turn: Turn
    calls: Sequence[DenseCall] = ()
    slots: Tensor | None = None


def attend_parts(method: Declaring, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
    """Return the output `[H, T, D]` of one softmax over the keys of all parts, for unrotated queries `q [H, T, D]`."""
    found = list[Attended]()
    for placed in placed_parts(method, q, cache, step):
        if (attended := method.attend_part(q, placed, cache, step)) is not None:
            found.append(attended)
    return merge(found)


def attend_all(method: Declaring, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
    """Return the output of causal attention to all tokens at true distances, from turned copies of the keys."""
    n = q.shape[1]
    placed = PlacedPart(Part((0, n), 0, exact=True), step.true_turn(q), [DenseCall(0, n, 0, step.stop, causal=True)])
    return attend_spans(q, placed, TurnedKeys(method, None, cache, step), step)[0]  # type: ignore[arg-type]


@singledispatch
def prepare(method: Declaring, like: Tensor, cache: LayerCache, step: Step) -> None:
    """Compute what layers share in a step, like `like [1, 0, 1]`: then one layer's kernels serve all layers."""
    if not cache.turned:
        step.key_turn(method.key_positions, like)
    scaled(method, like, step)
    with suppress(NotImplementedError):  # a method may attend without parts
        placed_parts(method, like, cache, step)


def scaled(method: Declaring, q: Tensor, step: Step) -> Tensor:
    """Return the queries multiplied by the method's `query_scale`, or unchanged if the method has none."""

    def make() -> Tensor | None:
        factor = method.query_scale(step.positions(q.device), step.window)
        return None if factor is None else factor[:, None].to(q.dtype)

    factor = step.once("query scale", make)
    return q if factor is None else q * factor


def declared(method: Declaring, i: Tensor, layer: int, longest: int, sliding_window: int | None) -> list[Part]:
    """Return the parts that `parts_of` yields for queries of indices `i [T]`, in a text of at most `longest` tokens."""
    parts = list(method.parts_of(i, LayerFacts(method.layer_kind(layer), longest, sliding_window)))
    if wrong := [part for part in parts if not isinstance(part, Part)]:
        raise UsageError(f"{method.label}.parts_of yielded a {type(wrong[0]).__name__}; expected a Part")
    return parts


def skips(method: Declaring, n_tokens: int) -> bool:
    """Return whether a method never attends some tokens between the first and the last of a text, as `streaming`."""
    i = torch.tensor([n_tokens - 1])
    parts = declared(method, i, 0, n_tokens, None)
    if not parts or any(part.keys == CHOSEN for part in parts):
        return False
    seen = 0
    for start, stop in sorted((int(start), int(stop)) for start, stop in (bounds(part, i) for part in parts)):
        seen = max(seen, stop) if start <= seen else seen
    return seen < n_tokens


def block_parts(method: Declaring, layer: int, step: Step, i: Tensor | None = None) -> tuple[Tensor, list[Part]]:
    """Return the indices of the block's queries, and their parts. Without `i [T]` the indices are made on the host."""
    i = torch.arange(step.start, step.stop) if i is None else i
    return i, declared(method, i, layer, step.stop, step.sliding_window)


def bounds(part: Part, i: Tensor) -> tuple[Tensor, Tensor]:
    """Return the start and stop `[T]` of each query's span, limited to the tokens from 0 to the query's own token."""
    assert part.keys != CHOSEN, "a span"
    start, stop = (torch.as_tensor(edge, device=i.device).expand(i.shape) for edge in part.keys)
    start = start.clamp(min=0)
    return start, torch.minimum(stop, i + 1).maximum(start)


def placed_parts(method: Declaring, q: Tensor, cache: LayerCache, step: Step) -> list[PlacedPart]:
    """Return the method's parts that have keys for these queries; computed once per pass for layers of one kind."""

    def make() -> list[PlacedPart]:
        i, parts = block_parts(method, cache.index, step)
        if not parts:
            raise NotImplementedError(f"{method.label} declares no parts; define parts_of, or attend")
        at, here, found = i, parts, list[PlacedPart]()
        if i.device != q.device and any(isinstance(x.query_at, Tensor) and x.query_at is not i for x in parts):
            at, here = block_parts(method, cache.index, step, step.positions(q.device))  # avoids a copy to the GPU
        slide = _sliding(method, cache.index, step) if len(i) == 1 and not step.decoding else ()
        for number, (part, same) in enumerate(zip(parts, here, strict=True)):
            calls = [] if part.keys == CHOSEN else dense_calls(*bounds(part, i))
            if number in slide:
                calls = [replace(call, causal=True, window=call.stop - call.start) for call in calls]
            if calls or part.keys == CHOSEN:
                places, slots = slot_positions(part.query_at, same.query_at)
                turn = turn_of(method, replace(same, query_at=places), at, q, step)
                if calls and len(turn.cos) != len(i):
                    turn = Turn(*(x.expand(len(i), -1).contiguous() for x in turn))
                found.append(PlacedPart(part if calls else same, turn, calls, slots))
        return found

    return step.once(f"parts {method.layer_kind(cache.index)}", make)


def _sliding(method: Declaring, layer: int, step: Step) -> Collection[int]:
    """Return the numbers of the parts whose spans slide with the query, of a block of one read query.

    Its calls are then those of a larger block, which has its neighbour.
    """
    i = torch.tensor([step.start - 1, step.start])
    parts = declared(method, i, layer, step.stop, step.sliding_window) if step.start else []
    spans = {number: torch.stack(bounds(part, i)) for number, part in enumerate(parts) if part.keys != CHOSEN}
    return [number for number, span in spans.items() if (span.diff() == 1).all()]


def slot_positions(on_host: Index, at: Index) -> tuple[Index, Tensor | None]:
    """Return positions `at [T]` and None; or for `at [T, K]` a table `[P]` of the positions, and each slot's row in it.

    Slots of neighbouring queries share most positions, so that a table is much smaller than a rotation for each slot.
    `on_host` are the same positions on the host, read without waiting for the device.
    """
    if not isinstance(at, Tensor) or not isinstance(on_host, Tensor) or at.ndim < 2 or not at.numel():
        return at, None
    low, high = (int(x) for x in on_host.aminmax())
    if high - low >= at.numel():
        return at.flatten(), torch.arange(at.numel(), device=at.device).view(at.shape)
    return torch.arange(low, high + 1, device=at.device), at - low


def turn_of(method: Declaring, part: Part, i: Tensor, like: Tensor, step: PassFacts) -> Turn:
    """Return the rotation of queries to `part.query_at`: `[T, D/2]`, `[T, K, D/2]`, or `[1, D/2]` if equal for all.

    If keys are cached unrotated, the rotation includes YaRN's factor twice: for the query and for the key.
    """
    if not part.exact and unrotated(method):
        return step.far_turn(part.query_at, like)
    if part.query_at is i:
        return step.true_turn(like)
    at = part.query_at if isinstance(part.query_at, Tensor) else torch.full((1,), part.query_at, device=like.device)
    return step.rope.turn(at, like.dtype)


def attend_spans(q: Tensor, placed: PlacedPart, cache: LayerCache, step: Step) -> Attended:
    """Return the attention of unrotated queries `[H, T, D]` to a part's spans; lse is -inf if a query sees no key."""
    found, done, n = list[Attended](), 0, q.shape[1]
    for call in placed.calls:
        if call.first > done:
            found.append(_unseen(q, done, call.first))
        found.append(_attend_call(q, placed, call, cache, step))
        done = call.last
    if done < n:
        found.append(_unseen(q, done, n))
    return join(found, 1)


def _unseen(q: Tensor, first: int, last: int) -> Attended:
    """Return the result of queries `first..last-1` of `q [H, T, D]`, which see no key."""
    lse = q.new_full((len(q), last - first), -torch.inf, dtype=torch.float32)
    return torch.zeros_like(q[:, first:last]), lse


def _attend_call(q: Tensor, placed: PlacedPart, call: DenseCall, cache: LayerCache, step: Step) -> Attended:
    """Compute the attention that `call` describes; keys in several cache segments take one call per segment."""
    turn, n_chunks = placed.turn, call.n_chunks
    if call.last - call.first < q.shape[1]:
        q, turn = q[:, call.first : call.last], turn.at(slice(call.first, call.last))
    recent = cache.kept(RecentRows, RECENT) if placed.part.exact and RECENT in cache.state else None
    rows = cache.stored if placed.part.group is None else partial(grouped, cache, placed.part.group, step)
    if recent is not None:
        rows = partial(_recent_rows, cache, recent)
    if n_chunks > 1:
        k, v = rows(call.start, call.stop)
        q, chunk_turn = (q, turn) if q.is_cpu else (rotate(q, turn), None)  # else copied to be rotated, and again
        queries, n_kv_heads = fold_chunks(q.unflatten(1, (n_chunks, -1)), len(k)), len(k)
        k, v = (x.unflatten(1, (n_chunks, -1)).flatten(0, 1) for x in (k, v))
        folded = step.attention.dense(queries, k, v, causal=True, turn=chunk_turn)
        out, lse = (unfold_chunks(x, n_kv_heads, n_chunks).flatten(1, 2) for x in folded)
        return out, lse
    found, least = list[Attended](), cache.resident_from if recent is None else max(cache.resident_from, recent.first)
    in_one = recent is not None or call.window is not None
    for some, border in [(slice(None), call.stop)] if in_one else _up_to_borders(call, segment_of(cache.layout)):
        seen = list[Attended]()
        for start, stop in [(call.start, call.stop)] if in_one else cache.segments(call.start, border):
            order = Order.of_keys(start, step.decoding)
            if order.first >= least:
                k, v = rows(order.first, stop)
            else:  # copies of the first row, which nobody sees, take the place of rows that would have to be fetched
                k, v = (torch.cat((x[:, :1].expand(-1, order.unseen, -1), x), dim=1) for x in rows(start, stop))
            how: Any = {"causal": call.causal and stop == border, "window": call.window, "turn": turn.at(some)}
            seen.append(step.attention.dense(q[:, some], k, v, order=order, **how))
        found.append(combine(seen))
    return join(found, 1)


def _recent_rows(cache: LayerCache, recent: RecentRows, start: int, stop: int) -> tuple[Tensor, Tensor]:
    return recent.span(start, stop), cache.span(start, stop)[1]


def _up_to_borders(call: DenseCall, segment: int) -> Iterator[tuple[slice, int]]:
    """Cut a call's queries where their keys reach a border of segments; yield slices, and the last query's stop."""
    n, first = call.last - call.first, 0
    while first < n:
        stop = call.stop - n + first + 1 if call.causal else call.stop
        border = min(-(-stop // segment) * segment, call.stop)
        last = n - (call.stop - border) if call.causal else n
        yield slice(first, last), border
        first = last


def dense_calls(start: Tensor, stop: Tensor) -> list[DenseCall]:
    """Return `dense` calls in which each query t attends keys `start[t]..stop[t]-1`; `start stop [T]` are on the host.

    Example: starts 0, 0, 0, 1, 2 and stops 1, 2, 3, 4, 5 give one causal call of five queries, with a window of 3.
    """
    if len(start) == 1:
        own = DenseCall(0, 1, int(start), int(stop))
        return [own] if own.start < own.stop else []
    edges = torch.stack((start, stop)).masked_fill(start >= stop, NONE_SEEN)
    (begin, end), moves, first, found = edges.tolist(), _moves(edges), 0, list[DenseCall]()
    while first < len(begin):
        while moves and moves[0][0] <= first:
            moves.pop(0)
        last, move = moves[0] if moves else (first, (0, 0))
        if move == (0, 1) and len(moves) > 1 and moves[1][1] == (1, 1):  # a span that grows and then slides is one call
            last, move = moves[1]
        if move not in ((0, 0), (0, 1), (1, 1)):
            last, move = first, (0, 0)
        if begin[first] != NONE_SEEN:
            window = end[last] - begin[last] if move == (1, 1) else None
            call = DenseCall(first, last + 1, begin[first], end[last], move != (0, 0), window)
            if found and found[-1].takes(call):
                found[-1] = replace(found[-1], last=call.last, stop=call.stop, n_chunks=found[-1].n_chunks + 1)
            else:
                found.append(call)
        first = last + 1
    return found


def _moves(edges: Tensor) -> list[tuple[int, tuple[int, int]]]:
    """Group adjacent queries whose `edges [2, T]` grow by equal steps: `(last query, (start's step, stop's step))`."""
    moves = edges.diff()
    borders = (moves[:, 1:] != moves[:, :-1]).any(0).nonzero().squeeze(1)
    ends = torch.cat((borders, borders.new_tensor([moves.shape[1] - 1])))
    a, b = moves[:, ends].tolist()
    return [(end + 1, move) for end, move in zip(ends.tolist(), zip(a, b, strict=True), strict=True)]


def slot_shift(part: Part, chosen: Tensor) -> Tensor | int:
    """Return how many slots are empty before each query's chosen chunks, `chosen [H, T, K]`: `[H, T, 1]`, or just 0."""
    if part.n_slots is None:
        return 0
    return part.n_slots.to(chosen.device)[:, None] - (chosen >= 0).sum(-1, keepdim=True)


def band_of(bands: Tensor, chosen: Tensor) -> Tensor:
    """Return the number of each chosen chunk's band (`Part.bands [T, B-1]`), for `chosen [H, T, K]`: `[H, T, K]`."""
    return (chosen[..., None] >= bands[:, None].to(chosen.device)).sum(-1)
