"""Measurements of `lce recommend`, kept in the user's cache: a JSON file for each model, named by its fingerprint."""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

from lce.errors import LceError
from lce.files import cache_home, named, object_of, read_file, unwritable, write_whole
from lce.methods.choices import Choice
from lce.methods.registry import available
from lce.models.config import ROPE_KINDS
from lce.progress import notice

MOST_BYTES, MOST_KEPT = 1 << 20, 16  # of a file, and the measurements in it
DOUBT = 0.05  # two methods are told apart if equal ones would differ as much with a smaller probability


R = TypeVar("R", bound="Trial")


@dataclass(frozen=True)
class Trial:
    """What a model found with a choice: the score of each question, and the bytes that a token read."""

    choice: Choice
    values: Sequence[float]
    read_bytes: float

    @property
    def found(self) -> str:
        """How much was found, of how many questions."""
        return f"{sum(self.values):.3g} of {len(self.values)}"


@dataclass(frozen=True)
class Measurement:
    """The results of the same questions, in texts of `length` tokens, for a model trusted on `window` positions.

    `day` is the date in ISO's form. `settings` says how was asked; nothing depends on it.
    """

    length: int
    window: int
    day: str
    settings: Mapping[str, Any]
    trials: Sequence[Trial]

    @classmethod
    def read(cls, found: Any) -> "Measurement":
        """Check what JSON has for a measurement. Raises `ValueError`, `TypeError`, `KeyError` or an `LceError`."""
        length, window, trials = found["length"], found["window"], [_trial(each) for each in found["trials"]]
        if not (_is_count(length) and _is_count(window)) or len({len(each.values) for each in trials}) != 1:
            raise ValueError
        return cls(length, window, date.fromisoformat(found["day"]).isoformat(), dict(found["settings"]), trials)


def _is_count(n: object) -> bool:
    return type(n) is int and 2 <= n < 1 << 40


def _trial(found: Any) -> Trial:
    choice = Choice(found["method"], found["knobs"], rope=found["rope"], window=found["window"])
    values, read_bytes = [float(x) for x in found["values"]], float(found["read_bytes"])
    if not isinstance(choice.method, str) or choice.method not in available():
        raise ValueError
    if choice.rope not in (None, *ROPE_KINDS) or not (choice.window is None or _is_count(choice.window)):
        raise ValueError
    if not values or not all(0 <= x <= 1 for x in values) or not 0 <= read_bytes < math.inf:
        raise ValueError
    choice.make()
    return Trial(choice, values, read_bytes)


def told_apart(some: Sequence[float], others: Sequence[float]) -> bool:
    """Return whether two methods' scores of the same questions differ by more than chance, by a sign test."""
    better = sum(x > y for x, y in zip(some, others, strict=True))
    n = sum(x != y for x, y in zip(some, others, strict=True))
    return 2 * sum(math.comb(n, k) for k in range(min(better, n - better) + 1)) < DOUBT * 2.0**n


def alike(results: Sequence[R]) -> list[R]:
    """Return the best result, and all of which the scores do not differ from its scores by more than chance."""
    best = max(results, key=lambda each: (sum(each.values), -each.read_bytes), default=None)
    return [] if best is None else [each for each in results if not told_apart(best.values, each.values)]


def chosen(results: Sequence[Trial], usual: Choice) -> Choice:
    """Return `usual`, unless another choice is told apart as better; then, of those alike, what reads least a token."""
    some = alike(results)
    if not some or usual in (each.choice for each in some):
        return usual
    return min(some, key=lambda each: each.read_bytes).choice


def folder() -> Path | None:
    """Return the folder of measurements; None for a user without a home folder."""
    home = cache_home()
    return None if home is None else home / "measured"


def keep(fingerprint: str, measurement: Measurement) -> Path | None:
    """Keep a measurement of the model with this fingerprint, instead of one with the same length and window.

    Return the file; None for a user without a home folder. Raises `CapacityError` if it cannot be written.
    """
    if (place := folder()) is None:
        return None
    mine = measurement.length, measurement.window
    others = [each for each in measurements(fingerprint) if (each.length, each.window) != mine]
    content = [_as_json(each) for each in [*others[1 - MOST_KEPT :], measurement]]
    path = place / f"{fingerprint}.json"
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(place, error) from error
    write_whole(path, json.dumps({"measurements": content}, indent=1).encode())
    return path


def _as_json(each: Measurement) -> dict[str, Any]:
    def trial(x: Trial) -> dict[str, Any]:
        choice = {name: getattr(x.choice, name) for name in ("method", "knobs", "rope", "window")}
        return {**choice, "found": x.found, "values": x.values, "read_bytes": x.read_bytes}

    return {**asdict(each), "trials": [trial(x) for x in each.trials]}


def measurements(fingerprint: str) -> Sequence[Measurement]:
    """Return what is kept of the model with this fingerprint, the oldest first. Says so if the file is damaged."""
    if (place := folder()) is None:
        return ()
    path = place / f"{fingerprint}.json"
    try:
        stat = path.stat()
    except OSError:
        return ()
    return _read(path, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(64)
def _read(path: Path, *_stamp: int) -> Sequence[Measurement]:
    try:
        return [Measurement.read(each) for each in object_of(read_file(path, MOST_BYTES), path)["measurements"]]
    except (LceError, AttributeError, KeyError, OverflowError, TypeError, ValueError):
        notice(f"{named(path)} is damaged, and ignored: `lce recommend` writes it anew")
        return ()
