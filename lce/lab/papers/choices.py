"""How an entry is measured by what a method chooses: chunks that have the fact, and tokens by low-dim scores."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from lce.lab.eval import perplexity, selection
from lce.lab.eval.suite import Suite, make_tasks
from lce.lab.papers.entry import Arm, Cell
from lce.lab.papers.measures import WithoutCeiling, contents, listed, load_each, texts
from lce.lab.papers.setting import Setting


@dataclass(frozen=True)
class Chosen(WithoutCeiling):
    """What heads choose when they answer: whether the best chunk, or one of the five best, has the fact; the share of
    chunks that some head chooses, and how unevenly (Gini's coefficient).
    """

    task: str = "passkey"
    labels: ClassVar = ("hit@1", "hit@5", "cover", "Gini")

    def command(self, arm: Arm, lengths: Sequence[int], setting: Setting) -> str:
        size = f"--lengths {listed(lengths)} --samples {setting.samples} --seed {setting.seed}"
        words = [f"lce eval selection --task {self.task} {size}", *setting.recorded(".looks")]
        return f"{' '.join(words)} {setting.options(arm, lengths[0])}"

    def check(self, arms: Sequence[Arm], lengths: Sequence[int], setting: Setting) -> None:
        setting.kept(selection.Looks, ".looks")

    def cells(self, arm: Arm, lengths: Sequence[int], setting: Setting) -> Iterator[Cell]:
        (task,) = make_tasks([self.task])
        suite = Suite(setting.samples, setting.seed)
        record = setting.kept(selection.Looks, ".looks")
        for length in lengths:
            with setting.advancing(f"{arm.name} at {length:,}") as advance:
                found = selection.measure(
                    setting.model, setting.method(arm), functools.partial(suite.made, task=task, length=length),
                    length=length, setting=suite.setting(task, length), record=record, progress=advance,
                    **setting.loading,
                )  # fmt: skip
            for label, value in zip(self.labels, (found.hit1, found.hit5, found.cover, found.gini), strict=True):
                note = "" if value is not None else "no fact lay among the chunks to choose from"
                yield Cell(arm.name, label, length, value, n=found.samples, note=note)


@dataclass(frozen=True)
class TokenRecall(WithoutCeiling):
    """The share of the best tokens by exact scores that low-dim scores find, on average over layers, and the share of
    layers above 0.9. `queries` are looked at, spread over the second half of a text.
    """

    queries: int = 32
    labels: ClassVar = ("recall", "layers above 0.9")

    @property
    def data(self) -> str:
        return "a text, in the place of prose that is made here"

    def command(self, arm: Arm, lengths: Sequence[int], setting: Setting) -> str:
        text = shlex.quote(setting.data[0]) if setting.data else "FILE"
        words = [f"--lengths {listed(lengths)} --queries {self.queries} --by-layer", *setting.recorded(".looks")]
        return f"lce eval selection --text {text} {' '.join(words)} {setting.options(arm, lengths[0])}"

    def check(self, arms: Sequence[Arm], lengths: Sequence[int], setting: Setting) -> None:
        load_each(arms, lengths, setting)
        setting.kept(selection.Looks, ".looks")
        perplexity.ends(texts(max(lengths), setting)[:1], max(lengths), max(lengths))

    def cells(self, arm: Arm, lengths: Sequence[int], setting: Setting) -> Iterator[Cell]:
        record = setting.kept(selection.Looks, ".looks")
        for length in lengths:
            one = selection.measure_text(
                setting.model, setting.method(arm), contents(length, setting)[0][1], length=length,
                queries=self.queries, record=record, **setting.loading,
            )  # fmt: skip
            found = [share for (share,) in one.by_layer.get("found", ())]
            if not found:
                yield Cell(arm.name, self.labels[0], length, None, note="all tokens are chosen; take a longer text")
                continue
            yield Cell(arm.name, self.labels[0], length, sum(found) / len(found), n=len(found))
            yield Cell(arm.name, self.labels[1], length, sum(x > 0.9 for x in found) / len(found), n=len(found))
