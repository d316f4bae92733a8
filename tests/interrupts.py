"""Ctrl-C at the instructions where CPython delivers signals, as a trace function raises it.

CPython runs signal handlers when a function starts or a generator goes on, at the end of a loop's turn, and behind a
call of what is not written in Python.
"""

import dis
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import lce

PACKAGE = str(Path(lce.__file__).parent)
DESTRUCTORS = {"Descriptor.close"}  # what is raised in one goes nowhere
Place = tuple[CodeType, int]  # a function, and the offset of an instruction in it, -1 for its start


class Tracer:
    """Notes the places of lce's own frames; raises `KeyboardInterrupt` at the `nth` run of one of them."""

    def __init__(self, place: Place | None = None, nth: int = 1) -> None:
        self.seen: list[Place] = []
        self.raised = False
        self._place = place
        self._left = nth
        self._called: dict[FrameType, int] = {}  # where a frame is in a call that has not come to Python code

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_back is not None:
            self._called.pop(frame.f_back, None)  # the call was one of Python code: its start is the place
        if not frame.f_code.co_filename.startswith(PACKAGE) or frame.f_code.co_qualname in DESTRUCTORS:
            return None
        frame.f_trace_opcodes = True
        if event == "call":
            self._come(frame.f_code, -1)
        elif event == "opcode":
            called = self._called.pop(frame, None)
            if called is not None:
                self._come(frame.f_code, called)
            name = _names(frame.f_code).get(frame.f_lasti, "")
            if name.startswith("CALL"):
                self._called[frame] = frame.f_lasti
            elif name.startswith("JUMP_BACKWARD"):
                self._come(frame.f_code, frame.f_lasti)
        else:
            self._called.pop(frame, None)
        return self

    def _come(self, *place: Any) -> None:
        if self._place is None:
            self.seen.append(place)
        elif place == self._place:
            self._left -= 1
            if not self._left:
                self.raised = True
                raise KeyboardInterrupt


@cache
def _names(code: CodeType) -> dict[int, str]:
    return {each.offset: each.opname for each in dis.get_instructions(code)}


def places(call: Callable[[], object], every: int = 1, *names: str) -> list[tuple[Place, int]]:
    """The places that `call` comes to, and at which of their first runs to interrupt each.

    Each place once, or one of `every`; those in files or functions of these `names`, or all. Early and late runs take
    turns.
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
