"""Recorded decode steps change nothing: not the tokens, not what a context keeps, not what an interruption leaves.

On a CPU the tape does the work again instead of recording it; on pretended GPUs it records operators.
"""

import gc
import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from weakref import ref

import pytest
import torch
from torch import Tensor

import lce
from lce.attention import Attended, Attention, Runs, Turn, rotate
from lce.attention.compiled import Compiled
from lce.cache.lanes import rows_of
from lce.engine.graph import DriverSteps, Graphs
from lce.engine.lanes import one_by_one
from lce.engine.recorder import KernelLists
from lce.engine.running import append, unread
from lce.engine.tape import Work
from lce.kernels.runtime import launching
from lce.methods import Full, LongHeads, Method, Quest, ReRope, SelfExtend
from lce.methods.step import Step
from tests.pretended import Gpus

METHODS = {"full": Full(), "longheads": LongHeads(chunk_size=8, chunks=4), "rerope": ReRope(local=10)}
MORE: dict[str, Method] = {
    **METHODS,
    "streaming": lce.methods.Streaming(),
    "dca": lce.methods.DualChunk(),
    "quest": Quest(page=8, budget=32, dense_layers=1),
    "self_extend": SelfExtend(local=10),
    "lm_infinite": lce.methods.LMInfinite(local=30),
    "shared": LongHeads(chunk_size=8, chunks=4, share="group", placement="constant"),
}
PROMPT = [(7 * i * i + 3) % 250 + 10 for i in range(50)]


class PlainRuns(Compiled):
    """A decode step over runs by PyTorch's operators, which a recording may take."""

    def decodes(self, dtype: torch.dtype, head_dim: int) -> bool:
        return True

    def decode(self, q: Tensor, k: Tensor, v: Tensor, runs: Runs) -> Attended:
        offset, rep = torch.arange(runs.most, device=q.device), len(q) // len(k)
        rows = (runs.first[:, 0, :, None] + offset).clamp(min=0, max=k.shape[1] - 1)  # [C, n, most]
        rows, seen = (x.repeat_interleave(len(q) // len(x), 0) for x in (rows, offset < runs.count[:, 0, :, None]))
        heads = (torch.arange(len(q), device=q.device) // rep)[:, None, None]
        turned = rotate(q, Turn(*(x[0].index_select(0, runs.turn) for x in runs.turns))).float()  # [H, n, D]
        scores = (k[heads, rows].float() @ turned[..., None]).squeeze(-1) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~seen, -torch.inf).flatten(1)
        lse = scores.logsumexp(-1, keepdim=True)
        weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)).exp()
        values = v[heads, rows].float().masked_fill(~seen[..., None], 0.0).flatten(1, 2)
        return (weights[:, None] @ values).to(q.dtype), lse


class Again:
    """A tape that does the work again."""

    def __init__(self, device: torch.device, n_numbers: int = 2) -> None:
        self.n_numbers = n_numbers

    def warm_up(self, work: Work) -> None:
        work()

    def record(self, work: Work) -> Work:
        return work

    def reader(self, numbers: Tensor) -> Callable[[], list[int]]:
        held = numbers.clone()
        return lambda: [int(x) for x in held]


class Unable(Again):
    def record(self, work: Work) -> Work:
        raise RuntimeError("operation not permitted when stream is capturing")


def loaded(folder: Path, method: Method, tape: type[Again] | None = Again, **options: object) -> lce.Engine:
    engine = lce.load(folder, method, block=32, **options)
    return engine if tape is None else taped(engine, tape)


def taped(engine: lce.Engine, tape: type[Again] = Again) -> lce.Engine:
    driver = replace(engine.setup.driver, attention=PlainRuns())
    engine.setup = replace(engine.setup, recorder=Graphs(tape), driver=driver)
    return engine


def graph_of(engine: lce.Engine, context: lce.Context | None = None) -> DriverSteps:
    """The recorded steps of an engine's method, for contexts with the RoPE of `context`."""
    found = [each for each in engine.setup.recorder.recorded if each.driver is engine.setup.driver]
    return next(each for each in found if context is None or each.rope.rotates_as(context.rope))


def on_gpu(folder: Path, method: Method, dtype: str) -> list[tuple[list[int], Tensor, list[DriverSteps]]]:
    """Tokens and last logits of an engine on a GPU: kernel by kernel, and recorded."""
    engine, found = lce.load(folder, method, block=32, device="cuda", dtype=dtype), []
    for alone in (one_by_one, nullcontext):
        context = engine.prefill(PROMPT, length=200)
        with alone():
            ids = engine.generate([7, 8], context=context, max_tokens=16).token_ids
            engine.prefill([*ids[-1:], 9], context=context)
        found.append((ids, context.logits.cpu(), [*engine.setup.recorder.recorded]))
    return found


def same_state(one: lce.Context, other: lce.Context) -> None:
    assert (one.token_ids, one.cache.length) == (other.token_ids, other.cache.length)
    n = one.cache.length
    for a, b in zip(one.cache.layers, other.cache.layers, strict=True):
        for x, y in zip(a.span(0, n), b.span(0, n), strict=True):
            assert torch.allclose(x, y, atol=1e-4)
    theirs = other.cache.tensors()
    for name, kept in one.cache.tensors().items():
        assert torch.allclose(kept, theirs[name], atol=1e-4), name
    assert torch.allclose(one.logits, other.logits, atol=1e-4)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("dca", "quest", "rerope")]


@pytest.mark.parametrize("name", ["full", pytest.param("longheads", marks=pytest.mark.slow), *SLOW])
@pytest.mark.filterwarnings("ignore::lce.errors.WindowWarning")
def test_a_recording_is_replayed(name: str, tiny_model: Path, gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a pretended GPU, whose graphs hold operators over memory and nothing of Python."""
    monkeypatch.setattr(Attention, "choose", lambda name: PlainRuns())
    monkeypatch.setattr(launching, "installed", lambda: False)
    (plain, logits, _), (ids, ours, (recorded,)) = on_gpu(tiny_model, MORE[name], "float32")
    assert ids == plain
    assert torch.allclose(ours, logits, atol=1e-4)
    assert recorded.refused == ""
    assert recorded.n_recorded <= 2
    assert recorded.n_replayed >= 10


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MORE)
@pytest.mark.filterwarnings("ignore::lce.errors.WindowWarning")
def test_a_cuda_graph_gives_what_its_kernels_give(name: str, dtype: str, tiny_model: Path) -> None:
    (plain, logits, _), (ids, ours, (recorded,)) = on_gpu(tiny_model, MORE[name], dtype)
    assert recorded.refused == ""
    # "shared" keeps 8 recent queries in a buffer, which is replaced every 8 tokens: one more recording than the others.
    assert recorded.n_replayed >= (9 if name == "shared" else 10)
    if dtype == "float32":  # in half precision two likely tokens may change places
        assert ids == plain
        assert torch.allclose(ours, logits, atol=1e-3)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.filterwarnings("ignore::lce.errors.WindowWarning")
def test_tokens_and_what_is_kept_are_those_of_ordinary_steps(method: Method, tiny_model: Path, tmp_path: Path) -> None:
    plain, engine = loaded(tiny_model, method, None), loaded(tiny_model, method)
    contexts = [each.prefill(PROMPT, length=200) for each in (plain, engine)]
    penal, warm = {"repetition_penalty": 1.5, "frequency_penalty": 1.0}, {"temperature": 0.8, "seed": 1}
    for question, how in (([5, 6], {}), ([9], warm), ([4], {"logprobs": 2}), ([3], penal)):
        both = zip((plain, engine), contexts, strict=True)
        said = [each.generate(question, context=context, max_tokens=20, **how).token_ids for each, context in both]
        assert said[0] == said[1]
        same_state(*contexts)
    graph = graph_of(engine, contexts[1])
    assert graph.n_replayed > 30
    assert graph.n_recorded < 12, "buffers stay where they are from one chunk to the next"
    contexts[1].save(tmp_path / "saved")
    goes_on = [contexts[0], contexts[1].fork(), engine.open_context(tmp_path / "saved"), contexts[1]]
    for context in goes_on:
        context.truncate(len(context) - 5)
    ids = [(plain if c is contexts[0] else engine).generate([8], context=c, max_tokens=12).token_ids for c in goes_on]
    assert ids == [ids[0]] * 4
    same_state(contexts[0], contexts[1])


def test_a_step_that_was_launched_early_is_dropped_where_the_text_goes_on_otherwise(tiny_model: Path) -> None:
    plain, engine = (loaded(tiny_model, METHODS["longheads"], tape) for tape in (None, Again))
    said = []
    for each in (plain, engine):
        context = each.prefill(PROMPT, length=200)
        stream = each.stream([5], context=context, max_tokens=30)
        for _ in range(4):
            next(stream)
        stream.close()  # a step is under way
        assert each is not engine or engine.setup.recorder._early
        n = len(context)
        context.truncate(n - 3)
        said.append(each.generate([11], context=context, max_tokens=1).token_ids)  # ends before the next step
        context.truncate(n - 3)
        said.append(each.generate([12, 13, 14], context=context, max_tokens=9).token_ids)
        last = said[-1][4]
        engine_ids = each.generate([15], context=context, max_tokens=9, stop=lambda text: len(text) > 3).token_ids
        said.append([last, *engine_ids])
    assert said[:3] == said[3:]


def test_the_step_of_the_likeliest_token_is_under_way_while_the_host_reads_it(tiny_model: Path) -> None:
    engine = loaded(tiny_model, METHODS["full"])
    context = engine.prefill(PROMPT, length=200)
    stream = engine.stream([5], context=context, max_tokens=12)
    for _ in range(4):
        next(stream)
    graph = graph_of(engine, context)
    early = engine.setup.recorder._early
    assert early.start == context.cache.length
    assert early.token_id == context.token_ids[-1], "drawn since"
    n = graph.n_replayed
    stream.finish()
    assert graph.n_replayed <= n + 8, "no step is run twice"
    assert engine.setup.recorder._early is None, "nothing comes after the last token"


def test_a_closed_context_frees_its_memory_at_once(tiny_model: Path) -> None:
    engine = loaded(tiny_model, METHODS["full"])
    context = engine.prefill(PROMPT, length=200)
    engine.generate([5], context=context, max_tokens=6)
    assert graph_of(engine, context).n_replayed > 0
    memory = [ref(x) for x, *_ in rows_of(context.cache)]
    gc.disable()
    try:
        context.close()
        assert not [x for x in memory if x() is not None]
    finally:
        gc.enable()


def test_logits_that_are_not_finite_change_nothing(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = loaded(tiny_model, METHODS["longheads"])
    context = engine.prefill(PROMPT, length=200)
    engine.generate([5], context=context, max_tokens=6)
    n, logits = context.cache.length, context.logits
    bad = torch.full((300,), torch.nan)
    engine.setup.recorder._early = None
    with monkeypatch.context() as patch:
        patch.setattr(engine.setup.model, "logits", lambda x, drawn: bad[None])
        with pytest.raises(lce.ModelError, match="not finite"):
            append(engine.setup, context, unread(engine.setup, context), decoding=True)
    assert (context.cache.length, context.logits) == (n, logits)
    append(engine.setup, context, unread(engine.setup, context), decoding=True)
    plain = loaded(tiny_model, METHODS["longheads"], None)
    again = plain.prefill(context.token_ids, length=200)
    assert torch.allclose(context.logits, again.logits, atol=1e-4)


def test_runs_kernel_by_kernel_where_it_must(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "lce")

    class HostScores(LongHeads):
        def score(self, q: Tensor, summary: Tensor, step: Step, layer: int) -> Tensor:
            return super().score(q, summary, step, layer) * (step.start + 1)

    longheads = METHODS["longheads"]
    truth = loaded(tiny_model, longheads, None).generate(PROMPT, max_tokens=12).token_ids
    cases: list[tuple[Method, type[Again], dict[str, object]]] = [
        (longheads, Unable, {}),
        (HostScores(chunk_size=8, chunks=4), Again, {}),
        (longheads, Again, {"kv_host_budget": "30KiB", "spill_dir": tmp_path}),
        (longheads, Again, {"kv_dtype": "int8"}),
    ]
    for method, tape, options in cases:
        engine = loaded(tiny_model, method, tape, **options)
        context = engine.new_context(100)
        found = engine.generate(PROMPT, context=context, max_tokens=12).token_ids
        assert found == truth or "kv_dtype" in options
        assert graph_of(engine, context).n_replayed == 0, options
        assert bool(graph_of(engine, context).refused) == (not options)
        if isinstance(method, HostScores):
            assert graph_of(engine, context).refused == "the method asks for start, which only the device knows"
            assert sum(graph_of(engine, context).refused in line for line in caplog.messages) == 1, (
                "a notice says why, once"
            )
    engine = loaded(tiny_model, longheads)
    context = engine.new_context(100)
    with lce.profiled(engine) as profile:
        assert engine.generate(PROMPT, context=context, max_tokens=12).token_ids == truth
    assert profile.calls
    assert not engine.setup.recorder.recorded
    assert len(engine.logits(PROMPT[:33])) == 33, "a block of one token keeps its hidden state"
    assert isinstance(lce.load(tiny_model, longheads).setup.recorder, KernelLists)


def lanes_answer_as_alone(folder: Path, n: int) -> None:
    """Ask n requests at once, of four methods, about three documents and forks of them; none was asked before."""
    names, documents = ("full", "longheads", "dca", "streaming"), [[*PROMPT[i:], *PROMPT[:i]] for i in (0, 9, 23)]
    asked = [(MORE[names[i % 4]], [*documents[i // 4 % 3], 7, i // 12]) for i in range(n)]
    engine = lce.load(folder, MORE["full"], block=32, device="cuda", dtype="float32")
    with engine.batch(max_lanes=16) as batch:
        streams = [batch.stream(prompt, method=method, max_tokens=20) for method, prompt in asked]
        found = [stream.finish().token_ids for stream in streams]
        for (method, prompt), ids in zip(asked, found, strict=True):
            assert ids == lce.Engine(batch.setup_of(method)).generate(prompt, max_tokens=20).token_ids, method


@pytest.mark.cuda
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::lce.errors.WindowWarning")
def test_lanes_that_compile_and_capture_at_once_answer_as_alone(tiny_model: Path) -> None:
    lanes_answer_as_alone(tiny_model, 32)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::lce.errors.WindowWarning")
def test_lanes_that_capture_at_once_answer_as_alone(
    tiny_model: Path, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Attention, "choose", lambda name: PlainRuns())
    monkeypatch.setattr(launching, "installed", lambda: False)
    lanes_answer_as_alone(tiny_model, 12)
