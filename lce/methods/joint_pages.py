"""Pages that the queries of a page choose together: scores are pooled, and the chosen keys are gathered once.

The gathered keys are turned to where the queries see them, so that one dense call serves all queries of a page.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lce.attention import ROW, Attended, SlotTurns, Tiles, Turn, join, rotate, widened
from lce.cache.layer import LayerCache
from lce.methods.attending import fold_chunks, unfold_chunks
from lce.methods.selection import Selector
from lce.methods.step import Step

AT_ONCE = 16 << 20  # the bytes of keys and values that are gathered at a time


def whole_pages(start: int, n_queries: int, size: int) -> tuple[int, int]:
    """Return the first query of the first page of `size` tokens that a block has whole, and the number of such pages.

    The block has the queries `start..start + n_queries - 1`; the first query is counted from the block's first.
    """
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
        key_turn = step.once(f"{n_slots} slots of {size}", lambda: _slot_turn(n_slots, size, q, step))
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


def _slot_turn(n_slots: int, size: int, like: Tensor, step: Step) -> Turn:
    """Return the rotations `[K, 1, D/2]` of cached keys from slot 0 to slot s, by s · L positions."""
    turn = step.rope.turn(torch.arange(n_slots, device=like.device) * size, torch.float64)
    return Turn(*((x / step.rope.scale).to(like.dtype)[:, None] for x in turn))
