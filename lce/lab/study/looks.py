"""Looks at some queries after a run: true attention beside the choices, and why a head misses.

After the run, the cache has the keys of the whole text. Keys are rotated once for many queries. Queries are processed
in slices, so that the weights over all keys stay bounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lce.lab.study.own_attention import own_attention
from lce.lab.study.run_observer import RunObserver, SeenLayer, SeenQuery
from lce.lab.study.segments import Numbers
from lce.methods.mass import Judge, TrueMass, scored_bytes

BEST = 8  # listed choices, by most true attention
ENOUGH = 0.9  # share of true attention with which a head misses nothing
MOVED = 0.5  # share of attention on wrong tokens from which distances mislead a head
COMPARED = 16  # own attention is computed for this many last prompt tokens and all generated ones
NUMBERS_AT_ONCE = 1 << 23  # weights of a slice of queries

Mark = tuple[int, int]  # tokens start..stop-1
Look = dict[str, Any]  # described in docs/inspect.md


@torch.inference_mode()
def looks_of(
    run: RunObserver, choices: tuple[int, int], marks: Sequence[Mark] = (), judge: Judge = "constant",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[int, Look]:  # fmt: skip
    """Return the looks at the observer's kept queries, by index. `choices` is `Method.choices`."""
    looks: dict[int, Look] = {}
    first, size = choices
    choosers = run.choices.choosers if run.choices is not None else 1
    for layer, seen in sorted(run.layers.items()):
        for queries in _slices(seen):
            run.check()
            weights = _true_weights(seen, queries, judge)
            masses = _chunk_masses(weights, first, size)
            numbers = weights.numpy()
            for n, query in enumerate(queries):
                stop = query.query + 1
                n_chunks = max(0, -(-(stop - first) // size))
                row = _Row(seen, query, numbers[:, n, :stop], masses[:, n, :n_chunks], first, size, marks)
                compares = query.query >= run.n_prompt - COMPARED
                row.add_to(looks.setdefault(query.query, _empty_look()), choosers, compares=compares)
        progress(layer + 1, len(run.layers))
    return looks


def _slices(seen: SeenLayer) -> Iterator[list[SeenQuery]]:
    """Yield the layer's queries in order, in slices of bounded size."""
    some: list[SeenQuery] = []
    for index, query in sorted(seen.queries.items()):
        if some and (len(some) + 1) * (index + 1) * len(query.q) > NUMBERS_AT_ONCE:
            yield some
            some = []
        some.append(query)
    if some:
        yield some


def _true_weights(seen: SeenLayer, queries: Sequence[SeenQuery], judge: Judge) -> Tensor:
    """Return the true attention of some queries, `[H, T, N]`, on the CPU."""
    first, stop = queries[0].query, queries[-1].query + 1
    step = replace(seen.step, start=first, stop=stop, memo={}, all_devices={}, note=None, note_scores=None)
    q = torch.stack([query.q for query in queries], dim=1)
    positions = torch.tensor([query.query for query in queries], device=q.device)
    return TrueMass(seen.method, seen.cache, step, judge).weights(q, positions).cpu()


def _chunk_masses(weights: Tensor, first: int, size: int) -> Numbers:
    """Return the sums of weights `[H, T, N]` over each choice, `[H, T, M]`."""
    n = weights.shape[-1] - first
    if n <= 0:
        return np.zeros((*weights.shape[:2], 0))
    size = min(size, n)  # a choice may be far longer than the text
    padded = torch.nn.functional.pad(weights[..., first:], (0, -n % size))
    masses: Numbers = padded.unflatten(-1, (-1, size)).sum(-1).numpy()
    return masses


def _empty_look() -> Look:
    return {"bytes": {"read": 0, "scored": 0, "full": 0}, "always": [], "distances": [], "layers": []}


@dataclass
class _Row:
    """One query in one layer.

    `weights [H, n]` is the true attention to the n tokens up to the query, `masses [H, M]` to the choices. Choice c
    begins at token `first + c size`.
    """

    layer: SeenLayer
    seen: SeenQuery
    weights: Numbers
    masses: Numbers
    first: int
    size: int
    marks: Sequence[Mark]

    def __post_init__(self) -> None:
        self.n_heads, self.n_chunks = self.masses.shape
        self.chosen: Numbers = self.seen.chosen.numpy()  # [H, K]
        self.taken = self.chosen >= 0
        self.safe = np.where(self.taken, self.chosen, 0)
        taken_masses = np.take_along_axis(self.masses, self.safe, 1) if self.n_chunks else self.safe * 0.0
        self.mass = np.where(self.taken, taken_masses, 0.0)  # [H, K]
        self.scores, self.ranks = self._by_head()

    def _by_head(self) -> tuple[Numbers | None, Numbers | None]:
        """Return the scores and ranks of all choices, `[H, M]`; NaN and -1 for choices that the query does not have."""
        scores = self.seen.scores
        if scores is None or not scores.shape[-1]:
            return None, None
        own = scores.numpy()
        order = np.argsort(-own, axis=-1, kind="stable")
        ranks = np.empty_like(order)
        np.put_along_axis(ranks, order, np.arange(own.shape[1])[None], axis=-1)
        ranks[own == -np.inf] = -1
        shape = self.n_heads, self.n_chunks
        all_scores, all_ranks = np.full(shape, np.nan), np.full(shape, -1)
        n, repeat = min(own.shape[1], shape[1]), self.n_heads // len(own)
        all_scores[:, :n] = np.where(own == -np.inf, np.nan, own)[:, :n].repeat(repeat, 0)
        all_ranks[:, :n] = ranks[:, :n].repeat(repeat, 0)
        return all_scores, all_ranks

    def add_to(self, look: Look, choosers: int, *, compares: bool) -> None:
        """Add this layer's facts to a look. `choosers` of the run's heads choose on their own.

        `compares`: compute the method's own attention and compare it with the true attention.
        """
        seen, layer = self.seen, Look()
        layer["always"] = None if seen.spans is None else _number_of(look["always"], [list(x) for x in seen.pieces])
        layer |= {"chosen": [], "scores": [], "ranks": []}
        if self.taken.any():
            for head in range(0, self.n_heads, self.n_heads // choosers):
                picked = self.chosen[head][self.taken[head]]
                none = [None] * len(picked)
                layer["chosen"].append(picked.tolist())
                layer["scores"].append(none if self.scores is None else rounded(self.scores[head, picked], digits=4))
                layer["ranks"].append(none if self.ranks is None else self.ranks[head, picked].tolist())
        layer["heads"] = self._heads(look, compares=compares)
        look["layers"].append(layer)
        self._count_bytes(look["bytes"])

    def _heads(self, look: Look, *, compares: bool) -> list[Look]:
        """Return each head's attended tokens beside its true attention."""
        recalls, bests, shares = self._recalls(), self._bests(), rounded(self.mass)
        own_shares, moved = self._own_attention() if compares and self.taken.any() else (None, None)
        marks = [self._mark(n, *mark) for n, mark in enumerate(self.marks) if mark[0] < self.weights.shape[1]]
        patterns: dict[bytes, int] = {}
        heads = []
        for head in range(self.n_heads):
            taken = self.taken[head]
            found: Look = {} if own_shares is None else {"given": _those(own_shares[head], taken)}
            found["distances"] = None
            if self.seen.distances is not None and taken.any():
                pairs = self.seen.distances.numpy()[head][taken]
                if (key := pairs.tobytes()) not in patterns:
                    patterns[key] = _number_of(look["distances"], pairs.tolist())
                found["distances"] = patterns[key]
            found |= {
                "mass": _those(shares[head], taken),
                "best": bests[head],
                "marked": [mark[head] for mark in marks],
            }
            found |= recalls[head]
            if found["why"] is None and moved is not None and moved[head] > MOVED:
                found["why"] = "placement"
            heads.append(found)
        return heads

    def _own_attention(self) -> tuple[Any, Any]:
        """Return the method's own attention to each choice, `[H][K]`, and its distance from true attention, by head.

        The distance is the total variation, half the sum of differences, over attended tokens. Unknown: None, None.
        """
        own = own_attention(self.layer, self.seen, self.first, self.size)
        if own is None:
            return None, None
        pieces = [self.weights[:, a:b].sum(-1) for a, b, *_ in self.seen.pieces]
        true = np.concatenate([self.mass, np.stack(pieces, axis=1)], axis=1)
        true = true / np.maximum(true.sum(-1, keepdims=True), 1e-9)
        return rounded(own[:, : self.mass.shape[1]]), np.abs(own - true).sum(-1) / 2

    def _bests(self) -> list[list[list[Any]]]:
        """Return each head's choices of most true attention, in order: `[choice, mass, rank or -1, 1 if chosen]`."""
        n = min(BEST, self.n_chunks)
        some = np.argpartition(-self.masses, n - 1, axis=-1)[:, :n] if n else np.zeros((self.n_heads, 0), np.int64)
        order = np.argsort(-np.take_along_axis(self.masses, some, 1), axis=-1, kind="stable")
        best = np.take_along_axis(some, order, 1)
        shares = rounded(np.take_along_axis(self.masses, best, 1))
        ranks = np.full_like(best, -1) if self.ranks is None else np.take_along_axis(self.ranks, best, 1)
        chosen = (best[:, :, None] == self.chosen[:, None]).any(-1).astype(int)
        rows = zip(best.tolist(), shares, ranks.tolist(), chosen.tolist(), strict=True)
        return [[list(one) for one in zip(*row, strict=True)] for row in rows]

    def _recalls(self) -> list[Look]:
        """Return each head's attended share of true attention, and the share of the best choice of the same size."""
        spans = self.seen.spans
        if spans is None:
            return [{"recall": None, "always_mass": None, "reachable": None, "why": None} for _ in range(self.n_heads)]
        always = sum((self.weights[:, a:b].sum(-1) for a, b in spans), np.zeros(self.n_heads))
        recall = always + self.mass.sum(-1) - self._twice(spans)
        reachable, counts = recall, self.taken.sum(-1)
        if self.scores is not None and counts.any():
            could = np.where(np.isnan(self.scores), 0.0, self.masses)
            most = min(int(counts.max()), could.shape[1])
            best = -np.sort(np.partition(-could, most - 1, axis=-1)[:, :most], axis=-1)
            sums = np.concatenate([np.zeros((self.n_heads, 1)), best.cumsum(-1)], axis=1)
            within = np.take_along_axis(sums, counts[:, None].clip(max=most), 1)[:, 0]
            reachable = np.maximum(recall, always + within)
        missed, lost = 1 - recall, reachable - recall
        found = []
        for head in range(self.n_heads):
            why = None
            if missed[head] > 1 - ENOUGH:
                why = "selection" if counts[head] and lost[head] >= missed[head] / 2 else "budget"
            numbers = (round(min(float(x[head]), 1.0), 4) for x in (recall, always, reachable))
            found.append({**dict(zip(("recall", "always_mass", "reachable"), numbers, strict=True)), "why": why})
        return found

    def _twice(self, spans: Sequence[Sequence[int]]) -> Numbers:
        """Return the true attention, by head, to tokens that are both chosen and always attended."""
        twice, starts = np.zeros(self.n_heads), self.first + self.safe * self.size
        for a, b in spans:
            for head, slot in zip(*(self.taken & (starts < b) & (starts + self.size > a)).nonzero(), strict=True):
                start = int(starts[head, slot])
                twice[head] += self.weights[head, max(a, start) : min(b, start + self.size)].sum()
        return twice

    def _mark(self, number: int, start: int, stop: int) -> list[list[Any]]:
        """Return by head: the mark, true attention to its tokens, the best rank of its choices, the share attended."""
        stop, first, size = min(stop, self.weights.shape[1]), self.first, self.size
        mass, ranks = rounded(self.weights[:, start:stop].sum(-1)), [-1] * self.n_heads
        a, b = max(0, (start - first) // size), max(0, (stop - 1 - first) // size + 1)
        if self.ranks is not None and b > a:
            most = self.n_chunks
            best = np.where(self.ranks[:, a:b] < 0, most, self.ranks[:, a:b]).min(-1)
            ranks = np.where(best == most, -1, best).tolist()
        token = np.arange(start, stop)
        always = np.zeros(len(token), bool)
        for x, y in self.seen.spans or ():
            always |= (token >= x) & (token < y)
        chunk = np.where(token >= first, (token - first) // size, -2)
        attended = ((chunk[None, :, None] == self.chosen[:, None]).any(-1) | always).mean(-1)
        return [[number, *rest] for rest in zip(mass, ranks, rounded(attended), strict=True)]

    def _count_bytes(self, counts: dict[str, float]) -> None:
        """Add the bytes of keys and values that this query reads in this layer, each KV head's token once."""
        seen, layer, n, first, size = self.seen, self.layer, self.weights.shape[1], self.first, self.size
        n_kv_heads, vector = layer.step.n_kv_heads, 2 * seen.q.shape[-1] * layer.cache.layout.dtype.itemsize
        spans = [[0, n]] if seen.spans is None else seen.spans
        for group in self.chosen.reshape(n_kv_heads, -1):
            ids = np.unique(group[group >= 0])
            starts, stops = first + ids * size, np.minimum(first + (ids + 1) * size, n)
            read = int((stops - starts).sum()) + sum(b - a for a, b in spans)
            for a, b in spans:
                read -= int(np.clip(np.minimum(stops, b) - np.maximum(starts, a), 0, None).sum())
            counts["read"] += read * vector
        counts["full"] += n * n_kv_heads * vector
        counts["scored"] += int(scored_bytes(layer.method, n - 1, seen.q[:, None], layer.cache, layer.step))


def _those(values: list[Any], taken: Numbers) -> list[Any]:
    """Return the values of slots with a choice."""
    return [x for x, there in zip(values, taken, strict=True) if there]


def _number_of(patterns: list[Any], pattern: Any) -> int:
    """Return the index of `pattern` in `patterns`; a new pattern is appended."""
    if pattern not in patterns:
        patterns.append(pattern)
    return patterns.index(pattern)


def rounded(values: Numbers, *, digits: int | None = None) -> Any:
    """Return numbers for JSON with 4 decimals, or `digits` digits of the largest; None for NaN."""
    x = np.asarray(values, dtype=np.float64)
    finite = np.isfinite(x)
    most = float(np.abs(x[finite]).max()) if digits and finite.any() else 0.0
    decimals = 4 if not digits or not most else digits - 1 - math.floor(math.log10(most))
    kept = np.round(x, decimals)
    return kept.tolist() if finite.all() else _without_nan(np.where(finite, kept, np.nan).tolist())


def _without_nan(x: Any) -> Any:
    if isinstance(x, list):
        return [_without_nan(each) for each in x]
    return x if x == x else None
