"""Published benchmarks, read from the user's own files. `SUITES` has them by name."""

from __future__ import annotations

from lce.errors import UsageError, nearest
from lce.lab.eval.published.base import Suite
from lce.lab.eval.published.counting_stars import CountingStars
from lce.lab.eval.published.infinitebench import InfiniteBench
from lce.lab.eval.published.leval import LEval
from lce.lab.eval.published.longbench import LongBench, LongBenchE
from lce.lab.eval.published.longbench_v2 import LongBenchV2
from lce.lab.eval.published.needlebench import NeedleBench
from lce.lab.eval.published.ruler import Ruler

_CLASSES: tuple[type[Suite], ...] = (
    LongBench, LongBenchE, LongBenchV2, InfiniteBench, Ruler, LEval, NeedleBench, CountingStars
)  # fmt: skip
SUITES: dict[str, Suite] = {suite.name: suite() for suite in _CLASSES}

__all__ = ["SUITES", "Suite", "find"]


def find(name: str) -> Suite:
    """Return the benchmark called `name`. Raises `UsageError`, with the nearest valid name."""
    if name not in SUITES:
        raise UsageError(f"unknown benchmark {name!r}; {nearest(name, SUITES)}")
    return SUITES[name]
