"""NeedleBench V2 (Li et al., 2025): needles in essays at lengths and depths, built from its files for a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from lce.errors import DataError, shown
from lce.files import named
from lce.lab.eval.published.base import Answered, Benchmark, PublishedTask
from lce.lab.eval.published.haystack import DEPTHS, LANGUAGES, Chain, Haystack, Needles
from lce.lab.eval.published.reading import Row, json_rows, json_value
from lce.lab.eval.sample import Sample

LENGTHS = {  # tokens of each size
    "4k": (1000, 2000, 3000, 4000),
    "8k": tuple(range(1000, 8001, 1000)),
    "32k": (1000, *range(4000, 32001, 4000)),
    "128k": (1000, 2000, 4000, 8000, 16000, 32000, 64000, 128000),
    "200k": (1000, *range(25000, 200001, 25000)),
    "256k": (32000, 128000, 256000),
    "1000k": (1000, *range(125000, 1000001, 125000)),
}
# The kinds of tasks by their names in OpenCompass's files.
_KINDS = {"origin": "single", "parallel": "multi_retrieval"} | {
    f"{n}needle": f"multi_reasoning_{n}" for n in (2, 3, 4, 5)
}
REPEATS = {"single": 10, "multi_retrieval": 25, "multi_reasoning": 10}


class NeedleBench(Benchmark):
    """One needle, eleven of them, or a chain of 2 to 5 relatives, in English and Chinese.

    Prompts and draws of numbers are those of the published code, with two differences: the model's tokenizer counts
    tokens (there GPT-4's), and the eleven needles of multi_retrieval are drawn with seed 0 (there unseeded). The
    published limit of an answer's length belongs to the model. Here the chain has 4096 tokens, as in OpenCompass's
    example, and the others 256. The Ancestral Trace Challenge, which has no long text, is not here.
    """

    name = "needlebench"
    answer_field = "prediction"

    def paths(self, task: PublishedTask) -> tuple[str, ...]:
        return (LANGUAGES[task.name[-2:]].texts,)

    def read(self, folder: Path, task: PublishedTask, variant: str, tokenizer: Any) -> Iterator[Sample]:
        texts = [row.text("text") for row in json_rows(self.file(folder, *self.paths(task)))]
        haystack = Haystack(task, tokenizer, texts)
        maker: Chain | Needles
        if task.category == "multi_reasoning":
            maker = Chain(haystack, self._names(folder, haystack.language.name), int(task.name.split("_")[-2]))
        else:
            path = self.file(folder, "needles.jsonl")
            maker = Needles(haystack, list(json_rows(path)))
            if len(maker.own) < 1 or len(maker.distinct) < len(DEPTHS):
                raise DataError(f"{named(path)} has too few needles in {haystack.language.name}; {self.remedy}")
        for counter in range(REPEATS[task.category]):
            haystack.shuffle(counter)
            for length in LENGTHS[variant or self.variants[0]]:
                yield from maker.samples(counter, length)

    def samples(self, row: Row, index: int, task: PublishedTask, variant: str) -> Iterator[Sample]:
        raise NotImplementedError("the samples of NeedleBench are built, not read")

    def _names(self, folder: Path, language: str) -> list[str]:
        path = self.file(folder, "names.json")
        content = json_value(path)
        if not isinstance(content, dict):
            raise DataError(
                f"{named(path)} holds a {type(content).__name__}; expected an object with English and Chinese"
            )
        names = Row(content, named(path)).text(language).split(",")
        if len(names) < 6:
            raise DataError(f"{named(path)} has {len(names)} names in {language}; expected 6 or more")
        return names

    def predictions(self, path: Path, task: PublishedTask) -> Iterator[Answered]:
        """Yield the answers of a file; OpenCompass's own file is one object with an entry for each answer."""
        if path.suffix != ".json":
            yield from super().predictions(path, task)
            return
        content = json_value(path)
        if not isinstance(content, dict) or not all(isinstance(entry, dict) for entry in content.values()):
            raise DataError(f"{named(path)} is no file of OpenCompass's predictions; expected an object of objects")
        for name, entry in content.items():
            yield from self.answered(Row(entry, f"entry {shown(name)} of {named(path)}"), 0, task)

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
        """Return the task of OpenCompass's file names, such as `Length1000Depth0_origin_en_4k.json`, or of ours."""
        language = next((x for x in LANGUAGES if f"_{x}" in path.name), None)
        kind = next((new for old, new in _KINDS.items() if old in path.name), None)
        if language is None or kind is None:
            return super().task_of(path)
        return self.task(f"{kind}_{language}")

    def averages(self, scores: Mapping[str, float]) -> dict[str, float]:
        """Return the mean of each of the three kinds of tasks, and the mean of these three, as V2 does."""
        if {task.name for task in self.tasks} - set(scores):
            return {}
        kinds = {kind: [scores[t.name] for t in self.tasks if t.category == kind] for kind in REPEATS}
        found = {f"average ({kind})": fmean(members) for kind, members in kinds.items()}
        return {**found, "average": fmean(found.values())}
