"""The work folder of a calibration: finished pieces and layers stay there until all are finished.

Each file is sealed and says which plan and place it belongs to. A file that is damaged, or belongs elsewhere, counts as
missing. What is no regular file is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from lce.errors import CapacityError, DataError, UsageError
from lce.files import named, open_regular, write_whole
from lce.methods.map_file import read_sealed, sealed

_PLAN = "plan.json"
_PLAN_BYTES = 1 << 16
_HEADER_BYTES = 1 << 16  # of a file, besides its tensors
_WORK_FILE = re.compile(r"\.?(piece|layer)-\d+.*\.(safetensors|tmp)|\.plan\.json\..*\.tmp")


class WorkFolder:
    """The work folder of one calibration. Only the calibration's own files are read, replaced and removed.

    `largest` bounds the bytes of the tensors in a file. `note` is called with a line about each file that is damaged.
    """

    def __init__(self, folder: Path, plan: dict[str, Any], largest: int, note: Callable[[str], None]) -> None:
        self.folder = folder
        self.plan = plan
        self.most = largest + _HEADER_BYTES
        self.note = note
        self._plan_digest = _digest(plan)

    def begin(self, needed: int) -> None:
        """Make the folder, for `needed` bytes, or go on with that of an earlier call with the same plan."""
        self._check_kind()
        earlier = self._earlier_plan()
        if earlier is not None and earlier != self.plan:
            differ = ", ".join(key for key in self.plan if earlier.get(key) != self.plan[key])
            raise UsageError(
                f"{named(self.folder)} was begun with other options, text or model ({differ}); finish it with those, "
                "or delete it"
            )
        free = shutil.disk_usage(self.folder.parent).free
        if earlier is None and needed > free:
            raise CapacityError(
                f"calibrating needs {needed:,} bytes for queries and keys in {named(self.folder)}, {free:,} are free; "
                "give fewer --tokens"
            )
        if earlier is None:
            try:
                self.folder.mkdir(exist_ok=True)
            except OSError as error:
                raise DataError(f"cannot write {named(self.folder)}: {error.strerror}") from error
            content = {"plan": self.plan, "digest": self._plan_digest}
            write_whole(self.folder / _PLAN, json.dumps(content).encode())

    def _check_kind(self) -> None:
        """Raise `DataError` if the folder's name belongs to something that is no folder."""
        try:
            mode = os.lstat(self.folder).st_mode
        except FileNotFoundError:
            return
        except OSError as error:
            raise DataError(f"cannot write {named(self.folder)}: {error.strerror}; name another file") from None
        if not stat.S_ISDIR(mode):
            raise DataError(f"{named(self.folder)} is no folder; remove it, or give another name for the maps")

    def _earlier_plan(self) -> dict[str, Any] | None:
        """Return the plan of an earlier call; None if there was none, or if its file is damaged."""
        path = self.folder / _PLAN
        if not os.path.lexists(path):
            return None
        with open(open_regular(path, follow=False), "rb") as file:
            raw = file.read(_PLAN_BYTES)
        try:
            content = json.loads(raw)
            plan: dict[str, Any] = content["plan"]
            if content["digest"] == _digest(plan):
                return plan
        except (ValueError, LookupError, TypeError, RecursionError):
            pass
        self.note(f"{named(path)} is damaged; work that belongs to the present options is kept")
        return None

    def has(self, place: str) -> bool:
        """Whether there is a file of this place, whole or not."""
        return os.path.lexists(self.folder / place)

    def write(self, place: str, tensors: dict[str, Tensor], facts: str = "") -> None:
        """Write the file of a place; it appears whole or not at all."""
        data = sealed(tensors, {"plan": self._plan_digest, "place": place, "facts": facts})
        write_whole(self.folder / place, data)

    def read(self, place: str) -> tuple[dict[str, Tensor], str] | None:
        """Return the tensors and facts of a place; None if there is no file, or a damaged or a foreign one."""
        if not self.has(place):
            return None
        path = self.folder / place
        try:
            tensors, metadata = read_sealed(path, self.most)
            if (metadata.get("plan"), metadata.get("place")) != (self._plan_digest, place):
                raise ValueError("it belongs to another calibration or place")
        except (OSError, ValueError) as error:
            self.note(f"{named(path)} cannot be used: {error}; it is computed again")
            return None
        return tensors, metadata["facts"]

    def remove(self) -> None:
        """Remove the folder, unless it holds files that are not the calibration's."""
        for path in sorted(self.folder.iterdir()):
            if _WORK_FILE.fullmatch(path.name) and path.is_file():
                path.unlink()
        (self.folder / _PLAN).unlink(missing_ok=True)
        if not any(self.folder.iterdir()):
            self.folder.rmdir()


def _digest(plan: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()
