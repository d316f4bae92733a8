"""`lce eval passkey`: what it prints, and what it refuses before it prints."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.command import assert_error, run


def test_eval_passkey_as_json_and_as_a_table(tiny_model: Path) -> None:
    args = ["eval", "passkey", "--model", tiny_model, "--lengths", "256,300", "--samples", "2"]
    methods = ["--method", "full,longheads", "--method", "full"]
    scores = json.loads(run(*args, *methods, "--json").stdout)
    assert [(score["method"], score["length"]) for score in scores] == [
        *(("full", 256), ("full", 300)),
        *(("longheads", 256), ("longheads", 300)),
    ]
    for score in scores:
        assert set(score) == {"method", "task", "length", "samples", "accuracy", "low", "high", "warning"}
        assert 0 <= score["low"] <= score["accuracy"] <= score["high"] <= 1
        assert (score["task"], score["samples"]) == ("passkey", 2)
    table = run(*args, *methods)
    assert table.exit_code == 0
    notes = table.stderr.splitlines()
    assert len(notes) == 2, "full beyond the window, once a length"
    assert all(re.match(r"lce: note: [0-9]+ tokens are more than the 64 that the method full can", x) for x in notes)
    assert [bool(score["warning"]) for score in scores] == [True, True, False, False]
    assert len(table.stdout.splitlines()) == 5 + 1 + 4  # the scores, and the methods by lengths


def test_an_answer_that_passes_the_windows_end_is_no_text_beyond_it(tiny_model: Path) -> None:
    args = ("eval", "passkey", "--model", tiny_model, "--lengths", "256", "--window", "256", "--samples", "1")
    result = run(*args, "--json")
    assert (json.loads(result.stdout)[0]["warning"], result.stderr) == (None, "")


def test_eval_passkey_refuses_what_it_cannot_use(tiny_model: Path) -> None:
    passkey = ("eval", "passkey", "--model", tiny_model, "--samples", "1")
    assert_error(run(*passkey, "--lengths", "2x"), 2, "'2x'", "4k")
    assert_error(run(*passkey, "--lengths", "256", "--method", "full", "-o", "chunks=3"), 2, "'full' has no option")
    assert_error(run(*passkey, "--lengths", "2K", "--task", "passkeys", "--json"), 2, "did you mean 'passkey'?")
    assert_error(run(*passkey, "--lengths", "256", "--method", ","), 2, "no name is given")
    assert_error(run(*passkey, "--lengths", "256", "--record", ""), 3, "is a folder")
    assert_error(run(*passkey), 2, "--lengths")


def test_eval_says_what_is_wrong_before_it_prints_anything(tiny_model: Path, tmp_path: Path) -> None:
    """Also what concerns the last method, or the shortest length, alone."""
    passkey = ("eval", "passkey", "--model", tiny_model, "--samples", "1")
    assert_error(run(*passkey, "--lengths", "300,20"), 2, "length is 20; expected at least")
    assert_error(run(*passkey, "--lengths", "300", "--filler", "nois"), 2, "did you mean 'noise'?")
    assert_error(
        run(*passkey, "--lengths", "300", "--method", "dca,longheads", "-o", "longheads.chunks=1"), 2, "chunks"
    )
    budget = ("--kv-host-budget", "128KiB")
    assert_error(run(*passkey, "--lengths", "200,4k", "--method", "streaming", *budget), 4, "tokens need")
