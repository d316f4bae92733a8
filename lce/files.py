"""Atomic writes of files, and checked reads of a checkpoint's small files, which are not trusted.

A file is written under a temporary name beside its target, locked while it is written, and renamed when complete. A
temporary file that no process has locked was left by a crash; the next write to the same target removes it.
"""

import errno
import fcntl
import json
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import Any, BinaryIO

from lce.errors import CapacityError, DataError, LceError, ModelError, UsageError, shown

LFS_POINTER = b"version https://git-lfs"  # how a file begins that stands for one that was not fetched
MAX_FILE_BYTES = 16 << 20  # the largest config or tokenizer file that is read; published files have up to 2 MiB
MOST_NAME_BYTES, MOST_PATH_BYTES = 255, 4096  # of a file's name, and of a path with its final NUL, under Linux
# Gives the bytes of a named file, or None if there is none. Raises ModelError for a file of more than so many bytes.
Reader = Callable[[str, int], bytes | None]
_SETTLED = 0.05  # seconds within which a process locks a file that it creates; until then the file is left alone
MAX_JSON_VALUES = 1_000_000  # the most JSON values in such a file; one token in added_tokens_decoder takes 12


def path_of(path: object, what: str = "the path") -> Path:
    """Convert a user's value to a `Path`. Raises `UsageError` about `what` if no file can have this name."""
    if not isinstance(path, str | os.PathLike) or isinstance(os.fspath(path), bytes):
        raise UsageError(f"{what} is {shown(path)}; expected a str or a pathlib.Path")
    text = os.fspath(path)
    try:
        names = [len(os.fsencode(part)) for part in Path(text).parts]
        if max(names, default=0) > MOST_NAME_BYTES or len(os.fsencode(text)) >= MOST_PATH_BYTES:
            most = f"names of {MOST_NAME_BYTES} bytes at most, and fewer than {MOST_PATH_BYTES:,} in all"
            raise UsageError(f"{what} is {shown(text)}, which is too long; expected {most}")
        fits = "\0" not in text and text != ""
    except UnicodeEncodeError:
        fits = False
    if not fits:
        raise UsageError(f"{what} is {shown(text)}; expected the name of a file or a folder")
    return Path(text)


def cache_home() -> Path | None:
    """Return lce's folder in the user's cache, which may not exist; None for a user without a home folder."""
    try:
        return (Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lce").absolute()
    except (OSError, RuntimeError):
        return None


def open_regular(path: str | Path, error: type[LceError] = DataError, *, follow: bool = True) -> int:
    """Return a descriptor to read a regular file, without blocking. Raises `error` for others; links need `follow`."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    try:
        mode = os.stat(path, follow_symlinks=follow).st_mode
        if stat.S_ISREG(mode):  # checked first, because opening a device may have an effect
            return os.open(path, flags)
    except (OSError, ValueError) as failure:  # ValueError: a NUL in the name
        raise error(f"cannot read {named(path)}: {_reason(failure)}; check the path and its permissions") from None
    raise error(f"{named(path)} is {_kind(mode)}; expected a regular file")


def check_target(path: str | Path, error: type[LceError] = DataError) -> None:
    """Raise `error` if something other than a regular file exists at `path`, where a file is to be written."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    except (OSError, ValueError) as failure:
        raise error(f"cannot write {named(path)}: {_reason(failure)}; name another file") from None
    if not stat.S_ISREG(mode):
        raise error(f"{named(path)} is {_kind(mode)}; expected a regular file, or a name that is free")


def check_new(path: str | Path, force: bool, is_ours: Callable[[Path], bool] = lambda path: False) -> None:
    """Raise `UsageError` if a file exists, unless `force` or `is_ours(path)`; `DataError` if it is no regular file."""
    check_target(path)
    if not isinstance(force, bool):
        raise UsageError(f"force is {shown(force)}; expected True or False")
    if not force and os.path.lexists(path) and not is_ours(Path(path)):
        remedy = "name another file, or give --force to replace it (in Python, force=True)"
        raise UsageError(f"{named(path)} exists; {remedy}")


def check_folder(path: str | Path) -> None:
    """Raise an error if no file can be created in the folder of `path`. Creates and removes a file to find out."""
    draft = draft_path(Path(path).absolute())
    try:
        os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except (OSError, ValueError) as failure:
        if isinstance(failure, OSError) and failure.errno in (errno.ENOSPC, errno.EDQUOT):
            raise unwritable(named(path), failure) from failure
        fault = f"is not a folder that can be written ({_reason(failure)})"
        raise UsageError(f"{named(draft.parent)} {fault}; name another place") from None
    finally:
        with suppress(OSError, ValueError):
            os.unlink(draft)


def named(path: str | Path) -> str:
    """Return a path for messages: unchanged if it is printable and short, else escaped and shortened."""
    text = str(path)
    return text if text and text.isprintable() and len(text) <= 512 else shown(text, 240)


def _reason(failure: Exception) -> str:
    return getattr(failure, "strerror", None) or str(failure)


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a FIFO"}
    kinds |= {stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
    return kinds.get(stat.S_IFMT(mode), "no file")


def write_whole(path: Path, data: bytes, *, force: bool = True) -> None:
    """Write a file whole or not at all, even after a crash. Raises `UsageError` if the file exists, unless `force`."""
    check_new(path, force)
    with written_whole(path) as file:
        file.write(data)


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file; rename it to `path` at the end of `with`. An error or crash leaves `path` as it was."""
    check_target(path)
    sweep(path)
    draft = draft_path(path)
    try:
        with open(draft, "x+b") as file:
            lock(file.fileno(), draft)
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(draft, path)
        sync_folder(path.parent)
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        with suppress(OSError):  # a read-only file system refuses although there is no draft
            draft.unlink()


def lock(descriptor: int, path: Path) -> None:
    """Lock an open file for writing. Raises `DataError` if another process has locked the file."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise DataError(f"{named(path)} is being written by another process; wait, or name another file") from None


def draft_path(target: Path) -> Path:
    """Return a new temporary name beside `target`; `sweep` removes files with such names."""
    return target.with_name(f"{_draft_stem(target)}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def _draft_stem(target: Path) -> str:
    """Return how the temporary names of `target` begin. Targets with a long name may have the same beginning."""
    return os.fsdecode(f".{target.name}".encode(errors="surrogateescape")[: MOST_NAME_BYTES - 32])


def sweep(target: Path) -> None:
    """Remove the temporary files of `target` that ended processes left behind."""
    for path in list(target.parent.glob(f"{escape(_draft_stem(target))}.*.tmp")):
        remove_leftover(path)


def remove_leftover(path: Path) -> None:
    """Remove a temporary file, unless a process has locked it."""
    with suppress(DataError, OSError), open(open_regular(path, follow=False), "rb") as file:
        if time.time() - os.fstat(file.fileno()).st_ctime < _SETTLED:
            time.sleep(_SETTLED)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if another process has locked the file
        path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Flush a folder to disk, so that the names of new files survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unwritable(name: str | Path, error: OSError) -> CapacityError:
    """Return the `CapacityError` for a file that cannot be written because of `error`."""
    return CapacityError(f"cannot write {named(name)}: {error.strerror}; free some space or name another place")


def read_file(path: Path, most: int = MAX_FILE_BYTES) -> bytes | None:
    """Return the bytes of a checkpoint's file, None if it does not exist. Raises `ModelError` above `most` bytes."""
    if not os.path.lexists(path):
        return None
    try:
        with open(open_regular(path, ModelError), "rb") as file:
            raw = file.read(most + 1)
    except OSError as error:
        raise ModelError(f"cannot read {named(path)}: {error.strerror}; check the disk") from error
    if raw.startswith(LFS_POINTER):
        raise ModelError(f"{named(path)} is a Git LFS pointer, not the file; fetch it with `git lfs pull`")
    if len(raw) > most:
        raise ModelError(f"{named(path)} is larger than {most} bytes, which no such file is; download the file again")
    return raw


def object_of(raw: bytes | None, path: Path, most: int = MAX_JSON_VALUES, *, unique: bool = False) -> dict[str, Any]:
    """Return the JSON object in a file's bytes, {} for None. Raises `ModelError`, naming `path`, for other JSON."""
    if raw is None:
        return {}
    try:
        content = parse_json(raw, most, unique=unique)
    except JsonError as error:
        raise ModelError(f"{named(path)}: {error}; correct the file or download it again") from None
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise ModelError(f"{named(path)} holds a {kind}; expected a JSON object; correct the file or download it again")
    return content


class JsonError(ValueError):
    """The error for a text that is not JSON or has too many values. Callers put the message into their own error."""


def parse_json(raw: bytes, most: int, *, unique: bool = False) -> Any:
    """Parse an untrusted JSON text. Raises `JsonError`; also for an object that has a name twice, if `unique`.

    A text with more than `most` values and names is refused unparsed: a value takes up to about 100 bytes of memory.
    """
    n_values = sum(map(raw.count, (b",", b":", b"[", b"{")))  # one precedes each value and name except the first
    if n_values > most:
        raise JsonError(f"more than {most} JSON values; expected far fewer")
    try:
        return json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_unique if unique else None)
    except (ValueError, RecursionError) as error:
        raise JsonError(f"not valid JSON: {_json_fault(error)}") from None


def _json_fault(error: ValueError | RecursionError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    known = isinstance(error, json.JSONDecodeError | JsonError)
    return str(error) if known else "a number of thousands of digits"  # Python limits the digits of an integer


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise JsonError("a name appears twice")
    return found
