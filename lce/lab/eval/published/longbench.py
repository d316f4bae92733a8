"""LongBench and LongBench-E (Bai et al., 2024): 21 tasks in English and Chinese, cut in the middle where too long."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import ClassVar

from lce.lab.eval.published.base import Answered, Item, Suite, Task, filled, prompts
from lce.lab.eval.published.reading import Row

# Chat models are asked without their template here, as in the published pred.py.
BARE = frozenset({"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"})
IN_E = frozenset(
    "qasper multifieldqa_en hotpotqa 2wikimqa gov_report multi_news trec triviaqa samsum passage_count "
    "passage_retrieval_en lcc repobench-p".split()
)
SINGLE, MULTI, SUMMARY = "single-document QA", "multi-document QA", "summarisation"
FEW_SHOT, SYNTHETIC, CODE = "few-shot", "synthetic", "code"
TASKS: tuple[Task, ...] = (
    Task("narrativeqa", ("qa_f1",), 128, SINGLE),
    Task("qasper", ("qa_f1",), 128, SINGLE),
    Task("multifieldqa_en", ("qa_f1",), 64, SINGLE),
    Task("multifieldqa_zh", ("qa_f1_zh",), 64, SINGLE),
    Task("hotpotqa", ("qa_f1",), 32, MULTI),
    Task("2wikimqa", ("qa_f1",), 32, MULTI),
    Task("musique", ("qa_f1",), 32, MULTI),
    Task("dureader", ("rouge_l_zh",), 128, MULTI),
    Task("gov_report", ("rouge_l",), 512, SUMMARY),
    Task("qmsum", ("rouge_l",), 512, SUMMARY),
    Task("multi_news", ("rouge_l",), 512, SUMMARY),
    Task("vcsum", ("rouge_l_zh",), 512, SUMMARY),
    Task("trec", ("longbench.classification",), 64, FEW_SHOT),
    Task("triviaqa", ("longbench.trivia_f1",), 32, FEW_SHOT),
    Task("samsum", ("longbench.dialogue_rouge",), 128, FEW_SHOT),
    Task("lsht", ("longbench.classification",), 64, FEW_SHOT),
    Task("passage_count", ("longbench.count",), 32, SYNTHETIC),
    Task("passage_retrieval_en", ("longbench.retrieval",), 32, SYNTHETIC),
    Task("passage_retrieval_zh", ("longbench.retrieval_zh",), 32, SYNTHETIC),
    Task("lcc", ("longbench.code_similarity",), 64, CODE),
    Task("repobench-p", ("longbench.code_similarity",), 64, CODE),
)
CHINESE = frozenset({"multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh"})


class LongBench(Suite):
    """The 21 tasks. Samples of few-shot tasks and code get no chat template; their first line is the answer.

    The published code forbids a line break as the first token of `samsum` and ends at the next; here the answer is
    `max_tokens` long and its first line is scored, which differs only where a model would have begun with the end.
    """

    name = "longbench"
    title = "LongBench"
    source = "THUDM/LongBench (LongBench/config, pred.py, eval.py, metrics.py)"
    data = "the data set THUDM/LongBench (data.zip)"
    layout = "the unpacked data.zip: qasper.jsonl, ... with input, context, answers, all_classes, length"
    tasks = TASKS
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
        """The average over the categories of each language, code in both, as in the published tables."""
        english = _over_categories(scores, {task.name for task in self.tasks} - CHINESE)
        chinese = _over_categories(scores, CHINESE | {"lcc", "repobench-p"})
        found = {"average (English)": english, "average (Chinese)": chinese}
        return {name: score for name, score in found.items() if score is not None}


class LongBenchE(LongBench):
    """The 13 tasks whose samples are spread evenly over lengths; scores are also given by length, in words."""

    name = "longbench-e"
    title = "LongBench-E"
    layout = "the unpacked data.zip: qasper_e.jsonl, ... with input, context, answers, all_classes, length"
    tasks = tuple(task for task in TASKS if task.name in IN_E)
    suffix = "_e"

    def group(self, row: Row) -> str:
        length = row.number("length")
        return "0-4k" if length < 4000 else "4-8k" if length < 8000 else "8k+"

    def averages(self, scores: Mapping[str, float]) -> dict[str, float]:
        return Suite.averages(self, scores)


def _references(row: Row, task: Task) -> tuple[str, ...]:
    answers = row.texts("answers")
    return (*answers, "", *row.texts("all_classes")) if task.metrics == ("longbench.classification",) else answers


def _over_categories(scores: Mapping[str, float], names: frozenset[str] | set[str]) -> float | None:
    if not names <= set(scores):
        return None
    members: dict[str, list[float]] = {}
    for task in TASKS:
        if task.name in names:
            members.setdefault(task.category, []).append(scores[task.name])
    return fmean(map(fmean, members.values()))
