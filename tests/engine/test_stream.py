"""Streams end early from any thread, and leave their context usable; `async for` has a thread of its own."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

import lce
from tests.checkpoints import tokens
from tests.command import begun, until, within

PROMPT = tokens(150)  # five blocks of 32


def stream_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("lce-stream")]


def assert_usable(engine: lce.Engine, context: lce.Context) -> None:
    """What the context holds is what it says: a fresh context of the same tokens goes on alike."""
    assert context.cache.length <= len(context) <= context.cache.length + 1
    fresh = engine.prefill(context.token_ids)
    ours, theirs = (engine.generate(tokens(9, 5), max_tokens=6, context=c).token_ids for c in (context, fresh))
    assert ours == theirs


def test_close_waits_for_a_step_that_runs_in_another_thread(engine: lce.Engine) -> None:
    context = engine.prefill(tokens(40))
    running, go_on = threading.Event(), threading.Event()

    def progress(done: int, total: int) -> None:
        running.set()
        assert go_on.wait(10)

    stream = engine.stream(PROMPT, max_tokens=5, context=context, progress=progress)
    reader = begun(lambda: list(stream))
    assert running.wait(10)
    closer = begun(stream.close)
    time.sleep(0.05)
    assert not closer.done(), "the step runs on"
    go_on.set()
    closer.result(10)
    reader.result(10)
    assert_usable(engine, context)
    assert stream.result.finish_reason == "cancelled"


class Ender:
    """A progress callback that ends its stream after the k-th block, in its own thread or in another one."""

    def __init__(self, block: int, end: Callable[[lce.Stream], Any]) -> None:
        self.block, self.end = block, end
        self.told = 0
        self.stream: lce.Stream | None = None

    def __call__(self, done: int, total: int) -> None:
        self.told += 1
        if self.told == self.block:
            self.end(self.stream)


ENDS: dict[str, Callable[[lce.Stream], Any]] = {
    "close": lce.Stream.close,
    "cancel": lce.Stream.cancel,
    "cancel elsewhere": lambda stream: within(stream.cancel),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_stream_ends_within_a_block_of_its_prefill(engine: lce.Engine, end: str) -> None:
    for block in (1, 3, 5):
        context, ender = engine.prefill(tokens(40)), Ender(block, ENDS[end])
        stream = ender.stream = engine.stream(PROMPT, max_tokens=5, context=context, progress=ender)
        assert list(stream) == []
        assert ender.told == block, "no block is read after it"
        assert context.token_ids == tokens(40), "as before the call"
        assert (stream.result.finish_reason, stream.result.token_ids) == ("cancelled", [])
        assert_usable(engine, context)


def test_any_thread_may_close_at_any_time(engine: lce.Engine) -> None:
    for wait_ms in range(0, 24, 4):
        context = engine.prefill(tokens(40))
        stream = engine.stream(PROMPT, max_tokens=1000, context=context)
        reader = begun(lambda stream=stream: list(stream))  # type: ignore[misc]
        time.sleep(wait_ms / 1000)
        within(stream.close)
        reader.result(10)
        assert stream.result.finish_reason in ("cancelled", "stop")
        assert_usable(engine, context)


def test_closing_before_the_first_piece_and_after_the_last(engine: lce.Engine) -> None:
    context = engine.prefill(tokens(40))
    for end in (lce.Stream.close, lce.Stream.cancel):
        stream = engine.stream(PROMPT, max_tokens=5, context=context)
        end(stream)
        assert (list(stream), stream.result.finish_reason, len(context)) == ([], "cancelled", 40)
    stream = engine.stream(PROMPT, max_tokens=5, context=context)
    reason = stream.finish().finish_reason
    stream.close()
    assert stream.result.finish_reason == reason != "cancelled"
    said = context.token_ids[:]
    with engine.stream([], max_tokens=50, context=context) as stream:
        first = next(stream)
        within(stream.close)
        assert list(stream) == []
    assert (stream.result.finish_reason, stream.result.text) == ("cancelled", first.text)
    assert context.token_ids == said + stream.result.token_ids
    assert_usable(engine, context)


def test_a_cancelled_stream_says_all_that_it_drew_or_nothing_of_it(engine: lce.Engine) -> None:
    """Text that is held back for a stop string is not said when the stream is cancelled."""
    whole = engine.generate(PROMPT, max_tokens=12).text
    stream = engine.stream(PROMPT, max_tokens=12, stop=[whole[1:] + "never"])
    said = next(stream).text
    stream.close()
    assert stream.result.text == said == whole[:1]


def test_a_callback_cannot_ask_for_the_next_piece(engine: lce.Engine) -> None:
    context, ender = engine.prefill(tokens(40)), Ender(2, next)
    ender.stream = engine.stream(PROMPT, max_tokens=5, context=context, progress=ender)
    with pytest.raises(lce.UsageError, match="a callback asks for the next piece of the stream that has called it"):
        list(ender.stream)
    assert len(context) == 40
    assert_usable(engine, context)


def test_an_async_stream_is_the_stream(engine: lce.Engine) -> None:
    async def read() -> tuple[str, lce.Generation]:
        stream = engine.astream(PROMPT, max_tokens=12, logprobs=1)
        assert stream.result.token_ids == []
        return "".join([piece.text async for piece in stream]), stream.result

    expected = engine.generate(PROMPT, max_tokens=12, logprobs=1)
    text, result = asyncio.run(read())
    assert (text, result.token_ids, result.logprobs) == (expected.text, expected.token_ids, expected.logprobs)
    assert (result.finish_reason, stream_threads()) == (expected.finish_reason, [])


def test_cancelling_the_task_cancels_the_stream(engine: lce.Engine) -> None:
    context, reading = engine.prefill(tokens(40)), threading.Event()

    async def read(stream: lce.AsyncStream) -> None:
        async for _ in stream:
            pass

    async def main() -> lce.Generation:
        def progress(done: int, total: int) -> None:
            reading.set()
            time.sleep(0.02)

        stream = engine.astream(PROMPT, max_tokens=100, context=context, progress=progress)
        task = asyncio.ensure_future(read(stream))
        await asyncio.to_thread(reading.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert_usable(engine, context)  # it is free as soon as the task has ended
        return stream.result

    assert (asyncio.run(main()).finish_reason, stream_threads()) == ("cancelled", [])


@pytest.mark.parametrize("how", ["aclose", "with", "break", "cancel"])
def test_leaving_an_async_loop_early_ends_the_thread(engine: lce.Engine, how: str) -> None:
    context = engine.prefill(tokens(40))

    async def main() -> None:
        stream = engine.astream([], max_tokens=100, context=context)
        if how == "with":
            async with stream:
                await anext(stream)
        else:
            await anext(stream)
        if how == "aclose":
            await stream.aclose()
            await stream.aclose()
        if how == "cancel":
            stream.cancel()
            assert [piece async for piece in stream] == []
        if how != "break":
            assert stream.result.finish_reason == "cancelled"
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

    asyncio.run(main())
    if how == "break":
        until(lambda: not stream_threads(), 5)  # a stream that is dropped ends soon
    assert stream_threads() == []
    assert_usable(engine, context)


def test_an_error_in_an_async_stream_reaches_the_loop(engine: lce.Engine) -> None:
    async def read(prompt: Any, **options: Any) -> None:
        async for _ in engine.astream(prompt, **options):
            pass

    with pytest.raises(KeyError, match="mine"):
        asyncio.run(read(PROMPT, progress=Mock(side_effect=KeyError("mine"))))
    with pytest.raises(lce.UsageError, match="the prompt is empty"):
        asyncio.run(read(""))
    with pytest.raises(lce.UsageError, match="max_tokens is 0"):
        engine.astream(PROMPT, max_tokens=0)
    assert stream_threads() == []
