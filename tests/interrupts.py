"""Ctrl-C between any two bytecodes of lce, as a trace function raises it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import lce

PACKAGE = str(Path(lce.__file__).parent)
Place = tuple[CodeType, int]  # a function, and the offset of an instruction in it


class Tracer:
    """Counts the instructions of lce's own frames, and raises `KeyboardInterrupt` before the `at`-th."""

    def __init__(self, at: int = 0) -> None:
        self.at = at
        self.places: list[Place] = []
        self._last: FrameType | None = None

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.places.append((frame.f_code, frame.f_lasti))
            if len(self.places) == self.at:
                raise KeyboardInterrupt
        return self


def places(call: Callable[[], object]) -> list[Place]:
    """Every instruction of lce that `call` runs, in order."""
    tracer = Tracer()
    with suppress(KeyboardInterrupt):
        interrupted(call, tracer)
    return tracer.places


def interrupted(call: Callable[[], object], at: int | Tracer) -> bool:
    """Make the call; whether it was interrupted before its `at`-th instruction. One that swallows Ctrl-C fails."""
    tracer = at if isinstance(at, Tracer) else Tracer(at)
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    assert not tracer.at or len(tracer.places) < tracer.at, f"swallowed at {tracer.places[-1]}"
    return False


def chosen(found: list[Place], every: int, *files: str) -> list[int]:
    """Which instructions to interrupt, counted from 1: one of `every`, of each place once, in functions of `files`."""
    first: dict[Place, int] = {}
    for number, place in enumerate(found, 1):
        if any(file in place[0].co_filename for file in files) or not files:
            first.setdefault(place, number)
    return sorted(first.values())[:: every]
