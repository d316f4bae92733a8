"""Compares what a recorded query attended with full attention. The results for one query are called a look.

A choice is a chunk, page, block or token that a method can select. True attention means the weights that full attention
gives to keys. Looks are computed after the run, when the cache has the keys of the whole text, a few queries at a time,
so that their weights over all keys take little memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from lce.methods import rotate
from lce_lab.analysis.distances import attended_tokens, scored_bytes
from lce_lab.analysis.mass import Judge, TrueMass
from lce_lab.study.run_observer import RunObserver, SeenLayer, SeenQuery

BEST = 8  # For each head, so many of the chunks with the highest weight under full attention are listed.
ENOUGH = 0.9  # A head misses nothing if it attends keys with this share of full attention's weight.
MOVED = 0.5  # Above this total variation distance of a head's weights from full attention's, `why` is "placement".
MOST_TOKENS = 1 << 14  # Weights are compared with full attention's only for queries that attend at most 16,384 tokens.
COMPARED = 16  # Weights are compared with full attention's for the last 16 prompt tokens and generated tokens.

Mark = tuple[int, int]  # (start, stop): the user marked the tokens start..stop-1.
Look = dict[str, Any]  # The results for one query; docs/inspect.md describes the fields.


@torch.inference_mode()
def looks_of(
    run: RunObserver,
    choices: tuple[int, int],
    marks: Sequence[Mark] = (),
    judge: Judge = "constant",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[int, Look]:
    """Return the results for each query whose data the observer kept, by the query's index in the text.

    `choices` is `Method.choices`: the first token of chunk 0, and the tokens per chunk (1 if tokens are chosen).
    """
    looks: dict[int, Look] = {}
    choosers, _, _ = run.choices.sizes()
    for layer, seen in sorted(run.layers.items()):
        for query, weights in _judged(seen, judge):
            run.check()
            empty = {"bytes": {"read": 0, "scored": 0, "full": 0}, "always": [], "distances": [], "layers": []}
            look = looks.setdefault(query.query, empty)
            row = _Row(seen, query, weights, choices, marks)
            row.add_to(look, choosers, compares=query.query >= run.n_prompt - COMPARED)
        progress(layer + 1, len(run.layers))
    return looks


def _judged(seen: SeenLayer, judge: Judge) -> Iterator[tuple[SeenQuery, Tensor]]:
    """Yield a layer's kept queries in order, each with full attention's weights `[H, n]` of the n tokens up to it."""
    queries = [query for _, query in sorted(seen.queries.items())]
    n_heads = len(queries[0].q) if queries else 1
    for some in TrueMass(seen.method, seen.cache, seen.step, judge).slices(len(queries), n_heads):
        part = queries[some]
        q = torch.stack([query.q for query in part], dim=1)
        positions = torch.tensor([query.query for query in part], device=q.device)
        step = replace(seen.step, start=part[0].query, stop=part[-1].query + 1, memo={}, all_devices={})
        weights = TrueMass(seen.method, seen.cache, step, judge).weights(q, positions).cpu()
        yield from ((query, weights[:, n, : query.query + 1]) for n, query in enumerate(part))


class _Row:
    """One query in one layer: the chunks it chose, and full attention's `weights [H, n]` of the n tokens up to it.

    Chunk c begins at token `first + c·size`; size is 1 if tokens are chosen. `masses [H, M]` is full attention's weight
    of every chunk, `mass [H, K]` of the chosen chunks. `always [n]` is True for tokens that are attended whatever is
    chosen, `attended [H, n]` for all tokens that a head attends.
    """

    def __init__(
        self, layer: SeenLayer, seen: SeenQuery, weights: Tensor, choices: tuple[int, int], marks: Sequence[Mark]
    ) -> None:
        self.layer, self.seen, self.weights, self.marks = layer, seen, weights, marks
        self.first, self.size = choices
        (self.n_heads, n), n_chosen_from = weights.shape, max(0, weights.shape[1] - self.first)
        size = min(self.size, max(1, n_chosen_from))  # a chunk may be far longer than the text
        self.masses = pad(weights[:, self.first :], (0, -n_chosen_from % size)).unflatten(1, (-1, size)).sum(-1)
        self.chosen, self.taken = seen.chosen, seen.chosen >= 0  # [H, K] each; `taken` is False for an empty slot
        slots = torch.where(self.taken, self.chosen, self.masses.shape[1])
        self.mass = pad(self.masses, (0, 1)).gather(1, slots)
        self.scores, self.ranks = self._scores_and_ranks()
        self.always = torch.zeros(n, dtype=torch.bool)
        for a, b in seen.spans or ():
            self.always[a:b] = True
        self.attended = attended_tokens(self.always[None], self.chosen[:, None], *choices, self.n_heads)[:, 0]

    def _scores_and_ranks(self) -> tuple[Tensor, Tensor]:
        """Return the score and the rank (0: best) of each chunk, `[H, M]` each; NaN and -1 for one without a score."""
        scores, m = self.seen.scores, self.masses.shape[1]
        if scores is None:
            scores = self.masses.new_empty(self.n_heads, 0)
        later_first = scores.flip(-1).argsort(descending=True, stable=True)  # of equal scores, as methods choose
        known, ranks = scores > -math.inf, later_first.argsort().flip(-1)
        found = []
        for x, fill in ((scores, math.nan), (ranks, -1)):
            fitted = pad(x.where(known, fill)[:, :m], (0, max(0, m - x.shape[1])), value=fill)
            found.append(fitted.repeat_interleave(self.n_heads // len(x), 0))
        return found[0], found[1]

    def add_to(self, look: Look, choosers: int, *, compares: bool) -> None:
        """Add this layer's results to `look`, by `choosers` groups of heads; if `compares`, with own weights."""
        seen, layer = self.seen, Look()
        layer["always"] = None if seen.spans is None else _number_of(look["always"], [list(x) for x in seen.pieces])
        layer |= {"chosen": [], "scores": [], "ranks": []}
        for head in range(0, self.n_heads, self.n_heads // choosers) if self.taken.any() else ():
            picked = self.chosen[head][self.taken[head]]
            layer["chosen"].append(picked.tolist())
            layer["scores"].append(rounded(self.scores[head, picked], digits=4))
            layer["ranks"].append(self.ranks[head, picked].tolist())
        layer["heads"] = self._heads(look, compares=compares)
        look["layers"].append(layer)
        self._count_bytes(look["bytes"])

    def _heads(self, look: Look, *, compares: bool) -> list[Look]:
        recalls, bests, mass = self._recalls(), self._bests(), rounded(self.mass)
        given, moved = self._own() if compares and self.taken.any() else (None, None)
        marks = [self._mark(n, *mark) for n, mark in enumerate(self.marks) if mark[0] < self.weights.shape[1]]
        heads = []
        for head, taken in enumerate(self.taken):
            found: Look = {} if given is None else {"given": [*compress(given[head], taken)]}
            found["distances"] = None
            if self.seen.distances is not None and taken.any():
                found["distances"] = _number_of(look["distances"], self.seen.distances[head][taken].tolist())
            found |= {"mass": [*compress(mass[head], taken)], "best": bests[head]}
            found |= {"marked": [mark[head] for mark in marks], **recalls[head]}
            if found["why"] is None and moved is not None and moved[head] > MOVED:
                found["why"] = "placement"
            heads.append(found)
        return heads

    def _own(self) -> tuple[Any, Tensor | None]:
        """Return the weights of chosen chunks under the method `[H][K]`, and their total variation `[H]`."""
        found = own_attention(self.layer, self.seen, self.first, self.size)
        if found is None:
            return None, None
        n, pieces = self.mass.shape[1], [slice(a, b) for a, b, *_ in self.seen.pieces]
        parts = found[1].split([self.size] * n + [piece.stop - piece.start for piece in pieces], dim=1)
        own = torch.stack([part.sum(-1) for part in parts], dim=1)
        true = torch.cat([self.mass, *(self.weights[:, piece].sum(-1, keepdim=True) for piece in pieces)], dim=1)
        distance = (own - true / true.sum(-1, keepdim=True).clamp(min=1e-9)).abs().sum(-1) / 2
        return rounded(own[:, :n]), distance

    def _bests(self) -> list[list[list[Any]]]:
        """Return per head the chunks that full attention weighs most: `[chunk, weight, rank or -1, 1 if chosen]`."""
        masses, best = self.masses.topk(min(BEST, self.masses.shape[1]))
        chosen = (best[:, :, None] == self.chosen[:, None]).any(-1).int()
        rows = zip(best.tolist(), rounded(masses), self.ranks.gather(1, best).tolist(), chosen.tolist(), strict=True)
        return [[list(one) for one in zip(*row, strict=True)] for row in rows]

    def _recalls(self) -> list[Look]:
        """Return per head what share of full attention's weight is on attended keys; if the share is small, also why.

        Shares: `recall` (attended), `always_mass` (attended whatever is chosen), `reachable` (with the best chunks).
        """
        if self.seen.spans is None:
            return [{"recall": None, "always_mass": None, "reachable": None, "why": None}] * self.n_heads
        always, recall = (self.weights * self.always).sum(-1), (self.weights * self.attended).sum(-1)
        counts = self.taken.sum(-1)
        could = self.masses.masked_fill(self.scores.isnan(), 0.0)
        sums = pad(could.topk(int(counts.amax())).values.cumsum(-1), (1, 0))
        reachable = torch.maximum(recall, always + sums.gather(1, counts[:, None])[:, 0])
        shares = {"recall": recall, "always_mass": always, "reachable": reachable}
        found: list[Look] = []
        for head, (missed, lost) in enumerate(zip(1 - recall, reachable - recall, strict=True)):
            why = "selection" if counts[head] and lost >= missed / 2 else "budget"
            found.append({name: round(min(float(share[head]), 1.0), 4) for name, share in shares.items()})
            found[-1]["why"] = why if missed > 1 - ENOUGH else None
        return found

    def _mark(self, number: int, start: int, stop: int) -> list[list[Any]]:
        """Return `[number, full attention's weight, best rank, attended share]` of tokens start..stop-1 per head."""
        stop, best = min(stop, self.weights.shape[1]), torch.full((self.n_heads,), -1)
        a, b = max(0, (start - self.first) // self.size), max(0, (stop - 1 - self.first) // self.size + 1)
        if b > a:
            ranks, most = self.ranks[:, a:b], self.masses.shape[1]
            best = ranks.masked_fill(ranks < 0, most).amin(-1)
            best = best.masked_fill(best == most, -1)
        mass, attended = self.weights[:, start:stop].sum(-1), self.attended[:, start:stop].float().mean(-1)
        return [[number, *rest] for rest in zip(rounded(mass), best.tolist(), rounded(attended), strict=True)]

    def _count_bytes(self, counts: dict[str, float]) -> None:
        """Add the bytes of attended keys and values (once per KV head), of scored data, and those of full attention."""
        seen, layer, n = self.seen, self.layer, self.weights.shape[1]
        full = n * layer.step.n_kv_heads
        attended = int(self.attended.unflatten(0, (layer.step.n_kv_heads, -1)).any(1).sum())
        layout = layer.cache.layout
        vector = layout.token_bytes // (layout.n_layers * layout.n_kv_heads)  # of keys and of values
        counts["read"] += (full if seen.spans is None else attended) * vector
        counts["full"] += full * vector
        counts["scored"] += int(scored_bytes(layer.method, n - 1, seen.q[:, None], layer.cache, layer.step))


def own_attention(layer: SeenLayer, seen: SeenQuery, first: int, size: int) -> tuple[Tensor, Tensor] | None:
    """Return a query's weights under the method: a softmax over the attended tokens, at the method's distances.

    Return the attended tokens `[H, n]`, first of chosen chunks, then those attended whatever is chosen, and the tokens'
    weights `[H, n]`, 0 in an empty slot. Chunk c begins at token `first + c·size`. A method's factor on logits is left
    out, since no method that chooses has one. Return None if a distance is unknown or too many tokens are attended.
    """
    chosen = seen.chosen
    pieces = [(a, b, near, far) for a, b, near, far in seen.pieces if near is not None and far is not None]
    known = len(pieces) == len(seen.pieces) and all(far - near in (0, b - a - 1) for a, b, near, far in pieces)
    if seen.spans is None or not known or (chosen.shape[1] and seen.distances is None):
        return None
    offset = torch.arange(size)
    tokens = (first + chosen.clamp(min=0)[..., None] * size + offset).flatten(1)  # [H, K·size]
    near, far = (torch.zeros_like(chosen),) * 2 if seen.distances is None else seen.distances.unbind(-1)
    distance = (far[..., None] - offset * (far > near)[..., None]).flatten(1)
    there = (chosen >= 0).repeat_interleave(size, 1) & (tokens <= seen.query)
    for a, b, nearest, farthest in pieces:
        fall = torch.arange(b - a) if farthest != nearest else torch.zeros(b - a, dtype=torch.int64)
        more = torch.stack((torch.arange(a, b), farthest - fall)).expand(len(chosen), 2, -1)
        tokens, distance = torch.cat((tokens, more[:, 0]), dim=1), torch.cat((distance, more[:, 1]), dim=1)
        there = pad(there, (0, b - a), value=True)
    if not tokens.shape[1] or tokens.shape[1] > MOST_TOKENS:
        return None
    tokens = tokens.clamp(max=seen.query)
    logits = _logits(layer, seen, tokens, distance).masked_fill_(~there, -math.inf)
    return tokens, logits.softmax(-1)


def _logits(layer: SeenLayer, seen: SeenQuery, tokens: Tensor, distance: Tensor) -> Tensor:
    """Return a query's logits with the keys of `tokens [H, n]` at `distance [H, n]`: `[H, n]`, float32, on the CPU.

    For a key that is cached at position p and seen at distance d, the query is rotated to position p + d.
    """
    rope, q = layer.step.rope, seen.q.float()
    keys = layer.cache.span(0, seen.query + 1)[0]  # [G, N, D]
    index = torch.arange(seen.query + 1)
    placed = None if layer.cache.turned else layer.method.key_positions(index.to(q.device))
    positions = distance if placed is None else placed.cpu()[tokens] + distance
    different, which = positions.unique(return_inverse=True)
    turn = rope.turn(different.to(q.device), torch.float64)
    scale = rope.scale if placed is None else 1.0  # YaRN scales rotated vectors; keys cached unrotated lack the factor
    turn = type(turn)((turn.cos * scale).float(), (turn.sin * scale).float())
    turned = rotate(q[:, None].expand(-1, len(different), -1), turn)  # [H, different positions, D]
    heads = torch.arange(len(q), device=q.device)[:, None]
    group = heads * len(keys) // len(q)
    there = keys[group, tokens.to(q.device)].float()  # [H, n, D]
    return (turned[heads, which.to(q.device)] * there).sum(-1).div_(math.sqrt(q.shape[-1])).cpu()


def _number_of(patterns: list[Any], pattern: Any) -> int:
    if pattern not in patterns:
        patterns.append(pattern)
    return patterns.index(pattern)


def rounded(values: Tensor, *, digits: int | None = None) -> Any:
    """Round numbers for JSON to 4 decimals, or so that the largest keeps `digits` digits; NaN becomes None."""
    x = np.asarray(values, dtype=np.float64)
    finite = np.isfinite(x)
    most = float(np.abs(x[finite]).max()) if digits and finite.any() else 0.0
    decimals = 4 if not digits or not most else digits - 1 - math.floor(math.log10(most))
    kept = np.round(x, decimals).astype(object)
    kept[~finite] = None
    return kept.tolist()
