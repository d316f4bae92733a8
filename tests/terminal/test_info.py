"""What `lce info` prints of models and of context files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lce
from tests.checkpoints import TINY
from tests.command import PROMPT, assert_error, run


def info(*args: str | Path) -> dict[str, Any]:
    """The object of --json; the text must print as well."""
    text, found = run("info", *args), run("info", *args, "--json")
    assert (text.exit_code, text.stderr) == (0, "")
    content: dict[str, Any] = json.loads(found.stdout)
    return content


def rows(*args: str | Path) -> dict[str, str]:
    """The lines of the text, by their first words."""
    pairs = (line.strip().split("  ", 1) for line in run("info", *args).stdout.splitlines() if "  " in line.strip())
    return {name: text.strip() for name, text in pairs}


def test_a_model(tiny_model: Path) -> None:
    found = info(tiny_model)
    assert (found["kind"], found["family"], found["architecture"]) == ("model", "llama", "LlamaForCausalLM")
    assert (found["n_layers"], found["n_heads"], found["n_kv_heads"], found["head_dim"]) == (2, 4, 2, 16)
    assert (found["window"], found["dtype"], found["vocab_size"]) == (64, "float32", 300)
    assert found["weight_bytes"] == 4 * found["parameters"]
    assert found["fingerprint"] == lce.load(tiny_model).fingerprint
    assert (found["tokenizer"], found["chat_template"]) == ("tokenizer.json", False)
    assert found["methods"]["longheads"]["chunk_size"] == 2
    assert found["methods"]["dca"]["chunk_size"] == 48
    assert "lce calibrate" in found["refused"]["esa"]
    text = rows(tiny_model)
    assert text["heads"] == "4 over 2 of keys and values, dimension 16"
    assert text["self_extend"] == "local=16 group=8"
    assert text["esa"] == found["refused"]["esa"]


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
    assert_error(run("info", tmp_path / "missing"), 3, "missing", "No such file")
    assert_error(run("info", tmp_path / "text.txt"), 3, "text.txt")
    assert_error(run("info", tmp_path / "empty"), 3, "config.json")
    assert_error(run("info", "/dev/zero"), 3, "/dev/zero is a device")
    assert_error(run("info", "demo", "-m", "demo"), 2, "--model is for a context file")
    assert_error(run("info"), 2, "FILE|MODEL")
