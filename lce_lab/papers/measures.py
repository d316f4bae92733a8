"""Measures for tables and figures of papers: the `lce` commands to run, and how their JSON gives cells."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from lce_lab.eval.perplexity import STRIDE
from lce_lab.eval.published import find
from lce_lab.eval.report import fails
from lce_lab.eval.scores import Score
from lce_lab.papers.setting import Cell, Row, Setting, fraction

WITHIN = "full, within the window"


class Measure(ABC):
    """A measurement of an entry's rows. `data` says what the user can give as --data; it is empty if nothing."""

    suffix: ClassVar[str] = ""  # the end of the name of the record file of the measure's commands
    data: str = ""

    @abstractmethod
    def words(self, lengths: Sequence[int], setting: Setting) -> str:
        """Return the command that measures `lengths`, without the options of a row."""

    @abstractmethod
    def cells(self, row: Row, found: Any, setting: Setting) -> Iterator[Cell]:
        """Yield the cells of a row from `found`, the JSON that a command printed."""

    def commands(self, row: Row, lengths: Sequence[int], setting: Setting) -> list[str]:
        """Return the command that measures a row; one command per length if the row scales RoPE by length."""
        groups = [lengths] if row.rope is None or row.factor else [[length] for length in lengths]
        return [self.command(row, self.words(group, setting), group[0], setting) for group in groups]

    def command(self, row: Row, words: str, length: int, setting: Setting) -> str:
        """Return the command `words` with the options of a row for a text of `length` tokens."""
        return " ".join([words, *setting.recorded(self.suffix), *setting.options(row, length)])

    def text_tokens(self, lengths: Sequence[int], setting: Setting) -> int:
        """Return the number of tokens of prose to put in for FILE in `--text FILE`; 0 if no FILE is needed."""
        return 0


def listed(lengths: Sequence[int]) -> str:
    return f"--lengths {','.join(map(str, lengths))}"


def counted(setting: Setting) -> str:
    return f"--samples {setting.samples} --seed {setting.seed}"


@dataclass(frozen=True)
class Answers(Measure):
    """Mean scores on generated tasks. The paper calls the score `called`, and its best value is `scale`."""

    tasks: tuple[str, ...]
    filler: str = "prose"
    called: tuple[str, ...] = ()
    scale: float = 1

    def words(self, lengths: Sequence[int], setting: Setting) -> str:
        filler = "" if self.filler == "prose" else f" --filler {self.filler}"
        return f"lce eval run --task {','.join(self.tasks)}{filler} {listed(lengths)} {counted(setting)}"

    def cells(self, row: Row, found: Any, setting: Setting) -> Iterator[Cell]:
        for each in found:
            score = Score(**{field.name: each[field.name] for field in fields(Score)})
            reason = fails(score) if each["ceiling"] else None
            note = "" if reason is None else f"tells methods apart nowhere: {reason} within the window"
            mean, low, high = (self.scale * x for x in (score.mean, score.low, score.high))
            name, label = WITHIN if each["ceiling"] else row.name, self.label(each["task"])
            yield Cell(name, label, each["length"], mean, low, high, score.samples, note=note)

    def label(self, task: str) -> str:
        """Return the paper's name of a generated task."""
        return (self.called or self.tasks)[self.tasks.index(task)]


@dataclass(frozen=True)
class Perplexity(Measure):
    """The perplexity of texts in sliding windows. `scored` says which tokens of a window count: `last` or `all`."""

    scored: str = "all"
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
            span, n, losses = (x["perplexity"], x["low"], x["high"]), x["samples"], x["losses"]
            yield Cell(row.name, "perplexity", x["length"], *span, n, losses=losses)

    def text_tokens(self, lengths: Sequence[int], setting: Setting) -> int:
        return max(lengths) + STRIDE * (setting.samples - 1)


@dataclass(frozen=True)
class Choices(Measure):
    """Statistics of the chunks chosen for pass keys; if `called` is set, of those chosen in a text without a key."""

    called: str = ""
    suffix = ".looks"

    def words(self, lengths: Sequence[int], setting: Setting) -> str:
        asked = "--text FILE" if self.called else "--task passkey"
        return " ".join(["lce eval selection", asked, listed(lengths), *[counted(setting)] * (not self.called)])

    def cells(self, row: Row, found: Any, setting: Setting) -> Iterator[Cell]:
        names = {"hit@1": "hit1", "hit@5": "hit5", "cover": "cover", "Gini": "gini"}
        if self.called:
            names = {f"cover, {self.called}": "cover", f"Gini, {self.called}": "gini"}
        for one in found:
            for label, name in names.items():
                note = "" if one[name] is not None else "no fact lay among the chunks to choose from"
                low, high = one["intervals"].get(name, (None, None))
                yield Cell(row.name, label, one["length"], one[name], low, high, one["samples"], note=note)

    def text_tokens(self, lengths: Sequence[int], setting: Setting) -> int:
        return max(lengths) if self.called else 0


@dataclass(frozen=True)
class Found(Measure):
    """The mean share of the best tokens that low-dim scores find for `queries` queries, and the layers above 0.9."""

    queries: str = "W/4"
    data = "a text, in the place of prose that is made here"
    suffix = ".looks"

    def words(self, lengths: Sequence[int], setting: Setting) -> str:
        text = shlex.quote(setting.data[0]) if setting.data else "FILE"
        queries = fraction(self.queries, setting.sizes or setting.window)
        return f"lce eval selection --text {text} {listed(lengths)} --queries {queries} --by-layer"

    def cells(self, row: Row, found: Any, setting: Setting) -> Iterator[Cell]:
        for one in found:
            shares = [share for (share,) in one["by_layer"].get("found", ())]
            if not shares:
                yield Cell(row.name, "recall", one["length"], None, note="all tokens are chosen; take a longer text")
                continue
            for label, values in {"recall": shares, "layers above 0.9": [x > 0.9 for x in shares]}.items():
                yield Cell(row.name, label, one["length"], sum(values) / len(values), n=len(values))

    def text_tokens(self, lengths: Sequence[int], setting: Setting) -> int:
        return max(lengths)


@dataclass(frozen=True)
class Operations(Measure):
    """The costs that the method's paper states, for the model's sizes (`lce.methods.costs.paper_figures`)."""

    labels: tuple[str, ...] = ()  # the names of the costs, in the order of `lce.methods.costs.paper_figures`

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
    """The share of cells in which lce's distances equal those `printed` in the paper's figure, by the row's name."""

    tokens: int
    window: int
    printed: Mapping[str, str]

    def words(self, lengths: Sequence[int], setting: Setting) -> str:
        return f"--tokens {self.tokens} --window {self.window}"

    def command(self, row: Row, words: str, length: int, setting: Setting) -> str:
        knobs = [f"-o {key}={value}" for key, value in row.knobs.items()]
        return " ".join(["lce explain", row.method, words, *knobs])

    def cells(self, row: Row, found: Any, setting: Setting) -> Iterator[Cell]:
        ours = ["." if x is None else str(x) for line in found["distances"] for x in line]
        theirs = self.printed[row.name].split()
        equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
        yield Cell(row.name, "equal cells", 0, equal / len(ours), n=len(ours))


@dataclass(frozen=True)
class Speed(Measure):
    """The median seconds of a step, which the paper calls `called`; the interval is that of all runs."""

    called: str
    step: Literal["prefill", "decode"] = "prefill"

    def words(self, lengths: Sequence[int], setting: Setting) -> str:
        new = 1 if self.step == "prefill" else 20
        return f"lce bench {listed(lengths)} --repeats {setting.samples} --new-tokens {new} --seed {setting.seed}"

    def commands(self, row: Row, lengths: Sequence[int], setting: Setting) -> list[str]:
        return [" ".join([self.words(lengths, setting), *setting.options(row, 0)])]

    def cells(self, row: Row, found: Any, setting: Setting) -> Iterator[Cell]:
        note = "the interval is the fastest and the slowest run"
        for each in found["rows"]:
            tokens = each["length"] if self.step == "prefill" else 1
            median, low, high = (tokens / each[self.step][name] for name in ("median", "high", "low"))
            yield Cell(row.name, self.called, each["length"], median, low, high, setting.samples, note=note)


@dataclass(frozen=True)
class Published(Measure):
    """The scores on `tasks` of a published benchmark, 0 to 100, from the user's copy of the data.

    Prompts are cut to the setting's lengths or, if the setting has none, to `cuts`, in multiples of the window.
    `variant` is the set of prompts. If the paper used other data, `differs` names the data used here.
    """

    suite: str
    tasks: tuple[str, ...]
    cuts: tuple[float, ...] = ()
    variant: str = ""
    differs: str = ""

    @property
    def data(self) -> str:  # type: ignore[override]
        benchmark = find(self.suite)
        return f"your copy of {benchmark.title}: {benchmark.layout}, as published at {benchmark.data}"

    def words(self, lengths: Sequence[int], setting: Setting) -> str:
        limits = [f"--max-length {length}" for length in lengths if length]
        limits += [f"--samples {setting.limit}"] * (setting.limit is not None)
        limits += [f"--prompts {self.variant}"] * bool(self.variant)
        asked = f"--task {','.join(self.tasks)}"
        return " ".join(["lce eval published", self.suite, "--data", shlex.quote(setting.data[0]), *limits, asked])

    def commands(self, row: Row, lengths: Sequence[int], setting: Setting) -> list[str]:
        """Return one command per length to which prompts are cut."""
        cuts = setting.lengths or [round(cut * setting.window) for cut in self.cuts] or [0]
        return [self.command(row, self.words([length], setting), length, setting) for length in cuts]

    def cells(self, row: Row, found: Any, setting: Setting) -> Iterator[Cell]:
        for each in found:
            if "task" in each:
                span = (each[name] for name in ("score", "low", "high", "samples"))
                yield Cell(row.name, each["task"], each["max_length"] or 0, *span)
