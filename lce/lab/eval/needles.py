"""The facts that are hidden in a haystack and then asked for.

A needle is a statement, a question whose last words begin the answer, and the answer. The pass key is worded as in
the passkey task of Mohtashami and Jaggi (2023), which states it twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from lce.lab.eval.prose import ANIMALS, COLOURS, FOODS, NAMES, PLACES, THINGS


@dataclass(frozen=True)
class Needle:
    """One hidden fact.

    `statement` goes into the text; `question` ends the prompt, and a model that read the statement goes on with
    `answer`. Example: `passkey(Random(0))` asks "What is the pass key? The pass key is" for five digits.
    """

    statement: str
    question: str
    answer: str
    topic: str  # two needles of one topic in one text would contradict each other


def _digits(rng: Random, n: int) -> str:
    return "".join(rng.choice("0123456789") for _ in range(n))


def passkey(rng: Random) -> Needle:
    """A pass key of five digits, stated twice."""
    key = _digits(rng, 5)
    return Needle(
        f"The pass key is {key}. Remember it. {key} is the pass key.",
        "What is the pass key? The pass key is",
        key,
        "pass key",
    )


def code(rng: Random) -> Needle:
    """The four-digit code of a coloured thing."""
    thing, key = f"the {rng.choice(COLOURS)} {rng.choice(THINGS)}", _digits(rng, 4)
    return Needle(f"The code of {thing} is {key}.", f"What is the code of {thing}? The code of {thing} is", key, thing)


def secret(rng: Random) -> Needle:
    """The secret of a named person: two words."""
    name, word = rng.choice(NAMES), f"{rng.choice(COLOURS)} {rng.choice(ANIMALS)}"
    return Needle(
        f"The secret of {name} is the {word}.",
        f"What is the secret of {name}? The secret of {name} is the",
        word,
        f"secret of {name}",
    )


def hiding_place(rng: Random) -> Needle:
    """Where a person hid a thing."""
    name, thing, place = rng.choice(NAMES), rng.choice(THINGS), rng.choice(PLACES)
    return Needle(
        f"{name} hid the {thing} in the {place}.",
        f"Where did {name} hide the {thing}? {name} hid the {thing} in the",
        place,
        f"{name} {thing}",
    )


def favourite(rng: Random) -> Needle:
    """What a person likes best to eat."""
    name, food = rng.choice(NAMES), rng.choice(FOODS)
    return Needle(
        f"Most of all {name} likes {food}.",
        f"What does {name} like? Most of all {name} likes",
        food,
        f"favourite of {name}",
    )


NEEDLES: dict[str, Callable[[Random], Needle]] = {
    "passkey": passkey,
    "code": code,
    "secret": secret,
    "place": hiding_place,
    "favourite": favourite,
}
