"""Lanes that share a pass: the bits that each has alone, and errors that are one lane's own."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import lce
from lce.engine import running
from lce.engine.lanes import Lane, forward
from lce.methods import Full, LayerCache, Step, available
from tests.checkpoints import save_tiny, tokens
from tests.running import threads

NEEDS: dict[str, dict[str, Any]] = {"esa": {"compress": "pca", "low_dim": 4}}
BLOCK = 32
SLOW = pytest.mark.slow


def engines_of(folder: Path, **options: Any) -> dict[str, lce.Engine]:
    """An engine for each method, all with the weights of one."""
    found: dict[str, lce.Engine] = {}
    for name in available():
        method = lce.methods.make(name, NEEDS.get(name))
        found[name] = lce.load(folder, method, block=BLOCK, sharing=next(iter(found.values()), None), **options)
    return found


def lane_of(engine: lce.Engine, context: lce.Context, ids: Sequence[int]) -> Lane:
    return running.lane_of(engine.setup, context, ids, decoding=len(ids) == 1)


@pytest.mark.timeout(600)  # it may compile the kernels of every method
@pytest.mark.parametrize("n_threads", [pytest.param(1, marks=SLOW), 2])
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"dtype": "bfloat16"}, marks=SLOW), pytest.param({"weights": "int8"}, marks=SLOW)]
)
@pytest.mark.filterwarnings("ignore::lce.errors.WindowWarning")
def test_every_method_has_the_bits_that_it_has_alone(n_threads: int, options: dict[str, Any], tmp_path: Path) -> None:
    """Lanes come and go: some read their prompts in blocks while others answer; each goes on as it would alone."""
    shape = {"hidden_size": 96, "intermediate_size": 2720}  # an MLP too wide for eight rows in the nearest cache
    engines = engines_of(save_tiny(tmp_path, **shape), **options)
    with threads(n_threads):
        texts = {name: tokens(70 + 13 * i, seed=i) for i, name in enumerate(engines)}
        alone, shared = ({name: engines[name].new_context(400) for name in engines} for _ in range(2))
        read = dict.fromkeys(engines, 0)
        for turn in range(10):
            passed: dict[str, Lane] = {}
            for i, (name, engine) in enumerate(engines.items()):
                if turn < i % 4:  # comes later
                    continue
                n = BLOCK - i if read[name] < 60 else 1
                ids = texts[name][read[name] : read[name] + n]
                read[name] += len(ids)
                single = lane_of(engine, alone[name], ids)
                (logits,) = forward(engine.setup.model, [single], engine.setup.recorder)
                texts[name] += [int(logits.argmax())] if read[name] == len(texts[name]) else []
                passed[name] = single
            lanes = [lane_of(engines[name], shared[name], lane.token_ids) for name, lane in passed.items()]
            together = forward(engine.setup.model, lanes, engine.setup.recorder)
            for (name, single), lane, logits in zip(passed.items(), lanes, together, strict=True):
                lane.check()
                assert torch.equal(logits, single.logits), (turn, name)
                assert shared[name].cache.length == alone[name].cache.length == read[name]


@dataclass(frozen=True)
class Failing(Full):
    """Fails in the second layer."""

    error: type[BaseException] = RuntimeError

    def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        if cache.index == 1 and step.start:
            raise self.error("mine")
        return super().attend(q, cache, step)


def beside_a_failing_lane(folder: Path, error: type[BaseException]) -> tuple[list[Lane], Callable[[], list[Tensor]]]:
    good = lce.load(folder, "longheads", block=BLOCK)
    bad = lce.load(folder, Failing(error), block=BLOCK, sharing=good)
    engines = [good, bad, good]
    contexts = [engine.prefill(tokens(20, seed=i)) for i, engine in enumerate(engines)]
    pairs = zip(engines, contexts, strict=True)
    lanes = [lane_of(engine, context, [5 + i]) for i, (engine, context) in enumerate(pairs)]
    return lanes, lambda: forward(good.setup.model, lanes, good.setup.recorder)


def test_a_lane_that_fails_fails_alone(tiny_model: Path) -> None:
    lanes, call = beside_a_failing_lane(tiny_model, RuntimeError)
    calm, calm_call = beside_a_failing_lane(tiny_model, RuntimeError)
    calm.pop(1)
    expected, found = calm_call(), call()
    assert torch.equal(torch.stack(found[::2]), torch.stack(expected))
    assert found[1].isnan().all()
    assert [lane.cache.length for lane in lanes] == [21, 20, 21]
    assert lanes[1].logits is None
    with pytest.raises(RuntimeError, match="mine"):
        lanes[1].check()
    lanes[1].check()


def test_ctrl_c_is_for_all_lanes(tiny_model: Path) -> None:
    lanes, call = beside_a_failing_lane(tiny_model, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        call()
    assert [lane.cache.length for lane in lanes] == [20, 20, 20]


def test_logits_that_are_not_finite_are_one_lane_s_error(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = lce.load(tiny_model, block=BLOCK)
    contexts = [engine.prefill(tokens(9, seed=i)) for i in range(2)]
    head = engine.setup.model.logits
    broken = torch.tensor([1])
    monkeypatch.setattr(engine.setup.model, "logits", lambda x, drawn: head(x, drawn).index_fill(0, broken, torch.nan))
    lanes = [lane_of(engine, context, [5]) for context in contexts]
    forward(engine.setup.model, lanes, engine.setup.recorder)
    assert [lane.cache.length for lane in lanes] == [10, 9]
    with pytest.raises(lce.ModelError, match="not finite after token 9"):
        lanes[1].check()


def test_a_product_that_fails_is_every_lane_s_error(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = lce.load(tiny_model, block=BLOCK)
    lanes = [lane_of(engine, engine.prefill(tokens(9, seed=i)), [5]) for i in range(2)]
    monkeypatch.setattr(engine.setup.model, "_of_generated", [None])
    assert torch.stack(forward(engine.setup.model, lanes, engine.setup.recorder)).isnan().all()
    assert [lane.cache.length for lane in lanes] == [9, 9]
    for lane in lanes:
        with pytest.raises(AttributeError):
            lane.check()


def test_from_a_stream_to_the_model_there_are_six_frames(engine: lce.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, depths = type(engine.setup.model), set[int]()
    embedded, here = kind.embedded, sys._getframe()

    def counted(model: Any, *args: Any) -> Tensor:
        frame: FrameType | None = sys._getframe()
        depth = 0
        while frame is not None and frame is not here:
            frame, depth = frame.f_back, depth + 1
        depths.add(depth)
        return embedded(model, *args)

    stream = engine.stream(tokens(20), max_tokens=4)
    first = next(stream)
    monkeypatch.setattr(kind, "embedded", counted)
    assert first.text
    for _ in stream:
        pass
    assert max(depths) <= 6
