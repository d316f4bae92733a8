"""Computes a method's own attention: a softmax over a query's attended tokens at the method's distances.

Inputs are a recording's choices, spans and distances, the unrotated query and the keys. If the result equals the
method's own output, all inputs are right.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lce.lab.study.run_observer import SeenLayer, SeenQuery
from lce.methods import rotate

MOST_TOKENS = 1 << 14  # attended by a head; more are not computed


def own_attention(layer: SeenLayer, seen: SeenQuery, first: int, size: int) -> tuple[Tensor, Tensor] | None:
    """Return the tokens `[H, n]` of a query's choices, then of its pieces, and the attention weights `[H, n]`.

    Choice c begins at token `first + c size`; a missing one has weights 0. Methods' factors on logits are left out,
    since no method that chooses has one. Returns None if a distance is unknown or too many tokens are attended.
    """
    chosen = seen.chosen
    pieces = [(a, b, near, far) for a, b, near, far in seen.pieces if near is not None and far is not None]
    known = len(pieces) == len(seen.pieces) and all(far - near in (0, b - a - 1) for a, b, near, far in pieces)
    if seen.spans is None or not known:
        return None
    if chosen.shape[1] and seen.distances is None:
        return None
    offset = torch.arange(size)
    tokens = (first + chosen.clamp(min=0)[..., None] * size + offset).flatten(1)  # [H, K size]
    near, far = (torch.zeros_like(chosen),) * 2 if seen.distances is None else seen.distances.unbind(-1)
    distance = (far[..., None] - offset * (far > near)[..., None]).flatten(1)
    there = (chosen >= 0).repeat_interleave(size, 1) & (tokens <= seen.query)
    for a, b, nearest, farthest in pieces:
        fall = torch.arange(b - a) if farthest != nearest else torch.zeros(b - a, dtype=torch.int64)
        more = torch.stack((torch.arange(a, b), farthest - fall)).expand(len(chosen), 2, -1)
        tokens, distance = torch.cat((tokens, more[:, 0]), dim=1), torch.cat((distance, more[:, 1]), dim=1)
        there = torch.nn.functional.pad(there, (0, b - a), value=True)
    if not tokens.shape[1] or tokens.shape[1] > MOST_TOKENS:
        return None
    tokens = tokens.clamp(max=seen.query)
    logits = _logits(layer, seen, tokens, distance).masked_fill_(~there, -torch.inf)
    return tokens, logits.softmax(-1)


def _logits(layer: SeenLayer, seen: SeenQuery, tokens: Tensor, distance: Tensor) -> Tensor:
    """Return the logits of a query with `tokens [H, n]` at `distance [H, n]`: `[H, n]`, float32, on the CPU.

    The query at position p + d sees a key cached at p at distance d.
    """
    rope, q = layer.step.rope, seen.q.float()
    keys = layer.cache.span(0, seen.query + 1)[0]  # [G, N, D]
    index = torch.arange(seen.query + 1)
    placed = layer.method.key_positions(index.to(q.device))
    positions = distance if placed is None else placed.cpu()[tokens] + distance
    different, which = positions.unique(return_inverse=True)
    turn = rope.turn(different.to(q.device), torch.float64)
    scale = rope.scale if placed is None else 1.0  # YaRN's factor, which unrotated keys lack
    turn = type(turn)((turn.cos * scale).float(), (turn.sin * scale).float())
    turned = rotate(q[:, None].expand(-1, len(different), -1), turn)  # [H, U, D]
    heads = torch.arange(len(q), device=q.device)[:, None]
    group = heads * len(keys) // len(q)
    there = keys[group, tokens.to(q.device)].float()  # [H, n, D]
    return (turned[heads, which.to(q.device)] * there).sum(-1).div_(math.sqrt(q.shape[-1])).cpu()
