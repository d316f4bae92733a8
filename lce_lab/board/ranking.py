"""Ranks a model's methods by the answers in some records: by reach, then by quality.

Tasks count at a length if the model can do them within its window. If some methods were asked more tasks than others,
those tasks count that most pairs of a task and a method have an answer to, without a gap. The **quality** of a method
at a length is its mean score over the tasks that count and tell methods apart there. Its **reach** is the longest
length up to which its mean score over all tasks that count is `HOLDS` times the ceiling's. A method that does not hold
at the first length it was asked at is ranked as if it held just below, since nobody knows. A method is tied with the
best if their paired difference may be 0, also where the best holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from statistics import fmean, median

from lce.errors import DataError
from lce.files import named, path_of
from lce_lab.eval.report import HOLDS, Report, Table, paired, reach
from lce_lab.eval.scores import by_document, interval, mean_of, mean_of_tasks

Span = tuple[float, float, float]  # a mean, and the low and the high end of its 95% interval


@dataclass(frozen=True)
class Standing:
    """A method's place on a board. Fields are None where too little was asked."""

    method: str
    rank: int | None
    tied: bool  # whether the method shares the first rank with others
    reach: int | None  # in tokens; 0 if the method does not hold at the length `first`
    first: int | None  # the shortest length at which the method was asked all that counts
    quality: dict[int, Span]  # by length
    read_bytes: float | None  # of a decode step at the board's length
    prefill: float | None  # the median time of a prefill of the board's length, divided by that of `full`


@dataclass(frozen=True)
class Board:
    """The methods of one model, ranked. `tables` has the tasks that they were asked."""

    model: str
    tables: tuple[Table, ...]

    @cached_property
    def methods(self) -> list[str]:
        return sorted({method for table in self.tables for method, _ in table.cells})

    @cached_property
    def lengths(self) -> list[int]:
        return sorted({length for table in self.tables for length in table.lengths})

    @cached_property
    def length(self) -> int:
        """The length at which most methods were asked. The length of the ceiling counts only if there is no other."""
        top = max((table.ceiling[0] for table in self.tables if table.ceiling), default=0)
        beyond = {method for method in self.methods if any(self.asked(method, n) for n in self.lengths if n > top)}
        among = beyond or set(self.methods)
        return max(self.lengths, key=lambda n: (sum(self.asked(method, n) for method in among), n))

    def asked(self, method: str, length: int) -> bool:
        return any((method, length) in table.cells for table in self.tables)

    def counted(self, length: int, *, telling: bool = True) -> list[Table]:
        """Return the tasks that count at a length; with `telling`, only the tasks that tell methods apart there."""
        asked = {
            table.title: {method for method, own in table.cells if own == length}
            for table in self.tables
            if length in table.lengths and table.discriminates
        }
        titles = sorted(asked, key=lambda title: (-len(asked[title]), title))
        n_pairs = {n: n * len(set.intersection(*map(asked.__getitem__, titles[:n]))) for n in range(1, len(asked) + 1)}
        kept = titles[: max(n_pairs, key=lambda n: (n_pairs[n], n), default=0)]
        return [table for table in self.tables if table.title in kept and (table.tells(length) or not telling)]

    @cached_property
    def qualities(self) -> dict[str, dict[int, Span]]:
        """The quality of each method by length, where it is known."""
        known = {method: {n: self._quality(method, n) for n in self.lengths} for method in self.methods}
        return {method: {n: span for n, span in found.items() if span} for method, found in known.items()}

    def _quality(self, method: str, length: int) -> Span | None:
        """Return a method's quality at a length; None if no task tells there, or if one was not asked."""
        cells = [table.cells.get((method, length)) for table in self.counted(length)]
        tasks = [by_document((x.document, x.value) for x in cell.answers.values()) for cell in cells if cell]
        if not tasks or len(tasks) < len(cells):
            return None
        _, low, high = interval(*tasks)
        return mean_of_tasks(tasks), low, high

    def holds(self, method: str) -> dict[int, bool]:
        """Return whether a method holds, for each length at which it was asked all tasks that count."""
        holds = {}
        for length in self.lengths:
            tables = self.counted(length, telling=False)
            means = [table.cells[method, length].score.mean for table in tables if (method, length) in table.cells]
            if means and len(means) == len(tables):
                top = fmean(table.ceiling[1].mean for table in tables if table.ceiling)
                holds[length] = fmean(means) >= HOLDS * top
        return holds

    def seconds(self, method: str) -> float | None:
        """Return the median time of a method's prefills of the board's length."""
        cells = [table.cells.get((method, self.length)) for table in reversed(self.tables)]
        answers = [answer for cell in cells if cell for _, answer in sorted(cell.answers.items(), reverse=True)]
        documents = {answer.document: answer.prefill_s for answer in answers if answer.prefill_s}  # the first of each
        return median(documents.values()) if documents else None

    @cached_property
    def standings(self) -> list[Standing]:
        """The methods, the best first; methods without a rank are last."""
        holds = {method: self.holds(method) for method in self.methods}
        reaches = {method: reach(held) for method, held in holds.items() if held}

        def key(method: str) -> tuple[int, float]:
            just_below = max((n for n in self.lengths if n < min(holds[method])), default=0)
            return -(reaches[method] or just_below), -self.qualities[method].get(self.length, (-1.0,))[0]

        ranked = sorted(reaches, key=lambda method: (key(method), method))
        best = next(iter(ranked), "")
        tied = [m for m in ranked if m == best or self._ties(m, best, reaches[best], key(m) == key(best))]
        others = [method for method in ranked if method not in tied]
        ranks = dict.fromkeys(tied, 1)
        ranks |= {m: len(tied) + 1 + sum(key(other) < key(m) for other in others) for m in others}
        fulls = {method for table in self.tables for method, _ in table.ceilings}
        base = self.seconds(fulls.pop()) if len(fulls) == 1 else None
        found = []
        for method in [*tied, *others, *(m for m in self.methods if m not in ranked)]:
            cells = [table.cells.get((method, self.length)) for table in self.tables]
            read, own = mean_of(cell.score.read_bytes for cell in cells if cell), self.seconds(method)
            is_tied = method in tied and len(tied) > 1
            prefill = own / base if own and base else None
            place = ranks.get(method), is_tied, reaches.get(method), min(holds[method], default=None)
            found.append(Standing(method, *place, self.qualities[method], read, prefill))
        return found

    def _ties(self, method: str, best: str, held: int, otherwise: bool) -> bool:
        """Return whether a method's difference from the best may be 0, at the longest length that both were asked at.

        It must also be so at the longest such length within the best's reach, `held`: beyond it all may fail alike. If
        there is no length at which tasks tell methods apart, return `otherwise`.
        """
        both = self.qualities[method].keys() & self.qualities[best].keys()
        lengths = {max(among) for among in (both, {n for n in both if n <= held}) if among}
        found = [paired(self.counted(length), method, best, length) for length in lengths]
        known = [low <= 0 <= high for _, low, high in filter(None, found)]
        return all(known) if known else otherwise


def read_boards(folder: str | Path) -> list[Board]:
    """Return a board for each model in the records of a folder, whose names end with `.jsonl`."""
    files = sorted(path_of(folder).glob("*.jsonl"))
    if not files:
        remedy = f"lce leaderboard add {named(folder)} -m MODEL asks one"
        raise DataError(f"{named(folder)} has no record, *.jsonl; {remedy}")
    asked = sorted(Report.read(files, ranked=True).tables, key=lambda table: (table.model, table.title))
    tables = [table for table in asked if table.cells]
    if not tables:
        raise DataError(f"the records in {named(folder)} have no answers to tasks; lce leaderboard add asks some")
    return [Board(model, tuple(group)) for model, group in groupby(tables, key=lambda table: table.model)]
