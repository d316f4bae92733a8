"""Measures methods' selections: the share of true attention, the cost, and whether facts are found."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import lce
from lce.lab.eval.metrics import METRICS
from lce.lab.eval.naming import described
from lce.lab.eval.record import Lines, text_hash
from lce.lab.eval.running import answer_tokens
from lce.lab.eval.sample import Sample
from lce.lab.eval.watching import Look, PerHead, States, Watch
from lce.methods import Observed
from lce.methods.mass import Judge

if TYPE_CHECKING:
    from lce import Engine, Method

Samples = Callable[["Engine"], Sequence[Sample]]  # made for an engine's tokenizer


class Looks(Lines[Look]):
    """Observations of texts in one file: a line a text."""

    kind, holds = Look, "what was selected"


@dataclass(frozen=True)
class Selection:
    """One method's selection in texts of one length: means over `samples` texts, queries, layers and heads.

    `recall`, `tokens`, `fact`, `hit1`, `hit5`, `cover`, `gini`, `found` and the bytes are those of `Look`. `by_layer`
    has some for each layer and head, and `found` for each layer. `right` is the answers' mean score. None: nothing to
    measure.
    """

    method: str
    length: int
    judge: str
    states: str
    samples: int
    queries: int
    tokens: float
    read_bytes: float
    scored_bytes: float
    full_bytes: float
    recall: float
    fact: float | None
    hit1: float | None
    hit5: float | None
    cover: float | None
    gini: float | None
    found: float | None
    right: float | None
    by_layer: dict[str, PerHead]

    @classmethod
    def of(cls, method: str, length: int, looks: Sequence[Look], judge: str, states: str) -> Selection:
        """Return the means over the observations of several texts."""
        per_head = {
            name: tables
            for name in ("recall", "tokens", "fact", "hit1", "hit5")
            if (tables := [table for look in looks if (table := getattr(look, name)) is not None])
        }
        by_layer = {name: _mean_tables(tables) for name, tables in per_head.items()}
        found = [[[x] for x in look.found] for look in looks if look.found]
        if found:
            by_layer["found"] = _mean_tables(found)
        means: dict[str, Any] = {name: _mean([x for row in table for x in row]) for name, table in by_layer.items()}
        for name in ("read_bytes", "scored_bytes", "full_bytes", "cover", "gini"):
            means[name] = _mean([x for look in looks if (x := getattr(look, name)) is not None])
        for name in ("fact", "hit1", "hit5", "found"):
            means.setdefault(name, None)
        scores = [look.score for look in looks if look.score is not None]
        return cls(
            method=method, length=length, judge=judge, states=states, samples=len(looks),
            queries=sum(look.queries for look in looks), by_layer=by_layer, right=_mean(scores),
            **means,
        )  # fmt: skip


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _mean_tables(tables: Sequence[PerHead]) -> PerHead:
    """Return the mean of tables by layer and head; for each layer, over the tables that have heads in it."""
    rows = [[table[layer] for table in tables if table[layer]] for layer in range(len(tables[0]))]
    return [[math.fsum(x) / len(x) for x in zip(*row, strict=True)] for row in rows]


def watching(model: str, method: Method, judge: Judge, states: States, **loading: Any) -> tuple[Engine, Watch]:
    """Return an engine whose method is watched; `loading` are options of `lce.load`."""
    watch = Watch(judge, states)
    return lce.load(model, Observed(method, watch), **loading), watch


def measure(
    model: str, method: Method, samples: Samples, *, length: int, judge: Judge = "constant", states: States = "own",
    setting: Mapping[str, Any] | None = None, record: Looks | None = None,
    progress: Callable[[int, int], None] | None = None, **loading: Any,
) -> Selection:  # fmt: skip
    """Answer samples with a method, and observe the queries that write the answers: those of the prompt's last token
    and of each written token.

    `samples` is called with the engine. `judge` says which full attention is the truth. `states` says whose hidden
    states the method selects on. `setting` and a sample's number identify the sample in `record`; recorded samples are
    not asked again. `setting` has what the samples are made from, first `task`.
    """
    engine, watch = watching(model, method, judge, states, **loading)
    asked = {**(setting or {"task": "samples"}), "judge": judge, "states": states, **described(engine)}
    made, looks = samples(engine), []
    for index, sample in enumerate(made):
        key = {**asked, "index": index}
        look = None if record is None else record.get(key)
        if look is None or look.prompt != text_hash(sample.prompt):
            look = replace(look_at(engine, watch, sample), **_about(engine, model, method))
            if record is not None:
                record.add(key, look)
        looks.append(look)
        if progress:
            progress(len(looks), len(made))
    return Selection.of(method.name, length, looks, judge, states)


def _about(engine: Engine, model: str, method: Method) -> dict[str, Any]:
    """Return further fields of a line, for reading and sorting."""
    return {"method": method.label, "window": engine.window, "checkpoint": str(model)}


def look_at(engine: Engine, watch: Watch, sample: Sample) -> Look:
    """Answer a sample; return what the answer's queries attended, with the answer's score."""
    ids = engine.tokenizer.encode(sample.prompt)
    watch.begin(len(ids) - 1, facts=fact_spans(engine, sample))
    answer = engine.generate(ids, max_tokens=answer_tokens(engine, sample)).text
    score = METRICS[sample.metric](answer, sample.answers)
    return replace(watch.end(), score=score, prompt=text_hash(sample.prompt))


def fact_spans(engine: Engine, sample: Sample) -> list[tuple[int, int]]:
    """Return the tokens `start..stop-1` of each of a sample's facts that the prompt contains."""
    spans = []
    for fact in sample.facts:
        at = sample.prompt.find(fact)
        if at >= 0:
            before, through = sample.prompt[:at].rstrip(" "), sample.prompt[: at + len(fact)]  # a space begins a token
            start, stop = (len(engine.tokenizer.encode(text)) for text in (before, through))
            spans.append((start, max(stop, start + 1)))
    return spans


def measure_text(
    model: str, method: Method, text: str, *, length: int, queries: int = 32, judge: Judge = "constant",
    states: States = "own", record: Looks | None = None, **loading: Any,
) -> Selection:  # fmt: skip
    """Read the first `length` tokens of a text; observe `queries` queries evenly spread over the second half."""
    engine, watch = watching(model, method, judge, states, **loading)
    ids = engine.tokenizer.encode(text)[:length]
    setting = {"task": "text", "text": text_hash(text), "length": length, "n_queries": queries}
    key = {**setting, "judge": judge, "states": states, **described(engine)}
    look = None if record is None else record.get(key)
    if look is None:
        first = len(ids) // 2
        positions = sorted({first + (len(ids) - 1 - first) * i // max(1, queries - 1) for i in range(queries)})
        watch.begin(0, positions)
        engine.prefill(ids)
        look = replace(watch.end(), **_about(engine, model, method))
        if record is not None:
            record.add(key, look)
    return Selection.of(method.name, len(ids), [look], judge, states)
