"""Ctrl-C between any two bytecodes of lce, as a trace function raises it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import lce

PACKAGE = str(Path(lce.__file__).parent)
DESTRUCTORS = {"Descriptor.close"}  # what is raised in one goes nowhere
Place = tuple[CodeType, int]  # a function, and the offset of an instruction in it


class Tracer:
    """Notes the instructions of lce's own frames; raises `KeyboardInterrupt` before the `nth` run of one of them."""

    def __init__(self, place: Place | None = None, nth: int = 1) -> None:
        self.seen: list[Place] = []
        self.raised = False
        self._place = place
        self._left = nth

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE) or frame.f_code.co_qualname in DESTRUCTORS:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            place = (frame.f_code, frame.f_lasti)
            if self._place is None:
                self.seen.append(place)
            elif place == self._place:
                self._left -= 1
                if not self._left:
                    self.raised = True
                    raise KeyboardInterrupt
        return self


def places(call: Callable[[], object], every: int = 1, *names: str) -> list[tuple[Place, int]]:
    """Which instructions that `call` runs to interrupt, and at which of their first runs.

    Each instruction once, or one of `every`; those in files or functions of these `names`, or all. Early and late runs
    take turns.
    """
    tracer = Tracer()
    _traced(call, tracer)
    runs = Counter(place for place in tracer.seen if not names or any(name in _called(place) for name in names))
    return [(place, 1 + i % min(n, 5)) for i, (place, n) in enumerate(runs.items())][::every]


def _called(place: Place) -> str:
    return f"{place[0].co_filename}:{place[0].co_qualname}."


def interrupted(call: Callable[[], object], place: Place, nth: int) -> KeyboardInterrupt | None:
    """Make the call, interrupted there; None if it does not come there. Fails for a call that swallows Ctrl-C."""
    tracer = Tracer(place, nth)
    try:
        _traced(call, tracer)
    except KeyboardInterrupt as error:
        return error
    assert not tracer.raised, f"swallowed in {place[0].co_qualname}"
    return None


def _traced(call: Callable[[], object], tracer: Tracer) -> None:
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        call()
    finally:
        sys.settrace(before)
