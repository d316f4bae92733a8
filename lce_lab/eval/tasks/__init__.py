"""Tasks that lce generates from a seed, at any length and for any tokenizer. `TASKS` maps names to classes."""

from __future__ import annotations

from lce_lab.eval.tasks import chains, facts, keys, lists, medley
from lce_lab.eval.tasks.base import MadeTask, Puzzle, Question

TASKS: dict[str, type[MadeTask]] = {  # in the order in which the files define them; a base of several has no name
    kind.name: kind
    for module in (keys, lists, chains, facts, medley)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, MadeTask) and hasattr(kind, "name")
}

__all__ = ["TASKS", "MadeTask", "Puzzle", "Question"]
