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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from lce.errors import CapacityError, DataError, UsageError
from lce.files import named, open_regular, write_whole
from lce.methods.map_file import read_sealed, sealed

_PLAN = "plan.json"
_PLAN_BYTES = 1 << 16
_HEADER_BYTES = 1 << 16  # bytes of a file besides its tensors
_WORK_FILE = re.compile(r"\.?(piece|layer)-\d+.*\.(safetensors|tmp)|\.plan\.json\..*\.tmp")


class WorkFolder:
    """The work folder of one calibration. Only the calibration's own files are read, replaced and removed.

    `largest` bounds the bytes of the tensors in a file. `note` is called with a line about each file that is damaged.
    """

    def __init__(self, folder: Path, plan: dict[str, Any], largest: int, note: Callable[[str], None]) -> None:
        self.folder, self.plan, self.note = folder, plan, note
        self.most = largest + _HEADER_BYTES
        self._plan_digest = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()

    def begin(self, needed: int) -> None:
        """Make the folder, for `needed` bytes, or go on with that of an earlier call with the same plan."""
        name, path = named(self.folder), self.folder / _PLAN
        if os.path.lexists(self.folder) and (self.folder.is_symlink() or not self.folder.is_dir()):
            raise DataError(f"{name} is no folder; remove it, or give another name for the maps")
        if os.path.lexists(path):
            if self._can_resume(path):
                return
        elif needed > (free := shutil.disk_usage(self.folder.parent).free):
            raise CapacityError(
                f"calibrating needs {needed:,} bytes for queries and keys in {name}, {free:,} are free; give fewer "
                "--tokens"
            )
        try:
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise DataError(f"cannot write {name}: {error.strerror}") from error
        write_whole(path, json.dumps(self.plan).encode())

    def _can_resume(self, path: Path) -> bool:
        """Return whether an earlier call left its plan undamaged. Raises `UsageError` if that is another plan."""
        with open(open_regular(path, follow=False), "rb") as file:
            raw = file.read(_PLAN_BYTES)
        try:
            earlier = dict(json.loads(raw))
        except (ValueError, TypeError, RecursionError):
            self.note(f"{named(path)} is damaged; work that belongs to the present options is kept")
            return False
        if earlier != self.plan:
            differ = ", ".join(key for key in self.plan if earlier.get(key) != self.plan[key])
            raise UsageError(
                f"{named(self.folder)} was begun with other options, text or model ({differ}); finish it with those, "
                "or delete it"
            )
        return True

    def has(self, place: str) -> bool:
        """Return whether there is a file of this place, damaged or not."""
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
