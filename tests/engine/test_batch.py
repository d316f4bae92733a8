"""Batches: the bits that each request has alone, prefixes that are read once, and faults that are one request's own."""

import asyncio
import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import lce
from lce.engine import scheduler
from lce.engine.batch import Batch
from lce.engine.requests import BatchStream
from lce.errors import BusyError, CapacityError, DataError, UsageError
from lce.tokenizer.chat import ChatText
from tests.checkpoints import save_tiny, tokens
from tests.command import begun, resident, start, together, until, within

SLOW = pytest.mark.slow
BLOCK = 32
PCA = {"compress": "pca", "low_dim": 4}
CASES: list[tuple[str, dict[str, Any], int, dict[str, Any]]] = [  # a method, its knobs, a prompt's length, and options
    ("full", {}, 50, {"max_tokens": 30}),
    ("longheads", {"chunk_size": 8}, 150, {"max_tokens": 24, "temperature": 0.8, "seed": 3, "logprobs": 2}),
    ("esa", PCA, 170, {"max_tokens": 20, "repetition_penalty": 1.3, "logprobs": 1}),
    ("dca", {}, 90, {"max_tokens": 26, "top_k": 20, "temperature": 1.0, "seed": 4}),
    ("pages", {}, 140, {"max_tokens": 20, "stop": ["e", "7"]}),
    ("self_extend", {}, 33, {"max_tokens": 1}),
    ("infllm", {}, 160, {"max_tokens": 22, "logprobs": 0, "logit_bias": {5: 4.0}}),
    ("streaming", {}, 64, {"max_tokens": 28, "presence_penalty": 0.5, "frequency_penalty": 0.3}),
    ("rerope", {}, 1, {"max_tokens": 18, "min_p": 0.05, "temperature": 0.7, "seed": 5}),
    ("quest", {}, 120, {"max_tokens": 16, "stop": lambda text: len(text) > 12}),
]


def facts(result: lce.Generation) -> tuple[Any, ...]:
    return result.token_ids, result.text, result.finish_reason, result.logprobs


def alone(batch: Batch, ids: list[int], **how: Any) -> lce.Generation:
    return lce.Engine(batch.setup).generate(ids, **how)


def finish(stream: BatchStream, seconds: float = 60) -> lce.Generation:
    return within(stream.finish, seconds)


@pytest.fixture(scope="module")
def full(tiny_model: Path) -> lce.Engine:
    return lce.load(tiny_model, block=BLOCK)


@pytest.fixture
def batch(full: lce.Engine) -> Iterator[Batch]:
    with full.batch() as made:
        yield made


def test_every_request_has_the_bits_that_it_has_alone(tmp_path: Path) -> None:
    check_alike(save_tiny(tmp_path), {})


STORAGE: list[dict[str, Any]] = [
    *({"dtype": "bfloat16"}, {"kv_dtype": "int8-device"}, {"weights": "int8"}, {"weights": "int4"}),
    *({"dtype": "bfloat16", "weights": "int8"}, {"budget": "auto"}, {"kv_dtype": "int8", "budget": "auto"}),
]


@SLOW
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("options", STORAGE, ids=str)
def test_requests_have_the_bits_of_one_in_any_storage(options: dict[str, Any], threads: int, tmp_path: Path) -> None:
    torch.set_num_threads(threads)
    if options.pop("budget", None):
        (tmp_path / "spill").mkdir()
        options |= {"kv_device_budget": 1 << 19, "spill_dir": tmp_path / "spill"}
        assert check_alike(save_tiny(tmp_path), options, 10)["disk"]
    else:
        check_alike(save_tiny(tmp_path), options)


def check_alike(folder: Path, options: dict[str, Any], times: int = 1) -> Counter[str]:
    """Mixed methods, samplings and lengths, which come one after another, also while others read or answer.

    Returns the bytes in each tier of all contexts.
    """
    engine, held = lce.load(folder, block=BLOCK, **options), Counter[str]()
    with engine.batch(max_lanes=8) as batch:
        streams: list[BatchStream] = []
        for i, (method, knobs, n, how) in enumerate(CASES):
            streams.append(batch.stream(tokens(n * times, seed=i), method=method, method_options=knobs, **how))
            if i % 3 == 2:
                within(lambda: next(streams[-1], None))
        found = [facts(finish(stream)) for stream in streams]
        for i, (method, knobs, n, how) in enumerate(CASES):
            truth = lce.Engine(batch.setup_of(method, knobs)).generate(tokens(n * times, seed=i), **how)
            assert found[i] == facts(truth), method
            held.update(streams[i].result.stats.memory)
    return held


def test_a_prompt_that_continues_a_kept_context_reads_only_the_rest(batch: Batch) -> None:
    engine = lce.Engine(batch.setup)
    first, more = tokens(100), tokens(20, seed=1)
    one = finish(batch.stream(first, max_tokens=8))
    two = finish(batch.stream([*first, *one.token_ids, *more], max_tokens=8, logprobs=1))
    context = engine.prefill(first)
    assert facts(one) == facts(engine.generate([], context=context, max_tokens=8))
    assert facts(two) == facts(engine.generate(more, context=context, max_tokens=8, logprobs=1))
    assert (one.stats.read_before, two.stats.read_before, two.stats.prompt_tokens) == (0, 107, 128)


@pytest.mark.parametrize("method", ["infllm", "esa", "longheads", "streaming"])
def test_a_method_that_cannot_go_back_continues_too(method: str, batch: Batch) -> None:
    knobs = PCA if method == "esa" else {}
    engine = lce.Engine(batch.setup_of(method, knobs))
    how: dict[str, Any] = {"method": method, "method_options": knobs, "max_tokens": 8}
    first, more = tokens(150), tokens(20, seed=1)
    one = finish(batch.stream(first, **how))
    two = finish(batch.stream([*first, *one.token_ids, *more], **how))
    context = engine.prefill(first)
    engine.generate([], context=context, max_tokens=8)
    assert (facts(two), two.stats.read_before) == (facts(engine.generate(more, context=context, max_tokens=8)), 157)
    other = tokens(20, seed=2)
    three = finish(batch.stream([*first, *other], **how))  # goes back to the end of `first`, as far as it can
    context = engine.prefill(first)
    engine.generate([], context=context, max_tokens=8)
    context.cache.truncate(context.cache.nearest(150))
    del context.token_ids[150:]
    if three.stats.read_before == context.cache.n_tokens:
        assert facts(three) == facts(engine.generate(other, context=context, max_tokens=8))


def test_requests_share_a_prefix_while_one_of_them_answers(batch: Batch) -> None:
    prefix = tokens(96)
    prompts = [[*prefix, *tokens(10 + i, seed=1 + i)] for i in range(6)]
    streams = [batch.stream(ids, max_tokens=40) for ids in prompts]
    found = [finish(stream) for stream in streams]
    assert sum(each.stats.read_before for each in found) >= 5 * 90
    for ids, each in zip(prompts, found, strict=True):
        assert facts(each) == facts(alone(batch, ids, max_tokens=40))


def test_the_same_prompt_again_reads_its_last_token(batch: Batch) -> None:
    ids = tokens(70)
    results = [finish(batch.stream(ids, max_tokens=5)) for _ in range(3)]
    assert {tuple(each.token_ids) for each in results} == {tuple(alone(batch, ids, max_tokens=5).token_ids)}
    assert [each.stats.read_before for each in results] == [0, 70, 70] or results[1].stats.read_before >= 69
    assert batch.gauges()["contexts"] == 1


def read(batch: Batch, ids: list[int], **how: Any) -> dict[str, Any]:
    """Read a text for later requests alone that name it: the options by which these continue it."""
    stream = batch.read(ids, keep_context=True, **how)
    assert finish(stream).token_ids == []
    return {"method": stream.setup, "context": stream.context}


def test_a_context_that_is_read_once_stays(batch: Batch) -> None:
    text = tokens(80)
    book = read(batch, text)
    assert finish(batch.stream(text[:70], max_tokens=1)).stats.read_before == 0, "nobody else continues it"
    asked = [batch.stream(tokens(5, seed=i), **book, max_tokens=6) for i in range(4)]
    for i, each in enumerate([finish(stream) for stream in asked]):
        truth = alone(batch, tokens(5, seed=i), context=lce.Engine(batch.setup).prefill(text), max_tokens=6)
        assert (facts(each), each.stats.prompt_tokens) == (facts(truth), 5)
    assert len(book["context"]) == 80


def test_turns_on_a_context_are_read_once(tiny_model: Path, tmp_path: Path) -> None:
    """Each turn continues the kept context of the one before, in memory alone: the document has a file already."""
    engine = lce.load(tiny_model, lce.methods.LongHeads(chunk_size=8), block=BLOCK)
    with engine.batch(cache_dir=tmp_path) as batch:
        book = read(batch, tokens(200))
        said, truth = tokens(7, seed=1), engine.prefill(tokens(200))
        for turn in range(5):
            result = finish(batch.stream(said, **book, max_tokens=6))
            assert result.token_ids == engine.generate(said[len(truth) - 200 :], context=truth, max_tokens=6).token_ids
            assert result.stats.read_before == (0 if not turn else len(said) - 1 - 7)
            said = [*said, *result.token_ids, *tokens(7, seed=turn + 2)]
        assert len(book["context"]) == 200
    assert not [*tmp_path.rglob("*.lce")]


def test_what_is_read_behind_a_context_without_some_keys_serves_nobody_else(batch: Batch) -> None:
    ids = [*tokens(80), *tokens(9, seed=1)]
    evicted = lce.Engine(batch.setup).evict(lce.Engine(batch.setup).prefill(tokens(80)), keep=0.5)
    assert evicted.cache.fixed
    finish(batch.stream(ids[80:], context=evicted, max_tokens=4))
    result = finish(batch.stream(ids, max_tokens=4))
    assert result.stats.read_before == 0
    again = finish(batch.stream(ids[80:], context=evicted, max_tokens=4))
    assert facts(again) == facts(alone(batch, ids[80:], context=evicted, max_tokens=4))


def test_a_stream_hands_its_context_over(batch: Batch) -> None:
    stream = batch.stream(tokens(40), max_tokens=5, keep_context=True)
    assert stream.context is None or stream.result.finish_reason
    result = finish(stream)
    assert stream.context is not None
    with stream.context as context:
        assert context.token_ids == [*tokens(40), *result.token_ids]
        more = alone(batch, [5], context=context, max_tokens=4)
    whole = alone(batch, [*tokens(40), *result.token_ids, 5], max_tokens=4)
    assert more.token_ids == whole.token_ids
    assert finish(batch.stream(tokens(40), max_tokens=5)).stats.read_before == 0  # the context was the caller's alone
    cancelled = batch.stream(tokens(4000), max_tokens=5, keep_context=True)
    cancelled.cancel()
    finish(cancelled)
    assert cancelled.context is None


def test_a_context_of_a_method_is_asked_by_its_setup(batch: Batch) -> None:
    book = read(batch, tokens(60), method="streaming")
    for i in range(40):  # more engines than a batch keeps
        batch.setup_of("streaming", {"local": 20 + i})
    truth = lce.Engine(book["method"]).generate([5], context=book["context"].fork(), max_tokens=4)
    assert facts(finish(batch.stream([5], **book, max_tokens=4))) == facts(truth)
    with pytest.raises(UsageError, match="another engine"):
        batch.stream([5], context=book["context"], method="dca")


@pytest.mark.parametrize("method", ["full", "longheads"])
def test_a_prompt_is_read_for_its_caller_and_stays_cached(method: str, batch: Batch) -> None:
    text = tokens(120)
    stream = batch.read(text[:100], method=method)
    assert stream.context is None
    assert finish(stream).finish_reason == "stop"
    assert stream.context is not None
    assert stream.context.token_ids == text[:100]
    truth = lce.Engine(stream.setup).generate(text, max_tokens=6)
    own = lce.Engine(stream.setup).generate(text[100:], context=stream.context, max_tokens=6)
    assert own.token_ids == truth.token_ids
    asked = finish(batch.stream(text, method=method, max_tokens=6))
    assert facts(asked) == facts(truth), "the fork is the caller's own"
    again = batch.read(text[:90], method=method)
    assert finish(again).stats.read_before >= 80


def test_a_context_is_read_on_for_the_caller(batch: Batch) -> None:
    book = read(batch, tokens(60), method="streaming")
    stream = batch.read(tokens(9), **book)
    finish(stream)
    assert stream.context is not None
    assert (stream.context.token_ids, lce.Engine(stream.setup).method.name) == ([*tokens(60), *tokens(9)], "streaming")
    assert len(book["context"]) == 60
    cancelled = batch.read(tokens(3000))
    cancelled.cancel()
    assert finish(cancelled).finish_reason == "cancelled"
    assert cancelled.context is None


WRONG: list[tuple[Any, dict[str, Any]]] = [  # prompts, and options of `stream`
    *(("", {}), ([], {}), (ChatText(""), {}), ([5, 300], {}), ([5], {"logit_bias": {10**6: 1.0}})),
    *(([5], {"method": method}) for method in ("longhead", [], 7)),
    *(([5], {"method": "dca", "method_options": knobs}) for knobs in ({"chunk": 3}, "chunk_size=3")),
    *(([5], {name: 3}) for name in ("max_token", "context", "constraint")),
    *(([5], {"method_options": [3]}), ([5], {"max_tokens": 0}), ([5], {"context": "none"})),
]


@pytest.mark.parametrize(("prompt", "options"), WRONG, ids=repr)
def test_what_cannot_be_used_is_refused_at_once(prompt: Any, options: dict[str, Any], batch: Batch) -> None:
    with pytest.raises(UsageError):
        batch.stream(prompt, **options)
    assert finish(batch.stream([5, 6], max_tokens=2)).token_ids


def test_another_engines_context_is_refused(batch: Batch, tiny_model: Path) -> None:
    other = lce.load(tiny_model, block=BLOCK).prefill(tokens(9))
    with pytest.raises(UsageError, match="another engine"):
        batch.stream([5], context=other)
    closed = lce.Engine(batch.setup).prefill(tokens(9))
    closed.close()
    with pytest.raises(UsageError, match="closed"):
        finish(batch.stream([5], context=closed))


def test_a_request_is_cancelled_at_any_moment(batch: Batch) -> None:
    busy = [batch.stream(tokens(40, seed=i), max_tokens=300) for i in range(8)]
    waiting = batch.stream(tokens(50), max_tokens=5)
    assert waiting.state == "waiting"
    waiting.cancel()
    assert finish(waiting).finish_reason == "cancelled"
    within(lambda: [next(stream) for stream in busy])
    threading.Thread(target=busy[0].cancel).start()
    assert finish(busy[0]).finish_reason == "cancelled"
    request = busy[1]._request
    del busy[1]
    gc.collect()
    until(lambda: request.state == "done")
    for stream in busy:
        stream.cancel()
    assert ({finish(stream).finish_reason for stream in busy}, batch.gauges()["running"]) == ({"cancelled"}, 0)


def test_what_a_cancelled_request_read_stays_cached(batch: Batch) -> None:
    ids = tokens(4000)
    stream = batch.stream(ids, max_tokens=5)
    until(lambda: stream.progress[0] >= 64)
    stream.cancel()
    assert finish(stream).finish_reason == "cancelled"
    n_read = stream.progress[0]
    assert 64 <= n_read < 4000
    again = batch.stream(ids[:n_read], max_tokens=5)
    assert finish(again).stats.read_before >= n_read - 1


def test_a_cancelled_task_loses_no_piece(batch: Batch) -> None:
    async def main() -> str:
        stream, text = batch.stream(tokens(40), max_tokens=60), ""
        while True:
            try:
                text += (await asyncio.wait_for(anext(stream), 0.001)).text
            except TimeoutError:
                continue
            except StopAsyncIteration:
                return text

    assert within(lambda: asyncio.run(main())) == alone(batch, tokens(40), max_tokens=60).text


def test_a_loop_that_was_closed_ends_nobody_elses_request(batch: Batch) -> None:
    held: list[BatchStream] = []

    async def main() -> None:
        held.append(batch.stream(tokens(2000), max_tokens=30))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(held[0]), 0.001)

    asyncio.run(main())
    assert finish(batch.stream(tokens(30, seed=1), max_tokens=4)).finish_reason
    assert len(finish(held[0]).token_ids) == 30


def test_several_tasks_and_threads_may_read_one_stream(batch: Batch) -> None:
    async def main() -> list[list[str]]:
        stream = batch.stream(tokens(900), max_tokens=40)

        async def read() -> list[str]:
            return [piece.text async for piece in stream]

        return await asyncio.gather(*(read() for _ in range(3)))

    expected = alone(batch, tokens(900), max_tokens=40).text
    assert sum(map(len, within(lambda: asyncio.run(main())))) > 0
    stream = batch.stream(tokens(900), max_tokens=40)
    found = together([lambda: "".join(piece.text for piece in stream)] * 3)
    assert sorted("".join(found)) == sorted(expected)


class Raising:
    def __init__(self, error: BaseException, n: int, at: str = "apply") -> None:
        self.error, self.n, self.at = error, n, at

    def __call__(self, *_: object, name: str = "apply") -> None:
        self.n -= name == self.at
        if not self.n and name == self.at:
            raise self.error

    def apply(self, logits: Tensor) -> Tensor:
        self()
        return logits

    def accept(self, token_id: int) -> None:
        self(name="accept")


ERRORS = [KeyError("mine"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit()]


@pytest.mark.parametrize("error", [*ERRORS, StopIteration()], ids=repr)
@pytest.mark.parametrize("where", ["progress", "stop", "constraint"])
@pytest.mark.covering
def test_a_callback_that_raises_ends_its_request_alone(error: BaseException, where: str, batch: Batch) -> None:
    other = batch.stream(tokens(40), max_tokens=50)
    how: dict[str, Any] = {
        "progress": {"progress": Raising(error, 2)},
        "stop": {"stop": Raising(error, 3)},
        "constraint": {"constraint": Raising(error, 2, "accept")},
    }[where]
    stream = batch.stream(tokens(100, seed=1), max_tokens=20, **how)
    expected: type[BaseException] = RuntimeError if isinstance(error, StopIteration) else type(error)
    with pytest.raises(expected):
        for _ in stream:
            pass
    assert facts(finish(other)) == facts(alone(batch, tokens(40), max_tokens=50))
    again = finish(batch.stream(tokens(100, seed=1), max_tokens=20))  # on what the failed one read
    assert facts(again) == facts(alone(batch, tokens(100, seed=1), max_tokens=20))


def test_a_callback_that_raises_between_slices_ends_its_request_alone(batch: Batch) -> None:
    """While another prompt is read, the answers' callbacks are called inside of its kernels."""
    answers = [batch.stream(tokens(20, seed=i), max_tokens=400, stop=Raising(ERRORS[i], 20 * i + 9)) for i in range(3)]
    reading = batch.stream(tokens(3000, seed=9), max_tokens=4)
    for stream, error in zip(answers, ERRORS, strict=False):
        with pytest.raises(type(error)):
            for _ in stream:
                pass
    assert facts(finish(reading)) == facts(alone(batch, tokens(3000, seed=9), max_tokens=4))


def test_a_request_that_can_never_fit_is_refused_at_once(tmp_path: Path, tiny_model: Path) -> None:
    """Also beside kept contexts that are too short to be saved, and beside an answer."""
    engine = lce.load(tiny_model, block=BLOCK)
    with engine.batch(cache_dir=tmp_path) as batch:
        finish(batch.stream(tokens(3), max_tokens=2))
        other = batch.stream(tokens(30, seed=1), max_tokens=30)
        with pytest.raises(CapacityError):
            batch.stream(tokens(40), max_tokens=1 << 40)
        assert finish(other).finish_reason


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_process_cannot_ask_its_parents_batch(batch: Batch) -> None:
    if not (child := os.fork()):
        with suppress(BaseException):
            with pytest.raises(UsageError, match="in the process that made it"):
                batch.stream(tokens(5), max_tokens=2)
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_few_prompts_overtake_one_that_waits_for_memory(full: lce.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    free, new_context, lengths = threading.Event(), scheduler.new_context, list[int]()

    def limited(setup: lce.Setup, length: Any = None) -> lce.Context:
        if length > 100 and not free.is_set():
            raise CapacityError("no memory is free")
        lengths.append(length)
        return new_context(setup, length)

    monkeypatch.setattr(scheduler, "new_context", limited)
    monkeypatch.setattr(scheduler, "MOST_OVERTAKING", 2)
    with full.batch() as batch:
        first = batch.stream(tokens(20), max_tokens=60, stop=lambda text: free.is_set() or free.wait(0.02))
        big = batch.stream(tokens(90, seed=1), max_tokens=20)
        small = [batch.stream(tokens(5, seed=i), max_tokens=2) for i in range(2, 6)]
        until(lambda: first.state == "decode" and small[1].state == "done")
        time.sleep(0.2)
        assert [each.state for each in (big, *small)] == ["waiting", "done", "done", "waiting", "waiting"]
        free.set()
        for each in (first, big, *small):
            assert finish(each).finish_reason
    assert lengths[:4] == [80, 7, 7, 110]


def test_short_prompts_are_read_between_blocks_of_a_long_one(full: lce.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    read, append = list[int](), scheduler.append

    def noted(setup: lce.Setup, context: lce.Context, *how: Any, **more: Any) -> None:
        read.append(len(context))
        append(setup, context, *how, **more)
        if len(read) == 1:  # while the first block of the long prompt is read, others are asked
            streams.extend(batch.stream(ids, max_tokens=2) for ids in others)

    long, others = tokens(10 * BLOCK), [tokens(10 * BLOCK, seed=1), *(tokens(BLOCK, seed=i) for i in range(2, 6))]
    alone = [full.generate(ids, max_tokens=2).token_ids for ids in (long, *others)]
    monkeypatch.setattr(scheduler, "append", noted)
    with full.batch() as batch:
        streams = [batch.stream(long, max_tokens=2)]
        until(lambda: len(streams) == 6)
        assert [finish(each).token_ids for each in streams] == alone
    assert read[:9] == [10 * BLOCK, *[BLOCK, 10 * BLOCK] * 4], "the second long prompt waits for the first"


FORBIDDEN: dict[str, Callable[[Batch], object]] = {  # by what the error says
    "its own batch": lambda batch: batch.stream(tokens(9), max_tokens=2).finish(),
    "cannot close": Batch.close,
}


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("words", FORBIDDEN)
def test_a_callback_cannot_wait_for_its_own_batch_or_close_it(words: str, n: int, batch: Batch) -> None:
    """The first token is drawn in another thread than later ones."""
    texts: list[str] = []

    def stop(text: str) -> None:
        texts.append(text)
        if len(texts) == n:
            FORBIDDEN[words](batch)

    with pytest.raises(UsageError, match=words):
        finish(batch.stream(tokens(20), max_tokens=9, stop=stop))
    assert finish(batch.stream(tokens(20), max_tokens=9)).token_ids


@pytest.mark.parametrize("drain_s", ["3", -1, float("inf"), float("nan"), None])
def test_close_refuses_what_is_no_time(drain_s: Any, batch: Batch) -> None:
    with pytest.raises(UsageError, match="drain_s"):
        batch.close(drain_s)


def test_a_full_queue_refuses(full: lce.Engine) -> None:
    with full.batch(max_lanes=2, max_waiting=1) as batch:
        streams = [batch.stream(tokens(2000, seed=i), max_tokens=500) for i in range(3)]
        with pytest.raises(BusyError):
            batch.stream([5])
        for stream in streams:
            stream.cancel()
        for stream in streams:
            finish(stream)
        assert finish(batch.stream([5], max_tokens=3)).finish_reason


def test_close_ends_what_runs_and_may_be_called_again(full: lce.Engine) -> None:
    batch = full.batch(max_lanes=2)
    streams = [batch.stream(tokens(60, seed=i), max_tokens=3000) for i in range(5)]
    within(lambda: next(streams[0]))
    closers = [begun(batch.close) for _ in range(3)]
    assert {finish(stream).finish_reason for stream in streams} == {"cancelled"}
    for closer in closers:
        closer.result(30)
    within(batch.close)
    with pytest.raises(BusyError, match="closed"):
        batch.stream([5])
    assert batch.gauges()["running"] == 0
    until(lambda: not batch._scheduler.thread.is_alive())


def test_close_drains(full: lce.Engine) -> None:
    batch = full.batch(max_lanes=2)
    short, long = batch.stream(tokens(20), max_tokens=8), batch.stream(tokens(20, seed=1), max_tokens=100_000)
    before = time.monotonic()
    within(lambda: batch.close(drain_s=0.5))
    assert time.monotonic() - before < 20
    assert finish(short).finish_reason in ("length", "stop")
    assert finish(long).finish_reason in ("cancelled", "stop")


def test_an_event_loop_closes_a_batch(full: lce.Engine) -> None:
    async def main() -> list[str]:
        async with full.batch() as batch:
            streams = [batch.stream(tokens(30, seed=i), max_tokens=9) for i in range(4)]
            return [result.text for result in await asyncio.gather(*(stream.afinish() for stream in streams))]

    expected = [full.generate(tokens(30, seed=i), max_tokens=9).text for i in range(4)]
    assert within(lambda: asyncio.run(main())) == expected


EXITS = """
import random, sys, time, warnings, lce
warnings.simplefilter("ignore")
engine = lce.load(sys.argv[1], block=32)
batch = engine.batch(cache_dir=sys.argv[2])
streams = [batch.stream([5 + i] * 3000, max_tokens=500) for i in range(4)]
time.sleep(random.random())
"""


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, pytest.param(10, marks=SLOW)])
def test_an_interpreter_may_end_without_close(n: int, tiny_model: Path, tmp_path: Path) -> None:
    for _ in range(n):
        with start(EXITS, tiny_model, tmp_path) as process:
            _, err = process.communicate(timeout=60)
            assert (process.wait(), err) == (0, "")


def test_many_threads_ask_at_once(full: lce.Engine) -> None:
    found: dict[int, Any] = {}
    methods = ["full", "streaming", "dca", "longheads"]
    with full.batch(max_lanes=5) as batch:

        def ask(i: int) -> None:
            for j in range(3):
                stream = batch.stream(tokens(20 + i, seed=i), method=methods[(i + j) % 4], max_tokens=6)
                batch.gauges()
                if j == 1 and i % 3 == 0:
                    stream.cancel()
                result = stream.finish()
                if result.finish_reason != "cancelled":
                    found[i, j] = result.token_ids  # type: ignore[index]
                batch.read(tokens(9, seed=i)).finish()

        together([partial(ask, i) for i in range(10)])
        assert len(found) >= 26
        for (i, j), ids in found.items():  # type: ignore[misc]
            method = methods[(i + j) % 4]
            assert ids == lce.Engine(batch.setup_of(method)).generate(tokens(20 + i, seed=i), max_tokens=6).token_ids


def test_threads_that_want_a_method_get_one_engine(full: lce.Engine) -> None:
    with full.batch() as batch:
        assert len(set(together([lambda: id(batch.setup_of("dca"))] * 8))) == 1


@pytest.mark.slow
def test_memory_stays_level(full: lce.Engine) -> None:
    with full.batch() as batch:

        def ask(first: int) -> None:
            for seed in range(first, first + 50, 5):
                streams = [batch.stream(tokens(60, seed=seed + i), max_tokens=3) for i in range(5)]
                for stream in streams:
                    finish(stream)

        batch._prefixes.memory = 1 << 20
        ask(0)
        gc.collect()
        before, n_before = resident(), batch.gauges()["contexts"]
        ask(100)
        ask(200)
        gc.collect()
        assert batch._prefixes.memory_bytes <= 1 << 20
        assert batch.gauges()["contexts"] <= n_before + 2
        assert resident() - before < 8 << 20


def test_a_kept_file_with_damaged_rows_is_read_anew(tiny_model: Path, tmp_path: Path, capfd: Any) -> None:
    ids, engine = tokens(400), lce.load(tiny_model, block=BLOCK)
    with engine.batch(cache_dir=tmp_path) as batch:
        finish(batch.stream(ids, max_tokens=4))
    (file,) = tmp_path.glob("*/*.lce")
    raw = bytearray(file.read_bytes())
    raw[-3000] ^= 0xFF
    file.write_bytes(raw)
    with engine.batch(cache_dir=tmp_path) as batch:
        result = finish(batch.stream([*ids, 5], max_tokens=4))
        assert facts(result) == facts(engine.generate([*ids, 5], max_tokens=4))
        assert not file.exists()
    assert "removed" in capfd.readouterr().err


def test_a_lane_that_fails_is_not_kept(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    other = batch.stream(tokens(20, seed=1), max_tokens=200)
    within(lambda: next(other))
    stream = batch.stream(tokens(90), max_tokens=200)
    within(lambda: next(stream))
    cache = stream._request.context.cache  # type: ignore[union-attr]
    monkeypatch.setattr(cache, "commit", Mock(side_effect=DataError("the disk is gone")))
    with pytest.raises(DataError, match="gone"):
        finish(stream)
    assert len(finish(other).token_ids) == 200 or other.result.finish_reason == "stop"
    assert facts(finish(batch.stream(tokens(90), max_tokens=5))) == facts(alone(batch, tokens(90), max_tokens=5))


@pytest.mark.parametrize("method", ["full", "streaming"])
def test_keys_that_are_rotated_for_another_length_are_not_continued(method: str, tiny_model: Path) -> None:
    """Dynamic RoPE scaling follows the final length of a text, which a shorter text's context was not made for."""
    engine = lce.load(tiny_model, method, block=BLOCK, rope="dynamic", rope_factor=2)
    short, long = tokens(30), [*tokens(30), *tokens(300, seed=2)]
    with engine.batch() as batch:
        finish(batch.stream(short, max_tokens=4))
        found = finish(batch.stream(long, max_tokens=8))
        assert facts(found) == facts(engine.generate(long, max_tokens=8))
        again = finish(batch.stream(long, max_tokens=8))  # of the same length
        assert facts(again) == facts(found)
        assert again.stats.read_before >= 329


def test_a_constraint_that_changes_logits_in_place_changes_no_other_answer(batch: Batch) -> None:
    class Sevens:
        def apply(self, logits: Tensor) -> Tensor:
            logits[:] = -torch.inf
            logits[7] = 0.0
            return logits

        def accept(self, token_id: int) -> None: ...

    ids = tokens(50)
    assert finish(batch.stream(ids, max_tokens=3, constraint=Sevens())).token_ids == [7, 7, 7]
    found = finish(batch.stream([*ids, 7, 7], max_tokens=3))  # whose logits are kept
    assert found.token_ids == alone(batch, [*ids, 7, 7], max_tokens=3).token_ids
