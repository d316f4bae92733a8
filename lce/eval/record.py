"""A record of answered samples, so that a long evaluation can be interrupted, resumed and shared out.

The file has one JSON line an answer: everything that the answer depends on, the hash of the prompt, the answer that was
expected, the model's answer, and whether it is right. A sample in it is not asked again. Older lines lack the texts.

Lines are appended under a lock and flushed to disk, so several processes may add to one file. An incomplete last line,
left by a crash, is ignored and then overwritten.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lce.errors import DataError, shown
from lce.files import check_target, lock, named, open_regular, unwritable

LARGEST_FILE = 1 << 30  # bytes; a line has some 700
LOCK_TRIES, LOCK_PAUSE_S = 50, 0.1  # another process holds the lock while it writes one line


@dataclass(frozen=True)
class Answer:
    """A model's answer to a sample, and whether it is right; None for texts that a line does not have."""

    right: bool
    prompt: str | None = None  # a hash of the text
    expected: str | None = None
    answer: str | None = None


class Record:
    """The answers in one file. Raises `DataError` for a file that cannot be used, before any work."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._answers: dict[str, Answer] = {}
        self._values: dict[str, set[str]] = {}
        check_target(self.path)
        if self.path.exists():
            data = self._bytes()
            for number, line in enumerate(data[: data.rfind(b"\n") + 1].split(b"\n")[:-1], 1):
                self._read(line, number)

    def _bytes(self) -> bytes:
        with open(open_regular(self.path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > LARGEST_FILE:
                raise DataError(f"{named(self.path)} has {size} bytes; expected {LARGEST_FILE} or fewer in a record")
            try:
                return file.read()
            except OSError as error:
                raise DataError(f"cannot read {named(self.path)}: {error.strerror}; name another file") from error

    def _read(self, line: bytes, number: int) -> None:
        try:
            sample = json.loads(line)
            answer = Answer(**{name: sample.pop(name) for name in Answer.__dataclass_fields__ if name in sample})
            texts = (answer.prompt, answer.expected, answer.answer)
            if not isinstance(answer.right, bool) or not all(isinstance(x, str | None) for x in texts):
                raise TypeError
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            text = shown(line[:60].decode(errors="replace"))
            raise DataError(
                f"{named(self.path)} is no record of answers: line {number} is {text}; correct the line, or name "
                "another file"
            ) from None
        for name, value in sample.items():
            if isinstance(value, str):
                self._values.setdefault(name, set()).add(value)
        self._answers[_key(sample)] = answer

    def values(self, name: str) -> set[str]:
        """The texts that the samples in the file have under a name."""
        return self._values.get(name, set())

    def given(self, sample: dict[str, Any], prompt: str) -> Answer | None:
        """The recorded answer to this sample; None without one, and for one to another prompt."""
        found = self._answers.get(_key(sample))
        return found if found is not None and found.prompt in (None, text_hash(prompt)) else None

    def prepare(self) -> None:
        """Raise `DataError` where no answer can be added."""
        os.close(self._opened())

    def add(self, sample: dict[str, Any], answer: Answer) -> None:
        """Append one answer to the file. Raises `CapacityError` where the disk is full; the file stays whole then."""
        line = json.dumps({**sample, **{k: v for k, v in asdict(answer).items() if v is not None}}).encode() + b"\n"
        descriptor = self._opened()
        try:
            _lock(descriptor, self.path)
            end = _end_of_lines(descriptor)
            os.ftruncate(descriptor, end)
            try:
                _write(descriptor, line, end)
                os.fsync(descriptor)
            except BaseException:
                os.ftruncate(descriptor, end)
                raise
        except OSError as error:
            raise unwritable(self.path, error) from error
        finally:
            os.close(descriptor)
        self._answers[_key(sample)] = answer

    def _opened(self) -> int:
        check_target(self.path)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            return os.open(self.path, flags, 0o644)
        except OSError as error:
            raise DataError(f"cannot write {named(self.path)}: {error.strerror}; name another file") from error


def text_hash(text: str) -> str:
    """A short hash that tells prompts apart."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _lock(descriptor: int, path: Path) -> None:
    """Lock the file; waits a little for a process that is adding a line."""
    for _ in range(LOCK_TRIES):
        try:
            return lock(descriptor, path)
        except DataError:
            time.sleep(LOCK_PAUSE_S)
    lock(descriptor, path)


def _write(descriptor: int, data: bytes, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _end_of_lines(descriptor: int, piece: int = 1 << 16) -> int:
    """The offset behind the last whole line."""
    end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - piece)
        at = os.pread(descriptor, end - start, start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0


def _key(sample: dict[str, Any]) -> str:
    return json.dumps(sample, sort_keys=True)
