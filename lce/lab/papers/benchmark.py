"""How an entry is measured on the paper's own data: a published benchmark, in the user's copy of its files."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lce.lab.eval.published import find
from lce.lab.eval.published.asking import Asking
from lce.lab.eval.published.running import Benchmark
from lce.lab.eval.record import Record
from lce.lab.papers.entry import Arm, Cell
from lce.lab.papers.measures import WithoutCeiling, load_each
from lce.lab.papers.setting import Setting


@dataclass(frozen=True)
class Published(WithoutCeiling):
    """Tasks of a benchmark, or all of them. Lengths that are asked for cut the prompts.

    `average` is what the paper calls the mean over the tasks, where it has that alone. `most` is the best score.
    """

    suite: str
    tasks: tuple[str, ...] = ()
    average: str = ""
    most: float = 100.0

    @property
    def data(self) -> str:
        suite = find(self.suite)
        return f"your copy of {suite.title}: {suite.layout}, as published at {suite.data}"

    @property
    def labels(self) -> tuple[str, ...]:
        if self.average:
            return (self.average,)
        return self.tasks or tuple(task.name for task in find(self.suite).tasks)

    def command(self, arm: Arm, lengths: Sequence[int], setting: Setting) -> str:
        words = [f"lce eval published {self.suite} --data {shlex.quote(setting.data[0])}"]
        words += [f"--task {','.join(self.tasks)}"] * bool(self.tasks)
        words += [f"--max-length {lengths[0]}"] * bool(setting.lengths)
        words += [f"--samples {setting.limit}"] * (setting.limit is not None)
        words += setting.recorded()
        return f"{' '.join(words)} {setting.options(arm, lengths[0] if setting.lengths else 0)}"

    def check(self, arms: Sequence[Arm], lengths: Sequence[int], setting: Setting) -> None:
        load_each(arms, lengths, setting)
        setting.kept(Record)
        benchmark = self._benchmark(0, setting)
        benchmark.prompted(setting.engine(arms[0], 0), benchmark.tasks(self.tasks)[0])

    def cells(self, arm: Arm, lengths: Sequence[int], setting: Setting) -> Iterator[Cell]:
        for length in setting.lengths or [0]:
            found = list(self._tasks(arm, length, setting))
            if self.average:
                mean = sum(cell.value or 0.0 for cell in found) / len(found)
                yield Cell(arm.name, self.average, length, mean, n=sum(cell.n or 0 for cell in found))
            else:
                yield from found

    def _benchmark(self, length: int, setting: Setting) -> Benchmark:
        asking = Asking(max_length=length or None)
        return Benchmark(find(self.suite), Path(setting.data[0]), asking=asking, samples=setting.limit)

    def _tasks(self, arm: Arm, length: int, setting: Setting) -> Iterator[Cell]:
        benchmark = self._benchmark(length, setting)
        record = setting.kept(Record)
        for task in benchmark.tasks(self.tasks):
            made = benchmark.prompted(setting.engine(arm, 0), task)
            longest = max((each.n_tokens + (each.sample.max_tokens or 0) for each in made), default=0)
            with setting.advancing(f"{arm.name}, {task.name}") as advance:
                outcome = benchmark.evaluate(
                    setting.engine(arm, longest), task, made, record=record, about={"checkpoint": setting.model},
                    progress=advance,
                )  # fmt: skip
            if outcome is not None:
                score = outcome.score
                found = (outcome.published.score / 100, score.low, score.high)
                mean, low, high = (self.most * share for share in found)
                yield Cell(arm.name, task.name, length, mean, low, high, score.samples)
