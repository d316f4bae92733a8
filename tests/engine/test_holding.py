"""Who uses a context: what runs does, and what has ended, in any way, does not."""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator

import pytest

from lce.engine.holding import Call, Holders, InUse, Streaming
from lce.errors import UsageError
from tests.interrupts import interrupted, places


def use(holders: Holders) -> InUse:
    return InUse(holders, sys._getframe(1))


def call(holders: Holders) -> None:
    with use(holders), pytest.raises(UsageError, match="is being asked already"):
        nested(holders)


def nested(holders: Holders) -> None:
    with use(holders):
        raise AssertionError("used twice")


def stream(holders: Holders) -> Generator[int, None, None]:
    holder = Streaming()

    def pieces() -> Generator[int, None, None]:
        holders.add(holder)
        yield 1
        yield 2

    return holder.bind(pieces())


def test_a_call_uses_a_context_until_it_returns() -> None:
    holders = Holders()
    for _ in range(3):
        call(holders)


def test_a_stream_uses_a_context_from_its_first_piece_until_it_ends() -> None:
    holders = Holders()
    first, second = stream(holders), stream(holders)
    call(holders)
    assert next(first) == 1
    for refused in (lambda: nested(holders), lambda: next(second)):
        with pytest.raises(UsageError, match="wait for that answer, or ask a fork"):
            refused()
    assert list(first) == [2]
    call(holders)
    third = stream(holders)
    next(third)
    third.close()
    fourth = stream(holders)
    next(fourth)
    del fourth  # dropped without an end
    call(holders)


def test_another_thread_is_refused_as_long_as_the_call_runs() -> None:
    holders, inside, done, errors = Holders(), threading.Event(), threading.Event(), list[str]()

    def working() -> None:
        with use(holders):
            inside.set()
            done.wait(10)

    thread = threading.Thread(target=working)
    thread.start()
    assert inside.wait(10)
    with pytest.raises(UsageError):
        nested(holders)
    done.set()
    thread.join(60)
    call(holders)
    assert errors == []


def test_of_many_threads_one_is_first() -> None:
    holders, start, done, won = Holders(), threading.Barrier(8), threading.Event(), list[bool]()

    def race() -> None:
        start.wait(60)
        try:
            with use(holders):
                won.append(True)
                done.wait(10)
        except UsageError:
            won.append(False)
        if len(won) == 8:
            done.set()

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(won) == 1


def test_no_interruption_keeps_a_context() -> None:
    """At any bytecode, even if the traceback, and with it every frame, is kept."""
    tracebacks = []
    for place, nth in places(lambda: nothing(Holders())):
        holders = Holders()
        try:
            assert interrupted(lambda holders=holders: nothing(holders), place, nth)
        except BaseException as error:
            tracebacks.append(error)
        call(holders)
    for place, nth in places(lambda: list(stream(Holders()))):
        holders = Holders()
        pieces = stream(holders)
        interrupted(lambda pieces=pieces: list(pieces), place, nth)
        call(holders)


def nothing(holders: Holders) -> None:
    with use(holders):
        pass


def test_a_frame_that_asks_again_has_left() -> None:
    """A lost release, in a frame that goes on after Ctrl-C."""
    holders = Holders()
    holders.add(Call(sys._getframe()))
    with pytest.raises(UsageError):
        nested(holders)
    holders.add(Call(sys._getframe()))
