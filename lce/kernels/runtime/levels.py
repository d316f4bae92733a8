"""The levels of processors that kernels are compiled for, and which of them this processor is."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lce.errors import UsageError

_CPUINFO = Path("/proc/cpuinfo")
_ARM_FLAGS = {1: "asimd", 8: "atomics", 20: "asimddp"}  # bits of what Linux says of an arm64 processor


@dataclass(frozen=True)
class Level:
    """A kind of processor: its machine, LLVM's names of it and of its features, and Linux's names of what it must have.

    A level without `features` is the processor of this machine; `digest` then tells one processor from another.
    """

    name: str
    machine: str
    cpu: str = ""
    features: str = ""
    flags: str = ""
    digest: str = ""

    @property
    def folder(self) -> str:
        """The name of the folder of the level's kernels."""
        return f"{self.name}-{self.digest}" if self.digest else self.name

    def has(self, feature: str) -> bool:
        """Return whether processors of the level have a feature, named as LLVM names it."""
        return feature in (self.features.split() if self.cpu else {name.replace("_", "") for name in _flags()})


_V3 = "avx avx2 bmi bmi2 f16c fma lzcnt movbe popcnt"
_V4 = f"{_V3} avx512f avx512bw avx512cd avx512dq avx512vl"
_V3_FLAGS = "avx avx2 bmi1 bmi2 f16c fma abm movbe popcnt"
_V4_FLAGS = f"{_V3_FLAGS} avx512f avx512bw avx512cd avx512dq avx512vl"

LEVELS = {  # of each machine, the best comes first
    level.name: level
    for level in (
        Level("v4-bf16", "x86_64", "znver4", f"{_V4} avx512bf16 avx512vnni", f"{_V4_FLAGS} avx512_bf16 avx512_vnni"),
        Level("v4", "x86_64", "x86-64-v4", _V4, _V4_FLAGS),
        Level("v3", "x86_64", "haswell", _V3, _V3_FLAGS),
        Level("arm64", "aarch64", "generic", "neon dotprod lse reserve-x18", "asimd asimddp atomics"),
    )
}
NAMES = (*LEVELS, "native")


def find(name: str, what: str = "the level") -> Level:
    """Return the level with a name: one of `LEVELS`, or native. Raises `UsageError` about `what` for other names."""
    if name not in NAMES:
        raise UsageError(f"{what} is {name!r}; expected one of {', '.join(LEVELS)} or native")
    return LEVELS.get(name) or _native()


def asked() -> Level:
    """Return the level that the variable LCE_CPU names; without one, the best that this processor can run."""
    name = os.environ.get("LCE_CPU")
    if name:
        return find(name, "LCE_CPU")
    return next((level for level in LEVELS.values() if _runs(level)), _native())


@cache
def current() -> Level:
    """Return the level whose kernels this process runs: `asked`. Raises `UsageError` if the processor cannot run it."""
    level = asked()
    if level.flags and not _runs(level):
        able = [other.name for other in LEVELS.values() if _runs(other)]
        raise UsageError(
            f"LCE_CPU is {level.name!r}, which this processor cannot run; expected {', '.join([*able, 'native'])}"
        )
    return level


def _native() -> Level:
    return Level(
        "native", _machine(), digest=hashlib.sha256(repr((_machine(), sorted(_flags()))).encode()).hexdigest()[:12]
    )


def _runs(level: Level) -> bool:
    return level.machine == _machine() and {*level.flags.split()} <= _flags()


def _machine() -> str:
    return {"arm64": "aarch64", "AMD64": "x86_64"}.get(platform.machine(), platform.machine())


@cache
def _flags() -> frozenset[str]:
    """Return what this processor has, in Linux's words; nothing where they are not known."""
    if _machine() == "aarch64":
        if platform.system() == "Darwin":
            return frozenset(_ARM_FLAGS.values())  # every processor of Apple's has them
        found = ctypes.CDLL(None).getauxval(16)
        return frozenset(name for bit, name in _ARM_FLAGS.items() if found >> bit & 1)
    try:
        lines = _CPUINFO.read_text(errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())
