"""benchmarks/study.py: what is asked, in which order, and nothing twice. Its tables count what the records have."""

import argparse
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import study
import study_tables

import lce
from lce_lab.eval.record import Answer, Loss, Record

ROWS = "full; full rope=yarn; pages placement=true budget=600 rope=ntk; pages budget=600"
SETTING = {"parts": "answers,perplexity", "lengths": "2,0.9,3000", "documents": "0,2", "methods": ROWS, "rows": "axes"}
COMMON = {
    "model": "demo",
    "dtype": "float32",
    "essays": "E",
    "seed": "0",
    "task": "facts_medley",
    "questions": "44",
    "samples": 12,
}
ENGINE = "Engine({}, window=512, block=512, cpu, torch.float32)"
ROPE = "RopeConfig(kind='{}', theta=10000.0, factor={})"


def commands(folder: Path, **changed: Any) -> list[list[str]]:
    given = {**COMMON, **SETTING, "texts": str(folder), "record": folder, "kind": "many_facts", "more": "", **changed}
    return list(study.commands(argparse.Namespace(**given), 512))


def test_the_order_is_length_then_document_then_row(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("A text.")
    places = [re.search(r"eval (\w+) .*--lengths ([\d,]+)(?: --shard (\d))?", " ".join(x)) for x in commands(tmp_path)]
    beyond = ["run {} 0", "run {} 2", "perplexity {},{} None"]
    order = [text.format(*n) for n in [(1024,)] for text in beyond[:2]] + ["perplexity 512,1024 None"]
    order += ["run 460 0", "run 460 2", "run 3000 0", "run 3000 2", "perplexity 1500,3000 None"]
    found = [" ".join(map(str, place.groups())) for place in places if place]
    assert list(dict.fromkeys(found)) == order
    assert [found.count(each) for each in order] == [3, 3, 3, 1, 1, 3, 3, 3]


@pytest.mark.parametrize(
    ("row", "length", "expected"),
    [
        ("full", 460, "--method full"),
        ("full rope=yarn", 460, ""),  # RoPE is scaled beyond the window alone
        ("full rope=yarn", 1024, "--method full --rope yarn --rope-factor 2"),
        ("full rope=yarn window=256", 460, "--method full --rope yarn --rope-factor 1.79688 --window 256"),
        ("pages placement=true budget=600", 1024, "--method pages -o placement=true -o budget=600"),
        ("pages placement=true budget=600", 460, ""),  # such a budget holds the text
        ("pages budget=600", 1024, ""),  # side by side, pages of more than the window are too many
        ("pages budget=600", 460, ""),
        ("pages budget=200", 460, "--method pages -o budget=200"),
    ],
)
def test_the_options_of_a_row(row: str, length: int, expected: str) -> None:
    assert " ".join(study.options(row, length, 512)) == expected


@pytest.mark.parametrize("rows", study.ROWS)
def test_every_row_is_a_method_with_its_knobs(rows: str) -> None:
    assert len(set(study.ROWS[rows])) == len(study.ROWS[rows])
    for row in study.ROWS[rows]:
        name, *words = row.split()
        knobs = dict(word.split("=", 1) for word in words)
        assert knobs.pop("rope", "yarn") in ("linear", "ntk", "dynamic", "yarn")
        lce.methods.make(name, knobs)


def test_a_command_that_ended_well_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append(" ".join(command))
        is_info = "info" in command
        return subprocess.CompletedProcess(command, int("--rope" in command), '{"window": 512}' if is_info else "")

    monkeypatch.setattr(subprocess, "run", run)
    words = (
        f"study.py --model demo --essays E --record {tmp_path} --parts answers --lengths 2 --documents 0 --workers 1"
    )
    monkeypatch.setattr("sys.argv", [*words.split(), "--methods", "full;full rope=yarn;dca"])
    for expected in (["full", "full --rope", "dca"], ["full --rope"]):  # what failed is run again
        ran.clear()
        with pytest.raises(SystemExit) as ended:
            study.main()
        assert ended.value.code == 1
        asked = [text.split("--method ")[1] for text in ran if "--method " in text]
        assert [text.split(" yarn")[0].split(" --lengths")[0] for text in asked] == expected


def answered(
    method: str, engine: str, rights: str, *, rope: tuple[str, float] = ("none", 1.0), n_bytes: int = 1000
) -> list[Any]:
    """Lines of a document's answers, 1 for a right one; every other question is of the kind b."""
    lines = []
    for index, right in enumerate(map(int, rights)):
        sample = {
            "task": "facts_medley",
            "length": 1024,
            "seed": 0,
            "model": "m",
            "index": index,
            "rope": ROPE.format(*rope),
        }
        about = {"method": method, "window": 512, "checkpoint": "demo", "kind": "ab"[index % 2], "score": float(right)}
        about |= {"prompt": f"q{index}", "document": index // 4, "prompt_tokens": 1000, "read_bytes": n_bytes}
        lines.append(({**sample, "engine": ENGINE.format(engine)}, Answer(right == 1, **about)))
    return lines


def split(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_tables_count_what_the_records_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = Record(tmp_path / "answers.jsonl")
    record.add_all(answered("full", "Full()", "00000000", n_bytes=64_000))
    record.add_all(answered("full", "Full()", "11111110", rope=("yarn", 2.0), n_bytes=64_000))
    record.add_all(answered("dca", "DualChunk(far=511)", "11010110", n_bytes=16_000))
    setting = {"task": "perplexity", "setting": "stream", "model": "m", "rope": ROPE.format("none", 1.0)}
    stream = {**setting, "engine": ENGINE.format("Full()")}
    losses = Record(tmp_path / "perplexity.jsonl")
    for length, first, nll in ((1024, 256, 99.0), (1024, 512, 2.0), (1024, 768, 2.0), (2048, 1024, 20.0)):
        sample = {**stream, "length": length, "text": "t", "first": first, "stop": first + 256}
        losses.add(sample, Loss(nll, 2, method="full", window=512, checkpoint="demo"))
    study_tables.main([str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    cells = {line.split("`")[1]: split(line)[1:] for line in lines if line.startswith("| `")}
    assert lines[0] == "## demo m"
    spans = ["perplexity, 512–1,024", "perplexity, 1,024–2,048"]
    assert split(lines[2]) == ["row", "1,024 tokens", "read a token at 1,024", "of the cache", *spans]
    assert split(lines[6])[2:] == ["62.5 KiB", "100%", "2.72", "22026.47"]
    assert list(cells) == ["full rope=yarn", "dca", "full"]
    assert cells["full rope=yarn"][:2] == ["4 of 4", "3 of 4"]
    assert cells["full rope=yarn"][2] == "7/8 (50–100)"
    assert cells["dca"][3:] == ["15.6 KiB", "25%", "0.250"]
    assert cells["full"][:2] == ["0 of 4", "0 of 4"]
    assert cells["full"][-1] == "0.008"
    study_tables.main([str(tmp_path), "--kinds", "b"])
    assert "3/4 (25–100)" in capsys.readouterr().out
