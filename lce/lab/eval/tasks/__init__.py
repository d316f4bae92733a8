"""Tasks made here: seeded, at any length, for any tokenizer. `TASKS` has them by name."""

from __future__ import annotations

from lce.lab.eval.tasks.base import MadeTask, Puzzle, Question
from lce.lab.eval.tasks.chains import Variables, Walk, Whereabouts
from lce.lab.eval.tasks.keys import (
    Code,
    CountingStars,
    Favourite,
    HidingPlace,
    PassKey,
    PublishedPassKey,
    Secret,
    SeveralKeys,
    SeveralQueries,
    SeveralValues,
    SplitPassKey,
)
from lce.lab.eval.tasks.lists import CommonWords, FrequentWords, NthRequest, Pairs

_CLASSES: tuple[type[MadeTask], ...] = (
    PassKey, PublishedPassKey, SplitPassKey, Code, Secret, HidingPlace, Favourite, SeveralKeys, SeveralQueries,
    SeveralValues, CountingStars, Pairs, CommonWords, FrequentWords, NthRequest, Variables, Walk, Whereabouts,
)  # fmt: skip
TASKS: dict[str, type[MadeTask]] = {task.name: task for task in _CLASSES}

__all__ = ["TASKS", "MadeTask", "Puzzle", "Question"]
