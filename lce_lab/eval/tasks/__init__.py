"""Tasks that lce generates from a seed, at any length and for any tokenizer. `TASKS` maps names to classes."""

from __future__ import annotations

from lce_lab.eval.tasks import chains, keys, lists, medley
from lce_lab.eval.tasks.base import MadeTask, Puzzle, Question

TASKS: dict[str, type[MadeTask]] = {
    task.name: task for task in (*keys.TASKS, *lists.TASKS, *chains.TASKS, *medley.TASKS)
}

__all__ = ["TASKS", "MadeTask", "Puzzle", "Question"]
