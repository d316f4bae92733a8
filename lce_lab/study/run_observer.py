"""Observes a run for a recording: keeps what every query chose, and data about some queries for `looks`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import lce
from lce.errors import CapacityError
from lce.methods import ChunkMethod, LayerCache, Method, Observation, Observed, QueryBlock, Step
from lce.sizes import size_text
from lce_lab.analysis.distances import distance, observed_distances, spans_by_query
from lce_lab.study.segments import MOST_BYTES, RunChoices, Spans

Piece = tuple[int, int, int | None, int | None]  # Start and stop of some tokens, their least and largest distance.
MOST_PIECES = 128  # The most pieces into which a span of tokens is cut.


@dataclass
class SeenQuery:
    """One query in one layer, as recorded while the method ran."""

    query: int
    q: Tensor  # [H, D], unrotated
    chosen: Tensor  # [H, K], the numbers of chosen chunks; -1: none
    scores: Tensor | None  # [C, M], of all M chunks; -inf for chunks that the query cannot choose
    spans: Spans | None  # the tokens attended whatever is chosen; None if the method does not tell
    pieces: list[Piece]  # the spans, cut where the distances jump
    distances: Tensor | None  # [H, K, 2], the least and the largest distance of each chosen chunk


@dataclass
class SeenLayer:
    """The queries of one layer to analyse, and the method, cache and last step to read the keys after the run."""

    method: Method
    cache: LayerCache
    step: Step
    queries: dict[int, SeenQuery] = field(default_factory=dict)


class RunObserver:
    """An observer of one run over a prompt of `n_prompt` tokens. After the run, `layers` and `choices` are complete.

    Data for analysis is kept for the queries in `looked` and of generated tokens. The heads in `off`, pairs of a layer
    and a head, are switched off. `check` is called often, and an error that it raises ends the run.
    """

    def __init__(
        self,
        n_prompt: int,
        looked: Iterable[int] = (),
        off: Sequence[tuple[int, int]] = (),
        check: Callable[[], None] = lambda: None,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self.n_prompt, self.looked, self.off, self.check = n_prompt, sorted(looked), tuple(off), check
        self.choices = RunChoices(most_bytes)
        self.layers: dict[int, SeenLayer] = {}
        self._pieces: dict[Any, list[Piece]] = {}  # by query and its spans; layers with the same spans share an entry

    def expected_bytes(self, engine: lce.Engine, n_new: int, n_before: int = 0) -> int:
        """Estimate the bytes of a run's JSON, as if every query chose as many chunks as the last query does.

        The run continues a context of `n_before` tokens and generates `n_new` tokens. A look takes about 200 bytes per
        head, 8 per choice of a head, and 17 per choice of a chooser. Choices that a block's queries share are not
        counted. Raises `CapacityError` if the bytes are by far more than `most_bytes`.
        """
        assert isinstance(engine.method, Observed)
        method, c, n = engine.method.inner, engine.setup.model.config, self.n_prompt + n_new
        n_acting = len(c.acting_layers)
        block = QueryBlock(n - 1, n, c.n_heads, c.n_kv_heads, c.head_dim, n_acting, c.n_layers - 1)
        n_keys = (method.choice_cost(block).attention or 0) // (2 * c.n_heads * c.head_dim)
        k, choosers = n_keys // method.choices[1], c.n_heads if method.access.per_head else 0
        if isinstance(method, ChunkMethod):
            choosers = method.selection.n_choosers(c.n_heads, c.n_kv_heads)
        if k >= (n - 1) // method.choices[1]:  # all chunks fit, so all heads choose alike
            choosers = min(choosers, 1)
        look = c.n_heads * (200 + 8 * k) + max(1, choosers) * 17 * k
        n_looks = sum(query >= n_before for query in self.looked) + n_new
        sliding = (c.n_layers - n_acting) * n_looks * c.n_heads * 200  # layers that choose nothing
        chosen = (n - n_before) * choosers * k * 2 * 4 // 3  # 4 / 3: base64
        n_bytes, most = n_acting * (n_looks * look + chosen) + sliding, self.choices.most_bytes
        if n_bytes > 2 * most:
            remedy = "give a shorter text, a smaller spread, or knobs by which fewer or larger chunks are chosen"
            found = f"a recording would have about {size_text(n_bytes)}"
            raise CapacityError(f"{found}; expected {size_text(most)} or less: {remedy}")
        return n_bytes

    def rows(self, step: Step) -> Tensor:
        """Return the numbers of the queries to analyse in the step's block, whose first query is number 0."""
        self.check()
        block = range(step.start, step.stop)
        some = block if step.start >= self.n_prompt else [i for i in self.looked if i in block]
        return torch.tensor([i - step.start for i in some], dtype=torch.int64)

    def observe(self, seen: Observation, out: Tensor) -> Tensor:
        """Keep what a layer's queries chose. Return `out [H, T, D]` with zeros for heads that are switched off."""
        layer, step = seen.layer, seen.step
        if layer == 0:
            self.choices.begin(step.start, step.stop)
        spans = spans_by_query(seen.method, layer, step)
        self.choices.add(layer, seen.chosen, spans, step.n_kv_heads)
        kept = self.layers.setdefault(layer, SeenLayer(seen.method, seen.cache, step))
        kept.step = step
        if len(seen.rows):
            kept.queries |= self._queries(seen, spans)
        off = [head for where, head in self.off if where == layer]
        return out.index_fill(0, torch.tensor(off, device=out.device), 0.0) if off else out

    def _queries(self, seen: Observation, spans: list[Spans] | None) -> dict[int, SeenQuery]:
        q, rows, scores, picked, distances = seen.q, seen.rows, seen.scores, seen.picked, observed_distances(seen)
        if picked is None:
            picked = q.new_empty(len(q), len(rows), 0, dtype=torch.int64)
        if scores is not None:
            scores = (scores[:, :1] if seen.together else scores).cpu().clone()
            self.choices.count(scores.nbytes)
        queries, picked = q[:, rows].clone(), picked.cpu()
        distances = None if distances is None else distances.cpu()
        found = {}
        for n, row in enumerate(rows.tolist()):
            query, own = seen.step.start + row, None if spans is None else spans[row]
            key = query, tuple(map(tuple, own or ()))
            if key not in self._pieces:
                self._pieces[key] = [piece for span in own or () for piece in _pieces(seen, query, *span)]
            scored = None if scores is None else scores[:, 0 if seen.together else n]
            seen_at = None if distances is None else distances[:, n]
            found[query] = SeenQuery(query, queries[:, n], picked[:, n], scored, own, self._pieces[key], seen_at)
        return found


def _pieces(seen: Observation, query: int, start: int, stop: int) -> list[Piece]:
    """Cut a span of tokens into pieces. In a piece, the distance falls by 1 from token to token, or is constant.

    A span that would have more than `MOST_PIECES` pieces is cut into that many equal parts instead.
    """
    found = distance(seen.method, seen.layer, torch.tensor([query]), torch.arange(start, stop), seen.step)
    if found is None:
        return [(start, stop, None, None)]
    row = found[0]
    return [(start + a, start + b, int(row[a:b].min()), int(row[a:b].max())) for a, b in _cuts(row)]


def _cuts(distance: Tensor) -> list[tuple[int, int]]:
    """Return the pieces `(start, stop)` of a span, given its distances: 5 4 3 9 8 8 8 becomes 5 4 3, 9 8 and 8 8."""
    n, (steps, counts) = len(distance), distance.diff().unique_consecutive(return_counts=True)
    edges, end = [0], 0
    if len(steps) <= 4 * MOST_PIECES:
        for step, count in zip(steps.tolist(), counts.tolist(), strict=True):
            if step not in (0, -1):
                edges += range(end + 1, end + 1 + count)
            elif edges[-1] != end:  # token `end` belongs to the previous piece already
                edges.append(end + 1)
            end += count
    if len(steps) > 4 * MOST_PIECES or len(edges) > MOST_PIECES:
        edges = list(range(0, n, -(-n // MOST_PIECES)))
    return list(zip(edges, [*edges[1:], n], strict=True))
