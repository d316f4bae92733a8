"""How far methods read, and what is said of longer texts: once a call, at the caller's line."""

import warnings
from pathlib import Path
from typing import Any, cast

import pytest

import lce
from lce.engine.setup import Planned
from lce.methods import DualChunk, Full, LongHeads, Quest, ReRope, RopeConfig, SelfExtend, Streaming
from lce.methods.step import ModelFacts
from lce.models.config import ModelConfig
from lce.sizes import MOST
from lce.weights.source import Source
from tests.checkpoints import tokens

W = 64


def beyond(method: lce.Method, sliding: int | None, window: int, n_tokens: int) -> str | None:
    """What is said of a text that a method reads of a model."""
    config, unused = ModelConfig("Any", 300, 64, 96, 2, 4, 2, 16, W, sliding_window=sliding), cast("Any", None)
    asked = ModelFacts(Source(Path()), config, window, RopeConfig())
    return Planned(config, window, RopeConfig(), method, unused, None, {}, None, asked).beyond(n_tokens)


@pytest.mark.parametrize(
    ("window", "rope", "expected"),
    [
        (4096, RopeConfig(), 4096),
        (4096, RopeConfig("linear", factor=4.0), 16384),  # the user's, or Vicuna 16k's
        (4096, RopeConfig("ntk", factor=2.0), 8192),
        (4096, RopeConfig("dynamic", factor=2.0), 8192),
        (131072, RopeConfig("llama3", factor=8.0, original_window=8192), 131072),  # Llama 3.1
        (131072, RopeConfig("llama3", factor=32.0, original_window=8192), 131072),  # Llama 3.2
        (8192, RopeConfig("llama3", factor=4.0), 32768),  # the user's
        (32768, RopeConfig("yarn", factor=4.0, original_window=32768), 131072),  # Qwen2.5, as its card says
        (131072, RopeConfig("yarn", factor=32.0, original_window=4096), 131072),
        (4096, RopeConfig("yarn", factor=4.0), 16384),  # the user's
        (4096, RopeConfig("yarn", factor="auto").fitted(4096, 10_007), 10_007),
        (4096, RopeConfig("yarn", factor="auto"), MOST),
    ],
)
def test_a_scaling_stretches_the_window_that_was_trained(window: int, rope: RopeConfig, expected: int) -> None:
    assert rope.reach(window) == expected


@pytest.mark.parametrize(
    ("method", "sliding", "limit"),
    [
        (Full(), None, W),
        (Full(), 32, None),  # no distance exceeds it
        (Full(), 100, W),
        (Quest(), None, W),
        (LongHeads(chunk_size=4), None, None),
        (LongHeads(chunk_size=4, placement="true"), 32, W),
        (LongHeads(chunk_size=4, placement="constant"), None, None),
        (SelfExtend(local=16, group=8), None, (64 - 16 + 2) * 8),
        (SelfExtend(local=16, group=1), None, W),
        (SelfExtend(group="auto"), None, None),
        (Streaming(), None, None),
        (DualChunk(), None, None),
        (ReRope(), None, None),
    ],
    ids=str,
)
def test_the_longest_text_that_a_method_reads(method: lce.Method, sliding: int | None, limit: int | None) -> None:
    method = method.resolve(W)
    assert method.limit(W, sliding) == limit
    for n in (W, limit or 10**9):
        assert beyond(method, sliding, W, n) is None
    if limit is not None:
        assert str(beyond(method, sliding, W, limit + 1)).startswith(f"{limit + 1:,} tokens")


def test_the_line_names_the_methods_that_read_on() -> None:
    line = str(beyond(Full(), None, 512, 32000))
    assert line.startswith(
        "32,000 tokens are more than the 512 that the method full can read of this model (window 512)"
    )
    assert "which takes pages for this length" in line
    named = line.rpartition(": ")[2].split(", ")
    assert "pages" not in named
    assert {"dca", "esa", "infllm"} <= set(named)
    assert not {"streaming", "lm_infinite", "full", "quest", "self_extend"} & set(named)
    assert line.isprintable()


CALLS: dict[str, Any] = {
    "generate": lambda engine, n: engine.generate(tokens(n), max_tokens=1),
    "stream": lambda engine, n: engine.stream(tokens(n), max_tokens=1).finish(),
    "prefill": lambda engine, n: engine.prefill(tokens(n)),
    "context": lambda engine, n: engine.generate(tokens(n - 20), max_tokens=1, context=engine.prefill(tokens(20))),
    "logits": lambda engine, n: engine.logits(tokens(n)),
    "trace": lambda engine, n: engine.trace(tokens(n)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_warns_once_and_at_its_own_line(tiny_model: Path, name: str) -> None:
    engine = lce.load(tiny_model, block=16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CALLS[name](engine, W - 1)
        CALLS[name](lce.load(tiny_model, rope="linear", rope_factor=2), W + 30)
        CALLS[name](lce.load(tiny_model, "longheads"), W + 30)
    with pytest.warns(lce.WindowWarning, match="95 tokens are more than the 64") as caught:
        CALLS[name](engine, 95)
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_an_answer_that_leaves_the_window_is_said_too(tiny_model: Path) -> None:
    engine = lce.load(tiny_model)
    with pytest.warns(lce.WindowWarning) as caught:
        result = engine.generate(tokens(W - 3), max_tokens=10)
    assert len(result.token_ids) == 10
    assert [str(warning.message) for warning in caught] == [result.warning]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine.generate(tokens(W - 3), max_tokens=2).warning is None
