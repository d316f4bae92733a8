"""Rotary embedding: transformers' own frequencies, angles exact far out, and what a rotation must keep."""

from pathlib import Path
from typing import Any

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import lce
from lce.attention import rotate
from lce.models.config import RopeConfig
from lce.models.rope import Rope

WINDOW = 4096
HEAD_DIM = 64
LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Kind, fields that lce and transformers call the same, and the window before scaling.
SCALINGS: list[tuple[str, dict[str, Any], int | None]] = [
    ("linear", {"factor": 4.0}, None),
    ("dynamic", {"factor": 2.0}, None),
    ("yarn", {"factor": 16.0}, 512),
    ("yarn", {"factor": 8.0, "beta_fast": 20.0, "beta_slow": 2.0}, 1024),
    ("yarn", {"factor": 8.0, "truncate": False}, 1024),
    ("yarn", {"factor": 8.0, "attention_factor": 1.5}, 1024),
    ("yarn", {"factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.3}, 1024),
    ("yarn", {"factor": 1.0}, 4096),
    ("llama3", {"factor": 8.0, **LLAMA_3}, 1024),
    ("llama3", {"factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 3.0}, 512),
]


def theirs(kind: str, theta: float, values: dict[str, Any], original: int | None, length: int) -> tuple[Tensor, float]:
    known = {} if original is None else {"original_max_position_embeddings": original}
    sizes = {"hidden_size": 4 * HEAD_DIM, "num_attention_heads": 4, "max_position_embeddings": WINDOW}
    config = LlamaConfig(**sizes, rope_parameters={"rope_type": kind, "rope_theta": theta, **values, **known})
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
    return frequencies.double(), float(scale)


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize(("kind", "values", "original"), SCALINGS, ids=str)
def test_frequencies_are_those_of_transformers(kind: str, values: Any, original: int | None, theta: float) -> None:
    for length in (10, WINDOW, 5 * WINDOW):
        ours = Rope(RopeConfig(kind, theta, original_window=original, **values), HEAD_DIM, WINDOW, length)
        frequencies, scale = theirs(kind, theta, values, original, length)
        assert ours.inv_freq.dtype == torch.float64
        torch.testing.assert_close(ours.inv_freq, frequencies, rtol=1e-5, atol=0)  # theirs are float32
        assert ours.scale == pytest.approx(scale, rel=1e-6)


def test_the_factor_of_a_length() -> None:
    """The smallest that reaches it; within the window nothing is scaled, to the last bit."""
    for kind in ("linear", "ntk", "dynamic", "yarn", "llama3"):
        auto = RopeConfig(kind, factor="auto")
        assert auto.follows_length
        assert auto.fitted(WINDOW, 10_007).factor == 10_007 / WINDOW
        assert auto.fitted(WINDOW, 10_007).reach(WINDOW) == 10_007
        assert auto.fitted(3000, 10_007).factor == 10_007 / 3000
        assert not auto.fitted(WINDOW, 10_007).follows_length
        within = Rope(auto.fitted(WINDOW, WINDOW), HEAD_DIM, WINDOW, WINDOW)
        assert torch.equal(within.inv_freq, Rope(RopeConfig(), HEAD_DIM, WINDOW).inv_freq)
        assert within.scale == 1
    fixed = RopeConfig("yarn", factor=4.0)
    assert fixed.fitted(WINDOW, 10_007) is fixed
    original = RopeConfig("yarn", factor="auto", original_window=1024)
    assert original.fitted(WINDOW, 10_240).factor == 10


def test_dynamic_with_the_factor_of_a_length_is_that_of_transformers_with_a_factor_of_1() -> None:
    for length in (10, WINDOW, 5 * WINDOW):
        ours = Rope(RopeConfig("dynamic", factor="auto").fitted(WINDOW, length), HEAD_DIM, WINDOW, length).inv_freq
        frequencies, _ = theirs("dynamic", 10000.0, {"factor": 1.0}, None, length)
        torch.testing.assert_close(ours, frequencies, rtol=1e-5, atol=0)  # theirs are float32
        one = Rope(RopeConfig("dynamic", factor=1.0), HEAD_DIM, WINDOW, length).inv_freq
        torch.testing.assert_close(ours, one, rtol=1e-14, atol=0)


@pytest.mark.parametrize("factor", [1.0, 2.0, 16.0])
def test_ntk_keeps_the_fastest_pair_and_interpolates_the_slowest(factor: float) -> None:
    plain = Rope(RopeConfig(), HEAD_DIM, WINDOW).inv_freq
    scaled = Rope(RopeConfig("ntk", factor=factor), HEAD_DIM, WINDOW).inv_freq
    assert scaled[[0, -1]].tolist() == [plain[0].item(), pytest.approx(plain[-1].item() / factor, rel=1e-12)]
    assert (scaled.diff() < 0).all()


@pytest.mark.parametrize("kind", ["none", "linear", "ntk", "dynamic", "yarn", "llama3"])
def test_angles_are_exact_at_a_million(kind: str) -> None:
    rope = Rope(RopeConfig(kind, 500000.0, factor=4.0, original_window=1024), HEAD_DIM, WINDOW, 8 * WINDOW)
    positions = torch.tensor([0, 1, 999_999, 1_000_000])
    cos, sin = rope.turn(positions, torch.float64)
    half, quarter = (rope.turn(positions, dtype) for dtype in (torch.float32, torch.bfloat16))
    with mpmath.workdps(40):
        for row, position in enumerate(positions.tolist()):
            for pair, frequency in enumerate(rope.inv_freq.tolist()):
                angle = mpmath.mpf(position) * mpmath.mpf(frequency)
                exact = float(mpmath.cos(angle) * rope.scale), float(mpmath.sin(angle) * rope.scale)
                got = torch.stack((cos, sin))[:, row, pair]
                assert got.tolist() == pytest.approx(exact, abs=2e-10)
                assert torch.stack(half)[:, row, pair].tolist() == pytest.approx(exact, abs=1e-7)
                assert torch.stack(quarter)[:, row, pair].tolist() == pytest.approx(exact, abs=5e-3)


def test_the_base_frequencies_are_exact_too() -> None:
    """Not only angle from frequency: the whole chain from theta, as exact arithmetic has it."""
    cos, _ = Rope(RopeConfig(theta=500000.0), HEAD_DIM, WINDOW).turn(torch.tensor(1_000_000), torch.float64)
    with mpmath.workdps(40):
        for pair in range(HEAD_DIM // 2):
            angle = 1_000_000 * mpmath.power(500000, -mpmath.mpf(2 * pair) / HEAD_DIM)
            assert cos[pair].item() == pytest.approx(float(mpmath.cos(angle)), abs=1e-9)


POSITIONS = st.integers(0, 1_000_000)


@given(a=POSITIONS, b=POSITIONS, shift=st.integers(-500_000, 500_000), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_a_score_depends_on_the_distance_alone(a: int, b: int, shift: int, seed: int) -> None:
    rope = Rope(RopeConfig(), 16, WINDOW)
    q, k = torch.randn(2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

    def score(i: int, j: int) -> float:
        turns = [rope.turn(torch.tensor(position), torch.float64) for position in (i, j)]
        return float(rotate(q, turns[0]) @ rotate(k, turns[1]))

    assert score(a, b) == pytest.approx(score(a + shift, b + shift), abs=1e-7)
    assert score(a, b) == pytest.approx(score(a - b, 0), abs=1e-7)  # a query may be turned back instead of the key


def test_dynamic_is_fixed_by_the_announced_length(tiny_model: Path) -> None:
    """The base that a context starts with is the one it keeps, however long it becomes."""
    engine = lce.load(tiny_model, rope="dynamic", rope_factor=2.0)
    ids = [(7 * i) % 290 + 5 for i in range(200)]
    announced = engine.prefill(ids[:100], length=200)
    frequencies = announced.rope.inv_freq.clone()
    engine.prefill(ids[100:], context=announced)
    assert torch.equal(announced.rope.inv_freq, frequencies)
    whole = engine.logits(ids)[-1]
    assert (announced.logits - whole).abs().max() <= 1e-4
    unannounced = engine.prefill(ids[:100])
    frequencies = unannounced.rope.inv_freq.clone()
    fork = unannounced.fork()
    engine.prefill(ids[100:], context=unannounced)
    assert torch.equal(unannounced.rope.inv_freq, frequencies)
    assert torch.equal(fork.rope.inv_freq, frequencies)
    assert (unannounced.logits - whole).abs().max() > 1e-2
