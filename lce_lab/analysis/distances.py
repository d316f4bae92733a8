"""Computes from a method's parts which tokens the queries of a block see, and at which distances."""

from __future__ import annotations

import torch
from torch import Tensor

from lce.methods import CHOSEN, LayerCache, Method, Observation, Part, QueryBlock, Step
from lce.methods.attending import band_of, block_parts, bounds, slot_shift


def spans(method: Method, layer: int, step: Step) -> Tensor | None:
    """Return the n spans of tokens that each query of the block always attends: `[T, n, 2]`, on the host.

    A span is tokens `start..stop-1`, none if `stop <= start`. Besides its spans, a query attends only the chunks or
    tokens passed to `step.note`. None: the method declares no parts, or does not report what queries choose.
    """
    i, parts = block_parts(method, layer, step)
    if not parts or (any(part.keys == CHOSEN for part in parts) and not method.promised("noted")):
        return None
    return torch.stack([torch.stack(bounds(part, i), dim=-1) for part in parts if part.keys != CHOSEN], dim=1)


def spans_by_query(method: Method, layer: int, step: Step) -> list[list[list[int]]] | None:
    """Return `spans` as a sorted list per query, `[[start, stop], …]`: empty spans left out, adjacent spans joined."""
    found, joined = spans(method, layer, step), []
    if found is None:
        return None
    for row in found.tolist():
        mine: list[list[int]] = []
        for start, stop in sorted(span for span in row if span[0] < span[1]):
            if mine and start == mine[-1][1]:
                mine[-1][1] = stop
            else:
                mine.append([start, stop])
        joined.append(mine)
    return joined


def distance(method: Method, layer: int, index: Tensor, token: Tensor, step: Step) -> Tensor | None:
    """Return the distances at which the block's queries of indices `index [t]` see the tokens `token [n]`: `[t, n]`.

    The result is on the host, -1 for tokens outside of the query's spans. None: the method declares no parts.
    """
    i, parts = block_parts(method, layer, step)
    if not parts:
        return None
    rows, found = index - step.start, torch.full((len(index), len(token)), -1, dtype=torch.int64)
    for part in parts:
        if part.keys != CHOSEN:
            start, stop = (edge[rows, None] for edge in bounds(part, i))
            at = torch.as_tensor(part.query_at).expand(len(i))[rows, None]
            found = torch.where((token >= start) & (token < stop), at - _key_at(method, part, token), found)
    return found


def choice_distance(method: Method, layer: int, chosen: Tensor, step: Step) -> Tensor | None:
    """Return the least and the largest distance at which queries see each chunk that they chose: `[H, T, K, 2]`.

    `chosen [H, T, K]` are chunks or tokens as passed to `step.note`. The distances of a chunk's tokens fall from
    token to token as their keys' positions rise, or are all equal. None: the method declares no part of chosen keys.
    """
    parts = block_parts(method, layer, step)[1]
    part = next((part for part in parts if part.keys == CHOSEN), None)
    if part is None:
        return None
    chosen, (first, size), at = chosen.cpu(), method.choices, torch.as_tensor(part.query_at)
    if part.bands is not None:
        at = at.expand(len(chosen), -1, -1).gather(-1, band_of(part.bands, chosen))
    elif at.ndim == 2:
        slots = torch.arange(chosen.shape[-1]) + slot_shift(part, chosen)
        at = at.expand(len(chosen), -1, -1).gather(-1, slots.clamp(min=0, max=at.shape[-1] - 1))
    elif at.ndim == 1:
        at = at[:, None]
    tokens = first + chosen.clamp(min=0) * size
    ends = [at - _key_at(method, part, token) for token in (tokens + size - 1, tokens)]
    return torch.stack([end.expand(chosen.shape) for end in ends], dim=-1)


def _key_at(method: Method, part: Part, token: Tensor) -> Tensor:
    """Return the positions at which a part's keys of tokens `[…]` are seen; 0 for unrotated keys."""
    if part.group is not None:
        return token // part.group
    found = token if part.exact else method.key_positions(token.flatten())
    return torch.zeros_like(token) if found is None else found.view(token.shape)


def observed_always(seen: Observation) -> Tensor | None:
    """Return the tokens that the observed queries always attend, `[n, N]` bool; None: not known."""
    found, index = spans(seen.method, seen.layer, seen.step), torch.arange(seen.step.stop)
    if found is None:
        return None
    return ((index >= found[..., :1]) & (index < found[..., 1:])).any(dim=1).to(seen.rows.device)[seen.rows]


def observed_distances(seen: Observation) -> Tensor | None:
    """Return the least and largest distance of what each observed query chose, `[H, n, K, 2]`; None: not known."""
    found = None if seen.chosen is None else choice_distance(seen.method, seen.layer, seen.chosen, seen.step)
    return None if found is None else found[:, seen.rows.to(found.device)]


def attended_tokens(always: Tensor, chosen: Tensor | None, first: int, size: int, n_heads: int) -> Tensor:
    """Return a mask `[H, T, N]` of attended tokens, from `always [T, N]` and `chosen [H, T, K]` of `size` tokens."""
    attended = always.expand(n_heads, *always.shape).clone()
    if chosen is None or not chosen.shape[-1]:
        return attended
    n = always.shape[-1]
    n_choices = max(0, -(-(n - first) // size))
    taken = torch.zeros(*attended.shape[:2], n_choices + 1, dtype=torch.bool, device=always.device)
    taken.scatter_(-1, torch.where(chosen < 0, n_choices, chosen), value=True)
    tokens = taken[..., :n_choices].repeat_interleave(size, -1)[..., : n - first]
    attended[..., first:] |= tokens
    return attended


def scored_bytes(method: Method, position: int, q: Tensor, cache: LayerCache, step: Step) -> float:
    """Return the bytes that a decode step at `position` reads to choose keys, as counted by `choice_cost`."""
    block = QueryBlock(position, position + 1, len(q), step.n_kv_heads, q.shape[-1], layer=cache.index)
    return float(method.choice_cost(block).state_read or 0) * cache.layout.dtype.itemsize
