"""Tasks of facts hidden in a text: one fact, or several keys, values or questions (RULER's NIAH, arXiv:2404.06654)."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import ClassVar, NamedTuple

from lce_lab.eval import prose
from lce_lab.eval.prose import COLOURS, NAMES, THINGS
from lce_lab.eval.tasks.base import WORDS, MadeTask, Puzzle, Question, digits, distinct

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


def check_ordinals(knob: str, value: int) -> None:
    """Raise `ValueError` if `value` has no word in `ORDINALS`."""
    if value > len(ORDINALS):
        raise ValueError(f"{knob} is {value}; expected {len(ORDINALS)} or fewer")


class Needle(NamedTuple):
    """A hidden fact. `statement` goes into a text, `question` ends the prompt, and `answer` continues `question`."""

    statement: str
    question: str
    answer: str


@dataclass(frozen=True)
class OneNeedle(MadeTask):
    """One fact in a text. `statement`, `question` and `answer` are templates.

    `drawn` lists the kinds of words to draw for the templates, in order; `n4` stands for four digits.
    """

    drawn: ClassVar[str]
    statement: ClassVar[str]
    question: ClassVar[str]  # ends with the beginning of the sentence that `answer` completes
    answer: ClassVar[str]
    opening: ClassVar[str] = ""  # the beginning of the document

    @classmethod
    def draw(cls, rng: Random) -> Needle:
        """Return a random fact. Two facts with the same question contradict each other."""
        words = {}
        for kind in cls.drawn.split():
            words[kind] = rng.choice(prose.WORDS[kind]) if kind in prose.WORDS else digits(rng, int(kind[1:]))
        return Needle(*(text.format(**words) for text in (cls.statement, cls.question, cls.answer)))

    def puzzle(self, rng: Random, n: int = 0) -> Puzzle:
        needle = self.draw(rng)
        question = Question(needle.question, needle.answer, (needle.answer,), (0,))
        return Puzzle((needle.statement,), (question,), self.opening)


class PassKey(OneNeedle):
    """A pass key of five digits, stated twice in one place, in the words of Mohtashami and Jaggi (2023)."""

    name, drawn = "passkey", "n5"
    statement = "The pass key is {n5}. Remember it. {n5} is the pass key."
    question, answer = "What is the pass key? The pass key is", "{n5}"


class PublishedPassKey(PassKey):
    """The pass key with the published opening (Mohtashami and Jaggi, 2023). The published filler is `noise`."""

    name = "passkey_published"
    opening = (
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
        "I will quiz you about the important information there."
    )


@dataclass(frozen=True)
class SplitPassKey(MadeTask):
    """A key in parts of three digits at different places. The question asks for all parts in order."""

    name = "split_passkey"
    metrics = ("recall",)
    parts: int = 2

    def puzzle(self, rng: Random, n: int = 0) -> Puzzle:
        check_ordinals("parts", self.parts)
        parts = distinct(rng, self.parts, lambda rng: digits(rng, 3))
        order = rng.sample(range(self.parts), self.parts)
        statements = tuple(f"The {ORDINALS[i]} part of the split key is {parts[i]}." for i in order)
        text, facts = "What is the split key? The split key is", tuple(range(self.parts))
        return Puzzle(statements, (Question(text, " ".join(parts), tuple(parts), facts),))


class Code(OneNeedle):
    """The four-digit code of a coloured thing."""

    name, drawn = "code", "colour thing n4"
    statement = "The code of the {colour} {thing} is {n4}."
    question = "What is the code of the {colour} {thing}? The code of the {colour} {thing} is"
    answer = "{n4}"


class Secret(OneNeedle):
    """The secret of a person: two words."""

    name, drawn = "secret", "name colour animal"
    statement = "The secret of {name} is the {colour} {animal}."
    question, answer = "What is the secret of {name}? The secret of {name} is the", "{colour} {animal}"


class HidingPlace(OneNeedle):
    """The place where a person hid a thing."""

    name, drawn = "place", "name thing place"
    statement = "{name} hid the {thing} in the {place}."
    question, answer = "Where did {name} hide the {thing}? {name} hid the {thing} in the", "{place}"


class Favourite(OneNeedle):
    """The favourite food of a person."""

    name, drawn = "favourite", "name food"
    statement = "Most of all {name} likes {food}."
    question, answer = "What does {name} like? Most of all {name} likes", "{food}"


NEEDLES = (PassKey, Code, Secret, HidingPlace, Favourite)


def _things(rng: Random, n: int) -> list[str]:
    return distinct(rng, n, lambda rng: f"the {rng.choice(COLOURS)} {rng.choice(THINGS)}")


@dataclass(frozen=True)
class SeveralKeys(MadeTask):
    """The codes of several things. The question asks for one code."""

    name = "several_keys"
    keys: int = 8

    def puzzle(self, rng: Random, n: int = 0) -> Puzzle:
        things, codes = _things(rng, self.keys), [digits(rng, 4) for _ in range(self.keys)]
        statements = tuple(f"The code of {thing} is {code}." for thing, code in zip(things, codes, strict=True))
        asked = rng.sample(range(self.keys), self.keys)
        questions = tuple(
            Question(f"What is the code of {things[i]}? The code of {things[i]} is", codes[i], (codes[i],), (i,))
            for i in asked
        )
        return Puzzle(statements, questions)


# Facts in words, each of another kind: the statement, the beginning of the question, and what is asked for. Of fourteen
# kinds, these are the eight that SmolLM2-135M found most often in 7,500 tokens of essays, with full attention.
FACTS = (
    ("{name} hid the {thing} in the {place}.", "Where did {name} hide the {thing}?", "place"),
    ("The key of the {place} lies under the {thing}.", "Where does the key of the {place} lie?", "thing"),
    ("{name} lost the {colour} {thing} near the {place}.", "Where did {name} lose the {colour} {thing}?", "place"),
    ("{name} repairs the {thing} with a {colour} ribbon.", "With what does {name} repair the {thing}?", "colour"),
    ("Behind the {place} {name} buried a {colour} {thing}.", "What did {name} bury behind the {place}?", "thing"),
    ("The {animal} of the {place} eats only {food}.", "What does the {animal} of the {place} eat?", "food"),
    ("The password of the {place} is {colour} {animal}.", "What is the password of the {place}?", "animal"),
    ("{name} taught the {animal} to carry the {thing}.", "What did {name} teach the {animal} to carry?", "thing"),
)


@dataclass(frozen=True)
class SeveralFacts(MadeTask):
    """Facts of different kinds, in words. The question asks for one of them.

    No fact distracts from another, so a small published model finds nearly all of them within its window.
    """

    name = "several_facts"
    facts: int = len(FACTS)

    def puzzle(self, rng: Random, n: int = 0) -> Puzzle:
        if self.facts > len(FACTS):
            raise ValueError(f"facts is {self.facts}; expected {len(FACTS)} or fewer")
        decks = {kind: rng.sample(words, len(words)) for kind, words in prose.WORDS.items()}
        statements, questions = [], []
        for number, (statement, question, asked) in enumerate(rng.sample(FACTS, self.facts)):
            words = {kind: deck[number] for kind, deck in decks.items()}  # no word is in two facts
            told, answer = statement.format(**words), words[asked]
            statements.append(told)
            text = f"{question.format(**words)} {told[: told.rindex(answer)].rstrip()}"
            questions.append(Question(text, answer, (answer,), (number,)))
        rng.shuffle(questions)
        return Puzzle(tuple(statements), tuple(questions))


@dataclass(frozen=True)
class SeveralQueries(MadeTask):
    """The codes of several things. The question asks for two codes."""

    name = "several_queries"
    metrics = ("recall",)
    keys: int = 6

    def puzzle(self, rng: Random, n: int = 0) -> Puzzle:
        things, codes = _things(rng, self.keys), distinct(rng, self.keys, lambda rng: digits(rng, 4))
        statements = tuple(f"The code of {thing} is {code}." for thing, code in zip(things, codes, strict=True))
        questions = []
        for _ in range(self.keys):
            i, j = rng.sample(range(self.keys), 2)
            text = f"What are the codes of {things[i]} and {things[j]}? The code of {things[i]} is"
            answer = f"{codes[i]} and the code of {things[j]} is {codes[j]}"
            questions.append(Question(text, answer, (codes[i], codes[j]), (i, j)))
        return Puzzle(statements, tuple(questions))


@dataclass(frozen=True)
class SeveralValues(MadeTask):
    """Several words of each of 1 + `others` people. The question asks for all words of one person."""

    name = "several_values"
    metrics = ("recall",)
    values: int = 3
    others: int = 2

    def puzzle(self, rng: Random, n: int = 0) -> Puzzle:
        names = rng.sample(NAMES, 1 + self.others)
        owners = [name for name in names for _ in range(self.values)]
        rng.shuffle(owners)
        words = distinct(rng, len(owners), lambda rng: rng.choice(WORDS))
        statements = tuple(f"One word of {owner} is {word}." for owner, word in zip(owners, words, strict=True))
        questions = []
        for name in names:
            facts = tuple(i for i, owner in enumerate(owners) if owner == name)
            answers = tuple(words[i] for i in facts)
            text = f"What are the words of {name}? The words of {name} are"
            questions.append(Question(text, ", ".join(answers), answers, facts))
        return Puzzle(statements, tuple(questions))


@dataclass(frozen=True)
class CountingStars(MadeTask):
    """Counts of stars in several statements. The question asks for all counts (Counting-Stars, arXiv:2403.11802)."""

    name = "counting_stars"
    metrics = ("recall",)
    times: int = 4

    def puzzle(self, rng: Random, n: int = 0) -> Puzzle:
        counts = distinct(rng, self.times, lambda rng: str(rng.randint(10, 99)))
        statements = tuple(f"The little penguin counted {count} stars." for count in counts)
        text = "How many stars did the little penguin count? The little penguin counted"
        return Puzzle(statements, (Question(text, ", ".join(counts), tuple(counts), tuple(range(self.times))),))
