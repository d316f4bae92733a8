"""The output of `lce eval run`, `published`, `score`, `tasks` and `benchmarks`: JSON, or lines as soon as measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lce
from lce.errors import DataError, UsageError, WindowWarning
from lce.files import named, write_whole
from lce.methods import knob_values
from lce.sizes import size_text
from lce.terminal.output import Output, note
from lce_lab.eval.naming import cut
from lce_lab.eval.published import Benchmark
from lce_lab.eval.published.base import Answered
from lce_lab.eval.published.scoring import TaskScore, prediction_files, score_file, scored
from lce_lab.eval.record import Record
from lce_lab.eval.report import fails, says_little
from lce_lab.eval.running import Progress, make_folder
from lce_lab.eval.sample import Sample
from lce_lab.eval.scores import Score
from lce_lab.eval.suite import MadeSuite, Suite
from lce_lab.eval.tasks import TASKS
from lce_lab.terminal.methods import check_capacity

HEADER = (
    f"{'task':<26}{'method':<18}{'length':>9}{'samples':>9}{'score':>8}  {'95% interval':<18}{'by':<11}"
    f"{'read a token':<14}metric"
)
CEILING = "full, ceiling"


class TokensLeft:
    """The progress of a run over cells of several tasks, in tokens to read; recorded answers do not count.

    A task whose samples are not made yet counts as much as the mean of the others. `advance` is a bar's function.
    """

    advance: Callable[[int, int], None]

    def __init__(self, n_tasks: int) -> None:
        self.n_tasks, self.label, self.read, self.recorded = n_tasks, "", 0.0, 0.0
        self.tasks: list[float] = []  # the tokens of each task made so far

    def cell(self, label: str, tokens: float) -> Progress:
        """Return a function to call with the samples done and their total, first with those that are recorded."""
        self.label, before, recorded = f"{label}:", self.read, list[float]()

        def advance(done: int, total: int) -> None:
            answered = tokens * done / max(1, total)
            if not recorded:
                recorded.append(answered)
                self.recorded += answered
            self.read = before + answered - recorded[0]
            whole = self.n_tasks * sum(self.tasks) / len(self.tasks) - self.recorded
            if self.read < whole:
                self.advance(round(self.read), round(whole))

        return advance


Samples = list[Sample]
Ceiling = tuple[lce.Engine, list[int]]  # an engine with full attention, and lengths within the window


@dataclass
class SuiteRun:
    """A run of `lce eval run` or `lce eval published`. A cell is the score of a method on a task at a length.

    `objects` has the cells measured so far, as JSON objects. Generated tasks have `lengths`, in tokens. `predictions`
    is a folder for answers in a benchmark's own file layout. The weights of the engine `sharing` are used.
    """

    model: str
    methods: Sequence[lce.Method]
    suite: Suite
    tasks: Sequence[Any]
    loading: Mapping[str, Any]
    output: Output
    lengths: Sequence[int] = ()
    ceiling: bool = False
    predictions: str | None = None
    sharing: lce.Engine | None = None
    answers: Record = field(default_factory=Record)
    objects: list[dict[str, Any]] = field(default_factory=list)
    scores: dict[str, dict[str, float]] = field(default_factory=dict)  # task scores in percent, by method and task

    def measure(self, record: str | None, fill: Callable[[SuiteRun], None] | None = None) -> None:
        """Measure and print all cells, under --json as one list. For the arguments, see `ask_all`."""
        self.ask_all(record, fill)
        self.output.object(self.objects)

    def ask_all(self, record: str | None, fill: Callable[[SuiteRun], None] | None = None) -> None:
        """Measure all cells. `fill` may put answers into the record first. Errors of the first task come first."""
        self.answers = Record(record)
        self.answers.prepare()
        if self.predictions is not None:
            make_folder(self.predictions, "predictions")
        engines = self.load()
        for task in self.tasks if self.lengths else ():
            self.suite.make(engines[0], task, min(self.lengths))  # raises if the length is too short for the task
        if fill is not None:
            fill(self)
        self.ask(engines)
        for label, scores in self.scores.items():
            for name, score in self.suite.averages(scores).items():
                self.objects.append({"average": name, "method": label, "score": score})
                self.output.text(f"{name:<26}{label:<18}{'':>18}{score:>8.2f}")

    def load(self) -> list[lce.Engine]:
        """Load the model, and return an engine for each method."""
        check_capacity(self.model, self.methods, max(self.lengths, default=1), self.loading)
        shared, engines = self.sharing, list[lce.Engine]()
        for method in self.methods:
            shared = lce.load(self.model, method, sharing=shared, **self.loading)
            engines.append(shared)
        return engines

    def ask(self, engines: Sequence[lce.Engine]) -> None:
        """Ask what the record lacks, and print all cells."""
        ceilings = self._ceilings(engines[0]) if self.ceiling else [(engines[0], list[int]())] * len(self.tasks)
        left = TokensLeft(len(self.tasks))
        with self.output.bar(lambda: left.label, " tok") as left.advance:
            self._tasks(engines, ceilings, left)

    def _tasks(self, engines: Sequence[lce.Engine], ceilings: Sequence[Ceiling], left: TokensLeft) -> None:
        told: set[str | None] = {None}
        for number, task in enumerate(self.tasks):
            made = {length: self.suite.make(engines[0], task, length) for length in self.lengths or [0]}
            sizes = [(sample.n_tokens or 0) + (sample.max_tokens or 0) for sample in made.get(0, ())]
            longest = max(*self.lengths, *sizes, 1)
            check_capacity(self.model, self.methods, longest, self.loading)
            beyond = dict.fromkeys(text for engine in engines if (text := engine.setup.beyond(longest)) not in told)
            told.update(beyond)
            if number == 0:
                self.output.text(HEADER)
            for text in filter(None, beyond):
                note(text)
            with self.output.noting(WindowWarning):
                self._task(task, engines, made, ceilings[number], left)

    def _ceilings(self, engine: lce.Engine) -> list[Ceiling]:
        """Return for each task an engine with method `full` and no RoPE scaling, and the lengths within the window."""
        assert isinstance(self.suite, MadeSuite)
        full = lce.load(self.model, "full", sharing=engine, **{**self.loading, "rope": None, "rope_factor": None})
        try:
            return [(full, self.suite.ceiling_lengths(full, task, self.lengths)) for task in self.tasks]
        except UsageError as error:
            error.add_note("this is full attention within the window, which --no-ceiling leaves out")
            raise

    def _task(
        self, task: Any, engines: Sequence[lce.Engine], made: Mapping[int, Samples], ceiling: Ceiling, left: TokensLeft
    ) -> None:
        """Measure the cells of a task. If `ceiling` has lengths, full attention is measured first, at these lengths."""
        full, within = ceiling
        tops = {length: self.suite.make(full, task, length) for length in within}
        top_tokens, tokens = (sum(self._tokens(*each) for each in some.items()) for some in (tops, made))
        left.tasks.append(top_tokens + tokens * len(engines))
        scores = {length: self._cell(task, full, length, samples, left, True) for length, samples in tops.items()}
        top = scores[within[-1]] if within else None
        if top and (reason := fails(top)):
            note(
                f"{task.name}: {reason}, in {top.samples} samples at {within[-1]:,} tokens, within the window: scores "
                "beyond it say little; ask another --task, more --samples, or a better model"
            )
        for length, samples in made.items():
            first = len(self.objects)
            found = [self._cell(task, engine, length, samples, left) for engine in engines]
            own = scores.get(length, top)
            reason = None if own is None else says_little([score for score in found if score], own)
            if reason:
                self.output.text(f"{task.name} at {length:,} tokens cannot rank methods: {reason}")
            for cell in self.objects[first:]:
                cell["discriminates"] = None if own is None else reason is None

    def _tokens(self, length: int, samples: Sequence[Sample]) -> float:
        """Return the tokens that a method reads of the shard's part of `samples`, made for `length` tokens if given."""
        single, texts = self.suite.asking.mode == "single", dict[int | str, int]()
        for number, sample in enumerate(samples):
            texts[number if single else sample.beginning] = length or sample.n_tokens or 0
        return sum(texts.values()) / self.suite.asking.shard.count

    def _cell(
        self, task: Any, engine: lce.Engine, length: int, made: Any, left: TokensLeft, ceiling: bool = False
    ) -> Score | None:
        about = {"checkpoint": self.model} | ({"ceiling": True} if ceiling else {})
        label, where = engine.method.label, f" at {length:,}" if length else ""
        bar = left.cell(f"{task.name}, {label}{where}", self._tokens(length, made))
        asked = self.suite.answers(engine, task, length, made=made, record=self.answers, about=about, progress=bar)
        found = scored(task, (Answered(x.answer or "", sample.answers, sample.group) for sample, x in asked))
        if found is None:
            return None
        score, scale = Score.of(answer for _, answer in asked), self.suite.scale
        self.output.text(self._row(CEILING if ceiling else label, length, found, score), *detail_lines(found))
        cell = {**self.suite.about(task), "method": label, "knobs": knob_values(engine.method), "length": length}
        cell |= {"ceiling": ceiling, "warning": engine.setup.beyond(length) if length else None, **asdict(score)}
        cell |= {**asdict(found), **{name: scale * cell[name] for name in ("mean", "low", "high")}}
        self.objects.append(cell)
        self.scores.setdefault(label, {})[task.name] = found.score
        if self.predictions is not None:
            path = Path(self.predictions) / label / f"{task.name}.jsonl"
            make_folder(path.parent, "predictions")
            lines = [self.suite.prediction(sample, answer.answer or "") for sample, answer in asked]
            write_whole(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode())
        return score

    def _row(self, method: str, length: int, found: TaskScore, score: Score) -> str:
        spelled = "{:.1%}".format if self.suite.scale == 1 else lambda x: f"{self.suite.scale * x:.2f}"
        mean, low, high = map(spelled, (score.mean, score.low, score.high))
        shown = f"{mean:>8}  {f'{low} to {high}':<18}"
        read = "" if score.read_bytes is None else size_text(round(score.read_bytes))
        asked = f"{f'{length:,}' if length else '':>9}{found.samples:>9,}"
        return f"{found.task:<26}{method:<18}{asked}{shown}{score.interval:<11}{read:<14}{found.metric}"


def task_object(name: str) -> dict[str, Any]:
    """Return a task as a JSON object, with its knobs' defaults."""
    cls = TASKS[name]
    summary, (metric,) = " ".join((cls.__doc__ or "").split()), cls.metrics
    return {"name": name, "summary": summary, "metric": metric, "fills": cls.fills, "knobs": knob_values(cls())}


def task_lines(task: Mapping[str, Any]) -> list[str]:
    """Format the JSON object of `task_object` as lines of text."""
    knobs = " ".join(f"{name}={value}" for name, value in task["knobs"].items())
    text = "its own text" if task["fills"] else "hidden in a filler"
    return [task["name"], f"  {task['summary']}", f"  metric {task['metric']}; {text}{'; ' if knobs else ''}{knobs}"]


def score_predictions(benchmark: Benchmark, path: str, task: str | None, metric: str | None, output: Output) -> None:
    """Score a file of predictions, or the files of a folder; print a line for each task.

    A broken file of a folder is named on stderr and left out. Raises `DataError` after the others' scores are printed.
    """
    files = prediction_files(benchmark, Path(path))
    found, broken = list[TaskScore](), list[DataError]()
    for file in files:
        try:
            found.append(score_file(benchmark, file, task, metric))
        except DataError as error:
            broken.append(error)
    if not found:
        raise broken[0]
    for fault in broken:
        note(f"not scored: {fault}")
    averages = {} if metric else benchmark.averages({each.task: each.score for each in found})
    output.object(
        [{"suite": benchmark.name, **asdict(each)} for each in found]
        + [{"suite": benchmark.name, "average": name, "score": score} for name, score in averages.items()]
    )
    output.text(f"{'task':<26}{'samples':>8}{'score':>8}  metric")
    for each in found:
        output.text(f"{each.task:<26}{each.samples:>8,}{each.score:>8.2f}  {each.metric}", *detail_lines(each))
    output.text(*(f"{name:<26}{'':>8}{score:>8.2f}" for name, score in averages.items()))
    if broken:
        count = f"{len(broken)} of {len(files)} files of {named(path)}"
        raise DataError(f"{count} are not scored; correct the lines named above")


def detail_lines(found: TaskScore) -> list[str]:
    """Return lines with a task's scores by group and by its other metrics."""
    # The user's files name the groups, so names can be long.
    lines = [f"  {cut(name)}: {score:.2f}" for name, score in found.groups.items()]
    return lines + [f"  by {name}: {score:.2f}" for name, score in found.others.items()]


def benchmark_object(benchmark: Benchmark) -> dict[str, Any]:
    """Return a benchmark's description as a JSON object."""
    summary = " ".join((type(benchmark).__doc__ or "").split())
    found = {"name": benchmark.name, "title": benchmark.title, "summary": summary, "files": benchmark.layout}
    found |= {"published": benchmark.data, "prompts_and_metrics": benchmark.source}
    prompts, tasks = [name for name in benchmark.variants if name], [asdict(task) for task in benchmark.tasks]
    return {**found, "prompts": prompts, "tasks": tasks}


def benchmark_lines(benchmark: Benchmark) -> list[str]:
    """Return lines that describe a benchmark."""
    facts = {"files": benchmark.layout, "published at": benchmark.data, "prompts and metrics of": benchmark.source}
    facts |= {"prompts": ", ".join(benchmark.variants), "tasks": ", ".join(task.name for task in benchmark.tasks)}
    return [f"{benchmark.name}: {benchmark.title}", *(f"  {name}: {text}" for name, text in facts.items() if text)]
