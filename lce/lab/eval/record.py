"""Records: what was measured, so that a long evaluation can be interrupted, resumed and shared out.

The file has one JSON line a measurement: all that it depends on, which identifies the sample, and the fields of an
`Answer`, a `Loss` or an `Attended`. A recorded sample is not measured again.

Lines are appended under a lock and flushed to disk, so several processes may add to one file. An incomplete last line,
left by a crash, is ignored and then overwritten. A file whose last line begins in another way is refused.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from lce.errors import DataError, shown
from lce.files import check_target, lock, named, open_regular, unwritable

BEGINNING = b'{"task": '  # how every line begins
LOCK_TRIES, LOCK_PAUSE_S = 50, 0.1  # another process holds the lock while it writes one line
PerHead = list[list[float]]  # layers, and their heads


@dataclass(frozen=True, kw_only=True)
class Line:
    """Facts about the engine, to read and to sort; None for fields that a line does not have."""

    method: str | None = None
    knobs: dict[str, Any] | None = None  # of the method, as it was resolved for the window
    window: int | None = None
    checkpoint: str | None = None  # what the user called the model
    version: str | None = None  # of lce


@dataclass(frozen=True)
class Answer(Line):
    """A model's answer to a sample, its score, and facts about both."""

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
    ceiling: bool | None = None  # whether the sample measures the ceiling within the window

    @property
    def value(self) -> float:
        """Return the score, 0 to 1."""
        return float(self.right) if self.score is None else self.score


@dataclass(frozen=True)
class Loss(Line):
    """The summed negative log-likelihood of some tokens."""

    nll: float
    tokens: int


@dataclass(frozen=True)
class Attended(Line):
    """What the watched queries of one text attended; shares are means over queries, by layer and head.

    `recall` is the attended share of true mass, `tokens` the number of attended tokens, and `fact` the attended share
    of the facts' tokens. `hit1` and `hit5` say whether a choice with a fact has the best, or one of the five best,
    scores of the query's choices; layers that choose nothing have no heads. `cover` is the share of choices that some
    head of some layer makes; `gini` is Gini's coefficient of how often each choice is made. `found` is, by layer, the
    share of the best tokens by exact scores that low-dim scores find. None: nothing to measure.

    Bytes are a query's reads in all layers: keys and values, each KV head's token once; the data to choose by; and the
    reads of full attention.
    """

    queries: int
    recall: PerHead
    tokens: PerHead
    read_bytes: float
    scored_bytes: float
    full_bytes: float
    fact: PerHead | None = None
    hit1: PerHead | None = None
    hit5: PerHead | None = None
    cover: float | None = None
    gini: float | None = None
    found: list[float] | None = None
    score: float | None = None  # of the answer, if any
    prompt: str | None = None  # a hash of the text


KINDS: dict[str, type[Line]] = {"right": Answer, "nll": Loss, "recall": Attended}  # by a field that only one kind has


class Record:
    """Measurements by sample, kept in a file, or in memory if `path` is None. A sample says what was measured.

    Raises `DataError` for a file that cannot be used, before any work.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._lines: dict[str, tuple[dict[str, Any], Any]] = {}
        if self.path is not None:
            check_target(self.path)
            if self.path.exists():
                self._read(self.path)

    def _read(self, path: Path) -> None:
        with open(open_regular(path), "rb") as file:
            *lines, rest = file.read().split(b"\n")
        for number, line in enumerate(lines, 1):
            try:
                sample, measured = _parsed(line)
            except (ValueError, TypeError, StopIteration):
                raise _strange(path, line, number) from None
            self._lines[_key(sample)] = sample, measured
        if rest[: len(BEGINNING)] != BEGINNING[: len(rest)]:
            raise _strange(path, rest, len(lines) + 1)

    def get(self, sample: dict[str, Any], prompt: str | None = None) -> Any:
        """Return what is recorded of a sample; None without a line, or if the line is of another prompt."""
        _, found = self._lines.get(_key(sample), (None, None))
        is_other = prompt is not None and found is not None and found.prompt not in (None, text_hash(prompt))
        return None if is_other else found

    def items(self) -> Iterator[tuple[str, dict[str, Any], Any]]:
        """Yield each sample once: a text that identifies the sample in any file, the sample, and its last line."""
        return ((key, *found) for key, found in self._lines.items())

    def prepare(self) -> None:
        """Raise `DataError` if no line can be added."""
        if self.path is not None:
            _opened(self.path).close()

    def add(self, sample: dict[str, Any], measured: Line) -> None:
        """Append one line to the file. Raises `CapacityError` if the disk is full; the file then stays whole."""
        self.add_all([(sample, measured)])

    def add_all(self, measured: Sequence[tuple[dict[str, Any], Line]]) -> None:
        """Append several lines in one write. A process killed meanwhile leaves the first few, each whole."""
        if self.path is not None:
            _append(self.path, b"".join(_line(*each) for each in measured))
        self._lines.update((_key(sample), (sample, each)) for sample, each in measured)


def _parsed(line: bytes) -> tuple[dict[str, Any], Line]:
    sample: Any = json.loads(line) if line.startswith(BEGINNING) else None
    kind = next(kind for sign, kind in KINDS.items() if sign in sample)
    given = {field: sample.pop(field.name) for field in fields(kind) if field.name in sample}
    for field, value in given.items():
        is_number = str(field.type).startswith(("int", "float"))
        if not isinstance(value, int | float | None if is_number else object):
            raise TypeError
    return sample, kind(**{field.name: value for field, value in given.items()})


def _strange(path: Path, line: bytes, number: int) -> DataError:
    found = f"line {number} is {shown(line[:60].decode(errors='replace'))}"
    return DataError(f"{named(path)} is no record: {found}; correct the line, or name another file")


def _append(path: Path, data: bytes) -> None:
    try:
        with _opened(path) as file:
            _lock(file.fileno(), path)
            end, written = _end_of_lines(file.fileno()), 0
            try:
                file.truncate(end)
                while written < len(data):
                    written += os.pwrite(file.fileno(), data[written:], end + written)
                os.fsync(file.fileno())
            except BaseException:
                file.truncate(end)
                raise
    except OSError as error:
        raise unwritable(path, error) from error


def _opened(path: Path) -> io.FileIO:
    """Open the file, made if missing. The file object closes the file and frees its lock at any Ctrl-C."""
    check_target(path)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return io.FileIO(path, "r+", opener=lambda path, _: os.open(path, flags, 0o644))
    except OSError as error:
        raise DataError(f"cannot write {named(path)}: {error.strerror}; name another file") from error


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


def _end_of_lines(descriptor: int) -> int:
    """Return the offset behind the last whole line."""
    size = os.fstat(descriptor).st_size
    return mmap(descriptor, size, access=ACCESS_READ).rfind(b"\n") + 1 if size else 0


def _line(sample: dict[str, Any], measured: Line) -> bytes:
    content = {**sample, **{name: value for name, value in asdict(measured).items() if value is not None}}
    try:
        return json.dumps(content, allow_nan=False).encode() + b"\n"
    except ValueError:  # this line would make reports meaningless
        found = shown(repr(measured), 240)
        raise DataError(f"cannot record {found}: a number is NaN or infinite; check the model's weights") from None


def _key(sample: dict[str, Any]) -> str:
    return json.dumps(sample, sort_keys=True)
