"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from lce.errors import CapacityError


def write_whole(path: Path, data: bytes) -> None:
    """Write a file under another name and rename it, so that it is whole or as it was before."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise CapacityError(f"cannot write {path}: {error.strerror}; free some space or name another file") from error
    finally:
        partial.unlink(missing_ok=True)
