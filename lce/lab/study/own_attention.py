"""Computes a method's own attention: a softmax over a query's attended tokens at the method's distances.

Inputs are a recording's choices, spans and distances, the unrotated query and the keys. If the result equals the
method's own output, all inputs are right.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lce.lab.study.run_observer import SeenLayer, SeenQuery
from lce.lab.study.segments import Numbers
from lce.methods import rotate

MOST_TOKENS = 1 << 14  # attended by a head; more are not computed


def own_attention(layer: SeenLayer, seen: SeenQuery, first: int, size: int) -> Numbers | None:
    """Return the shares of a query's attention to each choice, then to each piece, `[H, K + P]`.

    Choice c begins at token `first + c size`. Returns None if a distance is unknown or too many tokens are attended.
    """
    found = own_weights(layer, seen, first, size)
    if found is None:
        return None
    sizes = [size] * seen.chosen.shape[1] + [b - a for a, b, *_ in seen.pieces]
    return torch.stack([part.sum(-1) for part in found[1].split(sizes, dim=1)], dim=1).numpy()


def own_weights(layer: SeenLayer, seen: SeenQuery, first: int, size: int) -> tuple[Tensor, Tensor] | None:
    """Return the tokens `[H, n]` of a query's choices, then of its pieces, and the attention weights `[H, n]`.

    A missing choice has weights 0. Methods' factors on logits are left out, since no method that chooses has one.
    """
    known = all(near is not None and far - near in (0, b - a - 1) for a, b, near, far in seen.pieces)  # type: ignore[operator]
    if seen.spans is None or not known or (seen.chosen.shape[1] and seen.distances is None):
        return None
    tokens, distance, there = _chosen_tokens(seen, first, size)
    for a, b, near, far in seen.pieces:
        assert near is not None
        assert far is not None
        index = torch.arange(a, b)
        distances = far - (index - a) if far > near else torch.full_like(index, far)
        tokens, distance = (
            torch.cat((x, y.expand(len(x), -1)), dim=1) for x, y in ((tokens, index), (distance, distances))
        )
        there = torch.cat((there, torch.ones(len(there), b - a, dtype=torch.bool)), dim=1)
    if not tokens.shape[1] or tokens.shape[1] > MOST_TOKENS:
        return None
    logits = _logits(layer, seen, tokens, distance).masked_fill_(~there, -torch.inf)
    return tokens, logits.softmax(-1)


def _chosen_tokens(seen: SeenQuery, first: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens of the choices, the distances, and whether each exists: `[H, K * size]` each."""
    chosen, offset = seen.chosen, torch.arange(size)
    tokens = first + chosen.clamp(min=0)[..., None] * size + offset
    there = (chosen >= 0)[..., None] & (tokens <= seen.query)
    if seen.distances is None:
        distance = torch.zeros_like(tokens)
    else:
        near, far = seen.distances.unbind(-1)
        distance = far[..., None] - offset * (far > near)[..., None]
    return tuple(x.flatten(1) for x in (tokens.clamp(max=seen.query), distance, there))  # type: ignore[return-value]


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
