"""Measures methods' selections: the share of true attention, the cost, and whether facts are found."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import lce
from lce.lab.eval.meter import AttentionMeter, States
from lce.lab.eval.metrics import METRICS
from lce.lab.eval.naming import described
from lce.lab.eval.record import Attended, PerHead, Record, text_hash
from lce.lab.eval.running import answer_tokens
from lce.lab.eval.sample import Sample
from lce.lab.eval.scores import mean_of
from lce.methods import Observed
from lce.methods.mass import Judge

if TYPE_CHECKING:
    from lce import Engine, Method

Samples = Callable[["Engine"], Sequence[Sample]]  # made for an engine's tokenizer


@dataclass(frozen=True)
class Selection:
    """One method's selection in texts of one length: means over `samples` texts, queries, layers and heads.

    `recall`, `tokens`, `fact`, `hit1`, `hit5`, `cover`, `gini`, `found` and the bytes are those of `Attended`.
    `by_layer` has some for each layer and head, and `found` for each layer. `right` is the answers' mean score. None:
    nothing to measure.
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
    def of(cls, method: str, length: int, texts: Sequence[Attended], judge: str, states: str) -> Selection:
        """Return the means over several texts."""
        by_layer: dict[str, PerHead] = {}
        for name in ("recall", "tokens", "fact", "hit1", "hit5"):
            if tables := [table for text in texts if (table := getattr(text, name)) is not None]:
                by_layer[name] = _mean_table(tables)
        if found := [[[share] for share in text.found] for text in texts if text.found]:
            by_layer["found"] = _mean_table(found)
        means: dict[str, Any] = dict.fromkeys(("fact", "hit1", "hit5", "found"))
        means |= {name: mean_of(x for heads in table for x in heads) for name, table in by_layer.items()}
        for name in ("read_bytes", "scored_bytes", "full_bytes", "cover", "gini"):
            means[name] = mean_of(getattr(text, name) for text in texts)
        right, queries = mean_of(text.score for text in texts), sum(text.queries for text in texts)
        return cls(method, length, judge, states, len(texts), queries, right=right, by_layer=by_layer, **means)


def _mean_table(tables: Sequence[PerHead]) -> PerHead:
    """Return the mean of tables by layer and head; for each layer, over the tables that have heads in it."""
    rows = [[table[layer] for table in tables if table[layer]] for layer in range(len(tables[0]))]
    return [[math.fsum(x) / len(x) for x in zip(*row, strict=True)] for row in rows]


def measure(
    model: str, method: Method, samples: Samples, *, length: int, judge: Judge = "constant", states: States = "own",
    setting: Mapping[str, Any] | None = None, record: Record | None = None,
    progress: Callable[[int, int], None] | None = None, **loading: Any,
) -> Selection:  # fmt: skip
    """Answer samples with a method, and observe the queries that write the answers: those of the prompt's last token
    and of each written token.

    `samples` is called with the engine; `loading` are options of `lce.load`. `judge` says which full attention is the
    truth. `states` says whose hidden states the method selects on. `setting` and a sample's number identify the sample
    in `record`; recorded samples are not asked again. `setting` has what the samples are made from, first `task`.
    """
    meter = AttentionMeter(judge, states)
    engine = lce.load(model, Observed(method, meter), **loading)
    key = {**(setting or {"task": "samples"}), "judge": judge, "states": states, **described(engine)}
    made, texts = samples(engine), list[Attended]()
    for index, sample in enumerate(made):
        found = record.get({**key, "index": index}, sample.prompt) if record else None
        if found is None:
            found = replace(answered(engine, meter, sample), **_about(engine, model, method))
            if record:
                record.add({**key, "index": index}, found)
        texts.append(found)
        if progress:
            progress(len(texts), len(made))
    return Selection.of(method.name, length, texts, judge, states)


def _about(engine: Engine, model: str, method: Method) -> dict[str, Any]:
    """Return further fields of a line, for reading and sorting."""
    return {"method": method.label, "window": engine.window, "checkpoint": str(model)}


def answered(engine: Engine, meter: AttentionMeter, sample: Sample) -> Attended:
    """Answer a sample; return what the answer's queries attended, with the answer's score."""
    ids = engine.tokenizer.encode(sample.prompt)
    meter.begin(len(ids) - 1, facts=fact_spans(engine, sample))
    answer = engine.generate(ids, max_tokens=answer_tokens(engine, sample)).text
    score = METRICS[sample.metric](answer, sample.answers)
    return replace(meter.end(), score=score, prompt=text_hash(sample.prompt))


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
    states: States = "own", record: Record | None = None, **loading: Any,
) -> Selection:  # fmt: skip
    """Read the first `length` tokens of a text; observe `queries` queries evenly spread over the second half."""
    meter = AttentionMeter(judge, states)
    engine = lce.load(model, Observed(method, meter), **loading)
    ids = engine.tokenizer.encode(text)[:length]
    setting = {"task": "text", "text": text_hash(text), "length": length, "n_queries": queries}
    key = {**setting, "judge": judge, "states": states, **described(engine)}
    found = record.get(key) if record else None
    if found is None:
        first = len(ids) // 2
        positions = sorted({first + (len(ids) - 1 - first) * i // max(1, queries - 1) for i in range(queries)})
        meter.begin(0, positions)
        engine.prefill(ids)
        found = replace(meter.end(), **_about(engine, model, method))
        if record:
            record.add(key, found)
    return Selection.of(method.name, len(ids), [found], judge, states)
