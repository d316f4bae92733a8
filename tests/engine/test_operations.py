"""Counted operations are those of an engine at work; and what is counted of sizes that no test can run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lce
from lce.attention import Attention
from lce.methods import QueryBlock
from lce.methods.costs import cost
from lce.models.layers import Layer, Model
from tests.checkpoints import TINY, save_tiny, tokens

N = 150
KINDS = {"qkv": "projections", "o": "projections", "gate_up": "mlp", "down": "mlp"}


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Multiply-adds that the layers are asked for, by what they are for, and those of attention."""
    found = dict.fromkeys(("projections", "mlp", "head", "attention"), 0)
    backend = type(Attention.choose())
    project, logits, dense = Layer.project, Model.logits, backend.dense

    def count_project(self: Layer, name: str, x: Tensor, **more: Any) -> Tensor:
        found[KINDS[name]] += len(x) * self.w[name].numel()
        return project(self, name, x, **more)

    def count_logits(self: Model, x: Tensor, **how: Any) -> Tensor:
        found["head"] += len(x) * self.head.numel()
        return logits(self, x, **how)

    def count_dense(
        self: Attention, q: Tensor, k: Tensor, v: Tensor, causal: bool, window: Any = None, **how: Any
    ) -> Any:
        (n_heads, n, dim), past = q.shape, k.shape[1] - q.shape[1]
        found["attention"] += 2 * n_heads * dim * sum(min(past + t + 1, window or past + n) for t in range(n))
        return dense(self, q, k, v, causal, window, **how)

    monkeypatch.setattr(Layer, "project", count_project)
    monkeypatch.setattr(Model, "logits", count_logits)
    monkeypatch.setattr(backend, "dense", count_dense)
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True, "num_key_value_heads": 4},
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 40},
    ],
    ids=["grouped", "tied", "sliding window"],
)
def test_operations_are_those_of_an_engine(tmp_path: Path, counts: dict[str, int], changes: dict[str, Any]) -> None:
    folder = save_tiny(tmp_path, **changes)
    counted = lce.operations(folder, tokens=N, block=32)
    engine = lce.load(folder, block=32)
    context = engine.prefill(tokens(N))
    assert {name: getattr(counted.prefill, name) for name in counts} == counts
    counts.update(dict.fromkeys(counts, 0))
    engine.prefill([7], context=context)
    later = lce.operations(folder, tokens=N + 1).decode
    assert {name: getattr(later, name) for name in counts} == counts


def test_bytes_read_are_those_of_the_weights_and_the_keys(tmp_path: Path) -> None:
    counted = lce.operations(save_tiny(tmp_path), tokens=N, block=32)
    parameters, vocab, hidden = (lce.info(tmp_path).parameters, TINY["vocab_size"], TINY["hidden_size"])
    assert counted.decode.weight_bytes == 4 * (parameters - (vocab - 1) * hidden)
    assert counted.prefill.weight_bytes == 4 * (5 * (parameters - vocab * hidden) + N * hidden)
    assert counted.decode.key_bytes == 4 * N * 2 * 2 * 2 * 16  # layers, keys and values, KV heads, D
    assert (counted.decode.state_bytes, counted.decode.share) == (0, 1.0)


PROFILED = {
    "full": lce.methods.Full(),
    "streaming": lce.methods.Streaming(),
    "esa": lce.methods.ESA(sinks=4, compress="none"),
    "infllm": lce.methods.InfLLM(sinks=4, block_size=8, top_k=3),
    "longheads": lce.methods.LongHeads(chunk_size=8, chunks=4),
    "quest": lce.methods.Quest(page=8),
}


@pytest.mark.parametrize("name", PROFILED)
def test_bytes_read_are_those_of_a_profiled_step(tmp_path: Path, name: str) -> None:
    """Heads that choose on their own may choose alike, and then read less."""
    engine = lce.load(save_tiny(tmp_path), PROFILED[name], block=16)
    context = engine.prefill(tokens(N))
    with lce.profiled(engine) as step:
        engine.prefill([7], context=context)
    sizes = (4, 2, 16, 2)
    costs = [cost(engine.method, QueryBlock(N, N + 1, *sizes, layer)) for layer in range(2)]
    counted = sum(2 * 16 * (each.rows_read or 0) + (each.state_read or 0) for each in costs)
    if name == "esa":  # exact scores read the keys of the middle, which the profile takes for no state
        counted -= sum(each.state_read or 0 for each in costs)
    assert counted == step.read_bytes // 4 or (name in ("longheads", "quest") and counted > step.read_bytes // 4)


LLAMA_3: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128}
LLAMA_3 |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192}
LLAMA_3 |= {"torch_dtype": "bfloat16", "bos_token_id": 128000, "eos_token_id": 128001}


@pytest.mark.slow
def test_a_model_whose_weights_are_not_here(tmp_path: Path) -> None:
    """Llama 3 8B has 7.5 billion parameters beside its embedding; ESA's figures are those of the paper."""
    (tmp_path / "config.json").write_text(json.dumps(TINY | LLAMA_3))
    counted = lce.operations(tmp_path, lce.methods.make("esa", {"preset": "paper"}), tokens="256k")
    work = counted.decode
    assert (work.projections + work.mlp + work.head) / 1e9 == pytest.approx(7.50, abs=0.01)
    assert work.scores / work.causal == pytest.approx(1 / 64, rel=0.03)
    assert work.share < 0.05
    assert [f"{figure.value:.2%}" for figure in counted.paper_figures] == ["1.56%", "6.25%"]
    assert work.state_bytes / lce.operations(tmp_path, tokens="256k").decode.key_bytes == pytest.approx(1 / 16, 0.03)


def test_a_method_without_a_cost(tmp_path: Path) -> None:
    class Own(lce.methods.Full):
        def attend(self, q: Tensor, cache: Any, step: Any) -> Tensor:
            return torch.zeros_like(q)

    counted = lce.operations(save_tiny(tmp_path), Own(), tokens=N)
    assert (counted.decode.attention, counted.decode.operations, counted.decode.share) == (None, None, None)
    assert counted.decode.projections > 0
    assert counted.decode.bytes_read is None
