"""lce beside llama.cpp: the same weights give nearly the same logits; without the packages one line says so."""

import sys
from pathlib import Path

import models
import pytest
import torch
import vs_llama_cpp
from safetensors.torch import load_file, save_file

import lce

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_same_weights_give_the_same_logits(tmp_path: Path, kv_heads: int) -> None:
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    models.SHAPES["tiny"] = {**SHAPE, "vocab_size": 32000, "num_key_value_heads": kv_heads}
    folder = models.checkpoint(tmp_path, "tiny", "bfloat16")
    assert models.checkpoint(tmp_path, "tiny", "bfloat16") == folder
    weights = load_file(folder / "model.safetensors")  # so large that attention and its rotation decide the logits
    larger = {name: x * 15 if "layers" in name and x.ndim == 2 else x for name, x in weights.items()}
    save_file(larger, folder / "model.safetensors", {"format": "pt"})
    engine = lce.load(folder, dtype="float32")
    worker = vs_llama_cpp.LlamaCpp()
    models.write_gguf(folder, tmp_path / "a.gguf")
    worker.load(str(tmp_path / "a.gguf"), n_ctx=256, threads=1)
    theirs = torch.tensor(worker.logits())
    ours = engine.logits(vs_llama_cpp.token_ids(vs_llama_cpp.CHECKED))[-1]
    assert (ours - theirs).abs().max() < 0.02 * ours.abs().max()
    assert min(worker.prefill(40), worker.decode(3)) > 0


def test_a_row_has_ratios_speeds_the_share_of_reading_and_the_better_setting_of_flash_attention() -> None:
    at = {512: {"prefill": [3000.0, 1200.0, 1500.0], "decode": [94.25, 89.1, 60.0], "share": 0.618}}
    assert vs_llama_cpp.table([512], {"Q4_0": {"lengths": at}}).splitlines() == [
        "| weights | prefill 512 | decode 512 |",
        "|---|---:|---:|",
        "| Q4_0 | **2.00** 3,000, off | **1.06** 94.2, 0.62, on |",
    ]


def test_a_remark_compares_a_step_with_reading_the_file_once() -> None:
    at = {512: {"file_times": [1.5, 2.5, 2.25]}, 8192: {"file_times": [3.0, 4.0, 5.0]}}
    row = {"dtype": "bfloat16", "logits_differ": 0.01, "file_bytes": 1e9, "lengths": at}
    line = vs_llama_cpp.remark("Q6_K", row)
    assert line.endswith("reading the file's 1,000 MB once: 1.50 and 2.25 after 512, 3.00 and 4.00 after 8,192.")


@pytest.mark.slow
def test_a_decode_step_reads_the_weights_and_what_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vs_llama_cpp, "token_ids", lambda n: [i % 700 + 2 for i in range(n)])
    worker, found = vs_llama_cpp.Lce(), []
    assert worker.load("demo", n_ctx=256, threads=1) == "float32"
    for length in (60, 160):
        assert min(worker.prefill(length), worker.decode(3)) > 0
        found.append((len(worker.context), worker.reading()[0]))
    config, (less, more) = worker.engine.setup.model.config, found
    row = 2 * 4 * config.n_layers * config.n_kv_heads * config.head_dim  # bytes of a token's keys and values
    assert more[1] - less[1] == row * (more[0] - less[0])
    stored = (lce.info("demo").folder / "model.safetensors").stat().st_size
    assert 0.9 * stored < less[1] - row * less[0] < 2.1 * stored


def test_without_the_packages_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "llama_cpp.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["vs_llama_cpp.py"])
    vs_llama_cpp.main()
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert "pip install llama-cpp-python" in out
