"""Records: files of measurements, which make long evaluations resumable and divisible among processes.

A measurement is one JSON line: the fields of the sample, which say what the measurement depends on, and the fields of
the result, an `Answer`, a `Loss` or an `Attended`. A recorded sample is not measured again.

Lines are appended under a lock and flushed to disk, so several processes may add to one file. A crash can leave an
incomplete last line. Reading ignores this line, and the next write replaces it. A file with other content is refused.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from lce.errors import DataError, UsageError, shown
from lce.files import check_target, lock, named, open_regular, path_of, unwritable

BEGINNING = b'{"task": '  # how every line begins
LARGEST = 1e18  # of a number in a record, which may be a stranger's
LOCK_TRIES, LOCK_PAUSE_S = 50, 0.1  # a process holds the lock for one write, so a short wait is enough
PerHead = list[list[float]]  # one list per layer, with one number per head


@dataclass(frozen=True, kw_only=True)
class Line:
    """A measurement, with facts about the engine. Fields that a file's line lacks are None."""

    method: str | None = None
    knobs: dict[str, Any] | None = None  # the method's knobs, with the defaults for this window
    window: int | None = None
    checkpoint: str | None = None  # the model as the user named it
    version: str | None = None  # the version of lce


@dataclass(frozen=True)
class Answer(Line):
    """A model's answer to a sample, with its score."""

    right: bool  # whether the score is 1
    prompt: str | None = None  # the `text_hash` of the prompt
    expected: str | list[str] | None = None  # a perfect answer, or the texts that the metric looks for
    answer: str | None = None
    score: float | None = None  # 0 to 1
    metric: str | None = None
    document: int | None = None  # the document's number; several samples may ask about one document
    depth: float | None = None  # the place of the first fact: 0 is the document's beginning, 1 its end
    chance: float | None = None  # the score that another sample's right answer gets for this sample
    prompt_tokens: int | None = None  # all tokens read before the answer
    kind: str | None = None  # the question's task, in a document with questions of several tasks
    prefill_s: float | None = field(default=None, compare=False)  # seconds of a prefill that several questions share
    read_bytes: int | None = None  # bytes of keys, values and summaries read by a decode step after the answer
    ceiling: bool | None = None  # whether the sample measures the ceiling, the score of `full` within the window

    @property
    def value(self) -> float:
        """The score, 0 to 1."""
        return float(self.right) if self.score is None else self.score


@dataclass(frozen=True)
class Loss(Line):
    """The summed negative log-likelihood of some tokens."""

    nll: float
    tokens: int


@dataclass(frozen=True)
class Attended(Line):
    """What the watched queries of one text attended: means over these queries. A field that was not measured is None.

    Lists of the type `PerHead` are by layer and head. `recall` is the attended share of the true attention mass, and
    `tokens` the number of attended tokens. Facts are the sentences that the answer depends on; `fact` is the attended
    share of their tokens. `hit1` is the share of facts in a chunk with the best score of all chunks, and `hit5` the
    share of facts in one of the five best chunks; both are empty for layers that choose nothing. `cover` is the share
    of chunks that any head of any layer chooses, and `gini` the Gini coefficient of how often each chunk is chosen.
    `found` has one number per layer: the share of the tokens with the best exact scores that low-dim scores also find.

    Bytes are what one query reads in all layers. `read_bytes` counts keys and values, each token once per KV head,
    `scored_bytes` the data that chunks or tokens are chosen by, and `full_bytes` what full attention would read.
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
    score: float | None = None  # the answer's score, if an answer was asked for
    prompt: str | None = None  # the `text_hash` of the prompt


# Classes of lines, by a field that only lines of this class have.
KINDS: dict[str, type[Line]] = {"right": Answer, "nll": Loss, "recall": Attended}


class Record:
    """Measurements by sample (what was measured, as a JSON object), in a file, or in memory if `path` is None.

    Raises `DataError` for a file that cannot be used, before any work.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else path_of(path)
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
                sample, measured = parse_line(line)
            except (ValueError, TypeError, StopIteration, RecursionError):
                raise _strange(path, line, number) from None
            self._lines[_key(sample)] = sample, measured
        if rest[: len(BEGINNING)] != BEGINNING[: len(rest)]:
            raise _strange(path, rest, len(lines) + 1)

    def get(self, sample: dict[str, Any], prompt: str | None = None) -> Any:
        """Return the measurement of a sample; None if there is none, or if the recorded prompt differs."""
        _, found = self._lines.get(_key(sample), (None, None))
        is_other = prompt is not None and found is not None and found.prompt not in (None, text_hash(prompt))
        return None if is_other else found

    def items(self) -> Iterator[tuple[str, dict[str, Any], Any]]:
        """Yield each sample's key, the sample, and its last measurement. Equal samples have equal keys in all files."""
        return ((key, *found) for key, found in self._lines.items())

    def prepare(self) -> None:
        """Raise `DataError` if the file cannot be written."""
        if self.path is not None:
            _opened(self.path).close()

    def add(self, sample: dict[str, Any], measured: Line) -> None:
        """Append one line to the file. Raises `CapacityError` if the disk is full; earlier lines then stay."""
        self.add_all([(sample, measured)])

    def add_all(self, measured: Sequence[tuple[dict[str, Any], Line]]) -> None:
        """Append several lines in one write. If the process is killed, the file may have only the first lines."""
        if self.path is not None:
            _append(self.path, b"".join(line_of(*each) for each in measured))
        self._lines.update((_key(sample), (sample, each)) for sample, each in measured)


def parse_line(line: bytes) -> tuple[dict[str, Any], Line]:
    """Return the sample and the measurement of a line.

    Raises `ValueError`, `TypeError`, `StopIteration` or `RecursionError` for a line that is no measurement.
    """
    sample: Any = json.loads(line) if line.startswith(BEGINNING) else None
    kind = next(kind for sign, kind in KINDS.items() if sign in sample)
    given = {each: sample.pop(each.name) for each in fields(kind) if each.name in sample}
    if "engine" in sample:
        sample["engine"] = renewed_engine(str(sample["engine"]))
    known = all(value is None or _fits(str(each.type), value) for each, value in given.items())
    if not (known and isinstance(sample.get("task_knobs", {}), dict) and isinstance(sample.get("depths", []), list)):
        raise TypeError
    measured = kind(**{each.name: value for each, value in given.items()})
    if isinstance(measured, Answer) and not 0 <= measured.value <= 1 + 1e-9:  # a mean of scores may be rounded up
        raise ValueError
    return sample, measured


def renewed_engine(text: str) -> str:
    """Return the repr of an engine, as a version before wrote it, with the present names of the knobs of `pages`."""
    match = re.search(r"Pages\((select='.*?)\)", text)
    if match is None:
        return text
    from lce.methods import make, renewed

    knobs = {name: value.strip("'") for name, value in re.findall(r"(\w+)=('[^']*'|[^,]*)", match[1])}
    try:
        made = make("pages", renewed("pages", {name: None if x == "None" else x for name, x in knobs.items()}))
    except UsageError:
        return text  # of a version with other knobs
    return f"{text[: match.start()]}{made!r}{text[match.end() :]}"


def _fits(kind: str, value: Any) -> bool:
    if kind.startswith(("int", "float", "bool")):
        return isinstance(value, int | float) and -LARGEST < value < LARGEST  # NaN is not
    return isinstance(value, str) or kind != "str | None"


def _strange(path: Path, line: bytes, number: int) -> DataError:
    found = f"line {number} is {shown(line[:60].decode(errors='replace'))}"
    return DataError(f"{named(path)} is no record: {found}; correct the line, or name another file")


def _append(path: Path, data: bytes) -> None:
    try:
        with _opened(path) as file:
            _lock(file.fileno(), path)
            size, written = os.fstat(file.fileno()).st_size, 0
            end = mmap(file.fileno(), size, access=ACCESS_READ).rfind(b"\n") + 1 if size else 0  # of whole lines
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
    """Open or create a record's file. The returned object releases the file and its lock even after Ctrl-C."""
    check_target(path)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return io.FileIO(path, "r+", opener=lambda path, _: os.open(path, flags, 0o644))
    except OSError as error:
        raise DataError(f"cannot write {named(path)}: {error.strerror}; name another file") from error


def text_hash(text: str) -> str:
    """Return a short hash of a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _lock(descriptor: int, path: Path) -> None:
    for _ in range(LOCK_TRIES):
        with suppress(DataError):  # another process writes
            return lock(descriptor, path)
        time.sleep(LOCK_PAUSE_S)
    lock(descriptor, path)


def line_of(sample: dict[str, Any], measured: Line) -> bytes:
    """Return the line of a measurement. Raises `DataError` for numbers that are not finite."""
    known = {name: value for name, value in asdict(measured).items() if value is not None}
    try:
        return json.dumps({**sample, **known}, allow_nan=False).encode() + b"\n"
    except ValueError:  # NaN or infinity, which would make reports meaningless
        found = shown(known, 240)
        raise DataError(f"cannot record {found}: a number is NaN or infinite; check the model's weights") from None


def _key(sample: dict[str, Any]) -> str:
    return json.dumps(sample, sort_keys=True)
