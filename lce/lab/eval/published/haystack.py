"""Builds the prompts of NeedleBench V2: texts joined and cut to a length, with needles at depths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from random import Random

from lce.lab.eval.published.base import Item, Task, Tokens, filled, prompts
from lce.lab.eval.published.reading import Row

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
    """Texts that are joined, cut to a length, and get needles; `shuffle` reorders the texts."""

    def __init__(self, tokens: Tokens, texts: Sequence[str]) -> None:
        self.texts = list(texts)
        self.encode = cache(tokens.encode_alone)
        self.decode = tokens.decode

    def shuffle(self, seed: int) -> None:
        Random(seed).shuffle(self.texts)

    def ids(self, length: int) -> list[int]:
        """Return the first `length` tokens of the texts."""
        found: list[int] = []
        for text in self.texts:
            found.extend(self.encode(text))
            if len(found) >= length:
                break
        return found[: max(0, length)]


@dataclass(frozen=True)
class Needles:
    """Items of the tasks single and multi_retrieval."""

    task: Task
    language: Language
    haystack: Haystack
    needles: Sequence[Row]  # in all languages

    def items(self, counter: int, length: int) -> Iterator[Item]:
        if self.task.category == "single":
            chosen = [Random(counter).choice(self.own)]
            for depth in DEPTHS:
                yield self._item(chosen, [depth], length, chosen[0].text("retrieval_question"), depth / 100)
        else:
            chosen = list(self.distinct)
            Random(counter).shuffle(chosen)
            yield self._item(chosen, DEPTHS, length, self._joined(chosen), None)

    def _item(
        self, chosen: Sequence[Row], depths: Sequence[int], length: int, question: str, depth: float | None
    ) -> Item:
        needles = [f"\n{row.text('needle')}\n" for row in chosen]
        lengths = [len(self.haystack.encode(needle)) for needle in needles]
        ids = self.haystack.ids(length - self.language.left - sum(lengths))
        points = [int(len(ids) * (percent / 100)) for percent in depths]
        for number, (needle, point) in enumerate(zip(needles, points, strict=True)):
            at = min(point + sum(lengths[:number]), len(ids))
            ids[at:at] = self.haystack.encode(needle)
        keywords = tuple(row.text("arg2") for row in chosen)
        gold = (
            f"{needles[0]}*{keywords[0]}" if depth is not None else f"{'*'.join(keywords)}#{'*'.join(map(str, depths))}"
        )
        values = {"context": self.haystack.decode(ids), "question": question}
        return _item(self.task, self.language, values, keywords, gold, length, depth)

    @cached_property
    def own(self) -> list[Row]:
        """The needles in `language`."""
        return [row for row in self.needles if row.text("language") == self.language.name]

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
            if new and len(found) < len(DEPTHS) and row.text("language") == self.language.name:
                subjects.add(subject)
                keywords.add(keyword)
                found.append(row)
        return found

    def _joined(self, chosen: Sequence[Row]) -> str:
        """Return one text with all questions and the form of all answers."""
        mark, stop = self.language.question_mark, self.language.stop
        asked = [row.text("retrieval_question") for row in chosen]
        questions = "、".join(text.split(mark)[0] + mark for text in asked)
        forms = "、".join([*text.split("'"), ""][1].split(stop)[0] for text in asked)
        if self.language.code == "zh":
            return f"{questions}请按照'{forms}'的格式回答。"
        return f"{questions}Please answer in the format of '{forms}'"


@dataclass(frozen=True)
class Chain:
    """Items of multi_reasoning: who is the eldest relative that the last person can trace back to."""

    task: Task
    language: Language
    haystack: Haystack
    names: Sequence[str]
    n_needles: int

    def items(self, counter: int, length: int) -> Iterator[Item]:
        rng, data, code = Random(counter), prompts("needlebench"), self.language.code
        names = rng.sample(self.names, self.n_needles + 1)
        needles = []
        for elder, younger in pairwise(names):
            statement = rng.choice(data["statements"][code])
            values = {"A": elder, "B": younger, "relationship": rng.choice(data["relatives"][code])}
            needles.append(f"\n{statement.format(**values)}\n")
        rng.shuffle(needles)
        question = data["eldest"][code].replace("{last_person}", names[-1])
        lengths = [len(self.haystack.encode(needle)) for needle in needles]
        for depth in DEPTHS:
            ids = self.haystack.ids(length - self.language.left - sum(lengths))
            self._insert(ids, needles, lengths, depth)
            values = {"context": self.haystack.decode(ids), "question": question, "last_person": names[-1]}
            yield _item(self.task, self.language, values, (names[0],), names[0], length, depth / 100)

    def _insert(self, ids: list[int], needles: Sequence[str], lengths: Sequence[int], depth: int) -> None:
        """Insert the first needle at `depth` percent, each other a tenth of the text behind the needle before.

        As published, the lengths of earlier needles are added twice to each point.
        """
        total = len(ids)
        points: list[int] = []
        for number in range(len(needles)):
            point = total * (depth / 100) if not number else points[-1] + lengths[number - 1] + total * (BETWEEN / 100)
            points.append(min(int(point), total + sum(lengths[:number])))
        for number, needle in enumerate(needles):
            at = points[number] + sum(lengths[:number])
            ids[at:at] = self.haystack.encode(needle)


def _item(
    task: Task, language: Language, values: Mapping[str, str], answers: tuple[str, ...], gold: str, length: int,
    depth: float | None,
) -> Item:  # fmt: skip
    before, context, after = filled(prompts("needlebench")[task.category][language.code], **values)
    return Item(
        0, before, context, after, answers, task.metrics[0], task.max_tokens, template="chat", cut="none", depth=depth,
        group=str(length), source={"gold": gold, "length": length},
    )  # fmt: skip
