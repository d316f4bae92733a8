"""`lce inspect` and `lce trace`: pages, recordings, lines and pictures, and the page served until Ctrl-C."""

import json
import re
import signal
import urllib.request
from pathlib import Path

import pytest

import lce
from tests.command import assert_error, ran, run, spawn

TEXT = "the old dogs " * 9
LONGHEADS = ("--method", "longheads", "-o", "chunk_size=4", "-o", "chunks=4")
KNOBS = ("--method", "longheads,dca", "-o", "longheads.chunk_size=4", "-o", "longheads.chunks=4")


def test_a_page_and_its_recording(tiny_model: Path, tmp_path: Path) -> None:
    page, recording = tmp_path / "page.html", tmp_path / "recording.json"
    args = ("inspect", "-m", tiny_model, *KNOBS, TEXT, "--mark", "old dogs", "-n", "2", "--spread", "3")
    result = ran(*args, "--out", page, "--json", recording)
    assert result.stdout == ""
    found = json.loads(recording.read_text())
    assert json.loads(page.read_text().partition('id="lce-recording">')[2].partition("</script>")[0]) == found
    labels = ["longheads(chunk_size=4, chunks=4, local=4)", "dca(chunk_size=48, far=63)"]
    assert ([run["label"] for run in found["runs"]], len(found["marks"])) == (labels, 9)
    lines = result.stderr.splitlines()
    assert lines[0].startswith("longheads(chunk_size=4, chunks=4, local=4): ")
    assert lines[-1].startswith(f"{page}: ")
    assert_error(run(*args, "--out", page), 2, "exists")
    ran(*args, "--out", page, "--force", "--quiet")


def test_what_cannot_be_inspected(tiny_model: Path, tmp_path: Path) -> None:
    args = ("inspect", "-m", tiny_model, TEXT)
    assert_error(run(*args), 2, "nothing to write; give --out page.html")
    assert_error(run(*args, "--json", tmp_path / "x", "--mark", "cats"), 2, "the mark 'cats' is not in the prompt")
    assert_error(run(*args, "--json", tmp_path), 3, "is a folder")
    assert_error(run(*args, "--json", tmp_path / "x", "--judge", "nobody"), 2, "nobody")
    assert_error(run("inspect", "-m", tiny_model, "--live", "--port", "70000"), 2, "port 70000 cannot be used")
    assert not (tmp_path / "x").exists()
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    args = ("inspect", "-m", tiny_model, "-f", text)
    assert_error(run(*args, "--json", text), 2, "--prompt-file and --json are both")
    assert_error(run(*args, "--out", tmp_path / "x", "--json", tmp_path / "y" / ".." / "x"), 2, "--out and --json are")
    assert text.read_text() == TEXT


def test_a_recording_on_stdout(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("inspect", "-m", tiny_model, *KNOBS, TEXT, "-n", "0", "--spread", "3", "--json", "-")
    assert [run["method"] for run in json.loads(result.stdout)["runs"]] == ["longheads", "dca"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_live_until_interrupted(tiny_model: Path) -> None:
    process = spawn("", "inspect", "-m", tiny_model, "--live", "--out", "x.html", "--method", "dca", "-n", "4")
    try:
        address = process.line().strip()
        with urllib.request.urlopen(f"{address}state", timeout=30) as answer:
            assert json.loads(answer.read()) == {"state": "idle", "id": 0}
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, out) == (0, "")
    assert "--method, --out, --max-tokens: not used with --live" in err
    assert err.endswith("lce: ended\n")
    assert "Traceback" not in err


def test_trace_as_lines_and_as_json(tiny_model: Path) -> None:
    args = ("trace", "-m", tiny_model, *LONGHEADS, TEXT)
    head, *rows = ran(*args, "--last", "2").stdout.splitlines()
    assert head == "choice c: tokens 0 + 4 c and on; choice (rank, score)"
    assert len(rows) == 2 * 2 * 4, "tokens, layers, heads"
    assert re.fullmatch(r"token \d+, layer 0, head 0: 0 \(\d+, \S+\), \d+ \(\d+, \S+\), \d+ \(\d+, \S+\)", rows[0])
    found = json.loads(run(*args, "--json").stdout)
    assert (found["chunk_size"], len(found["rows"]), found["hits"]) == (4, 8, [])
    assert run("trace", "-m", tiny_model, "the old dogs").stdout.splitlines()[-1].endswith("layer 1, head 3: no choice")
    engine = lce.load(tiny_model, lce.methods.LongHeads(chunk_size=4, chunks=4))
    trace = engine.trace(engine.tokenizer.encode(TEXT))
    for row in found["rows"]:
        layer, head = row["layer"], row["head"]
        seen = [each[layer][head, -1].tolist() for each in (trace.chosen, trace.ranks)]
        assert [row["choices"], row["ranks"]] == seen
        assert row["scores"] == pytest.approx(trace.scores[layer][head, -1].tolist(), rel=1e-2, abs=1e-2)
        assert len(row["mass"]) == len(row["distances"]) == 3
        assert 0 <= row["recall"] <= row["reachable"] <= 1


def test_hits_of_marked_text(tiny_model: Path) -> None:
    text = f"{TEXT}the quick brown fox {TEXT}"
    args = ("trace", "-m", tiny_model, *LONGHEADS, text, "--mark", "quick brown", "--last", "3")
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
    assert last.startswith(f"'quick brown' at tokens {mark['start']} to {mark['stop'] - 1}, layer 1: attended by ")
    assert re.search(r"true attention 0\.\d{4}, hit1 \d+%, hit5 \d+%$", last)
    assert_error(run(*args[:-4], "--mark", "slow"), 2, "the mark 'slow' is not in the prompt")


def test_a_picture(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "choices.png"
    ran("trace", "-m", tiny_model, *LONGHEADS, TEXT, "--plot", path, "--mark", "old dogs")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert_error(run("trace", "-m", tmp_path / "no model", TEXT, "--plot", tmp_path / "x.gif"), 2, "unknown kind")
