"""Who uses a context: one call or one stream at a time.

A lock is lost if Ctrl-C comes between the bytecode that takes it and the one that guards it. So nothing here has to be
released: a holder counts for as long as it runs. A call runs while its frame is on the stack of its thread; a stream
until its generator has ended, by its end, by `close`, or by any exception.
"""

from __future__ import annotations

import inspect
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, TypeVar
from weakref import ReferenceType, ref

from lce.errors import UsageError

T = TypeVar("T")
SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Holder(ABC):
    """A call or a stream that uses a context."""

    @abstractmethod
    def runs(self, asking: Holder) -> bool:
        """Whether this holder has not ended when `asking` wants to use the context."""


class Call(Holder):
    """The call of a frame, in the thread that makes it."""

    def __init__(self, frame: FrameType) -> None:
        self.frame = frame
        self.thread = threading.get_ident()

    def runs(self, asking: Holder) -> bool:
        if isinstance(asking, Call) and asking.frame is self.frame:
            return False  # one frame asks twice: it was interrupted the first time
        if self.frame.f_code.co_flags & SUSPENDS:
            return True  # a generator's frame may be on no stack: only `release` ends it
        here = threading.get_ident() == self.thread
        at = sys._getframe() if here else sys._current_frames().get(self.thread)
        while at is not None and at is not self.frame:
            at = at.f_back
        return at is not None


class Streaming(Holder):
    """A generator: suspended or not, it uses the context until it ends."""

    def __init__(self) -> None:
        self._generator: ReferenceType[Generator[Any, Any, Any]] | None = None

    def bind(self, generator: Generator[T, None, None]) -> Generator[T, None, None]:
        """Say which generator it is, before it starts; returns it."""
        self._generator = ref(generator)
        return generator

    def runs(self, asking: Holder) -> bool:
        generator = None if self._generator is None else self._generator()
        return generator is not None and inspect.getgeneratorstate(generator) != inspect.GEN_CLOSED


class Holders:
    """The holders of one context, in the order in which they asked: the first that runs has it."""

    def __init__(self) -> None:
        self._all: list[Holder] = []

    def add(self, holder: Holder) -> None:
        """Have the context used by `holder` alone. Raises `UsageError` if another one uses it."""
        self._all.append(holder)  # of two threads one is the first
        for other in list(self._all):
            if other is holder:
                return
            if other.runs(holder):
                self.release(holder)
                raise UsageError("this context is being asked already: wait for that answer, or ask a fork() of it")
            self.release(other)

    def release(self, holder: Holder) -> None:
        """Forget a holder, if it is one."""
        with suppress(ValueError):
            self._all.remove(holder)


class InUse:
    """Use a context for the code inside `with`: see `Context.in_use`."""

    def __init__(self, holders: Holders, frame: FrameType) -> None:
        self._holders = holders
        self._call = Call(frame)

    def __enter__(self) -> None:
        self._holders.add(self._call)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._holders.release(self._call)
