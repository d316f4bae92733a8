"""Files that appear whole or not at all."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

from lce.errors import CapacityError

_MAP_NORESERVE = 0x4000  # Linux; Python 3.11's mmap does not name it yet


def map_copy(descriptor: int, size: int) -> mmap.mmap:
    """A private map of a file's first bytes: writing to it never reaches the file, and it claims no memory ahead."""
    if sys.platform != "linux":
        return mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    return mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE, prot=protection)


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
