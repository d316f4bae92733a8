"""lce beside llama.cpp: the same weights give nearly the same logits; without the packages one line says so."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file

import lce

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
SHAPE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 32000,
}  # fmt: skip


@pytest.fixture
def vs_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, as a module; its neighbours are imported by their plain names."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("models", "workers", "vs_llama_cpp"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("vs_llama_cpp")


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_same_weights_give_the_same_logits(vs_llama_cpp: ModuleType, tmp_path: Path, kv_heads: int) -> None:
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    vs_llama_cpp.SHAPES["tiny"] = {**SHAPE, "num_key_value_heads": kv_heads}
    folder = vs_llama_cpp.checkpoint(tmp_path, "tiny", "bfloat16")
    assert vs_llama_cpp.checkpoint(tmp_path, "tiny", "bfloat16") == folder
    weights = load_file(folder / "model.safetensors")  # so large that attention and its rotation decide the logits
    larger = {name: x * 15 if "layers" in name and x.ndim == 2 else x for name, x in weights.items()}
    save_file(larger, folder / "model.safetensors", {"format": "pt"})
    engine = lce.load(folder, dtype="float32")
    worker = vs_llama_cpp.LlamaCpp()
    worker.load(str(vs_llama_cpp.gguf_of(folder, "BF16")), n_ctx=256, threads=1)
    theirs = torch.tensor(worker.logits())
    ours = engine.logits(vs_llama_cpp.token_ids(vs_llama_cpp.CHECKED))[-1]
    assert (ours - theirs).abs().max() < 0.02 * ours.abs().max()
    prefill, decode = worker.run(40, 3)
    assert min(prefill, decode) > 0


def test_a_table_shows_what_was_not_measured(vs_llama_cpp: ModuleType) -> None:
    row = {"weights": "int8", "method": "full", "figure": "decode", "length": 2048, "llama_cpp": 80.0}
    rows = [{**row, "lce": None, "ratio": None}, {**row, "lce": 60.0, "ratio": 0.75}]
    assert vs_llama_cpp.table("small", rows).splitlines()[-2:] == [
        "| int8 | decode | 2,048 | `full` | – | 80 | – |",
        "| int8 | decode | 2,048 | `full` | 60 | 80 | 0.75 |",
    ]


def test_without_the_packages_one_line_says_so(
    vs_llama_cpp: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["vs_llama_cpp.py"])
    vs_llama_cpp.main()
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert "pip install llama-cpp-python gguf" in out
