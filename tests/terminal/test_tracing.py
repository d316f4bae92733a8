"""`lce trace`: choices as lines, as JSON and as a picture, and how often a marked text is chosen."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import lce
from tests.command import assert_error, run

TEXT = "the old dogs " * 9
KNOBS = ("--method", "longheads", "-o", "chunk_size=4", "-o", "chunks=4")


def test_trace_as_lines_and_as_json(tiny_model: Path) -> None:
    args = ("trace", "-m", tiny_model, *KNOBS, TEXT)
    result = run(*args, "--last", "2")
    assert result.exit_code == 0, result.stderr
    head, *rows = result.stdout.splitlines()
    assert head == "choice c: tokens 0 + 4 c and on; choice (rank, score)"
    assert len(rows) == 2 * 2 * 4, "tokens, layers, heads"
    assert re.fullmatch(r"token \d+, layer 0, head 0: 0 \(\d+, \S+\), \d+ \(\d+, \S+\), \d+ \(\d+, \S+\)", rows[0])
    found = json.loads(run(*args, "--json").stdout)
    assert (found["chunk_size"], len(found["rows"]), found["hits"]) == (4, 8, [])
    nothing = run("trace", "-m", tiny_model, "the old dogs")
    assert nothing.stdout.splitlines()[-1].endswith("layer 1, head 3: no choice")
    engine = lce.load(tiny_model, lce.methods.LongHeads(chunk_size=4, chunks=4))
    trace = engine.trace(engine.tokenizer.encode(TEXT))
    for row in found["rows"]:
        layer, head = row["layer"], row["head"]
        assert row["choices"] == trace.chosen[layer][head, -1].tolist()
        assert row["ranks"] == trace.ranks[layer][head, -1].tolist()
        assert row["scores"] == pytest.approx(trace.scores[layer][head, -1].tolist(), rel=1e-2, abs=1e-2)
        assert len(row["mass"]) == len(row["distances"]) == 3
        assert 0 <= row["recall"] <= row["reachable"] <= 1


def test_hits_of_marked_text(tiny_model: Path) -> None:
    text = f"{TEXT}the quick brown fox {TEXT}"
    args = ("trace", "-m", tiny_model, *KNOBS, text, "--mark", "quick brown", "--last", "3")
    found = json.loads(run(*args, "--json").stdout)
    (mark,) = found["marks"]
    chunks = range(mark["start"] // 4, (mark["stop"] - 1) // 4 + 1)
    for hit in found["hits"]:
        rows = [row for row in found["rows"] if row["layer"] == hit["layer"]]
        assert hit["queries_and_heads"] == len(rows) == 12
        assert hit["attended"] == sum(bool({*chunks} & {*row["choices"]}) for row in rows) / 12
        ranks = [row["marked"][0][2] for row in rows]
        assert (hit["hit1"], hit["hit5"]) == (sum(r < 1 for r in ranks) / 12, sum(r < 5 for r in ranks) / 12)
    last = run(*args).stdout.splitlines()[-1]
    where = f"'quick brown' at tokens {mark['start']} to {mark['stop'] - 1}, layer 1: attended by "
    assert last.startswith(where)
    assert re.search(r"true attention 0\.\d{4}, hit1 \d+%, hit5 \d+%$", last)
    assert_error(run(*args[:-4], "--mark", "slow"), 2, "the mark 'slow' is not in the prompt")


def test_a_picture(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "choices.png"
    result = run("trace", "-m", tiny_model, *KNOBS, TEXT, "--plot", path, "--mark", "old dogs")
    assert result.exit_code == 0, result.stderr
    assert path.read_bytes().startswith(b"\x89PNG")
    assert_error(run("trace", "-m", tmp_path / "no model", TEXT, "--plot", tmp_path / "x.gif"), 2, "unknown kind")
