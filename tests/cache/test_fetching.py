"""Fetches: the work is done once, by the thread or by the caller, and an interrupted caller comes back for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from lce.cache.fetching import Fetch
from tests.interrupts import interrupted, places


def recording(done: list[str], before: Callable[[], object] = lambda: None) -> Callable[[], None]:
    """Work that notes the name of the thread that does it."""

    def work() -> None:
        before()
        done.append(threading.current_thread().name)

    return work


def test_the_thread_does_the_work() -> None:
    done, began = list[str](), threading.Event()
    fetch = Fetch(recording(done, began.set))
    fetch.begin()
    assert began.wait(10)
    fetch.finish()
    fetch.finish()
    assert fetch.error is None
    assert len(done) == 1
    assert done[0].startswith("lce-fetch")


def test_the_caller_does_what_the_thread_has_not_begun() -> None:
    done, go, began = list[str](), threading.Event(), threading.Event()
    busy = Fetch(lambda: (began.set(), go.wait(10))[0])
    busy.begin()
    assert began.wait(10)
    fetch = Fetch(recording(done))
    fetch.begin()
    fetch.finish()
    assert done == [threading.current_thread().name]
    go.set()
    busy.finish()
    last = Fetch(lambda: None)
    last.begin()
    last.finish()
    assert len(done) == 1, "the thread leaves it alone"


@pytest.mark.parametrize("begun", [True, False])
def test_what_goes_wrong_is_kept_for_the_caller(begun: bool) -> None:
    at = threading.Event()

    def work() -> None:
        at.set()
        raise ValueError("wrong")

    fetch = Fetch(work)
    if begun:
        fetch.begin()
        assert at.wait(10)
    fetch.finish()
    assert isinstance(fetch.error, ValueError)


def test_an_interruption_at_any_bytecode_loses_no_work() -> None:
    def use(fetch: Fetch) -> None:
        fetch.begin()
        fetch.finish()

    for place, nth in places(lambda: use(Fetch(lambda: None)), 1, "fetching.py"):
        done: list[str] = []
        fetch = Fetch(recording(done))
        interrupted(lambda fetch=fetch: use(fetch), place, nth)  # type: ignore[misc]
        fetch.finish()
        assert done
        assert len({name for name in done if name.startswith("lce-fetch")}) <= 1
        assert fetch.error is None
