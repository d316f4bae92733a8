"""The work folder of a calibration: finished pieces and layers stay there until all are finished.

Each file contains a digest of its content, a digest of the calibration's plan (options, model and text), and its own
file name (`place`). A damaged or renamed file, or one of another plan, is missing; no regular file: refused.
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
from lce.files import named, write_whole
from lce.methods.map_file import read_sealed, sealed

_PLAN = "plan.safetensors"
_HEADER_BYTES = 1 << 16  # the most bytes of a file besides its tensors
_WORK_FILE = re.compile(r"\.?(plan|piece-\d+-\d+|layer-\d+)\.safetensors(\..*\.tmp)?")


class WorkFolder:
    """The work folder of one calibration. Only the calibration's own files are read, replaced and removed.

    `plan` has everything that the results depend on. `largest` bounds the bytes of the tensors in a file. `note` is
    called with a line about each file that cannot be used.
    """

    def __init__(self, folder: Path, plan: dict[str, Any], largest: int, note: Callable[[str], None]) -> None:
        self.folder, self.plan, self.note = folder, plan, note
        self.most = largest + _HEADER_BYTES
        self._plan_digest = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()

    def begin(self, needed: int) -> None:
        """Make the folder if the disk has `needed` free bytes, or resume the folder of an earlier, equal call."""
        name = named(self.folder)
        if os.path.lexists(self.folder) and (self.folder.is_symlink() or not self.folder.is_dir()):
            raise DataError(f"{name} is no folder; remove it, or give another name for the maps")
        if self.has(_PLAN):
            if (held := self.read(_PLAN)) is not None:
                earlier = json.loads(held[1])
                if differ := ", ".join(key for key in self.plan if earlier.get(key) != self.plan[key]):
                    other = f"other options, text or model ({differ})"
                    raise UsageError(f"{name} was begun with {other}; finish it with those, or delete it")
                return
        elif needed > (free := shutil.disk_usage(self.folder.parent).free):
            missing = f"{needed:,} bytes for queries and keys in {name}, {free:,} are free"
            raise CapacityError(f"calibrating needs {missing}; give fewer --tokens")
        try:
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise DataError(f"cannot write {name}: {error.strerror}") from error
        self.write(_PLAN, {}, json.dumps(self.plan))

    def has(self, place: str) -> bool:
        """Return whether the folder has a file with the name `place`, damaged or not."""
        return os.path.lexists(self.folder / place)

    def write(self, place: str, tensors: dict[str, Tensor], facts: str = "") -> None:
        """Write tensors and a text of facts to the file `place`. The file appears whole or not at all."""
        data = sealed(tensors, {"plan": self._plan_digest, "place": place, "facts": facts})
        write_whole(self.folder / place, data)

    def read(self, place: str) -> tuple[dict[str, Tensor], str] | None:
        """Return the tensors and facts in the file `place`; None if the file is missing or cannot be used."""
        if not self.has(place):
            return None
        path = self.folder / place
        try:
            tensors, metadata = read_sealed(path, self.most)
            if metadata.get("place") != place or (place != _PLAN and metadata.get("plan") != self._plan_digest):
                raise ValueError("it belongs to another calibration or place")
        except (OSError, ValueError) as error:
            self.note(f"{named(path)} cannot be used: {error}; it is computed again")
            return None
        return tensors, metadata["facts"]

    def remove(self) -> None:
        """Remove the calibration's files, and the folder if it has no other files."""
        for path in sorted(self.folder.iterdir()):
            if _WORK_FILE.fullmatch(path.name) and path.is_file():
                path.unlink()
        if not any(self.folder.iterdir()):
            self.folder.rmdir()
