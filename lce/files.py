"""Files that appear whole or not at all.

A file under work has another name beside the one it is to have, and a lock by which the living are known: what a
process that is gone left behind is removed the next time.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import sys
from pathlib import Path

from lce.errors import CapacityError, DataError

_MAP_NORESERVE = 0x4000  # Linux; Python 3.11's mmap does not name it yet


def write_whole(path: Path, data: bytes) -> None:
    """Write a file under another name and rename it, so that it is whole or as it was before."""
    sweep(path)
    draft = draft_path(path)
    try:
        with open(draft, "xb") as file:
            lock(file.fileno(), draft)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.replace(draft, path)
        sync_folder(path.parent)
    except OSError as error:
        raise unwritable(str(path), error) from error
    finally:
        draft.unlink(missing_ok=True)


def lock(descriptor: int, path: Path) -> None:
    """Hold a file under work. Raises `DataError` where another process does."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise DataError(f"{path} is being written by another process; wait for it, or name another file") from None


def draft_path(target: Path) -> Path:
    """A name beside `target` for a file under work; `sweep` knows it."""
    return target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def sweep(target: Path) -> None:
    """Remove what processes that are gone left of `target` under work."""
    try:
        names = [
            name for name in os.listdir(target.parent) if name.startswith(f".{target.name}.") and name.endswith(".tmp")
        ]
    except OSError:
        return
    for name in names:
        remove_leftover(target.with_name(name))


def remove_leftover(path: Path) -> None:
    """Remove a file under work, unless a living process holds it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except OSError:
        pass  # it is held
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Make a name in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unwritable(name: str, error: OSError) -> CapacityError:
    """The error for a file that cannot be written."""
    return CapacityError(f"cannot write {name}: {error.strerror}; free some space or name another place")


def map_copy(descriptor: int, size: int) -> mmap.mmap:
    """A private map of a file's first bytes: writing to it never reaches the file, and it claims no memory ahead."""
    if sys.platform != "linux":
        return mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    return mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE, prot=protection)
