"""LongBench (Bai et al., 2024), LongBench-E and LongBench v2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from lce_lab.eval.published.base import Answered, Benchmark, PublishedTask, Row, filled, prompts
from lce_lab.eval.sample import Sample

# The tasks whose prompts get no chat template even for chat models, as in the published pred.py.
BARE = frozenset({"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"})
CHINESE = frozenset({"multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh"})


class LongBench(Benchmark):
    """The 21 tasks. Few-shot and code tasks have no chat template, and only the first line of their answers is scored.

    For `samsum`, the published code forbids a line break as the first token and stops at the next line break. Here
    answers go on to `max_tokens`, which changes the score only if a model's first token would be the end token.
    """

    name = "longbench"
    files = ("{task}.jsonl", "data/{task}.jsonl")

    def samples(self, row: Row, index: int, task: PublishedTask, variant: str) -> Iterator[Sample]:
        context, asked = row.text("context"), row.text("input")
        before, context, after = filled(prompts("longbench")[task.name], context=context, input=asked)
        source = {name: row.content.get(name) for name in ("answers", "all_classes", "length")}
        how: dict[str, Any] = {"template": "none" if task.name in BARE else "chat", "fixed": task.name in BARE}
        how |= {"before": before, "group": self.group(row), "source": source}
        yield task.sample(context, after, _references(row, task), **how)

    def answered(self, row: Row, index: int, task: PublishedTask) -> Iterator[Answered]:
        yield Answered(row.text("pred"), _references(row, task), self.group(row))

    def group(self, row: Row) -> str:
        return ""

    def averages(self, scores: Mapping[str, float]) -> dict[str, float]:
        """Return the average over categories for each language, as published. Code tasks count for both languages."""
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
    """LongBench-E: the 13 tasks with samples spread evenly over lengths. Scores are also given by length in words."""

    name = "longbench-e"
    files = ("{task}_e.jsonl", "data/{task}_e.jsonl")

    def group(self, row: Row) -> str:
        length = row.number("length")
        return "0-4k" if length < 4000 else "4-8k" if length < 8000 else "8k+"

    def averages(self, scores: Mapping[str, float]) -> dict[str, float]:
        return Benchmark.averages(self, scores)


class LongBenchV2(Benchmark):
    """One task: 503 questions with four options about texts of up to 2 million words.

    Scores are also given by difficulty and length, as in the published table. Answers are greedy; the published code
    samples at temperature 0.1. The published prompts for chain of thought and for retrieval are left out.
    """

    name = "longbench-v2"
    files = ("data.json", "data.jsonl", "longbench_v2.jsonl")
    answer_field = "response"

    def samples(self, row: Row, index: int, task: PublishedTask, variant: str) -> Iterator[Sample]:
        template = prompts("longbench_v2")[variant or "0shot"]
        for sign, name in (("$Q$", "question"), *((f"$C_{x}$", f"choice_{x}") for x in "ABCD")):
            template = template.replace(sign, row.text(name).strip())
        before, holds_text, after = template.partition("$DOC$")
        context = row.text("context").strip() if holds_text else ""
        fields = ("_id", "domain", "sub_domain", "difficulty", "length", "question", "answer")
        source = {name: row.content.get(name) for name in fields}
        how = {"before": before, "template": "chat", "cut": "middle_joined", "group": self.group(row)}
        yield task.sample(context, after, row.texts("answer"), **how, source=source)

    def answered(self, row: Row, index: int, task: PublishedTask) -> Iterator[Answered]:
        response = row.content.get("response", row.content.get("pred"))
        yield Answered(response if isinstance(response, str) else "", row.texts("answer"), self.group(row))

    def group(self, row: Row) -> str:
        return f"{row.text('difficulty')}, {row.text('length')}"

    def task_of(self, path: Path) -> PublishedTask:
        return self.tasks[0]


def _references(row: Row, task: PublishedTask) -> tuple[str, ...]:
    answers = row.texts("answers")
    return (*answers, "", *row.texts("all_classes")) if task.metrics == ("longbench.classification",) else answers
