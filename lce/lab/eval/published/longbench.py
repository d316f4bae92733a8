"""LongBench and LongBench-E (Bai et al., 2024): 21 tasks in English and Chinese, cut in the middle if too long."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import ClassVar

from lce.lab.eval.published.base import Answered, Item, Suite, Task, filled, prompts
from lce.lab.eval.published.reading import Row

# Chat models get these tasks without their template, as in the published pred.py.
BARE = frozenset({"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"})
CHINESE = frozenset({"multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh"})


class LongBench(Suite):
    """The 21 tasks. Few-shot tasks and code get no chat template; the answer's first line is scored.

    For `samsum`, the published code forbids a line break as the first token and stops at the next. Here the answer is
    `max_tokens` long, which differs only for models that would begin with the end token.
    """

    name = "longbench"
    suffix: ClassVar[str] = ""  # of the files

    def paths(self, task: Task) -> tuple[str, ...]:
        file = f"{task.name}{self.suffix}.jsonl"
        return (file, f"data/{file}")

    def item(self, row: Row, index: int, task: Task, variant: str) -> Iterator[Item]:
        context, asked = row.text("context"), row.text("input")
        before, context, after = filled(prompts("longbench")[task.name], context=context, input=asked)
        source = {name: row.content.get(name) for name in ("answers", "all_classes", "length")}
        bare = task.name in BARE
        yield Item(
            index, before, context, after, _references(row, task), task.metrics[0], task.max_tokens,
            template="none" if bare else "chat", fixed=bare, group=self.group(row), source=source,
        )  # fmt: skip

    def answered(self, row: Row, index: int, task: Task) -> Iterator[Answered]:
        yield Answered(row.text("pred"), _references(row, task), task.metrics, self.group(row))

    def group(self, row: Row) -> str:
        return ""

    def averages(self, scores: Mapping[str, float]) -> dict[str, float]:
        """Return each language's average over categories, code in both, as in the published tables."""
        languages = {
            "English": {task.name for task in self.tasks} - CHINESE,
            "Chinese": CHINESE | {"lcc", "repobench-p"},
        }
        found = {}
        for language, names in languages.items():
            if names <= scores.keys():
                members: dict[str, list[float]] = {}
                for task in self.tasks:
                    if task.name in names:
                        members.setdefault(task.category, []).append(scores[task.name])
                found[f"average ({language})"] = fmean(map(fmean, members.values()))
        return found


class LongBenchE(LongBench):
    """The 13 tasks whose samples are spread evenly over lengths; scores are also given by length, in words."""

    name = "longbench-e"
    suffix = "_e"

    def group(self, row: Row) -> str:
        length = row.number("length")
        return "0-4k" if length < 4000 else "4-8k" if length < 8000 else "8k+"

    def averages(self, scores: Mapping[str, float]) -> dict[str, float]:
        return Suite.averages(self, scores)


def _references(row: Row, task: Task) -> tuple[str, ...]:
    answers = row.texts("answers")
    return (*answers, "", *row.texts("all_classes")) if task.metrics == ("longbench.classification",) else answers
