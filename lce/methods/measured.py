"""Measurements of `lce recommend`, kept in the user's cache: a JSON file for each model, named by its fingerprint."""

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
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


@dataclass(frozen=True)
class Measurement:
    """Trials with the same questions, in texts of `length` tokens, of a model trusted on `window` positions.

    `day` is the date in ISO's form. `settings` say how was asked; nothing depends on them.
    """

    length: int
    window: int
    day: str
    settings: Mapping[str, Any]
    trials: Sequence[Trial]


def sign_test(some: Sequence[float], others: Sequence[float]) -> float:
    """Return how likely chance alone makes `some` so much better than `others`, scores of the same questions.

    It is a one-sided sign test of the pairs that differ, which for scores of 0 and 1 is McNemar's exact test.
    """
    better, worse = (sum(x > y for x, y in zip(*pair, strict=True)) for pair in ((some, others), (others, some)))
    tail = sum(math.comb(better + worse, k) for k in range(better, better + worse + 1))
    return float(tail / 2 ** (better + worse))


def told_apart(some: Sequence[float], others: Sequence[float]) -> bool:
    """Return whether two methods' scores of the same questions differ by more than chance, by a sign test."""
    return 2 * min(sign_test(some, others), sign_test(others, some)) < DOUBT


def alike(trials: Sequence[R]) -> list[R]:
    """Return the best trial, and all whose scores do not differ from its scores by more than chance."""
    best = max(trials, key=lambda each: (sum(each.values), -each.read_bytes), default=None)
    return [] if best is None else [each for each in trials if not told_apart(best.values, each.values)]


def chosen(trials: Sequence[Trial], usual: Choice) -> Choice:
    """Return `usual`, unless another choice is told apart as better; then, of those alike, what reads least a token."""
    some = alike(trials)
    if not some or usual in (each.choice for each in some):
        return usual
    return min(some, key=lambda each: each.read_bytes).choice


def keep(fingerprint: str, measurement: Measurement) -> Path | None:
    """Keep a measurement of the model with this fingerprint, instead of one with the same length and window.

    Return the file; None for a user without a home folder. Raises `CapacityError` if it cannot be written.
    """
    if (home := cache_home()) is None:
        return None
    path, mine = home / "measured" / f"{fingerprint}.json", (measurement.length, measurement.window)
    others = [each for each in measurements(lambda: fingerprint) if (each.length, each.window) != mine]
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(path, error) from error
    content = {"measurements": [asdict(each) for each in [*others[1 - MOST_KEPT :], measurement]]}
    write_whole(path, json.dumps(content, indent=1).encode())
    return path


def measurements(fingerprint: Callable[[], str]) -> Sequence[Measurement]:
    """Return what is kept of the model with this fingerprint, the oldest first; () after a notice if it is damaged.

    The fingerprint, which reads some of the weights, is asked for if anything is kept of any model.
    """
    home = cache_home()
    if home is None or not (folder := home / "measured").is_dir():
        return ()
    path = folder / f"{fingerprint()}.json"
    return _read(path, path.stat().st_mtime_ns) if path.is_file() else ()


@functools.lru_cache(16)
def _read(path: Path, _changed_ns: int) -> Sequence[Measurement]:
    try:
        return [_checked(each) for each in object_of(read_file(path, MOST_BYTES), path)["measurements"]]
    except (LceError, AttributeError, LookupError, OverflowError, TypeError, ValueError):
        notice(f"{named(path)} is damaged, and ignored: `lce recommend` writes it anew")
        return ()


def _checked(found: Any) -> Measurement:
    """Return the measurement that JSON has. Raises one of the errors that `_read` expects for what is none."""
    trials, counts = list[Trial](), [found["length"], found["window"]]
    for each in found["trials"]:
        method, knobs, rope, window = (each["choice"][name] for name in ("method", "knobs", "rope", "window"))
        values, read_bytes = [float(x) for x in each["values"]], float(each["read_bytes"])
        in_range = all(0 <= x <= 1 for x in values) and 0 <= read_bytes < math.inf
        if not in_range or method not in available() or rope not in (None, *ROPE_KINDS):
            raise ValueError
        counts += [len(values) + 1, 2 if window is None else window]
        trials.append(Trial(Choice(method, knobs, rope=rope, window=window), values, read_bytes))
        trials[-1].choice.make()
    if not all(type(n) is int and 2 <= n < 1 << 40 for n in counts) or len({len(x.values) for x in trials}) != 1:
        raise ValueError
    day, settings = date.fromisoformat(found["day"]).isoformat(), dict(found["settings"])
    return Measurement(counts[0], counts[1], day, settings, trials)
