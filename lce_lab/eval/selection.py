"""Measures methods' selections: the share of true attention, the cost, and whether facts are found.

A judge is the kind of full attention that counts as true, and `states` names the output that later layers get.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import lce
from lce.methods import Observed
from lce_lab.analysis.mass import Judge
from lce_lab.eval.meter import AttentionMeter, States
from lce_lab.eval.metrics import METRICS
from lce_lab.eval.naming import EngineKey, cut, described, engine_key, method_names, model_names, way_of
from lce_lab.eval.record import Attended, PerHead, Record, text_hash
from lce_lab.eval.running import answer_tokens
from lce_lab.eval.sample import Sample
from lce_lab.eval.scores import by_document, interval, mean_of

AttendedLine = tuple[Mapping[str, Any], Attended]  # a sample, and its measurement
BUDGETS = frozenset({"budget", "chunks", "top_k", "top_p"})  # the knobs that set how much is chosen
# Fields of `Attended` that lie between 0 and 1, by their names in tables.
SHARES = {"recall": "recall", "hit@1": "hit1", "hit@5": "hit5", "fact": "fact"}
SHARES |= {"cover": "cover", "Gini": "gini", "found": "found", "score": "score"}
USUAL = {"judge": "constant", "states": "own"}
Samples = Callable[["lce.Engine"], Sequence[Sample]]  # makes samples for an engine's tokenizer


@dataclass(frozen=True)
class Selection:
    """One method's selection in texts of one length: means over `samples` texts, queries, layers and heads.

    `right` is the mean score of the answers. `lce_lab.eval.record.Attended` explains the other means. A mean is None if
    nothing was measured. `by_layer` has `recall`, `tokens`, `fact`, `hit1` and `hit5` by layer and head, and `found` by
    layer. `intervals` has the ends of the means' 95% intervals by fields of `Attended`: those of `lce_lab.eval.scores`,
    with each text as a document. A mean of one text has none.
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
    intervals: dict[str, tuple[float, float]]

    @property
    def all_bytes(self) -> float:
        """The bytes that a query reads in all layers: keys, values, and the data by which a method selects."""
        return self.read_bytes + self.scored_bytes

    @property
    def shares(self) -> dict[str, float | None]:
        """The means that lie between 0 and 1, by their names in tables."""
        return {name: self.right if each == "score" else getattr(self, each) for name, each in SHARES.items()}

    @classmethod
    def of(cls, method: str, length: int, texts: Sequence[Attended], judge: str, states: str) -> Selection:
        """Return the means of a method's selection over several texts."""
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
        means |= {"right": right, "by_layer": by_layer, "intervals": _intervals(texts)}
        return cls(method, length, judge, states, len(texts), queries, **means)


def _intervals(texts: Sequence[Attended]) -> dict[str, tuple[float, float]]:
    """Return the ends of the 95% intervals of means over texts, by field, for fields that two texts or more have."""
    intervals: dict[str, tuple[float, float]] = {}
    for name in SHARES.values():
        means = [_mean(getattr(text, name)) for text in texts]
        documents = by_document((text, mean) for text, mean in enumerate(means) if mean is not None)
        intervals |= {name: interval(documents)[1:]} if len(documents) > 1 else {}
    return intervals


def _mean(share: PerHead | list[float] | float | None) -> float | None:
    """Return the mean of a field of `Attended` over layers and heads; None if the field has no number."""
    if not isinstance(share, list):
        return share
    return mean_of(x for layer in share for x in (layer if isinstance(layer, list) else [layer]))


def _mean_table(tables: Sequence[PerHead]) -> PerHead:
    """Return the means by layer and head. A table whose list for a layer is empty does not count for this layer."""
    rows = [[table[layer] for table in tables if table[layer]] for layer in range(len(tables[0]))]
    return [[math.fsum(x) / len(x) for x in zip(*row, strict=True)] for row in rows]


def measure(
    model: str,
    method: lce.Method,
    samples: Samples,
    *,
    length: int,
    judge: Judge = "constant",
    states: States = "own",
    setting: Mapping[str, Any] | None = None,
    record: Record | None = None,
    progress: Callable[[int, int], None] | None = None,
    **loading: Any,
) -> Selection:
    """Ask the questions of samples with a method, and watch the queries that write the answers.

    `samples` makes the samples for an engine. `loading` are options of `lce.load`. `judge` names the full attention
    that counts as true, and `states` says whether later layers get the method's or the judge's output. In `record`, a
    sample is identified by its number and by `setting`, which says how samples are made and begins with `task`.
    """
    meter, record = AttentionMeter(judge, states), record or Record()
    engine = lce.load(model, Observed(method, meter), **loading)
    key = {**(setting or {"task": "samples"}), "judge": judge, "states": states, **described(engine)}
    made, texts = samples(engine), list[Attended]()
    for index, sample in enumerate(made):
        found = record.get({**key, "index": index}, sample.prompt)
        if found is None:
            ids = engine.tokenizer.encode(sample.prompt)
            meter.begin(len(ids) - 1, facts=fact_spans(engine, sample))
            answer = engine.generate(ids, max_tokens=answer_tokens(engine, sample)).text
            score, prompt = METRICS[sample.metric](answer, sample.answers), text_hash(sample.prompt)
            about: dict[str, Any] = {"method": method.label, "window": engine.window, "checkpoint": str(model)}
            found = replace(meter.end(), score=score, prompt=prompt, **about)
            record.add({**key, "index": index}, found)
        texts.append(found)
        if progress:
            progress(len(texts), len(made))
    return Selection.of(method.name, length, texts, judge, states)


def fact_spans(engine: lce.Engine, sample: Sample) -> list[tuple[int, int]]:
    """Return the token span `(start, stop)` of each of a sample's facts that the prompt contains."""
    spans = []
    for fact in sample.facts:
        at = sample.prompt.find(fact)
        if at >= 0:  # a space belongs to the token after it
            before, through = sample.prompt[:at].rstrip(" "), sample.prompt[: at + len(fact)]
            start, stop = (len(engine.tokenizer.encode(text)) for text in (before, through))
            spans.append((start, max(stop, start + 1)))
    return spans


def measure_text(
    model: str,
    method: lce.Method,
    text: str,
    *,
    length: int,
    queries: int = 32,
    judge: Judge = "constant",
    states: States = "own",
    record: Record | None = None,
    **loading: Any,
) -> Selection:
    """Read the first `length` tokens of a text, and watch `queries` queries spread evenly over the second half."""
    meter, record = AttentionMeter(judge, states), record or Record()
    engine = lce.load(model, Observed(method, meter), **loading)
    ids = engine.tokenizer.encode(text)[:length]
    setting = {"task": "text", "text": text_hash(text), "length": length, "n_queries": queries}
    key = {**setting, "judge": judge, "states": states, **described(engine)}
    found = record.get(key)
    if found is None:
        first = len(ids) // 2
        positions = sorted({first + (len(ids) - 1 - first) * i // max(1, queries - 1) for i in range(queries)})
        meter.begin(0, positions)
        engine.prefill(ids)
        found = replace(meter.end(), method=method.label, window=engine.window, checkpoint=str(model))
        record.add(key, found)
    return Selection.of(method.name, len(ids), [found], judge, states)


@dataclass
class SelectionTable:
    """The selections of one model's methods in one setting: a task or text, a judge and `states`.

    `lines` maps a method's name without budget to the selections that differ only in budget and length, in the order of
    bytes read. A selection has the means over all texts in the records, each counted once. A note names lengths at
    which methods were measured on different texts.
    """

    model: str
    setting: str
    lines: dict[str, list[Selection]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        return f"selection, {self.setting}"

    @property
    def lengths(self) -> list[int]:
        return sorted({one.length for line in self.lines.values() for one in line})

    @property
    def rows(self) -> list[Selection]:
        """All selections, sorted by length, then by line."""
        return [one for length in self.lengths for line in self.lines.values() for one in line if one.length == length]


def selection_tables(lines: Sequence[AttendedLine]) -> Iterator[SelectionTable]:
    """Yield one table per model and setting, in the order of `lines`."""
    names, models, bases = method_names(lines), model_names(lines), method_names(lines, without=BUDGETS)
    groups: dict[tuple[str, str], dict[tuple[int, EngineKey], list[AttendedLine]]] = {}
    for sample, attended in lines:
        where = sample["length"], engine_key(sample)
        group = groups.setdefault((models[str(sample.get("model"))], _setting(sample)), {})
        group.setdefault(where, []).append((sample, attended))
    for (model, setting), cells in groups.items():
        table = SelectionTable(model, setting)
        for (length, key), found in cells.items():
            judge, states = (str(found[0][0].get(name)) for name in USUAL)
            selection = Selection.of(names[key], length, [each for _, each in found], judge, states)
            table.lines.setdefault(bases[key], []).append(selection)
        for line in table.lines.values():
            line.sort(key=lambda one: one.all_bytes)
        table.notes = [
            f"At {length:,} tokens the methods were not watched at the same texts."
            for length in table.lengths
            if len({frozenset(map(_text, found)) for (own, _), found in cells.items() if own == length}) > 1
        ]
        yield table


def _setting(sample: Mapping[str, Any]) -> str:
    """Return the task, and the options of a sample whose values differ from the defaults, such as judge and states."""
    left_out = {"text", *(name for name, usual in USUAL.items() if sample.get(name) == usual)}
    way = way_of({name: value for name, value in sample.items() if name not in left_out})
    return f"{cut(sample['task'])}{', ' if way else ''}{way}"


def _text(line: AttendedLine) -> str:
    sample, attended = line
    return json.dumps([sample.get(name) for name in ("seed", "samples", "index", "text")] + [attended.prompt])
