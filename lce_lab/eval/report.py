"""Makes tables of the measurements in one or several record files. A row of a table is a method.

Losses and selections have tables of their own (`lce_lab.eval.perplexity`, `lce_lab.eval.selection`). A sample in
several files counts once.

A task's ceiling is the score of the method `full` within the model's window. It is measured at samples made for the
ceiling, or else at the largest length within the window. Notes name the tasks and lengths that cannot distinguish
methods: tasks whose ceiling is below 0.5 or not clearly above chance, and lengths at which every method reaches the
ceiling.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

from lce.errors import DataError, UsageError, shown
from lce.files import named, path_of
from lce_lab.eval.naming import cut, engine_key, engine_parts, fitted, method_names, model_names, way_of
from lce_lab.eval.perplexity import LossTable, loss_tables
from lce_lab.eval.record import Answer, Attended, Loss, Record
from lce_lab.eval.scores import Score, by_document, interval, mean_of_tasks
from lce_lab.eval.selection import SelectionTable, selection_tables

CLEARLY = 0.1  # the interval of the ceiling (`full` within the window) must lie above chance by this margin
FAILS = 0.5  # the method `full` fails a task if its mean score within the window is below this
HOLDS = 0.9  # a method holds at a length if its score is this share of `full`'s within the window, or more

AnswerLine = tuple[Mapping[str, Any], Answer]  # a sample and its answer
Place = tuple[str, int]  # a cell's method and length


@dataclass
class Cell:
    """The answers of one method at one length."""

    answers: dict[str, Answer] = field(default_factory=dict)
    depths: set[float] = field(default_factory=set)  # the depths that the user asked for

    @cached_property
    def score(self) -> Score:
        return Score.of(self.answers[key] for key in sorted(self.answers))

    def between(self, low: float, high: float) -> Score | None:
        """Return the score of answers whose facts stand at depths from `low` to `high`; None without such answers."""
        found = [a for a in self.answers.values() if a.depth is not None and low <= a.depth <= high]
        return Score.of(found) if found else None


@dataclass
class Table:
    """The results of one model on one task with one set of options: one cell per method and length."""

    model: str
    task: str
    way: str  # the options that are not defaults: task knobs, filler, mode and others
    cells: dict[Place, Cell] = field(default_factory=dict)
    ceilings: dict[Place, Cell] = field(default_factory=dict)  # scores of `full` at lengths within the window

    @property
    def title(self) -> str:
        return f"{self.task}{', ' if self.way else ''}{self.way}"

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(method for method, _ in self.cells))

    @property
    def lengths(self) -> list[int]:
        return sorted({length for _, length in self.cells})

    def row(self, method: str) -> dict[int, Cell]:
        """Return a method's cells by length."""
        return {length: self.cells[method, length] for length in self.lengths if (method, length) in self.cells}

    @property
    def ceiling(self) -> tuple[int, Score] | None:
        """The longest length at which `full` was measured within the window, and the score; None if not measured."""
        if not self.ceilings:
            return None
        where = max(self.ceilings, key=lambda place: place[1])
        return where[1], self.ceilings[where].score

    def ceiling_at(self, length: int) -> Score | None:
        """Return the score of `full` at `length` if measured within the window, else that of `ceiling`."""
        own = next((cell.score for place, cell in self.ceilings.items() if place[1] == length), None)
        return own or (self.ceiling[1] if self.ceiling else None)

    @property
    def notes(self) -> list[str]:
        """Sentences that say why the task or a length cannot distinguish methods."""
        if self.ceiling is None:
            return ["The ceiling is not measured: `full` was not asked within the window."]
        (length, top), notes = self.ceiling, []
        if reason := fails(top):
            good = [place[1] for place, cell in self.ceilings.items() if fails(cell.score) is None]
            beyond = f" beyond {max(good):,} tokens" if good else ""
            notes = [f"The task cannot rank methods{beyond}: {reason}, at {length:,} tokens within the window."]
        lengths = [each for each in self.lengths if not reason or self.ceiling_at(each) is not top]
        reasons = {each: self._says_little(each) for each in lengths}
        return notes + [f"At {each:,} tokens it cannot rank methods: {why}." for each, why in reasons.items() if why]

    @property
    def discriminates(self) -> bool | None:
        """Whether the model can do the task within its window with full attention; None if not measured."""
        return None if self.ceiling is None else fails(self.ceiling[1]) is None

    def tells(self, length: int) -> bool | None:
        """Return whether scores at `length` distinguish methods; None if `full` was not measured within the window."""
        return None if self.ceiling is None else self._says_little(length) is None

    def _says_little(self, length: int) -> str | None:
        top = self.ceiling_at(length)
        scores = [cell.score for (_, own), cell in self.cells.items() if own == length]
        return None if top is None else says_little(scores, top)

    def holds_to(self, method: str) -> int | None:
        """Return the longest length up to which a method has `HOLDS` of the ceiling; 0 if none, None if unknown."""
        if self.ceiling is None or not self.discriminates:
            return None
        top = self.ceiling[1].mean
        return reach({length: cell.score.mean >= HOLDS * top for length, cell in self.row(method).items()})


def reach(holds: Mapping[int, bool]) -> int:
    """Return the longest length up to which a method holds at each length asked; 0 if not at the shortest."""
    return max(takewhile(holds.__getitem__, sorted(holds)), default=0)


def paired(tables: Sequence[Table], method: str, other: str, length: int) -> tuple[float, float, float] | None:
    """Return the mean over tasks of a method's score minus another's on the same prompts, with its 95% interval."""
    scaled = []
    for table in tables:
        mine, others = (
            {answer.prompt: answer for answer in table.cells[name, length].answers.values() if answer.prompt}
            for name in (method, other)
        )
        both = mine.keys() & others.keys()
        scaled.append(by_document((mine[x].document, (mine[x].value - others[x].value + 1) / 2) for x in sorted(both)))
    if not all(scaled):
        return None
    if all(share == 0.5 for task in scaled for shares in task.values() for share in shares):
        return 0.0, 0.0, 0.0
    mean, low, high = (2 * share - 1 for share in (mean_of_tasks(scaled), *interval(*scaled)[1:]))
    return mean, low, high


def fails(ceiling: Score) -> str | None:
    """Return why a task with this score of `full` cannot distinguish methods; None if the task can."""
    if ceiling.low < (ceiling.chance or 0.0) + CLEARLY:
        return f"`full` scores {ceiling.mean:.2f}, not clearly above chance ({ceiling.chance or 0.0:.2f})"
    if ceiling.mean < FAILS:
        return f"`full` fails itself, with {ceiling.mean:.2f}"
    return None


def says_little(scores: Sequence[Score], ceiling: Score) -> str | None:
    """Return why methods' scores at one length do not distinguish the methods; None if they do."""
    all_reach = len(scores) > 1 and all(score.high >= ceiling.mean for score in scores)
    return fails(ceiling) or ("no method is measurably below `full` within the window" if all_reach else None)


@dataclass(frozen=True)
class Report:
    """The tables of all measurements in some record files."""

    tables: tuple[Table, ...]
    conflicts: int = 0  # the number of samples with different scores in several files; the first file counts
    perplexities: tuple[LossTable, ...] = ()
    selections: tuple[SelectionTable, ...] = ()

    @classmethod
    def read(cls, files: Sequence[str | Path], *, ranked: bool = False) -> Report:
        """Read records. Raises `DataError` for a file that is no record, or for a line without a length.

        With `ranked`, the answers of `lce eval why` are left out, methods that differ only in a RoPE factor of length
        over window are one method, and a report without tables is no error.
        """
        if not files:
            raise UsageError("no file is given; expected one record or more")
        found, conflicts = {kind: dict[str, Any]() for kind in (Answer, Loss, Attended)}, 0
        for file in files:
            if not path_of(file).exists():
                raise DataError(f"there is no file {named(file)}; name a record that lce eval run --record wrote")
            for key, sample, line in Record(file).items():
                task, length = sample.get("task"), sample.get("length")
                if type(length) is not int or length < 1 or not isinstance(task, str):
                    line = f"{named(file)} has a line of length {shown(length)} and task {shown(task)}"
                    raise DataError(f"{line}; expected a number of tokens and a name; correct the line")
                if ranked:
                    if "again" in sample:
                        continue
                    sample = fitted(sample)
                before = found[type(line)].setdefault(key, (sample, line))[1]
                conflicts += isinstance(line, Answer) and line.value != before.value
        if not ranked and not any(found.values()):
            raise DataError(f"{named(files[0])} has no answers; name a record that lce eval run --record wrote")
        losses, looks = list(found[Loss].values()), list(found[Attended].values())
        return cls(tuple(_tables(found[Answer])), conflicts, tuple(loss_tables(losses)), tuple(selection_tables(looks)))


def _tables(found: Mapping[str, AnswerLine]) -> list[Table]:
    """Return the tables of the answers in `found`, which has (sample, answer) by the key of the sample."""
    names, models = method_names(found.values()), model_names(found.values())
    tables: dict[tuple[str, ...], Table] = {}
    documents: dict[str, int] = {}  # numbers unique here; in a record, documents of unlike lengths share them
    for key, (sample, answer) in found.items():
        number = answer.document if answer.document is not None else sample.get("index")
        document = json.dumps({**sample, "index": number}, sort_keys=True)
        answer = replace(answer, document=documents.setdefault(document, len(documents)))
        task = f"{sample['task']}: {answer.kind}" if answer.kind else sample["task"]
        subject = models[str(sample.get("model"))], cut(task), way_of(sample)
        table = tables.setdefault(subject, Table(*subject))
        cells = table.ceilings if answer.ceiling else table.cells
        cell = cells.setdefault((names[engine_key(sample)], sample["length"]), Cell())
        cell.answers[key] = answer
        # Several facts in one text stand at random depths, not at the depths that the user asked for.
        if answer.depth is not None and answer.depth in sample.get("depths", ()):
            cell.depths.add(answer.depth)
    for table in tables.values():
        lengths = table.lengths
        for where, cell in table.ceilings.items():  # answers for the ceiling also count for the method `full`
            if where[1] in lengths or where[1] > max(lengths, default=0):
                same = table.cells.setdefault(where, Cell())
                same.answers |= cell.answers
                same.depths |= cell.depths
                cell.answers |= same.answers  # answers of the method `full` also count for the ceiling
        if not table.ceilings:
            table.ceilings = {place: cell for place, cell in table.cells.items() if _is_within(place, cell, found)}
        table.ceilings = dict(sorted(table.ceilings.items()))
    return [table for table in tables.values() if table.cells or table.ceilings]


def _is_within(place: Place, cell: Cell, found: Mapping[str, AnswerLine]) -> bool:
    """Return whether a cell can serve as the ceiling: the method is `full` without RoPE scaling, within the window."""
    sample, answer = found[next(iter(cell.answers))]
    kind, parts = engine_parts(sample)
    is_full = (answer.method or kind.lower()) == "full" and parts.get("rope", "none") == "none"
    return is_full and place[1] <= (answer.window or int(parts.get("window", 0)))
