"""The attention that a method itself gives: a softmax over what a query attends, at the distances at which it sees it.

It is computed from what a recording holds, the choices, the spans and their distances, and from the unrotated query and
the keys. So where it gives the method's own output, all of these are right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lce.lab.study.watching import LayerNotes, Noted
from lce.methods import rotate

MOST_TOKENS = 1 << 14  # attended by a head: for more it is not computed


@dataclass(frozen=True)
class Given:
    """Attention weights of one query: `weights [H, n]` over tokens `tokens [H, n]`, in parts.

    The first `K * size` are those of K choices, 0 where there is none; then those of pieces that are always attended.
    """

    tokens: Tensor
    weights: Tensor
    n_choices: int
    size: int
    pieces: list[int]  # the tokens of each piece

    @property
    def of_choices(self) -> Tensor:
        """`[H, K]`."""
        chosen = self.weights[:, : self.n_choices * self.size]
        return chosen.reshape(len(chosen), self.n_choices, self.size).sum(-1)

    @property
    def of_pieces(self) -> Tensor:
        """`[H, P]`."""
        parts = self.weights[:, self.n_choices * self.size :].split(self.pieces, dim=1)
        sums = [part.sum(-1, keepdim=True) for part in parts] if self.pieces else []
        return torch.cat([self.weights[:, :0], *sums], dim=1)


def given(notes: LayerNotes, noted: Noted, first: int, size: int) -> Given | None:
    """The attention of one query in one layer; None where a distance is not known. Choice c begins at `first + c size`.

    The factors that some methods put on logits are left out: none of those that choose has one.
    """
    pieces = noted.near
    known = all(near is not None and far is not None and far - near in (0, b - a - 1) for a, b, near, far in pieces)
    n_choices = noted.chosen.shape[1]
    if noted.spans is None or not known or (n_choices and noted.distances is None):
        return None
    tokens, distance, there = _chosen_tokens(noted, first, size)
    for a, b, near, far in pieces:
        assert near is not None
        assert far is not None
        index = torch.arange(a, b)
        seen = far - (index - a) if far > near else torch.full_like(index, far)
        tokens, distance = (torch.cat((x, y.expand(len(x), -1)), dim=1) for x, y in ((tokens, index), (distance, seen)))
        there = torch.cat((there, torch.ones(len(there), b - a, dtype=torch.bool)), dim=1)
    if not tokens.shape[1] or tokens.shape[1] > MOST_TOKENS:
        return None
    logits = _logits(notes, noted, tokens, distance).masked_fill_(~there, -torch.inf)
    return Given(tokens, logits.softmax(-1), n_choices, size, [b - a for a, b, *_ in pieces])


def _chosen_tokens(noted: Noted, first: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens of the choices, their distances, and which of them there are: `[H, K * size]` each."""
    chosen, offset = noted.chosen, torch.arange(size)
    tokens = first + chosen.clamp(min=0)[..., None] * size + offset
    there = (chosen >= 0)[..., None] & (tokens <= noted.query)
    if noted.distances is None:
        distance = torch.zeros_like(tokens)
    else:
        near, far = noted.distances.unbind(-1)
        distance = far[..., None] - offset * (far > near)[..., None]
    return tuple(x.flatten(1) for x in (tokens.clamp(max=noted.query), distance, there))  # type: ignore[return-value]


def _logits(notes: LayerNotes, noted: Noted, tokens: Tensor, distance: Tensor) -> Tensor:
    """The logits of a query with tokens `[H, n]`, each at its distance: `[H, n]`, float32, on the CPU.

    A key that is cached at position p is seen at distance d by the query at p + d.
    """
    rope, q = notes.step.rope, noted.q.float()
    keys = notes.cache.span(0, noted.query + 1)[0]  # [G, N, D]
    index = torch.arange(noted.query + 1)
    placed = notes.method.key_positions(index.to(q.device))
    positions = distance if placed is None else placed.cpu()[tokens] + distance
    different, which = positions.unique(return_inverse=True)
    turn = rope.turn(different.to(q.device), torch.float64)
    scale = rope.scale if placed is None else 1.0  # YaRN's factor, which unrotated keys do not have yet
    turn = type(turn)((turn.cos * scale).float(), (turn.sin * scale).float())
    turned = rotate(q[:, None].expand(-1, len(different), -1), turn)  # [H, U, D]
    heads = torch.arange(len(q), device=q.device)[:, None]
    group = heads * len(keys) // len(q)
    there = keys[group, tokens.to(q.device)].float()  # [H, n, D]
    return (turned[heads, which.to(q.device)] * there).sum(-1).div_(math.sqrt(q.shape[-1])).cpu()
