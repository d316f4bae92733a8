"""The filler prose: endless, varied, of one topic in a scene, and without facts."""

from __future__ import annotations

from itertools import islice
from random import Random

from lce.lab.eval.prose import sentences


def test_prose_goes_on_and_states_no_fact() -> None:
    text = " ".join(islice(sentences(Random(3)), 3000))
    assert len(set(islice(sentences(Random(3)), 3000))) > 2000
    for word in ("pass key", "secret", "code of", " hid ", "Most of all"):
        assert word not in text
    assert not any(character.isdigit() for character in text)


def test_a_seed_says_which_prose() -> None:
    first, again, other = (list(islice(sentences(Random(seed)), 50)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
