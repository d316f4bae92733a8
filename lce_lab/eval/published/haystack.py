"""Builds the prompts of NeedleBench V2: texts of a given length, with needles (facts) inserted at given depths."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from random import Random
from typing import Any

from lce_lab.eval.published.base import PublishedTask, Row, filled, prompts
from lce_lab.eval.sample import Sample

DEPTHS = range(0, 101, 10)  # the places of needles, in percent of the text
BETWEEN = 10  # the distance between the needles of a chain, in percent of the text


@dataclass(frozen=True)
class Language:
    """A language: its file of texts, the number of tokens `left` for the rest of the prompt, and its punctuation."""

    name: str
    code: str
    texts: str
    left: int
    question_mark: str
    stop: str


LANGUAGES = {
    "en": Language("English", "en", "PaulGrahamEssays.jsonl", 500, "?", "."),
    "zh": Language("Chinese", "zh", "zh_finance.jsonl", 200, "？", "。"),
}


@dataclass
class Haystack(ABC):
    """The samples of one task, made from texts in the task's language."""

    task: PublishedTask
    tokenizer: Any
    texts: list[str]

    def __post_init__(self) -> None:
        self.language = LANGUAGES[self.task.name[-2:]]
        self.encode: Callable[[str], list[int]] = cache(lambda text: self.tokenizer.encode(text, bos=False))

    @abstractmethod
    def samples(self, counter: int, length: int) -> Iterator[Sample]:
        """Yield samples whose prompts have `length` tokens; `counter` is the seed of random choices."""

    def hide(self, needles: Sequence[str], depth: int, between: int, length: int, *, chained: bool = False) -> str:
        """Return the beginning of the texts, with needles at `depth` percent and then every `between` percent.

        The result and the rest of the prompt together have about `length` tokens. If `chained`, a needle is moved twice
        by the lengths of earlier needles, as in the published code.
        """
        lengths = [len(self.encode(needle)) for needle in needles]
        n_tokens, ids = max(0, length - self.language.left - sum(lengths)), list[int]()
        for each in self.texts:
            if len(ids) < n_tokens:
                ids.extend(self.encode(each))
        del ids[n_tokens:]
        total, point = len(ids), 0
        for number, needle in enumerate(needles):
            if not chained or not number:
                point = int(total * ((depth + between * number) / 100))
            else:
                point = min(int(point + lengths[number - 1] + total * (between / 100)), total + sum(lengths[:number]))
            at = point + sum(lengths[:number])
            ids[at:at] = self.encode(needle)
        text: str = self.tokenizer.decode(ids)
        return text

    def sample(
        self, values: dict[str, str], answers: tuple[str, ...], gold: str, length: int, depth: int | None
    ) -> Sample:
        before, context, after = filled(prompts("needlebench")[self.task.category][self.language.code], **values)
        how = {"before": before, "template": "chat", "cut": "none", "group": str(length)}
        source, place = {"gold": gold, "length": length}, None if depth is None else depth / 100
        return self.task.sample(context, after, answers, depth=place, source=source, **how)


@dataclass
class Needles(Haystack):
    """The samples of the tasks single (one needle) and multi_retrieval (one needle per depth)."""

    needles: Sequence[Row]  # the needles in all languages

    def samples(self, counter: int, length: int) -> Iterator[Sample]:
        if self.task.category == "single":
            chosen = Random(counter).choice(self.own)
            needle, keyword = f"\n{chosen.text('needle')}\n", chosen.text("arg2")
            for depth in DEPTHS:
                text = self.hide([needle], depth, 0, length)
                values = {"context": text, "question": chosen.text("retrieval_question")}
                yield self.sample(values, (keyword,), f"{needle}*{keyword}", length, depth)
        else:
            several = list(self.distinct)
            Random(counter).shuffle(several)
            text = self.hide([f"\n{row.text('needle')}\n" for row in several], 0, DEPTHS.step, length)
            keywords = tuple(row.text("arg2") for row in several)
            gold = f"{'*'.join(keywords)}#{'*'.join(map(str, DEPTHS))}"
            yield self.sample({"context": text, "question": self._joined(several)}, keywords, gold, length, None)

    @cached_property
    def own(self) -> list[Row]:
        """The needles in the task's language."""
        return [row for row in self.needles if row.text("language") == self.language.name]

    @cached_property
    def distinct(self) -> list[Row]:
        """Randomly drawn needles, one for each depth, with different subjects and key words."""
        rows = list(self.needles)
        Random(0).shuffle(rows)
        found: list[Row] = []
        taken: set[tuple[str, str]] = set()
        for row in rows:
            own = {("arg1", row.text("arg1")), ("arg2", row.text("arg2"))}
            if not own & taken and len(found) < len(DEPTHS) and row.text("language") == self.language.name:
                taken |= own
                found.append(row)
        return found

    def _joined(self, chosen: Sequence[Row]) -> str:
        mark, stop = self.language.question_mark, self.language.stop
        asked = [row.text("retrieval_question") for row in chosen]
        questions = "、".join(text.split(mark)[0] + mark for text in asked)
        forms = "、".join([*text.split("'"), ""][1].split(stop)[0] for text in asked)
        if self.language.code == "zh":
            return f"{questions}请按照'{forms}'的格式回答。"
        return f"{questions}Please answer in the format of '{forms}'"


@dataclass
class Chain(Haystack):
    """The samples of multi_reasoning, which ask for the eldest relative of the last person in a chain."""

    names: Sequence[str]

    def samples(self, counter: int, length: int) -> Iterator[Sample]:
        rng, data, code = Random(counter), prompts("needlebench"), self.language.code
        names = rng.sample(self.names, int(self.task.name.split("_")[-2]) + 1)
        needles = []
        for elder, younger in pairwise(names):
            statement = rng.choice(data["statements"][code])
            values = {"A": elder, "B": younger, "relationship": rng.choice(data["relatives"][code])}
            needles.append(f"\n{statement.format(**values)}\n")
        rng.shuffle(needles)
        question = data["eldest"][code].replace("{last_person}", names[-1])
        for depth in DEPTHS:
            text = self.hide(needles, depth, BETWEEN, length, chained=True)
            values = {"context": text, "question": question, "last_person": names[-1]}
            yield self.sample(values, (names[0],), names[0], length, depth)
