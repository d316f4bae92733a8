"""Runs a method's `Selection`: chooses chunks for a block of queries, and attends the chosen chunks.

One code serves all selectors, placements and budgets, in prefill, in decode steps, and in recorded decode steps.
The queries of a page that choose together attend gathered keys, turned to where they see them, in one dense call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lce.attention import (
    ROW,
    Attended,
    Runs,
    SlotTurns,
    Tiles,
    Turn,
    best_runs,
    combine,
    fold_chunks,
    join,
    rotate,
    runs_of_chunks,
    unfold_chunks,
    widened,
)
from lce.cache.layer import LayerCache
from lce.cache.method_state import Summaries
from lce.kernels.elementwise.elementwise import take_rows
from lce.methods.attending import PlacedPart, band_of, slot_shift
from lce.methods.budget import keep_best, prune
from lce.methods.costs import Cost, QueryBlock
from lce.methods.selection import Selection, Selector
from lce.methods.selectors import SUMMARIES, SummarySelector
from lce.methods.step import DeviceStep, Step, is_recorded

Choose = Callable[[], Tensor | None]
FIRST_CHOICE = "first choice"  # the name in `Step.all_devices` of what one layer chose for all


def block_of(n_choices: int) -> int:
    """Return a block's size, 128 to 2,048 queries, that bounds the memory of choices: about 65,536 chunks in all."""
    return max(128, min(2048, 65536 // n_choices))


def choose(method: Any, q: Tensor, cache: LayerCache, step: Step) -> Tensor | None:
    """Choose the chunks that each query of each head attends, `[H, T, K]`; None: the text is one chunk at most.

    `method` is a `ChunkMethod`. If one layer chooses for all, the first call of a pass chooses. For a `DeviceStep` the
    result is `[C, B, K]` for C groups of heads: C is 1, G or H.
    """
    c: Selection = method.selection
    made: dict[str, Tensor | None] = step.all_devices if c.one_layer else {}
    if FIRST_CHOICE not in made:
        if is_recorded(step):
            assert isinstance(c.selector, SummarySelector), "steps of other selectors are not recorded"
            made[FIRST_CHOICE] = c.selector.on_device(c, q, cache, step)
        elif step.stop <= c.size:
            made[FIRST_CHOICE] = None
        else:
            by_page, parts = c.by_page and not step.decoding, list[Tensor]()
            score, rows = c.selector.scorer(method, c, q, cache, step)
            for here, some in _slices(step, q.shape[1], rows, c.size if by_page else 1):
                scores = score(here, some)
                if by_page:
                    scores = pooled(scores, some.start, c.size, c.selector)
                chosen = c.best(scores, some) if c.selector.takes_best else c.selector.select(c, scores, some)
                parts.append(_fewer(c, chosen, scores, q, some) if c.varies else chosen)
                if step.note_scores:
                    later = torch.arange(scores.shape[-1], device=q.device) >= c.ends(some, q.device)
                    step.note_scores(some, cache.index, scores.float().masked_fill(later, -torch.inf))
            chosen = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
            made[FIRST_CHOICE] = chosen if len(chosen) == len(q) else _of_each_head(chosen, len(q), step)
    found = made[FIRST_CHOICE]
    return found if found is None or found.device == q.device else step.once(FIRST_CHOICE, lambda: found.to(q.device))


def _slices(step: Step, n_queries: int, rows: int, least: int) -> Iterator[tuple[slice, Step]]:
    """Yield slices of the block's queries, of about `rows` or `least` queries, with their steps.

    All but the last end with a whole page of `least` tokens.
    """
    stop = 0
    while stop < n_queries:
        start, stop = stop, min(stop + max(rows, least), n_queries)
        if stop < n_queries:
            stop -= (step.start + stop) % least
        yield slice(start, stop), step if stop - start == n_queries else step.part(start, stop)


def _of_each_head(chosen: Tensor, n_heads: int, step: Step) -> Tensor:
    """Return the choices `[H, T, K]` of H heads by those of groups that choose together, `chosen [C, T, K]`."""
    n_choosers, n_queries, n = chosen.shape
    if n_queries > 1 or not chosen.is_cpu:
        return chosen.repeat_interleave(n_heads // n_choosers, 0)
    rep = n_heads // n_choosers  # a kernel copies, so that a step whose kernels serve other layers has no operator
    heads = step.once("choosers", lambda: torch.arange(n_heads) // rep)
    return take_rows((chosen.view(1, n_choosers, n), chosen.view(1, n_choosers, n)), heads)[0].view(n_heads, 1, n)


def _fewer(c: Selection, chosen: Tensor, scores: Tensor, q: Tensor, step: Step) -> Tensor:
    """Return the chunks of `chosen [C, T, K]` that the budget's growth and `top_p` leave: ids ascending, then -1."""
    chunk_ids, ends = torch.arange(scores.shape[-1], device=q.device), c.ends(step, q.device)
    later = chunk_ids >= ends
    forced = c.selector.forced(c, chunk_ids, ends).expand_as(later)
    if (n := c.n_chosen(step.positions(q.device))) is not None:
        chosen = keep_best(chosen, scores, forced, n)
    if c.budget.top_p is None:
        return chosen
    mass = c.selector.log_mass(scores, len(q), q.shape[-1], c.size).masked_fill(later, -torch.inf)
    return prune(chosen, scores, mass, forced, c.budget.top_p)


def n_seeing_all(c: Selection, step: Step) -> int:
    """Return how many of the block's queries, the first ones, attend all of their text at true distances.

    Dense attention takes less time for them.
    """
    if c.varies or c.n_near or not c.placement.true_within or not c.selector.takes_best:
        return 0
    return max(0, min(step.stop, (c.n_choices + 1) * c.size) - step.start)


def attend_chosen(
    c: Selection, chosen: Tensor, q: Tensor, placed: PlacedPart, cache: LayerCache, step: Step
) -> Attended:
    """Return the attention of unrotated queries `[H, T, D]` to the chunks that they chose, `chosen [H, T, K]`."""
    if c.varies and placed.part.n_slots is not None:
        number = torch.arange(chosen.shape[-1], device=q.device) - slot_shift(placed.part, chosen)
        chosen = chosen.gather(-1, number.clamp(min=0)).masked_fill(number < 0, -1)
    if c.by_page and not step.decoding:
        return _by_page(c, q, chosen, placed, cache, step)
    return _attend_lists(q, chosen, placed, cache, step)


def _attend_lists(q: Tensor, chosen: Tensor, placed: PlacedPart, cache: LayerCache, step: Step) -> Attended:
    n_slots, slots, bands, table = chosen.shape[-1], placed.slots, placed.part.bands, placed.turn

    if bands is None or slots is None:
        turns = _slot_turns(placed, n_slots, q, step)
        return step.attention.routed(q, turns, chosen, cache.tiles(chosen), generated=step.decoding)
    band, found = band_of(bands, chosen), list[Attended]()
    for number in reversed(range(slots.shape[1])):  # the last request for pages is the one that is prefetched
        some, rows = chosen.masked_fill(band != number, -1), slots[:, number : number + 1]
        turns = SlotTurns(table, rows)
        found.append(step.attention.routed(q, turns, some, cache.tiles(some), generated=step.decoding))
    return combine(found)


def _by_page(c: Selection, q: Tensor, chosen: Tensor, placed: PlacedPart, cache: LayerCache, step: Step) -> Attended:
    """Return what `_attend_lists` returns; the queries of whole pages, which chose together, in one dense call."""
    first, n_pages = whole_pages(step.start, q.shape[1], c.size)
    stop, n_slots = first + n_pages * c.size, chosen.shape[-1]
    first = max(first, (n_slots + c.n_near) * c.size - step.start)  # earlier pages choose all that there are
    lists = chosen[:, first : stop : c.size]
    if placed.part.bands is not None or first >= stop or not bool((lists >= 0).all()):
        return _attend_lists(q, chosen, placed, cache, step)
    turns = _slot_turns(placed, n_slots, q, step)

    def alone(here: slice) -> list[Attended]:
        queries, few = q[:, here], chosen[:, here]
        return [step.attention.routed(queries, turns.at(here), few, cache.tiles(few))] if queries.shape[1] else []

    n_lists, inner = max(c.n_choosers(len(q), step.n_kv_heads), step.n_kv_heads), slice(first, stop)
    whole = attend_whole_pages(q[:, inner], turns.at(inner), lists, n_lists, c.size, cache, step)
    return join([*alone(slice(first)), whole, *alone(slice(stop, None))], 1)


def _slot_turns(placed: PlacedPart, n_slots: int, q: Tensor, step: Step) -> SlotTurns:
    slots, table = placed.slots, placed.turn
    if slots is None:
        slots = step.once("each turn", lambda: torch.arange(len(table.cos), device=q.device)[:, None])
    return SlotTurns(table, slots[:, :n_slots])


def decode(
    c: Selection, choose: Choose, q: Tensor, turn: Turn, own: Turn | None, cache: LayerCache, step: DeviceStep
) -> Attended:
    """Return the attention to chosen chunks; and to the query's own chunk, if `own` is the query's rotation for that.

    `choose` returns the chunks, if no kernel can choose them.
    """
    bands = step.once("bands", lambda: c.placement.bands(step.at, c.size))
    n_bands = 0 if bands is None else bands.shape[1] + 1
    runs = plain_runs(c, q, cache, step, own is not None)
    if runs is None:
        chosen = choose()
        assert chosen is not None, "there are complete chunks"
        if bands is not None:  # each band has slots of its own
            band = band_of(bands, chosen)
            chosen = torch.cat([chosen.masked_fill(band != number, -1) for number in range(n_bands)], dim=-1)
        runs = runs_of_chunks(chosen, c.size, None if own is None else step.at, q)
    first, count = runs
    n_slots, n = first.shape[2] - (own is not None), len(step.at)

    def make() -> tuple[Turn, Tensor]:
        """Return rotations of the query, and the index of each run's rotation; the own chunk's rotation is last."""
        slots = [x[:, : n_bands or n_slots] if x.ndim == 3 else x[:, None] for x in turn]
        number = torch.arange(first.shape[2], device=turn.cos.device)
        number = number // max(1, n_slots // max(1, slots[0].shape[1]))
        every = [[x.expand(n, -1, -1)] for x in slots]
        if own is not None:
            every = [[*x, y[:, None].expand(n, -1, -1)] for x, y in zip(every, own, strict=True)]
        return Turn(*(torch.cat(x, dim=1) for x in every)), number

    turns, number = step.once(f"turns of {n_slots}", make)
    return step.attention.decode(q, *cache.whole, Runs(first, count, number, turns, c.size))


def plain_runs(c: Selection, q: Tensor, cache: LayerCache, step: DeviceStep, own: bool) -> tuple[Tensor, Tensor] | None:
    """Choose chunks with a GPU kernel, and return them as `runs_of_chunks` does; None: no kernel can choose."""
    plain = c.selector.plain if isinstance(c.selector, SummarySelector) and not c.one_layer else None
    if plain is None or (c.n_near and own):
        return None
    summary = cache.kept(Summaries, SUMMARIES).allocated(step.bound // c.size)
    scored, *others = c.placement.scored(q, step, c)
    if others:
        return None
    options: dict[str, Any] = {"choosers": c.n_choosers(len(q), step.n_kv_heads), "least": plain == "worst", "own": own}
    at = step.once("end of candidates", lambda: step.at - c.n_near * c.size) if c.n_near else step.at
    return best_runs(scored, summary, at, c.size, c.n_choices, n_first=c.n_first, n_last=c.n_last, **options)


def cost(c: Selection, block: QueryBlock) -> Cost:
    if block.layer < c.dense_layers:
        return Cost(0)
    near, i = c.n_near * c.size, torch.arange(block.start, block.stop)
    n, before = c.n_chosen(i), (i // c.size - c.n_near).clamp(min=0, max=c.n_choices)
    n_seen = int((before if n is None else before.minimum(n)).sum())
    candidates = replace(block, start=max(0, block.start - near), stop=max(0, block.stop - near))
    return candidates.chosen(c.size, n_seen, together=c.share != "head") + c.selector.cost(block, c)


AT_ONCE = 16 << 20  # the bytes of keys and values that are gathered at a time


def whole_pages(start: int, n_queries: int, size: int) -> tuple[int, int]:
    """Return the first query of the first page of `size` tokens that a block has whole, and the number of pages."""
    first = -start % size
    return first, max(0, n_queries - first) // size


def pooled(scores: Tensor, start: int, size: int, selector: Selector) -> Tensor:
    """Return the scores `[C, T, M]`, with those of a whole page's queries combined as the selector combines heads'."""
    first, n = whole_pages(start, scores.shape[1], size)
    if not n:
        return scores
    stop = first + n * size
    pages = scores[:, first:stop].unflatten(1, (n, size)).transpose(1, 2).flatten(0, 1)  # [C * L, n, M]
    together = selector.together(pages, len(scores)).repeat_interleave(size, 1)
    return torch.cat((scores[:, :first].to(together), together, scores[:, stop:].to(together)), dim=1)


def attend_whole_pages(
    q: Tensor, turns: SlotTurns, chosen: Tensor, n_lists: int, size: int, cache: LayerCache, step: Step
) -> Attended:
    """Return the attention of the unrotated queries `[H, P * L, D]` of P whole pages to the pages that they chose.

    `chosen [H, P, K]` are the choices of each page of queries, all of them pages; neighbouring heads share `n_lists`
    lists. `turns` has a rotation for each slot, or one for all slots. Time: O(H · P · L² · K · D) at the speed of dense
    attention, and O(P · K · L · D) for each list to gather keys and values.
    """
    (n_heads, n_pages, n_slots), dim, found = chosen.shape, q.shape[-1], list[Attended]()
    lists, key_turn = chosen[:: n_heads // n_lists], None
    queries = rotate(q, turns.table.at(turns.rows[:, 0])).unflatten(1, (n_pages, size))
    if turns.rows.shape[1] > 1:

        def make() -> Turn:
            turn = step.rope.turn(torch.arange(n_slots, device=q.device) * size, torch.float64)
            return Turn(*((x / step.rope.scale).to(q.dtype)[:, None] for x in turn))

        key_turn = step.once(f"{n_slots} slots of {size}", make)
    at_once = max(1, AT_ONCE // (2 * n_lists * n_slots * size * dim * q.element_size()))
    for start in range(0, n_pages, at_once):
        here = slice(start, min(start + at_once, n_pages))
        k, v = gathered(cache.tiles(chosen[:, here]), lists[:, here])
        if k.dtype is ROW:
            k, v = (widened(x, dim, q.dtype) for x in (k, v))
        if key_turn is not None:
            k = rotate(k.unflatten(1, (n_slots, size)), key_turn).flatten(1, 2)
        out, lse = step.attention.dense(fold_chunks(queries[:, here], n_lists), k, v, causal=False)
        out, lse = (unfold_chunks(x, n_lists, here.stop - here.start).flatten(1, 2) for x in (out, lse))
        found.append((out, lse))
    return join(found, 1)


def gathered(rounds: Iterable[Tiles], lists: Tensor) -> tuple[Tensor, Tensor]:
    """Return copies of the keys and values of chosen pages `[C, P, K]`, from all rounds: `[C * P, K * L, D]` each."""
    k = v = lists.new_empty(0)
    for some in rounds:  # the tiles of a round may be overwritten by the next round
        number = some.chosen(lists)
        if not k.numel():
            k, v = (x.new_empty(len(number), *x.shape[1:]) for x in (some.k, some.v))
        if (here := number >= 0).all():
            torch.index_select(some.k, 0, number, out=k)
            torch.index_select(some.v, 0, number, out=v)
        else:
            k[here], v[here] = some.k[number[here]], some.v[number[here]]
    shape = lists.shape[0] * lists.shape[1], -1, k.shape[-1]
    return k.view(shape), v.view(shape)
