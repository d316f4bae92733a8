"""`lce bench`: the tables, JSON, and what an interruption leaves."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lce_lab.bench import Bench, Ceilings, Report, Row, Spread, StepTimes, machine, measure
from lce_lab.terminal.bench import report_lines
from tests.command import assert_error, ran, run

SHARES = 1e9, 0.351, 0.284, None
LONG = Spread(1622.4, 1600, 1650.0), Spread(40.66, 40.0, 41), Spread(0.3158, 0.31, 0.32)
SHORT = Spread(9.876, 9.876, 9.876), Spread(5.0, 5.0, 5.0), Spread(1.5, 1.5, 1.5)
ROWS = Row("full", 8192, *LONG, 3 << 20, 1 << 20, *SHARES), Row("full", 512, *SHORT, 3 << 20, 0, *SHARES)
BEST = Ceilings(35.04e9, 20e9, {"float32": 400e9, "int8": 350e9}, 512)
TIMES = StepTimes("full", 8192, "decode", 1, {"products": 0.018, "Python and other": 0.002})
SETTING = "demo", "a machine", "1.0", "bfloat16", "cpu", 4096, 3, 32, 0, {"full": "Full()"}
REPORT = Report(*SETTING, BEST, ROWS, [TIMES])


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "ceilings", lambda *_: Ceilings(1e9, 2e9, {"int8": 3e12}, 8))


def test_a_report_as_markdown() -> None:
    assert report_lines(REPORT) == [
        "a machine",
        "",
        "demo, bfloat16 on cpu, window 4,096; lce 1.0. Medians of 3 runs (lowest to highest); decode over 32 tokens.",
        "",
        "| the machine | |",
        "|---|---:|",
        "| reading memory | 35.0 GB/s |",
        "| copying memory, read and written | 20.0 GB/s |",
        "| products of 512 rows, float32 | 400 GFLOP/s |",
        "| products of 512 rows, int8 | 350 GOP/s |",
        "",
        "Prefill is compared with products in float32, the fastest, and decode with reading memory.",
        "",
        "| method | length | prefill tok/s | of products | decode tok/s | of reading | read a token | first token s |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| `full` | 8,192 | 1,622 (1,600 to 1,650) | 0.35 | 40.7 (40.0 to 41.0) | 0.28 | 4.0 MiB "
        "| 0.316 (0.310 to 0.320) |",
        "| `full` | 512 | 9.88 | 0.35 | 5.00 | 0.28 | 3.0 MiB | 1.50 |",
        "",
        "| method | length | step | ms | products | Python and other |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| `full` | 8,192 | decode, 1 token | 20.0 | 90% | 10% |",
    ]


def test_prints_markdown_and_writes_json(tiny_model: Path, tmp_path: Path) -> None:
    small = ("--lengths", "8,40", "--repeats", "1", "--new-tokens", "2", "--block", "16", "--profile")
    args = ("bench", "-m", tiny_model, "--method", "full,longheads", "-o", "longheads.chunk_size=8", *small)
    result = ran(*args, "--json", tmp_path / "bench.json")
    assert result.stdout.startswith(machine())
    assert len(re.findall(r"^\| `(full|longheads)` \| (8|40) \| [0-9]", result.stdout, re.MULTILINE)) == 4
    assert len(re.findall(r"^\| `full` \| 8 \| (decode, 1 token|prefill, 16 tokens)", result.stdout, re.MULTILINE)) == 2
    assert result.stderr.endswith(f"lce: wrote {tmp_path / 'bench.json'}\n")
    content = json.loads((tmp_path / "bench.json").read_text())
    assert [row["length"] for row in content["rows"]] == [8, 8, 40, 40]
    assert content["rows"][3]["decode"]["median"] > 0
    assert content["methods"]["longheads"].startswith("LongHeads(chunk_size=8")
    alone = run(*args, "--json", "-", "--quiet")
    assert (alone.exit_code, alone.stderr) == (0, "")
    known = {"reading": 1e9, "copying": 2e9, "products": {"int8": 3e12}, "rows": 40}
    assert json.loads(alone.stdout)["ceilings"] == known


def test_says_once_that_a_text_is_beyond_the_window(tiny_model: Path) -> None:
    result = run("bench", "-m", tiny_model, "--lengths", "16,80", "--repeats", "1", "--new-tokens", "1")
    assert re.fullmatch(r"lce: note: 80 tokens are more than the 64 .*\n", result.stderr)


def test_ctrl_c_prints_what_was_measured(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = Bench._time

    def interrupt(self: Bench, name: str, *args: Any, **options: Any) -> None:
        if name == "streaming":
            raise KeyboardInterrupt
        timed(self, name, *args, **options)

    monkeypatch.setattr(Bench, "_time", interrupt)
    result = run("bench", "-m", tiny_model, "--method", "full,streaming", "--lengths", "8", "--new-tokens", "2")
    assert result.exit_code == 130
    assert "| `full` | 8 |" in result.stdout
    assert "streaming" not in result.stdout
    assert result.stderr == "\nlce: interrupted\n"


def test_refuses_in_one_line(tiny_model: Path, tmp_path: Path) -> None:
    command = ("bench", "-m", tiny_model)
    assert_error(run(*command, "--lengths", "0"), 2, "--lengths is '0'")
    assert_error(run(*command, "--lengths", "64,4k", "--kv-host-budget", "128KiB"), 4, "128.0 KiB", "a length of 4,096")
    assert_error(run(*command, "--json", ""), 2, "--json", "- for stdout")
    assert_error(run(*command, "--json", tmp_path / "no" / "bench.json"), 2, "no is not a folder")
