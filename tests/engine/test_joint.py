"""Lanes whose decode steps are one answer as they do alone, whoever joins, leaves or fails.

On a CPU the tape does the work again, and the kernels that read several contexts run in Triton's interpreter.
"""

import itertools
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from weakref import ref

import pytest
import torch
from torch import Tensor

import lce
from lce import gpu
from lce.attention import Attended, Runs
from lce.cache.lanes import rows_of
from lce.engine.graph import Graphs
from lce.engine.lanes import Lane, forward
from lce.engine.running import lane_of
from lce.kernels.runtime.launching import Rows
from lce.methods import LongHeads, Method, decoding
from tests.engine.test_graph import MORE, PROMPT, Again, PlainRuns, graph_of, same_state
from tests.pretended import Gpus

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::lce.errors.WindowWarning")
PROMPTS = [[*PROMPT[i:], *PROMPT[:i]][: 50 - i] for i in (0, 9, 23, 5, 31)]
DAILY = ("longheads", "quest")
NAMES = [*DAILY, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE if name not in DAILY)]


class JointRuns(PlainRuns):
    """A decode step by PyTorch's operators, or for several contexts by the kernel."""

    def decode(self, q: Tensor, k: Rows, v: Rows, runs: Runs) -> Attended:
        if isinstance(k, Tensor):
            return super().decode(q, k, v, runs)
        return gpu.decoding.attend_runs(q, k, v, runs.first, runs.count, runs.turn, *runs.turns, runs.most)


@pytest.fixture(autouse=True)
def _short_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "LEAST_BOUND", 64)


def loaded(folder: Path, method: Method) -> lce.Engine:
    engine = lce.load(folder, method, block=32)
    driver = replace(engine.setup.driver, attention=JointRuns())
    engine.setup = replace(engine.setup, recorder=Graphs(Again), driver=driver)
    return engine


def lanes_of(engine: lce.Engine, contexts: Sequence[lce.Context], token_id: int = 7) -> list[Lane]:
    for context in contexts:
        context.token_ids.append(token_id)
    return [lane_of(engine.setup, context, context.uncached, decoding=True) for context in contexts]


def step(engine: lce.Engine, contexts: Sequence[lce.Context], token_id: int = 7) -> list[Lane]:
    lanes = lanes_of(engine, contexts, token_id)
    forward(engine.setup.model, lanes, engine.setup.recorder)
    for context, lane in zip(contexts, lanes, strict=True):
        context.store_logits(lane)
    return lanes


@pytest.mark.parametrize("name", NAMES)
def test_lanes_answer_as_alone_and_keep_the_same(name: str, tiny_model: Path) -> None:
    """Three lanes, then five, of other lengths; then two that went back, one a fork; and one: chunks are completed."""
    plain, engine = lce.load(tiny_model, MORE[name], block=32), loaded(tiny_model, MORE[name])
    truth, contexts = ([each.prefill(prompt, length=200) for prompt in PROMPTS] for each in (plain, engine))
    for i, there in enumerate([slice(3)] * 4 + [slice(5)] * 4 + [slice(1, 3)] * 2 + [slice(1, 2)]):
        if i == 8:
            contexts[1] = contexts[1].fork()
            for each, context in itertools.product((plain, engine), range(1, 3)):
                other = (truth if each is plain else contexts)[context]
                other.truncate(len(other) - 3)
                each.prefill([77, 78], context=other)
        lanes = step(engine, contexts[there], 11 + i)
        for own, lane in zip(truth[there], lanes, strict=True):
            (alone,) = step(plain, [own], 11 + i)
            assert lane.error is None
            assert torch.allclose(lane.logits, alone.logits, atol=1e-4), i
            assert lane.likeliest is None or lane.likeliest == int(alone.logits.argmax())
    for own, context in zip(truth, contexts, strict=True):
        same_state(context, own)
    joint = graph_of(engine)
    assert joint.joins
    assert joint.refused == ""
    assert joint.n_replayed >= 3
    assert joint.n_recorded <= 6, "a recording for each number of lanes, and each kind of step"


def test_a_batch_decodes_its_lanes_together(tiny_model: Path) -> None:
    engine, plain = loaded(tiny_model, MORE["longheads"]), lce.load(tiny_model, MORE["longheads"], block=32)
    asked = [{"max_tokens": n, "temperature": t, "seed": 3} for n, t in ((6, 0.0), (14, 0.9), (9, 0.0))]
    with engine.batch() as batch:
        streams = [batch.stream(prompt, **how) for prompt, how in zip(PROMPTS, asked, strict=False)]
        found = [stream.finish().token_ids for stream in streams]
    assert found == [plain.generate(p, **how).token_ids for p, how in zip(PROMPTS, asked, strict=False)]
    assert graph_of(engine).n_replayed > 3


def test_a_lane_fails_alone(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = loaded(tiny_model, MORE["full"])
    contexts = [engine.prefill(prompt, length=200) for prompt in PROMPTS[:3]]
    step(engine, contexts)
    model, lengths = engine.setup.model, [context.cache.length for context in contexts]
    logits = model.logits
    with monkeypatch.context() as patch:
        patch.setattr(model, "logits", lambda x, drawn: logits(x, drawn).index_fill(0, torch.tensor([1]), torch.nan))
        lanes = step(engine, contexts)
    assert [type(lane.error) for lane in lanes] == [type(None), lce.ModelError, type(None)]
    assert [c.cache.length - n for c, n in zip(contexts, lengths, strict=True)] == [1, 0, 1]
    assert lanes[1].logits is None
    del contexts[1].token_ids[-1:]
    assert all(lane.error is None for lane in step(engine, contexts))


def test_an_interruption_leaves_all_caches_as_before(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = loaded(tiny_model, MORE["longheads"])
    contexts = [engine.prefill(prompt, length=200) for prompt in PROMPTS[:2]]
    step(engine, contexts)

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Again, "reader", interrupt)
        with pytest.raises(KeyboardInterrupt):
            forward(engine.setup.model, lanes_of(engine, contexts), engine.setup.recorder)
    plain = lce.load(tiny_model, MORE["longheads"], block=32)
    for context in contexts:
        assert context.cache._pass == "none"
        assert len(context.uncached) == 1
        context.token_ids.pop()
    step(engine, contexts, 9)
    for context in contexts:
        again = plain.prefill(context.token_ids, length=200)
        assert torch.allclose(context.logits, again.logits, atol=1e-4)


def test_what_cannot_be_joined_decodes_alone(tiny_model: Path) -> None:
    class OwnScores(LongHeads):
        def score(self, q: Tensor, summary: Tensor, step: object, layer: int) -> Tensor:
            return super().score(q, summary, step, layer) * 2  # type: ignore[arg-type]

    engine = loaded(tiny_model, OwnScores(chunk_size=8, chunks=4))
    plain = lce.load(tiny_model, OwnScores(chunk_size=8, chunks=4), block=32)
    contexts = [engine.prefill(prompt, length=200) for prompt in PROMPTS[:2]]
    for i in range(4):
        assert all(lane.error is None for lane in step(engine, contexts, 20 + i))
    assert not graph_of(engine).joins
    assert graph_of(engine).n_replayed > 0
    for context in contexts:
        same_state(context, plain.prefill(context.token_ids, length=200))


def test_lanes_of_other_methods_and_closed_ones_are_no_hindrance(tiny_model: Path) -> None:
    engine = loaded(tiny_model, MORE["longheads"])
    other = lce.Engine(replace(engine.setup, driver=replace(engine.setup.driver, window=40)))
    mixed = [
        (each, each.prefill(prompt, length=200)) for each, prompt in zip((engine, other) * 2, PROMPTS, strict=False)
    ]
    alone = engine.prefill(PROMPTS[4], length=200)
    lanes = [lane for each, context in [*mixed, (engine, alone)] for lane in lanes_of(each, [context])]
    forward(engine.setup.model, lanes, engine.setup.recorder)
    assert all(lane.error is None for lane in lanes)
    assert len(engine.setup.recorder.recorded) == 2
    memory = [ref(x) for x, *_ in rows_of(alone.cache)]
    del lanes
    alone.close()
    assert not [x for x in memory if x() is not None]
    step(engine, [context for each, context in mixed if each is engine])


def test_batches_of_one_engine_at_once(tiny_model: Path) -> None:
    engine, found = loaded(tiny_model, MORE["full"]), dict[int, list[list[int]]]()

    def ask(number: int) -> None:
        with engine.batch() as batch:
            streams = [batch.stream(prompt, max_tokens=8) for prompt in PROMPTS[:3]]
            found[number] = [stream.finish().token_ids for stream in streams]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    plain = lce.load(tiny_model, MORE["full"], block=32)
    assert found[0] == found[1] == [plain.generate(prompt, max_tokens=8).token_ids for prompt in PROMPTS[:3]]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_on_a_gpu_contexts_are_read_where_they_are(tiny_model: Path, triton_gpus: Gpus) -> None:
    """On a pretended GPU, whose graphs hold kernels and memory, and whose freed memory is overwritten."""
    method = MORE["longheads"]
    engine, plain = (lce.load(tiny_model, method, block=32, device=x, dtype="float32") for x in ("cuda", "cpu"))
    contexts = [engine.prefill(prompt, length=64) for prompt in PROMPTS[:2]]
    for i in range(7):
        lanes = step(engine, contexts, 20 + i)
        assert all(lane.error is None for lane in lanes)
    joint = graph_of(engine)
    assert joint.joins
    assert joint.refused == ""
    assert joint.n_replayed >= 3
    for context in contexts:
        again = plain.prefill(context.token_ids, length=200)
        assert torch.allclose(context.logits.cpu(), again.logits, atol=1e-3)
