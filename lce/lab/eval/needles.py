"""The facts that a haystack hides and a question asks for.

A needle is a statement, a question whose last words begin the answer, and the answer. The pass key is worded as in
the passkey task of Mohtashami and Jaggi (2023), which states it twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from lce.lab.eval.prose import ANIMALS, COLOURS, FOODS, NAMES, PLACES, THINGS


@dataclass(frozen=True)
class Needle:
    """One hidden fact.

    `statement` goes into the text. `question` ends the prompt. A model that read the statement continues with
    `answer`. Example: `passkey(Random(0))` asks "What is the pass key? The pass key is" for five digits.
    """

    statement: str
    question: str
    answer: str
    topic: str  # two needles of one topic in one text would contradict each other


_DRAWN = {"name": NAMES, "colour": COLOURS, "thing": THINGS, "animal": ANIMALS, "place": PLACES, "food": FOODS}
# The fields to draw, in order; the statement, the question and the answer; the topic.
_KINDS = {
    "passkey": (
        "5", "The pass key is {5}. Remember it. {5} is the pass key.", "What is the pass key? The pass key is", "{5}",
        "pass key",
    ),
    "code": (
        "colour thing 4", "The code of the {colour} {thing} is {4}.",
        "What is the code of the {colour} {thing}? The code of the {colour} {thing} is", "{4}", "the {colour} {thing}",
    ),
    "secret": (
        "name colour animal", "The secret of {name} is the {colour} {animal}.",
        "What is the secret of {name}? The secret of {name} is the", "{colour} {animal}", "secret of {name}",
    ),
    "place": (
        "name thing place", "{name} hid the {thing} in the {place}.",
        "Where did {name} hide the {thing}? {name} hid the {thing} in the", "{place}", "{name} {thing}",
    ),
    "favourite": (
        "name food", "Most of all {name} likes {food}.", "What does {name} like? Most of all {name} likes", "{food}",
        "favourite of {name}",
    ),
}  # fmt: skip


def _needle(kind: str, rng: Random) -> Needle:
    draws, *texts = _KINDS[kind]
    drawn = {}
    for name in draws.split():
        drawn[name] = rng.choice(_DRAWN[name]) if name in _DRAWN else digits(rng, int(name))
    return Needle(*(re.sub(r"\{(\w+)\}", lambda found: drawn[found[1]], text) for text in texts))


def digits(rng: Random, n: int) -> str:
    """Return `n` random digits."""
    return "".join(rng.choice("0123456789") for _ in range(n))


NEEDLES: dict[str, Callable[[Random], Needle]] = {kind: partial(_needle, kind) for kind in _KINDS}
passkey = NEEDLES["passkey"]
