"""The standard questions of a leaderboard, and the folder that keeps the answers: one record for each model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lce
from lce.errors import DataError, UsageError
from lce.files import named, path_of
from lce_lab.eval.record import Record
from lce_lab.eval.running import Asking, make_folder
from lce_lab.eval.suite import MadeSuite
from lce_lab.eval.tasks import MadeTask
from lce_lab.eval.tasks.medley import Medley

WINDOWS = (1 / 4, 15 / 16, 2, 4)  # the usual lengths, in windows
CEILING = 15 / 16  # the length of the ceiling's texts, in windows
TASK, SHARED = Medley(), Asking("shared")


@dataclass(frozen=True, kw_only=True)
class StandardSuite(MadeSuite):
    """A suite that reads each document once and asks all questions of `TASK`. The ceiling has one length."""

    samples: int = 4
    questions: int | None = 40
    asking: Asking = SHARED

    def ceiling_lengths(self, engine: lce.Engine, task: MadeTask, lengths: Sequence[int]) -> list[int]:
        return [int(CEILING * engine.window)]

    def usual_lengths(self, engine: lce.Engine) -> list[int]:
        """Return the lengths of `WINDOWS`, without the first if the questions do not fit into so short a text."""
        lengths = [int(share * engine.window) for share in WINDOWS]
        try:
            self.make(engine, TASK, lengths[0])
        except UsageError:
            return lengths[1:]
        return lengths


def rounds(
    engine: lce.Engine, loading: dict[str, Any], lengths: Sequence[int]
) -> list[tuple[dict[str, Any], Sequence[int]]]:
    """Return pairs: options of `lce.load`, and the lengths of the texts to ask an engine with these options about.

    A RoPE scaling without a factor stretches the window of `engine` to each length beyond this window; shorter lengths
    are left out. Raises `UsageError` if no length is left.
    """
    kind = loading["rope"]
    if kind in (None, "none", engine.setup.rope.kind) or loading["rope_factor"] is not None:
        return [(loading, lengths)]
    beyond = [length for length in lengths if length > engine.window]
    if not beyond:
        why = f"--rope {kind} stretches the window, {engine.window:,} tokens, and no length is beyond it"
        raise UsageError(f"{why}; give longer --lengths, or a --rope-factor")
    return [({**loading, "rope_factor": length / engine.window}, [length]) for length in beyond]


def records(folder: str | Path) -> list[Path]:
    """Return the records of a leaderboard's folder, which is made if missing. A folder of something else is refused."""
    folder = path_of(folder, "the folder")
    make_folder(folder, "records")
    files = sorted(folder.glob("*.jsonl"))
    for file in files:
        Record(file)
    others = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if others and not files:
        found = f"{named(folder)} holds {named(others[0])} and no record, *.jsonl"
        raise DataError(f"{found}; name a new folder, or a leaderboard's")
    return files


def record_of(folder: str | Path, model: str, fingerprint: str) -> Path:
    """Return the path of a model's record: the file of `folder` that ends with the fingerprint, or a new safe name."""
    ending = f"-{fingerprint[:8]}.jsonl"
    name = re.sub(r"[^A-Za-z0-9._]+", "-", Path(model).name)[:80].strip("-.") or "model"
    return next((file for file in records(folder) if file.name.endswith(ending)), path_of(folder) / f"{name}{ending}")
