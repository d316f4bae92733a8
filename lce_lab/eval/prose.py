"""Makes endless simple English prose from a seed, for fillers and for the training text of the demo model.

The prose is a sequence of scenes of four to nine sentences. A scene is about a place, two people and two things, so
names and nouns recur nearby as in real text. No sentence states a fact that `lce_lab.eval.tasks` could ask about.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

_FOUND: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
WORDS: dict[str, list[str]] = {
    kind: _FOUND[kind].split() for kind in ("name", "colour", "thing", "animal", "place", "food", "adjective")
}
NAMES, COLOURS, THINGS, ANIMALS, PLACES, FOODS, ADJECTIVES = WORDS.values()
TIMES, WEATHER, TEMPLATES = (_FOUND[kind] for kind in ("time", "weather", "sentence"))


def scene(rng: Random) -> list[str]:
    """Return four to nine sentences about one place, two people and two things."""
    place, places = rng.choice(PLACES), rng.sample(PLACES, 2)
    people, things, animal = rng.sample(NAMES, 2), rng.sample(THINGS, 2), rng.choice(ANIMALS)
    sentences = []
    for template in rng.sample(TEMPLATES, rng.randint(4, 9)):
        first, second = rng.sample(people, 2)
        adjectives, foods = rng.sample(ADJECTIVES, 2), rng.sample(FOODS, 2)
        words = {"time": rng.choice(TIMES), "name": first, "name2": second}
        words["place"] = place if rng.random() < 0.6 else rng.choice(places)
        words |= {"thing": rng.choice(things), "animal": animal, "adj": adjectives[0], "adj2": adjectives[1]}
        words |= {"colour": rng.choice(COLOURS), "food": foods[0], "food2": foods[1]}
        sentences.append(template.format(**words))
    if rng.random() < 0.4:
        sentences.insert(rng.randrange(len(sentences)), rng.choice(WEATHER))
    return sentences


def sentences(rng: Random) -> Iterator[str]:
    """Yield endless prose, sentence by sentence."""
    while True:
        yield from scene(rng)
