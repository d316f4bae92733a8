"""Builds the prompts of NeedleBench V2: texts joined and cut to a length, with needles at depths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from random import Random
from typing import Any

from lce.lab.eval.published.base import PublishedTask, filled, prompts
from lce.lab.eval.published.reading import Row
from lce.lab.eval.sample import Sample

DEPTHS = range(0, 101, 10)  # percent
BETWEEN = 10  # percent of the text between the needles of a chain


@dataclass(frozen=True)
class Language:
    """A language's files of texts and needles, and how many tokens are kept free for the prompt."""

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


class Haystack:
    """The texts of a task's language, from which its samples are made; `shuffle` reorders the texts."""

    def __init__(self, task: PublishedTask, tokenizer: Any, texts: Sequence[str]) -> None:
        self.task, self.language, self.texts = task, LANGUAGES[task.name[-2:]], list(texts)
        self.encode: Callable[[str], list[int]] = cache(lambda text: tokenizer.encode(text, bos=False))
        self.decode: Callable[[list[int]], str] = tokenizer.decode

    def shuffle(self, seed: int) -> None:
        Random(seed).shuffle(self.texts)

    def hide(self, needles: Sequence[str], depth: int, between: int, length: int, *, chained: bool = False) -> str:
        """Return the first tokens of the texts, with the first needle at `depth` percent and each other `between`
        percent behind the needle before.

        As published, the lengths of earlier needles are added twice to each point if the needles are `chained`.
        """
        lengths = [len(self.encode(needle)) for needle in needles]
        n_tokens, ids = max(0, length - self.language.left - sum(lengths)), list[int]()
        for text in self.texts:
            if len(ids) < n_tokens:
                ids.extend(self.encode(text))
        del ids[n_tokens:]
        total, point = len(ids), 0
        for number, needle in enumerate(needles):
            if not chained or not number:
                point = int(total * ((depth + between * number) / 100))
            else:
                point = min(int(point + lengths[number - 1] + total * (between / 100)), total + sum(lengths[:number]))
            at = point + sum(lengths[:number])
            ids[at:at] = self.encode(needle)
        return self.decode(ids)

    def sample(
        self, values: dict[str, str], answers: tuple[str, ...], gold: str, length: int, depth: int | None
    ) -> Sample:
        before, context, after = filled(prompts("needlebench")[self.task.category][self.language.code], **values)
        how = {"before": before, "template": "chat", "cut": "none", "group": str(length)}
        source, place = {"gold": gold, "length": length}, None if depth is None else depth / 100
        return self.task.sample(context, after, answers, depth=place, source=source, **how)


@dataclass(frozen=True)
class Needles:
    """Samples of the tasks single and multi_retrieval."""

    haystack: Haystack
    needles: Sequence[Row]  # in all languages

    def samples(self, counter: int, length: int) -> Iterator[Sample]:
        if self.haystack.task.category == "single":
            chosen = Random(counter).choice(self.own)
            needle, keyword = f"\n{chosen.text('needle')}\n", chosen.text("arg2")
            for depth in DEPTHS:
                text = self.haystack.hide([needle], depth, 0, length)
                values = {"context": text, "question": chosen.text("retrieval_question")}
                yield self.haystack.sample(values, (keyword,), f"{needle}*{keyword}", length, depth)
        else:
            several = list(self.distinct)
            Random(counter).shuffle(several)
            text = self.haystack.hide([f"\n{row.text('needle')}\n" for row in several], 0, DEPTHS.step, length)
            keywords = tuple(row.text("arg2") for row in several)
            gold = f"{'*'.join(keywords)}#{'*'.join(map(str, DEPTHS))}"
            values = {"context": text, "question": self._joined(several)}
            yield self.haystack.sample(values, keywords, gold, length, None)

    @cached_property
    def own(self) -> list[Row]:
        """The needles in the task's language."""
        return [row for row in self.needles if row.text("language") == self.haystack.language.name]

    @cached_property
    def distinct(self) -> list[Row]:
        """Randomly drawn needles, one a depth, with different subjects and key words."""
        rows = list(self.needles)
        Random(0).shuffle(rows)
        found: list[Row] = []
        subjects: set[str] = set()
        keywords: set[str] = set()
        for row in rows:
            subject, keyword = row.text("arg1"), row.text("arg2")
            new = subject not in subjects and keyword not in keywords
            if new and len(found) < len(DEPTHS) and row.text("language") == self.haystack.language.name:
                subjects.add(subject)
                keywords.add(keyword)
                found.append(row)
        return found

    def _joined(self, chosen: Sequence[Row]) -> str:
        """Return one text with all questions and the form of all answers."""
        mark, stop = self.haystack.language.question_mark, self.haystack.language.stop
        asked = [row.text("retrieval_question") for row in chosen]
        questions = "、".join(text.split(mark)[0] + mark for text in asked)
        forms = "、".join([*text.split("'"), ""][1].split(stop)[0] for text in asked)
        if self.haystack.language.code == "zh":
            return f"{questions}请按照'{forms}'的格式回答。"
        return f"{questions}Please answer in the format of '{forms}'"


@dataclass(frozen=True)
class Chain:
    """Samples of multi_reasoning: who is the eldest relative that the last person can trace back to?"""

    haystack: Haystack
    names: Sequence[str]
    n_needles: int

    def samples(self, counter: int, length: int) -> Iterator[Sample]:
        rng, data, code = Random(counter), prompts("needlebench"), self.haystack.language.code
        names = rng.sample(self.names, self.n_needles + 1)
        needles = []
        for elder, younger in pairwise(names):
            statement = rng.choice(data["statements"][code])
            values = {"A": elder, "B": younger, "relationship": rng.choice(data["relatives"][code])}
            needles.append(f"\n{statement.format(**values)}\n")
        rng.shuffle(needles)
        question = data["eldest"][code].replace("{last_person}", names[-1])
        for depth in DEPTHS:
            text = self.haystack.hide(needles, depth, BETWEEN, length, chained=True)
            values = {"context": text, "question": question, "last_person": names[-1]}
            yield self.haystack.sample(values, (names[0],), names[0], length, depth)
