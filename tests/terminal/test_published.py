"""`lce eval published`, `score` and `benchmarks`: what they print, and that runs resume and are shared out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command import assert_error, run
from tests.lab.eval.published.layouts import write


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder, "longbench", "passage_retrieval_zh")
    row = {"input": "", "answers": ["abcdefgh ijkl"], "all_classes": None}
    rows = [{**row, "context": "red " * n, "length": n} for n in (3, 4, 40)]
    (folder / "lcc.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_run_resumes_is_shared_out_and_scores_what_it_wrote(tiny_model: Path, data: Path, tmp_path: Path) -> None:
    args = ["eval", "published", "longbench", "--data", data, "--model", tiny_model, "--method", "full,streaming"]
    args += ["--max-length", "100"]
    record, kept = tmp_path / "answers.jsonl", tmp_path / "pred"
    whole = run(*args, "--json", "--record", record, "--predictions", kept)
    assert whole.exit_code == 0, whole.stderr
    found = json.loads(whole.stdout)
    assert [(x["method"], x["task"], x["samples"]) for x in found] == [
        ("full", "passage_retrieval_zh", 1),
        ("streaming", "passage_retrieval_zh", 1),
        ("full", "lcc", 3),
        ("streaming", "lcc", 3),
    ]
    assert all(0 <= x["low"] <= x["score"] <= x["high"] <= 100 for x in found)
    before = record.read_bytes()
    again = run(*args, "--record", record)
    assert record.read_bytes() == before
    assert again.stdout.splitlines()[0].split()[:5] == ["task", "method", "length", "samples", "score"]
    assert len(again.stdout.splitlines()) == 5

    halves = [tmp_path / f"half{i}.jsonl" for i in (0, 1)]
    for i, half in enumerate(halves):
        assert run(*args, "--record", half, "--shard", f"{i}/2").exit_code == 0
    merged = b"".join(half.read_bytes() for half in halves)
    assert sorted(merged.splitlines()) == sorted(before.splitlines())

    scored = json.loads(run("eval", "score", kept / "streaming", "--suite", "longbench", "--json").stdout)
    own = {x["task"]: x["score"] for x in found if x["method"] == "streaming"}
    assert {x["task"]: x["score"] for x in scored} == pytest.approx(own)


def test_scores_of_published_predictions(tmp_path: Path) -> None:
    rows = [{"pred": "red", "answers": ["red"], "all_classes": None, "length": n} for n in (10, 5000)]
    rows[1]["pred"] = "blue"
    path = tmp_path / "qasper.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = run("eval", "score", path, "--suite", "longbench-e")
    assert shown.stdout.splitlines()[1].split() == ["qasper", "2", "50.00", "qa_f1"]
    assert shown.stdout.splitlines()[2:] == ["  0-4k: 100.00", "  4-8k: 0.00"]
    (found,) = json.loads(run("eval", "score", path, "--suite", "longbench", "--metric", "starts", "--json").stdout)
    assert (found["metric"], found["score"]) == ("starts", 50)
    other = tmp_path / "mine.jsonl"
    other.write_bytes(path.read_bytes())
    assert_error(run("eval", "score", other, "--suite", "longbench"), 2, "tells no task of longbench; give --task")
    assert run("eval", "score", other, "--suite", "longbench", "--task", "qasper").exit_code == 0
    assert_error(run("eval", "score", path, "--suite", "longbench", "--metric", "start"), 2, "did you mean 'starts'")
    assert_error(run("eval", "score", tmp_path / "no.jsonl", "--suite", "ruler", "--task", "vt"), 3, "no.jsonl")
    assert_error(run("eval", "score", tmp_path / "none.jsonl", "--suite", "ruler"), 3, "none.jsonl")
    (tmp_path / "empty").mkdir()
    assert_error(run("eval", "score", tmp_path / "empty", "--suite", "ruler"), 3, "has no file of predictions of RULER")


def test_what_cannot_be_used_is_refused_before_a_model_is_loaded(tmp_path: Path, data: Path) -> None:
    args = ("eval", "published", "--data", data, "--model", tmp_path / "none")
    assert_error(run(*args, "longbnch"), 2, "did you mean 'longbench'")
    assert_error(run(*args, "longbench", "--task", "qaspr"), 2, "did you mean 'qasper'")
    assert_error(run(*args, "longbench", "--template", "llama"), 2, "text with {prompt}")
    assert_error(run(*args, "longbench", "--prompts", "gpt4"), 2, "leave it out")
    assert_error(run(*args, "longbench", "--mode", "turns"), 2, "expected single or shared")
    (tmp_path / "file").touch()
    assert_error(run(*args, "longbench", "--predictions", tmp_path / "file"), 2, "is no folder for predictions")
    assert_error(run(*args, "longbench", "--record", tmp_path), 3, "is a folder")
    assert_error(run(*args, "ruler"), 3, "has no file of RULER, such as niah_single_1/validation.jsonl")


def test_benchmarks_lists_files_and_tasks() -> None:
    listed = json.loads(run("eval", "benchmarks", "--json").stdout)
    assert {"longbench", "infinitebench", "ruler", "l-eval"} <= {suite["name"] for suite in listed}
    text = run("eval", "benchmarks").stdout
    for suite in listed:
        assert f"{suite['name']}: {suite['title']}" in text
        assert suite["files"] in text
