"""`lce plan --operations`: its table and its JSON."""

from __future__ import annotations

import json
from pathlib import Path

from lce.terminal.operations import COUNTED, count_text
from tests.command import run


def test_counts_as_people_read_them() -> None:
    for n, text in ((0, "0"), (999, "999"), (1234, "1.23 k"), (999_600, "1 M"), (13_000_000_000, "13 G")):
        assert count_text(n) == text


def test_plan_prints_what_it_counted(tiny_model: Path) -> None:
    args = ("plan", "--model", tiny_model, "--method", "longheads", "-o", "chunk_size=8", "--tokens", "300")
    lines = run(*args, "--operations").stdout.splitlines()
    start = lines.index("Counted for 300 tokens: the prefill in blocks of 512, and the decode of the last 8.")
    table = [line for line in lines[start + 2 :] if not line.startswith("In the paper")]
    assert [line[:20].rstrip() for line in table[1:8]] == [text[:20].rstrip() for text in COUNTED.values()]
    assert any(line.endswith("|P| · heads · layers: 64") for line in lines)
    assert "Counted" not in run(*args).stdout


def test_plan_as_json_has_the_counts(tiny_model: Path) -> None:
    args = ("plan", "--model", tiny_model, "--method", "esa", "--tokens", "300", "--operations", "--json")
    found = json.loads(run(*args).stdout)["operations"]
    assert found["prefill"]["flops"] == 2 * found["prefill"]["operations"]
    assert found["decode"]["operations"] == sum(found["decode"][name] for name in COUNTED)
    assert [round(figure["value"], 4) for figure in found["paper_figures"]] == [1.0, 2.0]  # 128 numbers of 64 and 32
    assert found["decode"]["bytes_read"] == sum(found["decode"][f"{name}_bytes"] for name in ("weight", "key", "state"))
