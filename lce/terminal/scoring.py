"""`lce eval`: every method at every length, as a table that grows line by line or as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lce
from lce.lab.eval.passkey import Score, check_length, check_task, evaluate
from lce.lab.eval.record import Record
from lce.terminal import figures
from lce.terminal.capacity import check_capacity
from lce.terminal.output import Output


@dataclass(frozen=True)
class Table:
    """What is measured: a model with some methods at some lengths; `task` are the other options of `evaluate`."""

    model: str
    methods: Sequence[lce.Method]
    lengths: Sequence[int]
    task: Mapping[str, Any]
    loading: Mapping[str, Any]

    def measure(self, record: str | None, output: Output) -> None:
        """Measure and print it. Whatever is refused is refused before the first line."""
        check_task(self.task["task"], self.task["filler"], self.task["n"])
        answers = None if record is None else Record(record)
        check_capacity(self.model, self.methods, max(self.lengths), self.loading)
        scores: list[Score] = []
        objects = []
        for method in self.methods:
            engine = lce.load(self.model, method, **self.loading)
            if not scores:
                check_length(engine, min(self.lengths), **self.task)
            for length in self.lengths:
                noting = output.noting(engine.beyond(length))  # also where all answers are recorded
                with noting as notes, output.bar(f"{method.name} at {length:,}:", " samples") as bar:
                    scores.append(evaluate(engine, length=length, record=answers, progress=bar, **self.task))
                objects.append(figures.score_object(scores[-1], next(iter(notes), None)))
                output.text(*([figures.SCORE_HEADER] if len(scores) == 1 else []), figures.score_row(scores[-1]))
        output.object(objects)
        if len(self.methods) > 1 and len(self.lengths) > 1:
            output.text("", *figures.score_table(scores))
