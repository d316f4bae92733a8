"""Measures for tables and figures of papers: the `lce` commands to run, and how their JSON gives cells."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import lce
from lce.lab.eval.perplexity import STRIDE
from lce.lab.eval.published import find
from lce.lab.eval.published.suite import PublishedSuite
from lce.lab.eval.report import fails
from lce.lab.eval.scores import Score
from lce.lab.papers.setting import Cell, Row, Setting

WITHIN = "full, within the window"


class Measure(ABC):
    """A measurement of an entry's rows. `data` says what the user can give as --data; it is empty if nothing."""

    suffix: ClassVar[str] = ""  # the end of the name of the record file of the measure's commands
    labels: tuple[str, ...] = ()  # the names of the measured numbers
    data: str = ""

    @abstractmethod
    def words(self, lengths: Sequence[int], setting: Setting) -> str:
        """Return the command that measures `lengths`, without the options of a row."""

    @abstractmethod
    def cells(self, row: Row, found: Any, setting: Setting) -> Iterator[Cell]:
        """Yield the cells of a row from `found`, the JSON that a command printed."""

    def commands(self, row: Row, lengths: Sequence[int], setting: Setting) -> list[str]:
        """Return the command that measures a row; one command per length if the row scales RoPE by length."""
        groups = [lengths] if row.rope is None else [[length] for length in lengths]
        return [self.command(row, self.words(group, setting), group[0], setting) for group in groups]

    def command(self, row: Row, words: str, length: int, setting: Setting) -> str:
        """Return the command `words` with the options of a row for a text of `length` tokens."""
        return " ".join([words, *setting.recorded(self.suffix), *setting.options(row, length)])

    def text_tokens(self, lengths: Sequence[int], setting: Setting) -> int:
        """Return the number of tokens of prose to put in for FILE in `--text FILE`; 0 if no FILE is needed."""
        return 0


def listed(lengths: Sequence[int]) -> str:
    """Return the `--lengths` option."""
    return f"--lengths {','.join(map(str, lengths))}"


def counted(setting: Setting) -> str:
    """Return the options for the number of samples and the seed."""
    return f"--samples {setting.samples} --seed {setting.seed}"


@dataclass(frozen=True)
class Answers(Measure):
    """The mean scores on tasks that lce generates. `called` has the paper's names of the corresponding tasks."""

    tasks: tuple[str, ...]
    filler: str = "prose"
    called: tuple[str, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.called or self.tasks

    def words(self, lengths: Sequence[int], setting: Setting) -> str:
        filler = "" if self.filler == "prose" else f" --filler {self.filler}"
        return f"lce eval run --task {','.join(self.tasks)}{filler} {listed(lengths)} {counted(setting)}"

    def cells(self, row: Row, found: Any, setting: Setting) -> Iterator[Cell]:
        for each in found:
            score = Score(**{field.name: each[field.name] for field in fields(Score)})
            reason = fails(score) if each["ceiling"] else None
            note = "" if reason is None else f"tells methods apart nowhere: {reason} within the window"
            name, span = WITHIN if each["ceiling"] else row.name, (score.mean, score.low, score.high, score.samples)
            yield Cell(name, self.label(each["task"]), each["length"], *span, note=note)

    def label(self, task: str) -> str:
        """Return the paper's name of a generated task."""
        return self.labels[self.tasks.index(task)]


@dataclass(frozen=True)
class Perplexity(Measure):
    """The perplexity of texts in sliding windows. `scored` says which tokens of a window count: `last` or `all`."""

    scored: str = "all"
    labels = ("perplexity",)
    data = "texts, such as those of PG19, in the place of prose that is made here"
    suffix = ".perplexity"

    def words(self, lengths: Sequence[int], setting: Setting) -> str:
        texts = " ".join(f"--text {shlex.quote(path)}" for path in setting.data or ["FILE"])
        return f"lce eval perplexity {texts} {listed(lengths)} --windows {setting.samples} --scored {self.scored}"

    def commands(self, row: Row, lengths: Sequence[int], setting: Setting) -> list[str]:
        """Return the commands. Windows of every length end where the windows of the largest length end."""
        found = super().commands(row, lengths, setting)
        return found if len(found) == 1 else [f"{command} --longest {max(lengths)}" for command in found]

    def cells(self, row: Row, found: Any, setting: Setting) -> Iterator[Cell]:
        for x in found:
            yield Cell(row.name, "perplexity", x["length"], x["perplexity"], x["low"], x["high"], x["samples"])

    def text_tokens(self, lengths: Sequence[int], setting: Setting) -> int:
        return max(lengths) + STRIDE * (setting.samples - 1)


@dataclass(frozen=True)
class Choices(Measure):
    """Statistics of the chunks that heads choose: `hit1` to `gini` of `lce.lab.eval.record.Attended`."""

    labels = ("hit@1", "hit@5", "cover", "Gini")
    suffix = ".looks"

    def words(self, lengths: Sequence[int], setting: Setting) -> str:
        return f"lce eval selection --task passkey {listed(lengths)} {counted(setting)}"

    def cells(self, row: Row, found: Any, setting: Setting) -> Iterator[Cell]:
        for one in found:
            for label, name in zip(self.labels, ("hit1", "hit5", "cover", "gini"), strict=True):
                note = "" if one[name] is not None else "no fact lay among the chunks to choose from"
                yield Cell(row.name, label, one["length"], one[name], n=one["samples"], note=note)


@dataclass(frozen=True)
class Found(Measure):
    """The share of the best tokens that low-dim scores find (`found` of `lce.lab.eval.record.Attended`).

    Measured for `queries` queries of a text: the mean over layers, and the share of layers with more than 0.9.
    """

    queries: int = 32
    labels = ("recall", "layers above 0.9")
    data = "a text, in the place of prose that is made here"
    suffix = ".looks"

    def words(self, lengths: Sequence[int], setting: Setting) -> str:
        text = shlex.quote(setting.data[0]) if setting.data else "FILE"
        return f"lce eval selection --text {text} {listed(lengths)} --queries {self.queries} --by-layer"

    def cells(self, row: Row, found: Any, setting: Setting) -> Iterator[Cell]:
        for one in found:
            shares = [share for (share,) in one["by_layer"].get("found", ())]
            if not shares:
                yield Cell(row.name, "recall", one["length"], None, note="all tokens are chosen; take a longer text")
                continue
            for label, values in zip(self.labels, (shares, [x > 0.9 for x in shares]), strict=True):
                yield Cell(row.name, label, one["length"], sum(values) / len(values), n=len(values))

    def text_tokens(self, lengths: Sequence[int], setting: Setting) -> int:
        return max(lengths)


@dataclass(frozen=True)
class Operations(Measure):
    """The costs that the method's paper states, for the model's sizes (`Method.paper_figures`)."""

    labels: tuple[str, ...] = ()  # the names of the costs, in the order of `Method.paper_figures`

    def words(self, lengths: Sequence[int], setting: Setting) -> str:
        return f"lce plan --operations --tokens {setting.window}"

    def command(self, row: Row, words: str, length: int, setting: Setting) -> str:
        return " ".join([words, *setting.options(row, 0, only=("window", "dtype"))])

    def cells(self, row: Row, found: Any, setting: Setting) -> Iterator[Cell]:
        for label, figure in zip(self.labels, found["operations"]["paper_figures"], strict=True):
            where = f" ({figure['where']})" if figure["where"] else ""
            yield Cell(row.name, label, 0, figure["value"], note=f"{figure['text']}{where}")


@dataclass(frozen=True)
class Distances(Measure):
    """The share of cells in which lce's distances from queries to keys equal those of the paper's figure.

    `printed` has the lines of the figure by the row's name: one line per query, with a dot for an unattended key.
    """

    tokens: int
    window: int
    printed: dict[str, tuple[str, ...]]
    labels = ("equal cells",)

    def words(self, lengths: Sequence[int], setting: Setting) -> str:
        return f"--tokens {self.tokens} --window {self.window}"

    def command(self, row: Row, words: str, length: int, setting: Setting) -> str:
        knobs = [f"-o {key}={value}" for key, value in row.knobs.items()]
        return " ".join(["lce explain", row.method, words, *knobs])

    def cells(self, row: Row, found: Any, setting: Setting) -> Iterator[Cell]:
        ours = ["." if x is None else str(x) for line in found["distances"] for x in line]
        theirs = [x for line in self.printed[row.name] for x in line.split()]
        equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
        yield Cell(row.name, "equal cells", 0, equal / len(ours), n=len(ours))


@dataclass(frozen=True)
class Speed(Measure):
    """The median time of a prefill, in seconds. The interval is from the fastest to the slowest run."""

    labels = ("prefill seconds",)

    def words(self, lengths: Sequence[int], setting: Setting) -> str:
        return f"lce bench {listed(lengths)} --repeats {setting.samples} --new-tokens 1 --seed {setting.seed}"

    def commands(self, row: Row, lengths: Sequence[int], setting: Setting) -> list[str]:
        return [" ".join([self.words(lengths, setting), *setting.options(row, 0)])]

    def cells(self, row: Row, found: Any, setting: Setting) -> Iterator[Cell]:
        note = "the interval is the fastest and the slowest run"
        for each in found["rows"]:
            median, low, high = (each["length"] / each["prefill"][name] for name in ("median", "high", "low"))
            yield Cell(row.name, self.labels[0], each["length"], median, low, high, setting.samples, note=note)


@dataclass(frozen=True)
class Published(Measure):
    """The scores on `tasks` of a published benchmark, or on all its tasks, from the user's copy of the data.

    The setting's lengths limit the prompts. `average` is the paper's name for the mean over the tasks, if the paper has
    only this mean. `most` is the paper's score for perfect answers, 100 or 1.
    """

    suite: str
    tasks: tuple[str, ...] = ()
    average: str = ""
    most: float = 100.0

    @property
    def data(self) -> str:  # type: ignore[override]
        benchmark = find(self.suite)
        return f"your copy of {benchmark.title}: {benchmark.layout}, as published at {benchmark.data}"

    @property
    def labels(self) -> tuple[str, ...]:  # type: ignore[override]
        if self.average:
            return (self.average,)
        return self.tasks or tuple(task.name for task in find(self.suite).tasks)

    def words(self, lengths: Sequence[int], setting: Setting) -> str:
        limits = [f"--max-length {lengths[0]}"] * bool(setting.lengths)
        limits += [f"--samples {setting.limit}"] * (setting.limit is not None)
        return " ".join(["lce eval published", self.suite, "--data", shlex.quote(setting.data[0]), *limits])

    def commands(self, row: Row, lengths: Sequence[int], setting: Setting) -> list[str]:
        """Return one command per length of the setting.

        Without lengths, a row that scales RoPE has one command per task, scaled for the task's longest prompt.
        """
        groups = [(self.tasks, length) for length in setting.lengths or [0]]
        if row.rope is not None and not setting.lengths and not self.average:
            groups = [((task,), length) for task, length in self._longest(setting).items()]
        found = []
        for tasks, length in groups:
            chosen = f" --task {','.join(tasks)}" if tasks else ""
            found.append(self.command(row, f"{self.words([length], setting)}{chosen}", length, setting))
        return found

    def _longest(self, setting: Setting) -> dict[str, int]:
        """Return the largest number of tokens of a prompt and its answer, by task."""
        suite = PublishedSuite(find(self.suite), Path(setting.data[0]), most=setting.limit)
        engine = lce.load(setting.model, "full", **setting.loading)
        made = {task: suite.make(engine, task) for task in suite.tasks(self.tasks)}
        return {task.name: task.max_tokens + max(each.n_tokens or 0 for each in found) for task, found in made.items()}

    def cells(self, row: Row, found: Any, setting: Setting) -> Iterator[Cell]:
        tasks, share = [each for each in found if "task" in each], self.most / 100
        length = tasks[0]["max_length"] or 0
        if self.average:
            mean = sum(each["score"] for each in tasks) / len(tasks)
            yield Cell(row.name, self.average, length, share * mean, n=sum(each["samples"] for each in tasks))
            return
        for each in tasks:
            mean, low, high = (share * each[name] for name in ("score", "low", "high"))
            yield Cell(row.name, each["task"], length, mean, low, high, each["samples"])
