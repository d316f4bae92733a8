"""The engine's promises: one text however it is asked for, contexts kept apart, and failures that break nothing."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lce
from lce.cache.layer import LayerCache
from lce.methods import Full, LongHeads, Method, Step

METHODS = {"full": Full(), "longheads": LongHeads(chunk_size=8, chunks=4)}
TEXT = "The quick brown fox jumps over the lazy dog, and then over the moon and the other dogs. " * 3
BLOCK = 32


@pytest.fixture(scope="module", params=METHODS)
def engine(request: pytest.FixtureRequest, tiny_model: Path) -> lce.Engine:
    return lce.load(tiny_model, METHODS[request.param], block=BLOCK)


def tokens(n: int, seed: int = 0) -> list[int]:
    ids: list[int] = torch.randint(2, 300, (n,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def last_logits(context: lce.Context) -> Tensor:
    assert context.logits is not None
    assert not context.unread
    return context.logits


# One text, however it is asked for


def test_generate_is_the_stream_joined(engine: lce.Engine) -> None:
    whole = engine.generate(TEXT, max_tokens=30)
    stream = engine.stream(TEXT, max_tokens=30)
    assert "".join(piece.text for piece in stream) == whole.text
    assert stream.result.token_ids == whole.token_ids
    assert stream.result.finish_reason == whole.finish_reason
    assert whole.text


def test_a_generation_may_be_continued(engine: lce.Engine) -> None:
    whole = engine.generate(TEXT, max_tokens=30)
    assert len(whole.token_ids) == 30
    context = engine.prefill(TEXT)
    parts = [engine.generate("", max_tokens=n, context=context) for n in (1, 9, 20)]
    assert [token for part in parts for token in part.token_ids] == whole.token_ids
    assert context.token_ids == engine.tokenizer.encode(TEXT) + whole.token_ids


def test_sampled_text_repeats_with_its_seed(engine: lce.Engine) -> None:
    def draw(seed: int) -> list[int]:
        sampling = lce.Sampling(temperature=1.0, seed=seed)
        return engine.generate(TEXT, max_tokens=20, sampling=sampling).token_ids

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_a_document_and_a_question_are_one_prompt(engine: lce.Engine) -> None:
    document, question = tokens(150), tokens(20, seed=1)
    asked = engine.generate(question, max_tokens=20, context=engine.prefill(document))
    assert asked.token_ids == engine.generate(document + question, max_tokens=20).token_ids


def test_a_question_as_text_gets_no_second_beginning(engine: lce.Engine) -> None:
    context = engine.prefill("The old miller")
    engine.generate(" took the bread", max_tokens=1, context=context)
    beginning = engine.tokenizer.encode("The old miller")
    assert beginning[0] == engine.tokenizer.bos_id
    said = beginning + engine.tokenizer.encode(" took the bread", bos=False)
    assert context.token_ids[:-1] == said


@pytest.mark.parametrize("block", [1, 7, 64, 512])
def test_blocks_do_not_matter(engine: lce.Engine, tiny_model: Path, block: int) -> None:
    ids = tokens(170)
    other = lce.load(tiny_model, engine.method, block=block)
    assert (other.logits(ids) - engine.logits(ids)).abs().max() <= 1e-4
    assert (last_logits(other.prefill(ids)) - engine.logits(ids)[-1]).abs().max() <= 1e-4


def test_logits_are_float32_for_every_token(engine: lce.Engine, tiny_model: Path) -> None:
    logits = engine.logits(tokens(70))
    assert logits.shape == (70, 300)
    assert logits.dtype == torch.float32
    assert lce.load(tiny_model, dtype="bfloat16").logits([5]).dtype == torch.float32
    greedy = engine.generate(tokens(70), max_tokens=1)
    assert greedy.token_ids == [int(logits[-1].argmax())]


def test_selecting_everything_is_full_attention(tiny_model: Path) -> None:
    ids = tokens(64)
    full, longheads = (lce.load(tiny_model, name).logits(ids) for name in ("full", "longheads"))
    assert (full - longheads).abs().max() <= 1e-4
    ids = tokens(200)
    full, longheads = (lce.load(tiny_model, name).logits(ids) for name in ("full", "longheads"))
    assert (full - longheads).abs().max() > 0.1


def test_stop_strings_end_the_text(engine: lce.Engine) -> None:
    whole = engine.generate(TEXT, max_tokens=30)
    stop = whole.text[5:8]
    cut = engine.generate(TEXT, max_tokens=30, stop=[stop])
    assert cut.text == whole.text[: whole.text.find(stop)]
    assert cut.finish_reason == "stop"
    assert engine.generate(TEXT, max_tokens=30, stop=stop).text == cut.text
    assert engine.generate(TEXT, max_tokens=30, sampling=lce.Sampling(stop=(stop,))).text == cut.text
    assert "".join(p.text for p in engine.stream(TEXT, max_tokens=30, stop=[stop])) == cut.text


def test_end_tokens_come_from_the_model_and_its_tokenizer(tiny_model: Path, tmp_path: Path) -> None:
    ids = lce.load(tiny_model).generate(TEXT, max_tokens=20).token_ids
    at = next(i for i in range(3, 20) if ids[i] not in ids[:i])
    for file, key in (("generation_config.json", "eos_token_id"), ("config.json", "eos_token_id")):
        folder = shutil.copytree(tiny_model, tmp_path / file)
        path = folder / file
        values = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(values | {key: [2, ids[at]]}))
        ended = lce.load(folder).generate(TEXT, max_tokens=20)
        assert ended.token_ids == ids[:at], file
        assert ended.finish_reason == "stop"


def test_the_figures_of_a_generation(engine: lce.Engine) -> None:
    result = engine.generate(tokens(100), max_tokens=8)
    stats = result.stats
    assert (stats.prompt_tokens, stats.generated_tokens) == (100, len(result.token_ids))
    assert 0 < stats.prefill_s <= stats.first_token_s
    assert stats.prefill_tokens_per_s == pytest.approx(100 / stats.prefill_s)
    assert stats.memory["device"] >= 100 * 2 * 2 * 2 * 16 * 4


def test_progress_is_told_after_each_block(engine: lce.Engine) -> None:
    told: list[tuple[int, int]] = []
    engine.generate(tokens(100), max_tokens=3, progress=lambda done, total: told.append((done, total)))
    assert told == [(32, 100), (64, 100), (96, 100), (100, 100)]


def test_writing_moves_nothing(engine: lce.Engine) -> None:
    """Room for the whole answer is made before its first token."""
    context = engine.prefill(tokens(45))
    stream = engine.stream(tokens(5), max_tokens=60, context=context)
    next(stream)
    before = [layer.k_buffer.data_ptr() for layer in context.cache.layers]
    assert len(list(stream)) > 10
    assert [layer.k_buffer.data_ptr() for layer in context.cache.layers] == before


# Contexts


def test_a_fork_goes_its_own_way(engine: lce.Engine) -> None:
    context = engine.prefill(tokens(100))
    before = last_logits(context).clone()
    answers = [engine.generate(tokens(9, seed), max_tokens=12, context=context.fork()).token_ids for seed in (1, 2)]
    assert answers[0] != answers[1]
    assert len(context) == context.cache.length == 100
    assert torch.equal(last_logits(context), before)
    assert engine.generate(tokens(9, 1), max_tokens=12, context=context.fork()).token_ids == answers[0]
    assert torch.equal(last_logits(context.fork()), before)
    fork = context.fork()
    engine.generate(tokens(40, 3), max_tokens=30, context=context)  # and the other way round
    assert engine.generate(tokens(9, 2), max_tokens=12, context=fork).token_ids == answers[1]


def test_a_fork_in_the_middle_of_an_answer_goes_on_alike(engine: lce.Engine) -> None:
    context = engine.prefill(tokens(100))
    engine.generate([], max_tokens=5, context=context)
    fork = context.fork()
    assert fork.token_ids == context.token_ids
    assert fork.unread == context.unread != []
    assert fork.logits is not None
    ours, theirs = (engine.generate([], max_tokens=15, context=c).token_ids for c in (context, fork))
    assert ours == theirs


def test_a_context_is_asked_by_one_thread_at_a_time(engine: lce.Engine) -> None:
    context = engine.prefill(tokens(40))
    stream = engine.stream([], max_tokens=5, context=context)
    next(stream)

    def refusals() -> Iterator[str]:
        for call in (
            lambda: engine.generate("x", context=context),
            lambda: engine.prefill("x", context=context),
            context.fork,
        ):
            with pytest.raises(lce.UsageError) as caught:
                call()
            yield str(caught.value)

    with ThreadPoolExecutor(1) as pool:
        messages = pool.submit(lambda: list(refusals())).result()
    assert all("fork" in message for message in messages)
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
    start = threading.Barrier(2)

    def together(seeds: range) -> list[tuple[list[int], Tensor]]:
        start.wait()
        return [ask(seed) for seed in seeds]

    with ThreadPoolExecutor(2) as pool:
        halves = [pool.submit(together, seeds) for seeds in (range(2), range(2, 4))]
        at_once = [answer for half in halves for answer in half.result()]
    for (ids, logits), (same_ids, same_logits) in zip(in_turn, at_once, strict=True):
        assert ids == same_ids
        assert torch.equal(logits, same_logits)


def test_a_context_says_what_it_is(engine: lce.Engine) -> None:
    context = engine.prefill(tokens(40))
    assert len(context) == 40
    assert repr(context) == f"Context(40 tokens, {context.cache.bytes_by_tier['device']} bytes)"


def test_an_engine_is_not_changed_by_use(engine: lce.Engine) -> None:
    def weights() -> dict[str, Tensor]:
        found = {f"{layer.index}.{name}": w for layer in engine.model.layers for name, w in layer.w.items()}
        model = engine.model
        found |= {"embed": model.embed, "head": model.head, "norm": model.final_norm}
        return {name: weight.clone() for name, weight in found.items() if weight is not None}

    before, fields = weights(), dict(vars(engine))
    engine.generate(TEXT, max_tokens=10, sampling=lce.Sampling(temperature=1.0))
    engine.logits(tokens(50))
    engine.trace(tokens(50))
    engine.prefill(TEXT).fork()
    assert vars(engine) == fields
    after = weights()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_engine_says_what_it_is(tiny_model: Path) -> None:
    assert repr(lce.load(tiny_model, "longheads", block=16, device="cpu")) == (
        "Engine(LongHeads(chunk_size=2, chunks=32, share='head', rank='top', keep_first=True, fix_head=False, "
        "fix_layer=False), window=64, block=16, cpu, torch.float32)"
    )


# Failures


class Interrupted(Exception):
    pass


class Fuse:
    """Burns through at the k-th call."""

    def __init__(self) -> None:
        self.left = -1

    def burn(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise Interrupted


FUSE = Fuse()


@dataclass(frozen=True)
class FailingFull(Full):
    late: bool = False  # fail once the layer has done its work, not before

    def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        return failing(super().attend, self.late, q, cache, step)


@dataclass(frozen=True)
class FailingLongHeads(LongHeads):
    late: bool = False

    def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        return failing(super().attend, self.late, q, cache, step)


def failing(attend: Callable[..., Tensor], late: bool, *values: Any) -> Tensor:
    if not late:
        FUSE.burn()
    out = attend(*values)
    if late:
        FUSE.burn()
    return out


FAILING: dict[str, Method] = {
    "full": FailingFull(),
    "full, late": FailingFull(late=True),
    "longheads": FailingLongHeads(chunk_size=8, chunks=4),
    "longheads, late": FailingLongHeads(chunk_size=8, chunks=4, late=True),
}


@pytest.fixture(scope="module", params=FAILING)
def fragile(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[lce.Engine]:
    yield lce.load(tiny_model, FAILING[request.param], block=BLOCK)
    FUSE.left = -1


def contents(context: lce.Context) -> list[Tensor | int | None]:
    """All that a context knows, as far as it counts."""
    known: list[Tensor | int | None] = [
        context.cache.length,
        None if context.logits is None else context.logits.clone(),
    ]
    for layer in context.cache.layers:
        known += [layer.length, *(x.clone() for x in layer.span(0, layer.stop))]
        known += [layer.chunks.n_chunks, layer.chunks.n_summaries]
        known += [layer.chunks.first.clone(), layer.chunks.length.clone()]
        known += [None if layer.chunks.summary is None else layer.chunks.summary.clone()]
    return known


def assert_same(context: lce.Context, known: list[Tensor | int | None]) -> None:
    for now, then in zip(contents(context), known, strict=True):
        if isinstance(then, Tensor) and isinstance(now, Tensor):
            assert torch.equal(now, then)
        elif then is None and isinstance(now, Tensor):
            assert now.numel() == 0  # summaries: room was made, nothing is in it
        else:
            assert now == then


def test_a_failure_in_any_layer_of_any_block_leaves_whole_blocks(fragile: lce.Engine) -> None:
    """45 tokens, then 100 more in four blocks through two layers: fail at each of the eight calls, then go on."""
    start, rest = tokens(45), tokens(100, seed=1)
    truth = fragile.prefill(rest, context=fragile.prefill(start))
    for call in range(1, 9):
        context = fragile.prefill(start)
        FUSE.left = call
        with pytest.raises(Interrupted):
            fragile.prefill(rest, context=context)
        read = (call - 1) // 2 * BLOCK
        assert context.token_ids == start + rest[:read]
        whole = fragile.prefill(start)
        if read:
            fragile.prefill(rest[:read], context=whole)
        assert_same(context, contents(whole))
        fragile.prefill(rest[read:], context=context)
        assert_same(context, contents(truth))


def test_a_question_that_fails_was_never_asked(fragile: lce.Engine) -> None:
    """A question of one block: the context is as before, and may be asked again, or forked."""
    start, question = tokens(45), tokens(20, seed=1)
    answer = fragile.generate(question, max_tokens=8, context=fragile.prefill(start)).token_ids
    context = fragile.prefill(start)
    before = contents(context)
    for call in (1, 2):
        FUSE.left = call
        with pytest.raises(Interrupted):
            fragile.generate(question, max_tokens=8, context=context)
        assert context.token_ids == start
        assert_same(context, before)
        assert fragile.generate(question, max_tokens=8, context=context.fork()).token_ids == answer
    assert fragile.generate(question, max_tokens=8, context=context).token_ids == answer


def test_a_question_that_fails_takes_no_word_of_the_last_answer_along(fragile: lce.Engine) -> None:
    """The last token of an answer is not read yet; it was said all the same."""
    start, question = tokens(45), tokens(20, seed=1)
    context = fragile.prefill(start)
    answer = fragile.generate([], max_tokens=5, context=context).token_ids
    fork = context.fork()
    FUSE.left = 1
    with pytest.raises(Interrupted):
        fragile.prefill(question, context=context)
    assert context.token_ids == start + answer
    assert context.unread == answer[-1:]
    for each in (context, fork):
        fragile.prefill(question, context=each)
    assert_same(context, contents(fork))


def test_a_failure_while_writing_loses_no_token(fragile: lce.Engine) -> None:
    """Nine tokens are read one by one through two layers; whichever fails, the answer can be continued."""
    start = tokens(45)
    answer = fragile.generate([], max_tokens=10, context=fragile.prefill(start)).token_ids
    for call in range(1, 19):
        context = fragile.prefill(start)
        FUSE.left = call
        stream = fragile.stream([], max_tokens=10, context=context)
        with pytest.raises(Interrupted):
            list(stream)
        said = stream.result.token_ids
        assert len(said) == (call + 1) // 2
        assert context.token_ids == start + said
        said = said + fragile.generate([], max_tokens=10 - len(said), context=context).token_ids
        assert said == answer


def test_a_failure_in_the_progress_callback_leaves_whole_blocks(engine: lce.Engine) -> None:
    start, rest = tokens(45), tokens(100, seed=1)
    truth = engine.prefill(rest, context=engine.prefill(start))
    for block in range(1, 5):

        def progress(done: int, total: int, last: int = block) -> None:
            if done >= min(last * BLOCK, total):
                raise Interrupted

        for call in ("prefill", "generate"):
            context = engine.prefill(start)
            with pytest.raises(Interrupted):
                getattr(engine, call)(rest, context=context, progress=progress)
            read = min(block * BLOCK, 100)
            assert context.token_ids == start + rest[:read]
            engine.prefill(rest[read:], context=context)
            assert_same(context, contents(truth))


def test_an_interruption_between_two_layers_commits_keeps_the_whole_block(
    engine: lce.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        assert context.token_ids == start + rest
        assert_same(context, contents(truth))


def test_a_prefill_that_fails_holds_nothing_up(fragile: lce.Engine) -> None:
    FUSE.left = 1
    with pytest.raises(Interrupted):
        fragile.prefill(tokens(45))
    FUSE.left = 3
    with pytest.raises(Interrupted):
        fragile.logits(tokens(45))
    assert len(fragile.prefill(tokens(45))) == 45


# What cannot be


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_refused(engine: lce.Engine, prompt: Any) -> None:
    for call in (engine.generate, engine.stream, engine.prefill, engine.logits, engine.trace):
        with pytest.raises(lce.UsageError, match="the prompt is empty; expected some text"):
            call(prompt)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([5, 300], "token id 300 is not in the model's vocabulary; expected 0 to 299"),
        ([-1], "token id -1"),
        ([5, 10**30], "token id 1000000"),
        ([5.0], "the prompt is a list; expected text or token ids"),
        (["a"], "the prompt is a list"),
        (None, "the prompt is a NoneType"),
    ],
)
def test_tokens_that_the_model_lacks_are_refused(engine: lce.Engine, prompt: Any, message: str) -> None:
    context = engine.prefill(tokens(10))
    for call in (engine.generate, engine.stream, engine.prefill, engine.logits, engine.trace):
        with pytest.raises(lce.UsageError, match=message):
            call(prompt)
    with pytest.raises(lce.UsageError, match=message):
        engine.generate(prompt, context=context)
    assert len(context) == 10


def test_token_ids_come_in_any_sequence(engine: lce.Engine) -> None:
    ids = tokens(40)
    expected = engine.logits(ids)
    for same in (tuple(ids), torch.tensor(ids), torch.tensor(ids).numpy()):
        assert torch.equal(engine.logits(same), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; expected 1 or more"),
        ({"max_tokens": -3}, "max_tokens is -3"),
        ({"stop": [""]}, "none of them empty"),
    ],
)
def test_options_that_cannot_be_are_refused_at_once(engine: lce.Engine, values: dict[str, Any], message: str) -> None:
    context = engine.prefill(tokens(10))
    for call in (engine.generate, engine.stream):
        with pytest.raises(lce.UsageError, match=message):
            call("x", context=context, **values)
    assert len(context) == 10


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"block": 0}, "block is 0; expected 1 or more tokens"),
        ({"window": 1}, "window is 1; expected 2 or more positions"),
        ({"window": 0}, "window is 0"),
        ({"method": "longhead"}, "unknown method 'longhead'; did you mean 'longheads'"),
        ({"device": "gpu"}, "unknown device 'gpu'; expected auto, cpu, cuda or cuda:N"),
        ({"device": "meta"}, "device 'meta' is not available here"),
        ({"dtype": "float23"}, "unknown dtype 'float23'; did you mean 'float32'"),
        ({"attention": "torh"}, "unknown attention backend 'torh'; did you mean 'torch'"),
        ({"rope": "lineer", "rope_factor": 2}, "unknown rope 'lineer'; did you mean 'linear'"),
        ({"rope": "yarn"}, "rope='yarn' needs a rope_factor"),
        ({"rope": "linear", "rope_factor": 0.5}, "rope_factor is 0.5; expected 1 or more"),
        ({"rope": "linear", "rope_factor": float("nan")}, "rope_factor is nan"),
        ({"rope_factor": 4}, "rope_factor=4 has no scaling to belong to; add rope="),
        ({"rope": "none", "rope_factor": 4}, "rope_factor=4 has no scaling"),
    ],
)
def test_options_of_load_that_cannot_be_are_refused(tiny_model: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(lce.UsageError, match=message):
        lce.load(tiny_model, **values)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_is_refused_where_there_is_none(tiny_model: Path) -> None:
    with pytest.raises(lce.UsageError, match=r"device 'cuda' is not available here; expected auto, cpu$"):
        lce.load(tiny_model, device="cuda")


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(lce.ModelError, match="does not exist"):
        lce.load(tmp_path / "absent")
    with pytest.raises(lce.ModelError, match=r"no config\.json"):
        lce.load(tmp_path)


def test_the_window_may_be_overridden(tiny_model: Path) -> None:
    engine = lce.load(tiny_model, "longheads", window=32)
    assert engine.window == 32
    assert engine.method == LongHeads(chunk_size=1, chunks=32)


def test_rope_may_be_overridden(tiny_model: Path) -> None:
    ids = tokens(100)
    plain = lce.load(tiny_model).logits(ids)
    assert torch.equal(lce.load(tiny_model, rope="none").logits(ids), plain)
    assert (lce.load(tiny_model, rope="linear", rope_factor=1).logits(ids) - plain).abs().max() <= 1e-5
    kinds = ("linear", "ntk", "dynamic", "yarn", "llama3")
    scaled = [lce.load(tiny_model, rope=kind, rope_factor=4).logits(ids) for kind in kinds]
    for i, logits in enumerate(scaled):
        assert all((logits - other).abs().max() > 1e-2 for other in [plain, *scaled[:i]]), kinds[i]


# What a method chose


def test_a_trace_lists_the_chunks_of_every_query(tiny_model: Path) -> None:
    size, budget, n = 8, 4, 150
    ids = tokens(n)
    trace = lce.load(tiny_model, LongHeads(chunk_size=size, chunks=budget), block=BLOCK).trace(ids)
    assert trace.chunk_size == size
    assert len(trace.chosen) == 2
    for chosen in trace.chosen:
        assert chosen.shape == (4, n, budget - 1)
        assert chosen.dtype == torch.int64
        for head in chosen.tolist():
            for index, row in enumerate(head):
                own = index // size
                taken = [chunk for chunk in row if chunk >= 0]
                assert row == taken + [-1] * (budget - 1 - len(taken)), "none comes last"
                assert taken == sorted(set(taken)), "ascending, and none twice"
                assert len(taken) == min(own, budget - 1)
                assert own not in taken
                if own:
                    assert taken[0] == 0
                    assert taken[-1] == own - 1
    assert not torch.equal(*trace.chosen), "layers choose on their own"
    assert not torch.equal(trace.chosen[0][0], trace.chosen[0][1]), "and so do heads"


@pytest.mark.parametrize("block", [1, 7, 64, 512])
def test_a_trace_does_not_depend_on_blocks(tiny_model: Path, block: int) -> None:
    method = LongHeads(chunk_size=8, chunks=4)
    ids = tokens(120)
    expected = lce.load(tiny_model, method, block=BLOCK).trace(ids).chosen
    chosen = lce.load(tiny_model, method, block=block).trace(ids).chosen
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(chosen, expected, strict=True))


@pytest.mark.parametrize("name", ["full", "longheads"])
def test_a_trace_is_empty_where_nothing_is_chosen(tiny_model: Path, name: str) -> None:
    trace = lce.load(tiny_model, name).trace(tokens(40 if name == "full" else 2))
    assert [chosen.shape for chosen in trace.chosen] == [(4, 40 if name == "full" else 2, 0)] * 2
