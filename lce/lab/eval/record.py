"""A record of answered samples, so that a long evaluation can be interrupted, resumed and shared out.

The file has one JSON line an answer: everything that the answer depends on, which identifies the sample, and the fields
of `Answer`. A recorded sample is not asked again.

Lines are appended under a lock and flushed to disk, so several processes may add to one file. An incomplete last line,
left by a crash, is ignored and then overwritten. A file whose last line begins in another way is refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, get_args, get_origin, get_type_hints

from lce.errors import DataError, shown
from lce.files import check_target, lock, named, open_regular, unwritable

BEGINNING = b'{"task": '  # of every line
LARGEST_FILE = 1 << 30  # bytes; a line has some 1,500
MOST = 1 << 62  # largest number in a line
LOCK_TRIES, LOCK_PAUSE_S = 50, 0.1  # another process holds the lock while it writes one line


@dataclass(frozen=True)
class Answer:
    """A model's answer to a sample, its score, and facts about both; None for fields that a line does not have."""

    positive: ClassVar = ()
    shares: ClassVar = ("score", "depth", "chance")

    right: bool  # whether the score is 1
    prompt: str | None = None  # a hash of the text
    expected: str | list[str] | None = None  # a perfect answer, or the texts that the metric looks for
    answer: str | None = None
    score: float | None = None  # 0 to 1
    metric: str | None = None
    document: int | None = None  # its number; a document may have several questions
    depth: float | None = None  # of the first fact: 0 is the document's beginning, 1 its end
    chance: float | None = None  # the score of another sample's perfect answer
    prompt_tokens: int | None = None  # all tokens read before the answer
    read_bytes: int | None = None  # of keys, values and their summaries, by a decode step behind the answer
    method: str | None = None
    knobs: dict[str, Any] | None = None  # of the method, as it was resolved for the window
    window: int | None = None
    checkpoint: str | None = None  # what the user called the model
    version: str | None = None  # of lce
    ceiling: bool | None = None  # whether the sample measures the ceiling within the window

    @property
    def value(self) -> float:
        """Return the score, 0 to 1."""
        return float(self.right) if self.score is None else self.score


def is_sound(line: Any) -> bool:
    """Return whether each field of `line` has its type and is in range. Lines of a file are not trusted.

    Numbers are finite and not negative. Fields named in `positive` are above 0, fields named in `shares` at most 1.
    """
    hints, positive, shares = get_type_hints(type(line)), line.positive, line.shares
    found = {field.name: getattr(line, field.name) for field in dataclasses.fields(line)}
    return (
        all(_is_of(value, hints[name]) for name, value in found.items())
        and all(found[name] is None or found[name] > 0 for name in positive)
        and all(found[name] is None or found[name] <= 1 for name in shares)
    )


def _is_of(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is list:
        return isinstance(value, list) and all(_is_of(x, arguments[0]) for x in value)
    if origin is dict:
        return isinstance(value, dict)
    if arguments:  # a union
        return any(_is_of(value, kind) for kind in arguments)
    if hint in (int, float):
        return type(value) in (int, hint) and 0 <= value < MOST
    return type(value) is hint


Kind = TypeVar("Kind")


class Lines(Generic[Kind]):
    """The lines of one file; each has a sample and a value of one kind, such as an `Answer`.

    Raises `DataError` for a file that cannot be used, before any work.
    """

    kind: type[Kind]
    holds: ClassVar[str] = "answers"

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._answers: dict[str, tuple[dict[str, Any], Kind]] = {}
        self._values: dict[str, set[str]] = {}
        check_target(self.path)
        if self.path.exists():
            *lines, rest = self._bytes().split(b"\n")
            for number, line in enumerate(lines, 1):
                self._read(line, number)
            if rest[: len(BEGINNING)] != BEGINNING[: len(rest)]:
                raise self._strange(rest, len(lines) + 1)

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
            fields = {field.name for field in dataclasses.fields(self.kind)}  # type: ignore[arg-type]
            answer = self.kind(**{name: sample.pop(name) for name in fields & sample.keys()})
            if not is_sound(answer):
                raise TypeError
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise self._strange(line, number) from None
        for name, value in sample.items():
            if isinstance(value, str):
                self._values.setdefault(name, set()).add(value)
        self._answers[_key(sample)] = (sample, answer)

    def _strange(self, line: bytes, number: int) -> DataError:
        found = f"{self.holds}: line {number} is {shown(line[:60].decode(errors='replace'))}"
        return DataError(f"{named(self.path)} is no record of {found}; correct the line, or name another file")

    def values(self, name: str) -> set[str]:
        """Return the texts of the samples' field `name`."""
        return self._values.get(name, set())

    def get(self, sample: dict[str, Any]) -> Kind | None:
        """Return the recorded value of a sample; None without one."""
        return self._answers.get(_key(sample), (None, None))[1]

    def items(self) -> Iterator[tuple[str, dict[str, Any], Kind]]:
        """Yield each sample once: a text that identifies the sample in any file, the sample, the last answer."""
        return ((key, *found) for key, found in self._answers.items())

    def prepare(self) -> None:
        """Raise `DataError` if no answer can be added."""
        self._opened().close()

    def add(self, sample: dict[str, Any], answer: Kind) -> None:
        """Append one answer to the file. Raises `CapacityError` if the disk is full; the file then stays whole."""
        self.add_all([(sample, answer)])

    def add_all(self, answered: Sequence[tuple[dict[str, Any], Kind]]) -> None:
        """Append several answers in one write. A process killed meanwhile leaves the first few, each whole."""
        for _, answer in answered:
            if not is_sound(answer):  # this line would make the file unreadable
                found = shown(repr(answer), 240)
                raise DataError(
                    f"cannot record {found}: a number is NaN or out of its range; check the model's weights"
                )
        lines = b"".join(_line(sample, answer) for sample, answer in answered)
        try:
            with self._opened() as file:
                descriptor = file.fileno()
                _lock(descriptor, self.path)
                end = _end_of_lines(descriptor)
                os.ftruncate(descriptor, end)
                try:
                    _write(descriptor, lines, end)
                    os.fsync(descriptor)
                except BaseException:
                    os.ftruncate(descriptor, end)
                    raise
        except OSError as error:
            raise unwritable(self.path, error) from error
        self._answers.update((_key(sample), (sample, answer)) for sample, answer in answered)

    def _opened(self) -> io.FileIO:
        """Open the file, made if missing. The file object closes the file and frees its lock at any Ctrl-C."""
        check_target(self.path)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            return io.FileIO(self.path, "r+", opener=lambda path, _: os.open(path, flags, 0o644))
        except OSError as error:
            raise DataError(f"cannot write {named(self.path)}: {error.strerror}; name another file") from error


class Record(Lines[Answer]):
    """The answers in one file."""

    kind = Answer

    def given(self, sample: dict[str, Any], prompt: str) -> Answer | None:
        """Return the recorded answer to this sample and prompt, or None."""
        found = self.get(sample)
        return found if found is not None and found.prompt in (None, text_hash(prompt)) else None


def text_hash(text: str) -> str:
    """Return a short hash of a prompt."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _lock(descriptor: int, path: Path) -> None:
    """Lock the file; wait briefly for a process that is adding a line."""
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
    """Return the offset behind the last whole line."""
    end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - piece)
        at = os.pread(descriptor, end - start, start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0


def _line(sample: dict[str, Any], answer: Any) -> bytes:
    return json.dumps({**sample, **{k: v for k, v in asdict(answer).items() if v is not None}}).encode() + b"\n"


def _key(sample: dict[str, Any]) -> str:
    return json.dumps(sample, sort_keys=True)
