"""Observes a run for a recording: the choices of every query, and the data for a closer look at some.

Looked-at queries are kept with their scores and spans. True attention is computed after the run
(`lce.lab.study.looks`), when the cache has all keys and one rotation serves many queries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lce.lab.study.segments import MOST_BYTES, RunChoices, Spans
from lce.methods import LayerCache, Method, Observation, Step, distances

Piece = tuple[int, int, int | None, int | None]  # tokens start..stop-1, least and largest distance
MOST_PIECES = 128  # pieces of a query's always attended tokens


@dataclass
class SeenQuery:
    """One query in one layer, recorded when the method ran."""

    query: int
    q: Tensor  # [H, D], unrotated
    chosen: Tensor  # [H, K], -1 for none
    scores: Tensor | None  # [C, M] of the choices; -inf for choices that the query does not have
    spans: Spans | None  # always attended tokens
    pieces: list[Piece]  # the spans, cut by distances
    distances: Tensor | None  # [H, K, 2], the least and the largest distance of each choice


@dataclass
class SeenLayer:
    """The looked-at queries of a layer, and the means to read the layer's keys after the run."""

    method: Method
    cache: LayerCache
    step: Step
    queries: dict[int, SeenQuery] = field(default_factory=dict)


class RunObserver:
    """A record of one run's choices: observe a prompt of `n_prompt` tokens, then read the fields.

    Queries in `looked` and of generated tokens are looked at. The heads `off`, pairs of a layer and a head, are
    switched off. `check` is called often; an error that it raises ends the run.
    """

    def __init__(
        self, n_prompt: int, looked: Iterable[int] = (), off: Sequence[tuple[int, int]] = (),
        check: Callable[[], None] = lambda: None, most_bytes: int = MOST_BYTES,
    ) -> None:  # fmt: skip
        self.n_prompt, self.looked, self.off, self.check = n_prompt, sorted(looked), tuple(off), check
        self.most_bytes = most_bytes
        self.layers: dict[int, SeenLayer] = {}
        self.choices: RunChoices | None = None
        self._pieces: dict[Any, list[Piece]] = {}  # by query and spans, for all layers

    def rows(self, step: Step) -> Tensor:
        """Return the indices of the looked-at queries within the block."""
        self.check()
        block = range(step.start, step.stop)
        some = block if step.start >= self.n_prompt else [i for i in self.looked if i in block]
        return torch.tensor([i - step.start for i in some], dtype=torch.int64)

    def observe(self, seen: Observation, out: Tensor) -> Tensor:
        """Keep a layer's choices; return `out` with zeros for heads that are off."""
        layer, step = seen.layer, seen.step
        if self.choices is None:
            self.choices = RunChoices(step.n_kv_heads, self.most_bytes)
        if layer == 0:
            self.choices.begin(step.start, step.stop)
        spans = seen.spans()
        self.choices.add(layer, seen.chosen, spans)
        kept = self.layers.setdefault(layer, SeenLayer(seen.method, seen.cache, step))
        kept.step = step
        if len(seen.rows):
            kept.queries |= self._queries(seen, spans, self.choices)
        off = [head for where, head in self.off if where == layer]
        return out.index_fill(0, torch.tensor(off, device=out.device), 0.0) if off else out

    def _queries(self, seen: Observation, spans: list[Spans] | None, choices: RunChoices) -> dict[int, SeenQuery]:
        """Return the block's looked-at queries by index."""
        q, rows, scores, picked, distances = seen.q, seen.rows, seen.scores, seen.picked, seen.distances()
        if picked is None:
            picked = q.new_empty(len(q), len(rows), 0, dtype=torch.int64)
        if scores is not None:
            scores = (scores[:, :1] if seen.together else scores).cpu().clone()
            choices.count(scores.nbytes)
        queries, picked = q[:, rows].clone(), picked.cpu()
        distances = None if distances is None else distances.cpu()
        found = {}
        for n, row in enumerate(rows.tolist()):
            query, own = seen.step.start + row, None if spans is None else spans[row]
            key = query, tuple(map(tuple, own or ()))
            if key not in self._pieces:
                self._pieces[key] = [piece for span in own or () for piece in _pieces(seen, query, *span)]
            found[query] = SeenQuery(
                query, queries[:, n], picked[:, n], None if scores is None else scores[:, 0 if seen.together else n],
                own, self._pieces[key], None if distances is None else distances[:, n],
            )  # fmt: skip
        return found


def _pieces(seen: Observation, query: int, start: int, stop: int) -> list[Piece]:
    """Cut a span into pieces in which the distance falls by 1 from token to token, or is constant.

    If this makes too many pieces, each piece is a part of the span with its least and largest distance.
    """
    distance = distances.distance(seen.method, seen.layer, torch.tensor([query]), torch.arange(start, stop), seen.step)
    if distance is None:
        return [(start, stop, None, None)]
    row = distance[0]
    return [(start + a, start + b, int(row[a:b].min()), int(row[a:b].max())) for a, b in _cuts(row)]


def _cuts(distance: Tensor) -> list[tuple[int, int]]:
    """Cut the distances of a span: 5, 4, 3, 9, 8, 8, 8 is cut into 5, 4, 3; 9, 8; 8, 8."""
    n, (steps, counts) = len(distance), distance.diff().unique_consecutive(return_counts=True)
    edges, end = [0], 0
    if len(steps) <= 4 * MOST_PIECES:
        for step, count in zip(steps.tolist(), counts.tolist(), strict=True):
            if step not in (0, -1):
                edges += range(end + 1, end + 1 + count)
            elif edges[-1] != end:  # the token before the step is in another piece
                edges.append(end + 1)
            end += count
    if len(steps) > 4 * MOST_PIECES or len(edges) > MOST_PIECES:
        edges = list(range(0, n, -(-n // MOST_PIECES)))
    return list(zip(edges, [*edges[1:], n], strict=True))
