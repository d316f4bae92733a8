"""`lce eval selection`, `why` and `perplexity`: their tables, JSON, and what they refuse."""

import json
from pathlib import Path

import pytest

from lce_lab.eval.why import CAUSES
from lce_lab.terminal.measuring import number
from tests.command import assert_error, ran, run

SMALL = ("--method", "longheads,full", "-o", "longheads.chunk_size=8", "-o", "longheads.chunks=4")
PROSE = "The quick brown fox jumps over the lazy dog, and then over the moon and the other dogs. " * 12
TEXTS = ("--lengths", "300", "--samples", "1")


@pytest.fixture
def asked(tiny_model: Path) -> tuple[str, ...]:
    return ("--model", str(tiny_model), *SMALL, *TEXTS)


def test_selection_as_a_table_and_as_json(asked: tuple[str, ...]) -> None:
    head, longheads, *layers = ran("eval", "selection", *asked, "--by-layer", "--quiet").stdout.splitlines()
    assert head.split()[:4] == ["method", "length", "tokens", "reads"]
    assert (longheads.split()[:2], len(longheads)) == (["longheads", "300"], len(head))
    assert layers[0].startswith("  layer 0: recall 0.")
    assert layers[2].split()[0] == "full"
    assert layers[2].split()[5:9] == ["100%", "1.00", "-", "-"], "everything is read, and nothing chosen"
    found = json.loads(run("eval", "selection", *asked, "--json", "--quiet").stdout)
    assert [(one["method"], one["samples"]) for one in found] == [("longheads", 1), ("full", 1)]
    assert [len(layer) for layer in found[0]["by_layer"]["recall"]] == [4, 4]
    assert found[0]["tokens"] < 32 < found[1]["tokens"]


def test_selection_of_a_text(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("The old miller took the bread. " * 40, encoding="utf-8")
    args = ("--model", tiny_model, *SMALL[:2], "--lengths", "150", "--text", tmp_path / "text", "--queries", "7")
    found = json.loads(run("eval", "selection", *args, *SMALL[2:], "--states", "judge", "--json").stdout)
    assert [(one["queries"], one["right"], one["length"]) for one in found] == [(7, None, 150)] * 2


def test_causes_as_a_table_and_as_json(tiny_model: Path) -> None:
    args = ("eval", "why", "--model", tiny_model, *SMALL[2:], "--method", "longheads", *TEXTS, "--quiet")
    head, row, verdict, itself, *_ = ran(*args, "--each").stdout.splitlines()
    assert (head.split(), sum(map(int, row.split()[3:]))) == (["method", "task", "length", *CAUSES], 1)
    assert verdict.startswith("  sample 0 at depth 0.")
    assert itself.startswith("    itself: ")
    found = json.loads(run(*args, "--json").stdout)[0]
    assert sum(found["counts"].values()) == 1
    assert found["verdicts"][0]["answers"]["itself"] is not None


def test_what_cannot_be_used_is_refused(asked: tuple[str, ...]) -> None:
    assert_error(run("eval", "why", *asked, "--samples", "0"), 2, "--samples")
    assert_error(run("eval", "selection", *asked, "--judge", "nobody"), 2, "nobody")


@pytest.mark.parametrize("command", ["selection", "why"])
def test_what_does_not_fit_is_refused_before_texts_are_made(tiny_model: Path, command: str) -> None:
    result = run("eval", command, "--model", tiny_model, "--method", "longheads", "--lengths", "1000000m")
    assert_error(result, 4, "the longest that fits")


def test_windows_as_a_table_and_as_json(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(PROSE)
    args = ("eval", "perplexity", "--model", tiny_model, "--text", tmp_path / "text.txt", "--stride", "16")
    methods = ("--method", "full,longheads", "--lengths", "32,128", "--windows", "3")
    table = ran(*args, *methods)
    lines = table.stdout.splitlines()
    assert (len(lines), lines[-4]) == (5 + 1 + 4, "| method | 32 | 128 |")
    assert [line for line in table.stderr.splitlines() if "128 tokens are more than the 64" in line]
    found = json.loads(run(*args, *methods, "--json").stdout)
    assert [(each["method"], each["length"], each["tokens"]) for each in found] == [
        (method, length, 48) for method in ("full", "longheads") for length in (32, 128)
    ]
    assert found[0]["perplexity"] == pytest.approx(found[2]["perplexity"], rel=1e-4), "within the window"
    assert [bool(each["warning"]) for each in found] == [False, True, False, False]
    assert f"{number(found[1]['perplexity'])} |" in lines[-2]


def test_streams_by_position_from_stdin(tiny_model: Path, tmp_path: Path) -> None:
    record = tmp_path / "losses.jsonl"
    args = ("eval", "perplexity", "--model", tiny_model, "--text", "-", "--lengths", "32,100", "--stream")
    first = run(*args, "--record", record, stdin=PROSE)
    assert [line.split()[:2] for line in first.stdout.splitlines()[1:]] == [["full", "0-32"], ["full", "32-100"]]
    assert run(*args, "--record", record, stdin=PROSE).stdout == first.stdout
    assert {json.loads(line)["setting"] for line in record.read_text().splitlines()} == {"stream"}


def test_perplexities_that_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(PROSE)
    args = ("eval", "perplexity", "--model", tiny_model, "--text", tmp_path / "text.txt")
    assert_error(run(*args, "--lengths", "32,64k"), 2, "no text has 65,536 tokens")
    assert_error(run(*args, "--lengths", "1"), 2, "a length is 1")
    assert_error(run(*args, "--lengths", "32", "--scored", "first"), 2, "unknown scored 'first'")
    assert_error(run(*args, "--lengths", "32", "--text", "-", "--text", "-"), 2, "stdin twice")
    assert_error(run(*args, "--lengths", "32", "--text", tmp_path / "none.txt"), 3, "none.txt")
    assert_error(run(*args, "--lengths", "32", "--record", tmp_path / "text.txt"), 3, "no record")
