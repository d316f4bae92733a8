"""Asks an engine pass keys, as `lce eval passkey` does."""

from typing import Any

import lce
from lce_lab.eval.scores import Score
from lce_lab.eval.suite import MadeSuite, make_tasks


def pass_keys(engine: lce.Engine, length: int, n: int, *, seed: int = 0, filler: str = "prose", **how: Any) -> Score:
    """Return the score of `n` pass keys in texts of `length` tokens; `how` is for `MadeSuite.evaluate`."""
    return MadeSuite(n, seed, filler).evaluate(engine, make_tasks(["passkey"])[0], length, **how)
