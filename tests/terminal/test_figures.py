"""The lines, tables and JSON objects that commands print."""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

import pytest

import lce
from lce.cache.tier import Traffic
from lce.engine.planning import Need, Plan
from lce.engine.stream import Stats
from lce.terminal import figures, output
from lce.terminal.output import plain
from tests.checkpoints import TINY
from tests.command import PROMPT, assert_error, run

STATS = Stats(2000, generated_tokens=11, prefill_s=2.0, first_token_s=2.25, decode_s=0.5, memory={"device": 3 << 20})


def test_closing_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "peak_memory", lambda: {"process": 5 << 20, "gpu": 7 << 20})
    memory = "cache: device 3.0 MiB | peak memory: process 5.0 MiB, gpu 7.0 MiB"
    assert output.generation_line(STATS) == (
        f"2,000 prompt tokens | prefill 1,000.0 tok/s | first token 2.25 s | decode 20.0 tok/s | {memory}"
    )
    assert output.prefill_line(STATS) == f"2,000 prompt tokens | prefill 1,000.0 tok/s | {memory}"
    resumed = dataclasses.replace(STATS, prompt_tokens=4360, read_before=8192, prefill_s=4.36)
    line = f"12,552 prompt tokens (8,192 read before) | prefill 1,000.0 tok/s | {memory}"
    assert output.prefill_line(resumed) == line
    traffic = Traffic(hits=930, misses=70, early=5, bytes_in=12 << 20, bytes_out=3 << 29)
    stats = Stats(memory={"device": 1 << 20, "host": 0, "disk": 4096}, traffic={"device": traffic})
    assert output.memory_text(stats, {"process": 9 << 20}) == (
        "cache: device 1.0 MiB, disk 4.0 KiB | peak memory: process 9.0 MiB | "
        "device 93% of 1,000 page requests met, 12.0 MiB read in, 1.5 GiB moved out (5 ahead of need)"
    )
    nothing = "cache: device 0 B | peak memory: process 1 B"
    assert output.memory_text(Stats(memory={"device": 0}), {"process": 1}) == nothing
    assert Stats().prefill_tokens_per_s == Stats(generated_tokens=1).decode_tokens_per_s == 0


def test_a_plan_of_unknown_sizes() -> None:
    tiers = {"device": Need(1024, 10, 100, None, None), "disk": Need(2048, budget=4096, available=1024)}
    plan = Plan(9000, "full", "float32", "int8", "cpu", tiers, None, "too long")
    content = json.loads(json.dumps(figures.plan_object(plan), default=plain))
    assert ((content["fits"], content["longest"]), content["tiers"]["device"]["needed"]) == ((False, None), 1134)
    _, _, _, device, disk, _, verdict = figures.plan_lines(plan)
    assert "unknown" in device
    assert "4.0 KiB" in disk
    assert verdict == "It does not fit. Nothing bounds the length."


def test_types_as_a_user_writes_them() -> None:
    hints = (int, int | None, Literal["all"], Literal["a", "b", "c"], Literal["a", "b"] | None)
    assert [*map(figures.type_text, hints)] == ["int", "int or none", "all", "a, b or c", "a or b or none"]


def info(*args: str | Path) -> dict[str, Any]:
    """The object of --json; the text must print as well."""
    text, found = run("info", *args), run("info", *args, "--json")
    assert (text.exit_code, text.stderr) == (0, "")
    content: dict[str, Any] = json.loads(found.stdout)
    return content


def rows(*args: str | Path) -> dict[str, str]:
    pairs = (line.strip().split("  ", 1) for line in run("info", *args).stdout.splitlines() if "  " in line.strip())
    return {name: text.strip() for name, text in pairs}


def test_a_model(tiny_model: Path) -> None:
    found = info(tiny_model)
    assert (found["kind"], found["family"], found["architecture"]) == ("model", "llama", "LlamaForCausalLM")
    assert (found["n_layers"], found["n_heads"], found["n_kv_heads"], found["head_dim"]) == (2, 4, 2, 16)
    assert (found["window"], found["dtype"], found["vocab_size"]) == (64, "float32", 300)
    assert found["weight_bytes"] == 4 * found["parameters"]
    assert found["fingerprint"] == lce.load(tiny_model).setup.fingerprint
    assert (found["tokenizer"], found["chat_template"]) == ("tokenizer.json", False)
    assert (found["methods"]["longheads"]["chunk_size"], found["methods"]["dca"]["chunk_size"]) == (2, 48)
    assert "lce calibrate" in found["refused"]["esa"]
    text = rows(tiny_model)
    assert text["heads"] == "4 over 2 of keys and values, dimension 16"
    assert (text["self_extend"], text["esa"]) == ("local=16 group=8 far=none", found["refused"]["esa"])


def test_a_quantised_model_is_checked_and_its_tensors_are_listed(tiny_model: Path, tmp_path: Path) -> None:
    out = lce.quantize(tiny_model, tmp_path / "out", "int8")
    (head, last), plain, text = info(out)["tensors"][-2:], rows(tiny_model, "--check"), rows(out, "--check")
    assert plain["checked"] == "no checksums: all weights can be read and are finite"
    assert text["checked"] == "all files are as `lce quantize` wrote them"
    assert (head | {"kind": "head", "type": "int8", "count": 1}, last["kind"]) == (head, "norms")
    assert text["head"].split() == ["1", "int8", *figures.size_text(head["n_bytes"]).split()]
    assert (text["tensors"].split(), "tensors" in plain) == (["count", "type", "size"], False)
    (out / "config.json").write_text((out / "config.json").read_text() + "\n")
    assert (run("info", out).exit_code, run("info", "--check", out).exit_code) == (0, 3)


def test_a_folder_with_nothing_but_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    found = info(tmp_path)
    assert (found["weight_bytes"], found["fingerprint"], found["tokenizer"]) == (None, None, None)
    assert found["parameters"] > 10_000
    assert rows(tmp_path)["weights"] == "none"


def test_a_context(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "text.lce"
    command = ("prefill", "-m", tiny_model, "-p", PROMPT * 3, "--out", out, "--method", "dca", "--window", "48")
    assert run(*command, "--rope", "linear", "--rope-factor", "2").exit_code == 0
    found = info(out)
    n_tokens = len(lce.load(tiny_model).tokenizer.encode(PROMPT * 3))
    assert (found["kind"], found["method"], found["knobs"]["chunk_size"]) == ("context", "dca", 36)
    assert (found["window"], found["rope"], found["rope_factor"], found["dtype"]) == (48, "linear", 2.0, "float32")
    assert (found["tokens"], found["cached"], found["complete"]) == (n_tokens, n_tokens, True)
    assert found["file_bytes"] == out.stat().st_size
    assert found["model"] == info(tiny_model)["identity"] == rows(tiny_model)["in contexts"]
    assert found["text"] is None
    assert "chunk_size=36" in rows(out)["method"]
    first, last = info(out, "-m", tiny_model)["text"]
    assert PROMPT.startswith(first.strip()[:10])
    assert (PROMPT * 3).endswith(last)
    assert repr(first) == rows(out, "-m", tiny_model)["begins"]


def test_what_is_neither(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text")
    (tmp_path / "empty").mkdir()
    assert_error(run("info", tmp_path / "missing"), 3, "missing does not exist", "expected a checkpoint")
    assert_error(run("info", tmp_path / "text.txt"), 3, "text.txt")
    assert_error(run("info", tmp_path / "empty"), 3, "config.json")
    assert_error(run("info", "/dev/zero"), 3, "/dev/zero is a device")
    assert_error(run("info", "demo", "-m", "demo"), 2, "--model is for a context file")
    assert_error(run("info"), 2, "FILE|MODEL")
