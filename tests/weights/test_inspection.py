"""The stored tensors by kind and type."""

from pathlib import Path

import lce
from lce.weights.checkpoint import Checkpoint
from lce.weights.inspection import tensor_groups
from lce.weights.safetensors_file import TensorInfo


def listed(checkpoint: Checkpoint) -> list[tuple[str, str, int, int]]:
    return [(group.kind, group.type, group.count, group.n_bytes) for group in tensor_groups(checkpoint)]


def test_kinds_stand_in_the_models_order_and_the_type_with_most_bytes_first():
    stored = {"model.norm.weight": ("F32", 256), "model.layers.0.input_layernorm.weight": ("F32", 256)}
    stored |= {f"model.layers.0.self_attn.{x}": ("F32", n) for x, n in (("q_norm.weight", 64), ("q_proj.bias", 256))}
    values = (("Q4_K", 144), ("Q6_K", 210), ("Q4_K", 144))
    stored |= {f"layers.{i}.self_attn.v_proj.weight": value for i, value in enumerate(values)}
    stored |= {"layers.0.mlp.gate_up_proj.weight": ("Q4_K", 288), "lm_head.weight": ("Q8_0", 544)}
    stored |= {"model.embed_tokens.weight": ("Q8_0", 544), "own.weights": ("F16", 2), "single": ("F16", 4)}
    tensors = {name: TensorInfo(Path("a"), kind, (1,), 7, 7 + size) for name, (kind, size) in stored.items()}
    assert listed(Checkpoint(Path("a"), tensors)) == [
        *(("embedding", "Q8_0", 1, 544), ("attention v", "Q4_K", 2, 288), ("attention v", "Q6_K", 1, 210)),
        *(("mlp gate and up", "Q4_K", 1, 288), ("head", "Q8_0", 1, 544), ("norms", "F32", 3, 576)),
        *(("biases", "F32", 1, 256), ("other", "F16", 2, 6)),
    ]


def test_a_quantised_matrix_counts_once(tiny_model: Path, tmp_path: Path):
    found = lce.info(lce.quantize(tiny_model, tmp_path / "out", "int4"))
    assert sum(group.n_bytes for group in found.tensors) == found.weight_bytes
    by_kind = {(group.kind, group.type): group.count for group in found.tensors}
    assert by_kind.pop(("norms", "F32")) == 5
    assert by_kind.pop(("embedding", "int8")) == by_kind.pop(("head", "int8")) == 1
    parts = ("attention q", "attention k", "attention v", "attention o", "mlp gate", "mlp up", "mlp down")
    assert by_kind == {(part, "int4"): 2 for part in parts}
