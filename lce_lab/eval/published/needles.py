"""Three benchmarks of facts hidden in long texts: RULER, NeedleBench V2 and Counting-Stars."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from lce.errors import DataError, shown
from lce.files import named
from lce_lab.eval.published import base
from lce_lab.eval.published.base import Answered, Benchmark, PublishedTask, Row
from lce_lab.eval.published.haystack import DEPTHS, LANGUAGES, Chain, Needles
from lce_lab.eval.sample import Sample

# The kinds of NeedleBench's tasks, by the names of these kinds in OpenCompass's files.
_KINDS = {"origin": "single", "parallel": "multi_retrieval"} | {
    f"{n}needle": f"multi_reasoning_{n}" for n in (2, 3, 4, 5)
}
REPEATS = {"single": 10, "multi_retrieval": 25, "multi_reasoning": 10}
# The wrong counts of Counting-Stars' published files with 32 counts. In other files, the text states the wrong counts.
WRONG = ("16 116 43 70 59 106 8 48 112 67 25 101 82 93 76 62 6 18 108 4 34 53 85 90 126 22 45 121 39 96 75 30").split()
_CORRECTED = (
    r"counted (\d+) ★, but found that a mistake had been made, so the counting was done again, and this time (\d+) ★",
    r"小企鹅数了(\d+)颗★，但发现数错了，于是又数了一遍，这次数对了，是(\d+)颗★",
)


class Ruler(Benchmark):
    """RULER (Hsieh et al., 2024): the 13 tasks of its synthetic.yaml, read from files that RULER's generator wrote.

    A line has the prompt as `input`, the beginning of the answer as `answer_prefix`, and the references as `outputs`.
    The generator's `--model_template_type` puts a template into `input`, so lce adds a template only for `--template`.
    Prompts are never cut, because the generator makes them for a length.
    """

    name = "ruler"
    files = ("{task}/validation.jsonl", "data/{task}/validation.jsonl", "{task}/test.jsonl")

    def samples(self, row: Row, index: int, task: PublishedTask, variant: str) -> Iterator[Sample]:
        opening = row.text("answer_prefix") if "answer_prefix" in row else ""
        source = {name: row.content.get(name) for name in ("index", "outputs", "length")}
        source |= {"input": row.text("input") + opening, "others": row.content.get("others", {})}
        yield task.sample(row.text("input"), "", row.texts("outputs"), opening=opening, cut="none", source=source)

    def answered(self, row: Row, index: int, task: PublishedTask) -> Iterator[Answered]:
        yield Answered(row.text("pred"), row.texts("outputs", "output"))


class NeedleBench(Benchmark):
    """NeedleBench V2 (Li et al., 2025): one needle, 11 needles, or a chain of 2 to 5 relatives, in English and Chinese.

    Prompts and random numbers are those of the published code, with two differences: tokens are counted by the model's
    tokenizer instead of GPT-4's, and the needles of multi_retrieval are drawn with seed 0 instead of no seed.
    OpenCompass limits answers by model; here the limit is 4096 tokens for a chain, as in OpenCompass's example, and 256
    for other tasks. The Ancestral Trace Challenge, which has no long text, is left out.
    """

    name = "needlebench"
    answer_field = "prediction"

    def paths(self, task: PublishedTask) -> tuple[str, ...]:
        return (LANGUAGES[task.name[-2:]].texts,)

    def read(self, folder: Path, task: PublishedTask, variant: str, tokenizer: Any) -> Iterator[Sample]:
        texts = [row.text("text") for row in base.json_rows(self.file(folder, *self.paths(task)))]
        haystack: Chain | Needles
        if task.category == "multi_reasoning":
            path = self.file(folder, "names.json")
            names = base.row_of(base.json_value(path), named(path)).text(LANGUAGES[task.name[-2:]].name).split(",")
            if len(names) < 6:
                raise DataError(f"{named(path)} has {len(names)} names; expected 6 or more in each language")
            haystack = Chain(task, tokenizer, texts, names)
        else:
            path = self.file(folder, "needles.jsonl")
            haystack = Needles(task, tokenizer, texts, list(base.json_rows(path)))
            if len(haystack.own) < 1 or len(haystack.distinct) < len(DEPTHS):
                raise DataError(f"{named(path)} has too few needles in {haystack.language.name}; {self.remedy}")
        for counter in range(REPEATS[task.category]):
            Random(counter).shuffle(haystack.texts)
            for length in base.DESCRIBED[self.name]["lengths"][variant or self.variants[0]]:
                yield from haystack.samples(counter, length)

    def samples(self, row: Row, index: int, task: PublishedTask, variant: str) -> Iterator[Sample]:
        raise NotImplementedError("the samples of NeedleBench are built, not read")

    def predictions(self, path: Path, task: PublishedTask) -> Iterator[Answered]:
        """Yield the answers of a file. A `.json` file has OpenCompass's layout: an object with one entry per answer."""
        if path.suffix != ".json":
            yield from super().predictions(path, task)
            return
        for name, entry in base.row_of(base.json_value(path), named(path)).content.items():
            yield from self.answered(base.row_of(entry, f"entry {shown(name)} of {named(path)}"), 0, task)

    def answered(self, row: Row, index: int, task: PublishedTask) -> Iterator[Answered]:
        gold = row.text("gold")
        if task.category == "single":
            answers = tuple(gold.split("*")[1:2])
        else:
            answers = tuple(gold.split("#")[0].split("*")) if task.category == "multi_retrieval" else (gold,)
        if not answers:
            raise DataError(f"'gold' of {row.where} has no key word; expected the needle, * and the key word")
        yield Answered(row.text("prediction"), answers, str(row.content.get("length", "")))

    def task_of(self, path: Path) -> PublishedTask | None:
        """Return the task of a file named by OpenCompass, such as `Length1000Depth0_origin_en_4k.json`, or by lce."""
        language = next((x for x in LANGUAGES if f"_{x}" in path.name), None)
        kind = next((new for old, new in _KINDS.items() if old in path.name), None)
        if language is None or kind is None:
            return super().task_of(path)
        return self.task(f"{kind}_{language}")

    def averages(self, scores: Mapping[str, float]) -> dict[str, float]:
        """Return the means of the three kinds of tasks, and the mean of these means."""
        kinds = self.by_category(scores)
        if len(kinds) < len(REPEATS):
            return {}
        found = {f"average ({kind})": fmean(kinds[kind]) for kind in REPEATS}
        return {**found, "average": fmean(found.values())}


class CountingStars(Benchmark):
    """Counting-Stars (Song et al., 2025): find 32 counts of stars; in reasoning tasks a count is first wrong.

    Answers are limited to 512 tokens; the published code has no limit. A sample's `group` is the length of its context
    in words or characters.
    """

    name = "counting-stars"
    answer_field = "answer"

    def paths(self, task: PublishedTask) -> tuple[str, ...]:
        kind, _, language = task.name.partition("_")
        older = {"acquisition": "searching", "reasoning": "reasoning"}[kind]
        names = [f"Counting_Stars_{language.upper()}_*{word}_*.jsonl" for word in (kind, older)]
        return (*names, *(f"test_data/{name}" for name in names))

    def samples(self, row: Row, index: int, task: PublishedTask, variant: str) -> Iterator[Sample]:
        text, question = row.text("question"), row.text("retrieval_question")
        fields = ("context_size", "reference_counting_results", "retrieval_question")
        source = {name: row.content.get(name) for name in fields}
        references = _references(row, task)
        if task.name.startswith("reasoning"):
            source["corrected"] = list(references)
        how = {"template": "chat", "cut": "none", "group": str(row.content.get("context_size", "")), "source": source}
        yield task.sample(text.removesuffix(question), question if text.endswith(question) else "", references, **how)

    def answered(self, row: Row, index: int, task: PublishedTask) -> Iterator[Answered]:
        group = str(row.content.get("context_size", ""))
        yield Answered(row.text("answer"), _references(row, task), group)

    def task_of(self, path: Path) -> PublishedTask | None:
        name = path.name.lower()
        kind = "reasoning" if "reasoning" in name else "acquisition"
        language = next((x for x in ("zh", "en") if f"_{x}" in name), None)
        return None if language is None else self.task(f"{kind}_{language}")


def _references(row: Row, task: PublishedTask) -> tuple[str, ...]:
    """Return the right counts; for reasoning tasks pairs `right/wrong`, with the wrong count that the text corrects."""
    right = row.texts("reference_counting_results")
    if task.name.startswith("acquisition"):
        return right
    if "corrected" in row:
        return row.texts("corrected")
    text = row.text("question") if "question" in row else ""
    wrong = {right: wrong for pattern in _CORRECTED for wrong, right in re.findall(pattern, text)}
    if not wrong and len(right) == len(WRONG):
        return tuple(f"{a}/{b}" for a, b in zip(right, WRONG, strict=True))
    if not set(right) <= set(wrong):
        raise DataError(f"{row.where} does not tell the counts that are corrected; expected its 'question' too")
    return tuple(f"{a}/{wrong[a]}" for a in right)
