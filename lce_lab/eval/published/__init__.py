"""Published benchmarks, read from the user's own files. `BENCHMARKS` maps names to benchmarks."""

from __future__ import annotations

from lce.errors import UsageError, nearest
from lce_lab.eval.published.base import Benchmark
from lce_lab.eval.published.infinitebench import InfiniteBench
from lce_lab.eval.published.leval import LEval
from lce_lab.eval.published.longbench import LongBench, LongBenchE, LongBenchV2
from lce_lab.eval.published.needles import CountingStars, NeedleBench, Ruler

_CLASSES = (LongBench, LongBenchE, LongBenchV2, InfiniteBench, Ruler, LEval, NeedleBench, CountingStars)
BENCHMARKS: dict[str, Benchmark] = {benchmark.name: benchmark() for benchmark in _CLASSES}

__all__ = ["BENCHMARKS", "Benchmark", "find"]


def find(name: str) -> Benchmark:
    """Return the benchmark called `name`. Raises `UsageError` for an unknown name."""
    if name not in BENCHMARKS:
        raise UsageError(f"unknown benchmark {name!r}; {nearest(name, BENCHMARKS)}")
    return BENCHMARKS[name]
