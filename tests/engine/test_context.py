"""Contexts are kept apart, and a call that fails leaves a context as it was."""

import copy
import os
import pickle
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lce
from lce.cache.layer import LayerCache
from lce.cache.limits import Limits
from lce.methods import Full, LongHeads, Method
from lce.methods.run import Block
from lce.weights.checkpoint import Checkpoint
from tests.checkpoints import tokens
from tests.command import resident

BLOCK = 32


def test_a_fork_goes_its_own_way(engine: lce.Engine) -> None:
    context = engine.prefill(tokens(100))
    before = context.logits.clone()
    answers = [engine.generate(tokens(9, seed), max_tokens=12, context=context.fork()).token_ids for seed in (1, 2)]
    assert answers[0] != answers[1]
    assert len(context) == context.cache.length == 100
    assert torch.equal(context.logits, before)
    assert engine.generate(tokens(9, 1), max_tokens=12, context=context.fork()).token_ids == answers[0]
    assert torch.equal(context.fork().logits, before)
    fork = context.fork()
    engine.generate(tokens(40, 3), max_tokens=30, context=context)  # and the other way round
    assert engine.generate(tokens(9, 2), max_tokens=12, context=fork).token_ids == answers[1]


def test_a_context_is_asked_by_one_thread_at_a_time(engine: lce.Engine) -> None:
    context = engine.prefill(tokens(40))
    stream = engine.stream([], max_tokens=5, context=context)
    next(stream)

    def refused() -> None:
        calls = (lambda: engine.generate("x", context=context), lambda: engine.prefill("x", context=context))
        for call in (*calls, context.fork, context.close):
            with pytest.raises(lce.UsageError, match="being asked already: wait for that answer, or ask a fork"):
                call()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(refused).result(60)
    said = len(context)
    stream.close()
    assert len(context) == said
    engine.generate("x", max_tokens=1, context=context)


def test_two_threads_do_as_one_after_the_other(engine: lce.Engine) -> None:
    def ask(seed: int) -> tuple[list[int], Tensor]:
        context = engine.prefill(tokens(120, seed))
        ids = engine.generate(tokens(10, seed + 50), max_tokens=15, context=context).token_ids
        return ids, engine.logits(tokens(60, seed))

    in_turn = [ask(seed) for seed in range(4)]
    with ThreadPoolExecutor(2) as pool:
        at_once = list(pool.map(ask, range(4), timeout=60))
    for (ids, logits), (same_ids, same_logits) in zip(in_turn, at_once, strict=True):
        assert ids == same_ids
        assert torch.equal(logits, same_logits)


def test_a_context_shows_what_users_call(engine: lce.Engine) -> None:
    with engine.prefill(tokens(3)) as context:
        shown = {name for name in dir(context) if not name.startswith("_")}
    for_extensions = "data files go_back hold mark rope store_logits uncached".split()
    assert shown == {*"announced cache close fork logits save source token_ids truncate".split(), *for_extensions}


def test_a_context_belongs_to_its_engine(engine: lce.Engine, tiny_model: Path) -> None:
    """Even to an engine of the same model and options, whose files it can share."""
    context = engine.prefill(tokens(10))
    twin = lce.load(tiny_model, engine.method, block=BLOCK)
    for call in (twin.generate, twin.stream, twin.prefill):
        with pytest.raises(lce.UsageError, match="made by another engine"):
            call("x", context=context)
    assert context.fork().files is context.files is not twin.setup.files
    assert (context.files.identity.facts, len(context)) == (twin.setup.identity.facts, 10)


def test_a_fingerprint_is_read_when_needed(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Checkpoint] = []
    fingerprint, engine = Checkpoint.fingerprint, lce.load(tiny_model)
    monkeypatch.setattr(Checkpoint, "fingerprint", lambda self: calls.append(self) or fingerprint(self))
    context = engine.prefill(tokens(10))
    engine.generate("x", max_tokens=1, context=context.fork())
    assert calls == []
    for _ in range(2):
        context.save(tmp_path / "c.lce")
        engine.open_context(tmp_path / "c.lce")
    assert (len(calls), engine.setup.fingerprint) == (1, fingerprint(calls[0]))


class Interrupted(Exception):
    pass


class Fuse:
    def __init__(self) -> None:
        self.left = -1

    def burn(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise Interrupted


FUSE = Fuse()


EVERY: dict[str, Method] = {
    "full": Full(),
    "streaming": lce.methods.Streaming(local=20),
    "self_extend": lce.methods.SelfExtend(local=8),
    "self_extend, auto": lce.methods.SelfExtend(local=8, group="auto"),
    "longheads": LongHeads(chunk_size=8, chunks=4),
    "constant": LongHeads(chunk_size=8, chunks=4, placement="constant"),
    "quest": lce.methods.Quest(page=4, budget=16, dense_layers=0),
}


def failing(late: bool) -> Callable[..., Tensor]:
    """`Block.__call__`, which fails once the layer has done its work, or before."""
    attend = Block.__call__

    def run(*values: Any) -> Tensor:
        out = attend(*values) if late else None
        FUSE.burn()
        return attend(*values) if out is None else out

    return run


@pytest.fixture(scope="module", params=["full", "full, late", "longheads", "longheads, late", "longheads, late, int8"])
def fragile(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[lce.Engine]:
    name, *more = request.param.split(", ")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Block, "__call__", failing("late" in more))
        yield lce.load(tiny_model, EVERY[name], block=BLOCK, kv_dtype="int8" if "int8" in more else "auto")
    FUSE.left = -1


def contents(context: lce.Context) -> list[Tensor | int | None]:
    """All that a context knows, as far as it counts."""
    known = [context.cache.length, None if context.logits is None else context.logits.clone()]
    for layer in context.cache.layers:
        known += [layer.length, *(x.clone() for x in layer.span(0, layer.stop))]
        for _, state in sorted(layer.state.items()):
            tensor, number = state.committed(layer.length)
            known += [number] if tensor is None else [number, tensor.clone()]
    return known


def assert_same(context: lce.Context, known: list[Tensor | int | None]) -> None:
    for now, then in zip(contents(context), known, strict=True):
        if isinstance(then, Tensor) and isinstance(now, Tensor):
            assert torch.equal(now, then)
        elif then is None and isinstance(now, Tensor):
            assert now.numel() == 0  # summaries: room was made, nothing is in it
        else:
            assert now == then


def test_a_failure_in_any_layer_of_any_block_leaves_the_context_as_it_was(fragile: lce.Engine) -> None:
    """45 tokens, then 100 more in four blocks through two layers: fail at each of the eight calls, then try again."""
    start, rest = tokens(45), tokens(100, seed=1)
    truth = fragile.prefill(rest, context=fragile.prefill(start))
    for call in range(1, 9):
        context = fragile.prefill(start)
        before = contents(context)
        FUSE.left = call
        with pytest.raises(Interrupted):
            fragile.prefill(rest, context=context)
        assert context.token_ids == start
        assert_same(context, before)
        fragile.prefill(rest, context=context)
        assert_same(context, contents(truth))


def test_a_question_that_fails_takes_no_word_of_the_last_answer_along(fragile: lce.Engine) -> None:
    """The last token of an answer is not read yet; it was said all the same."""
    start, question = tokens(45), tokens(20, seed=1)
    context = fragile.prefill(start)
    answer = fragile.generate([], max_tokens=5, context=context).token_ids
    fork = context.fork()
    FUSE.left = 1
    with pytest.raises(Interrupted):
        fragile.prefill(question, context=context)
    assert (context.token_ids, context.uncached) == (start + answer, answer[-1:])
    for each in (context, fork):
        fragile.prefill(question, context=each)
    assert_same(context, contents(fork))


def test_a_failure_while_writing_loses_no_token(fragile: lce.Engine) -> None:
    start = tokens(45)
    answer = fragile.generate([], max_tokens=10, context=fragile.prefill(start)).token_ids
    for call in range(1, 19, 3):
        context = fragile.prefill(start)
        FUSE.left = call
        stream = fragile.stream([], max_tokens=10, context=context)
        with pytest.raises(Interrupted):
            list(stream)
        said = stream.result.token_ids
        assert (len(said), context.token_ids) == ((call + 1) // 2, start + said)
        said = said + fragile.generate([], max_tokens=10 - len(said), context=context).token_ids
        assert said == answer


def test_generate_that_fails_says_nothing(fragile: lce.Engine) -> None:
    start, question = tokens(45), tokens(9, seed=1)
    context = fragile.prefill(start)
    before = contents(context)
    answer = fragile.generate(question, max_tokens=6, context=context.fork()).token_ids
    for call in range(1, 13):
        FUSE.left = call
        with pytest.raises(Interrupted):
            fragile.generate(question, max_tokens=6, context=context)
        assert context.token_ids == start
        assert_same(context, before)
    assert fragile.generate(question, max_tokens=6, context=context).token_ids == answer


def test_a_failure_in_the_progress_callback_leaves_the_context_as_it_was(engine: lce.Engine) -> None:
    start, rest = tokens(45), tokens(100, seed=1)
    truth = engine.prefill(rest, context=engine.prefill(start))
    for block in range(1, 5):

        def progress(done: int, total: int, last: int = block) -> None:
            if done >= min(last * BLOCK, total):
                raise Interrupted

        for call in ("prefill", "generate", "score"):
            context = engine.prefill(start)
            with pytest.raises(Interrupted):
                getattr(engine, call)(rest, context=context, progress=progress)
            assert context.token_ids == start
            engine.prefill(rest, context=context)
            assert_same(context, contents(truth))


def test_an_interruption_between_two_commits_is_undone(engine: lce.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may come anywhere: half the layers with a block and half without it would be the end of a context."""
    start, rest = tokens(40), tokens(20, seed=1)
    truth = engine.prefill(rest, context=engine.prefill(start))
    commit = LayerCache.commit

    def interrupted(layer: LayerCache) -> None:
        if FUSE.left > 0:
            FUSE.burn()
        commit(layer)

    monkeypatch.setattr(LayerCache, "commit", interrupted)
    for call in (1, 2):
        context = engine.prefill(start)
        FUSE.left = call
        with pytest.raises(Interrupted):
            engine.prefill(rest, context=context)
        assert context.token_ids == start
        engine.prefill(rest, context=context)
        assert_same(context, contents(truth))


TIERED = [("longheads", "64KiB"), ("quest", "64KiB")]
ALIKE = ("full", "self_extend, auto", "constant", "quest")  # another method keeps rows or a state of the same kind


@pytest.mark.parametrize(
    ("name", "budget"),
    [*(pytest.param(name, None, marks=[pytest.mark.slow] * (name in ALIKE)) for name in EVERY), *TIERED],
)
@pytest.mark.covering("name")
def test_a_truncated_context_goes_on(tiny_model: Path, tmp_path: Path, name: str, budget: str | None) -> None:
    spill: dict[str, Any] = {} if budget is None else {"kv_host_budget": budget, "spill_dir": tmp_path}
    engine = lce.load(tiny_model, EVERY[name], block=BLOCK, **spill)
    ids, question = tokens(150), tokens(9, seed=1)
    context = engine.prefill(ids)
    engine.generate([], max_tokens=5, context=context)  # its last token is not read yet
    for n in (154, 148, 96, 33, 1):
        context.truncate(n)
        assert (len(context), context.token_ids[:150]) == (n, ids[:n])
        fork = context.fork()
        logits = engine.prefill([], context=fork).logits
        assert (logits - engine.logits(fork.token_ids)[-1]).abs().max() <= 1e-4
        asked = engine.generate(question, max_tokens=4, context=fork).token_ids
        fresh = engine.prefill(fork.token_ids[:n])
        assert asked == engine.generate(question, max_tokens=4, context=fresh).token_ids
        context.save(tmp_path / f"{n}.lce")
        opened = engine.open_context(tmp_path / f"{n}.lce")
        assert asked == engine.generate(question, max_tokens=4, context=opened).token_ids
    engine.prefill(ids).save(tmp_path / "c.lce")
    opened = engine.open_context(tmp_path / "c.lce")
    opened.truncate(60)
    opened.save(tmp_path / "c.lce")  # the logits of its last token may not be known, and no token may be cached
    expected = engine.generate(question, max_tokens=4, context=engine.prefill(ids[:60])).token_ids
    for each in (opened, engine.open_context(tmp_path / "c.lce")):
        assert engine.generate(question, max_tokens=4, context=each).token_ids == expected
    alone = engine.generate([], max_tokens=4, context=engine.open_context(tmp_path / "c.lce")).token_ids
    assert alone == engine.generate(ids[:60], max_tokens=4).token_ids
    context.truncate(0)
    assert len(context) == context.cache.length == 0
    with pytest.raises(lce.UsageError, match="the prompt is empty"):
        engine.generate([], context=context)
    assert engine.prefill(ids, context=context).token_ids == ids


@pytest.mark.parametrize("name", ["full", "longheads", "quest", "self_extend, auto"])
def test_a_truncated_context_of_8_bits_is_the_same_in_any_budget(tiny_model: Path, tmp_path: Path, name: str) -> None:
    """What was rounded stays so: near to a context that read no more, and to the bit alike whatever the budget."""
    roomy = lce.load(tiny_model, EVERY[name], block=BLOCK, kv_dtype="int8")
    budgets = {"kv_host_budget": Limits(roomy.setup.layout).least_budget, "spill_dir": tmp_path}
    tight = lce.load(tiny_model, EVERY[name], block=BLOCK, kv_dtype="int8", **budgets)
    contexts = [engine.prefill(tokens(150)) for engine in (roomy, tight)]
    for n in (149, 97, 33):
        logits = []
        for engine, context in zip((roomy, tight), contexts, strict=True):
            context.truncate(n)
            logits.append(engine.prefill(tokens(9, seed=1), context=context.fork()).logits)
        fresh = roomy.prefill(tokens(9, seed=1), context=roomy.prefill(tokens(150)[:n])).logits
        assert torch.equal(logits[0], logits[1])
        assert (logits[0] - fresh).abs().max() <= 0.1 * fresh.std()


def test_a_context_is_truncated_to_what_it_has(engine: lce.Engine) -> None:
    context = engine.prefill(tokens(40))
    before = context.logits
    context.truncate(40)
    assert torch.equal(context.logits, before)
    for wrong in (41, -1, 1.5, None):
        with pytest.raises(lce.UsageError, match="n_tokens is"):
            context.truncate(wrong)
    assert len(context) == context.cache.length == 40


def test_closed_contexts_take_no_memory(tiny_model: Path) -> None:
    """Fifty forks and six contexts of their own, each asked: what they took is the system's again."""
    engine = lce.load(tiny_model)
    document = engine.prefill(tokens(4000))
    engine.generate(tokens(9), max_tokens=2, context=document.fork())
    before = resident()
    contexts = [document.fork() for _ in range(50)] + [engine.prefill(tokens(4000)) for _ in range(6)]
    for number, context in enumerate(contexts):
        engine.generate(tokens(9, number), max_tokens=2, context=context)
    taken = resident() - before
    assert taken > 6 * 4000 * 512, "bytes of a token in the tiny model"
    for context in contexts:
        context.close()
    assert resident() - before < taken / 8


def test_with_closes_a_context_and_frees_its_files_at_once(tiny_model: Path, tmp_path: Path) -> None:
    engine = lce.load(tiny_model, EVERY["longheads"], block=BLOCK, kv_host_budget="64KiB", spill_dir=tmp_path)

    def open_files() -> list[str]:
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        names = [os.readlink(link) for link in links if os.path.islink(link)]
        return [name for name in names if name.startswith(str(tmp_path))]

    with engine.prefill(tokens(300)) as context:
        weak = weakref.ref(context.cache)
        assert context.cache.bytes_by_tier["disk"]
        assert open_files()
    assert weak() is None
    assert (open_files(), list(tmp_path.iterdir()), repr(context)) == ([], [], "Context(300 tokens, closed)")
    context.close()
    more = (lambda: context.truncate(3), lambda: context.save(tmp_path / "c.lce"))
    asked = (lambda: engine.generate("x", context=context), lambda: engine.prefill("x", context=context))
    for call in (context.fork, context.__enter__, *more, *asked):
        with pytest.raises(lce.UsageError, match="this context was closed"):
            call()


def test_engines_contexts_and_streams_are_neither_pickled_nor_copied(engine: lce.Engine) -> None:
    context = engine.prefill(tokens(10))
    things = (engine, context, engine.stream("x", context=context), engine.astream("x", context=context))
    for thing in things:
        for how in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(lce.UsageError, match=f"this {type(thing).__name__} cannot be pickled") as error:
                how(thing)
            assert "\n" not in str(error.value)
    with pytest.raises(lce.UsageError, match=r"copy it with fork\(\), or write it with save\(\)"):
        copy.copy(context)


def test_a_traceback_that_is_kept_keeps_no_context_in_use(fragile: lce.Engine) -> None:
    """As in a notebook, which keeps the last one."""
    context = fragile.prefill(tokens(20))
    kept: list[object] = []
    for call in range(1, 7):
        FUSE.left = call
        with pytest.raises(Interrupted) as error:
            fragile.generate(tokens(5), max_tokens=4, context=context)
        kept.append(error)
        assert len(context) == len(context.fork()) == 20
