"""`lce leaderboard add` and `show`, from the questions to the page."""

import json
from functools import partial
from pathlib import Path

import pytest

from lce_lab.board import questions
from tests.command import assert_error, ran, run
from tests.lce_lab.board.test_ranking import CEILING, answers, at
from tests.lce_lab.eval.test_report import file

ADD = ("-m", "demo", "--lengths", "512", "--samples", "1", "--quiet")


def test_a_method_is_added_and_ranked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(questions, "StandardSuite", partial(questions.StandardSuite, questions=6))
    folder = tmp_path / "board"
    assert (added := run("leaderboard", "add", folder, *ADD, "--method", "streaming")).exit_code == 0, added.stderr
    (record,) = folder.iterdir()
    assert record.name == "demo-6accbf15.jsonl"
    before = record.read_bytes()
    asked = [json.loads(each) for each in before.splitlines()]
    cells = {(each["method"], each["length"], each.get("ceiling")) for each in asked}
    assert cells == {("full", 480, True), ("streaming", 512, None)}
    assert {tuple(map(each.get, ("samples", "seed", "questions", "mode"))) for each in asked} == {(1, 0, 6, "shared")}
    again = run("leaderboard", "add", folder, *ADD, "--method", "streaming", "--json")
    assert record.read_bytes() == before, "adding twice changes nothing"
    assert [cell["method"] for cell in json.loads(again.stdout)] == ["full", "streaming"]
    ran("leaderboard", "add", folder, *ADD[:2], "--lengths", "480,640", *ADD[4:], "--rope", "yarn")
    assert "factor=1.25" in record.read_text().splitlines()[-1]
    page, picture = tmp_path / "page.html", tmp_path / "picture.png"
    shown = ran("leaderboard", "show", folder, "--page", page, "--picture", picture)
    assert shown.stdout.startswith("## demo 6accbf15\n\n| method | rank | reach |")
    assert "| `full rope=yarn` | " in shown.stdout
    assert "full rope=yarn" in page.read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert_error(run("leaderboard", "show", folder, "--page", page), 2, "exists", "--force")
    (board,) = json.loads(run("leaderboard", "show", folder, "--json").stdout)
    assert {each["method"] for each in board["ranking"]} == {"streaming", "full rope=yarn"}


def test_cells_that_do_not_count_are_in_parentheses(tmp_path: Path) -> None:
    file(tmp_path / "a.jsonl", *answers("full", 500, *at(0.2), ceiling=True), *answers("quest", 1024, *at(0.75)))
    file(tmp_path / "b.jsonl", *({**x, "model": "b" * 9} for x in [*CEILING, *answers("quest", 1024, *at(0.75))]))
    lines = run("leaderboard", "show", tmp_path).stdout.splitlines()
    assert [each for each in lines if each.startswith("| `quest` | ") and each.count("|") == 3] == [
        "| `quest` | (0.75) |",
        "| `quest` | 0.75 |",
    ]
    assert lines[-1] == "A score in parentheses does not tell methods apart and does not count."


def test_what_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (other := tmp_path / "other").mkdir()
    (other / "thesis.tex").touch()
    new = tmp_path / "new"
    for args, code, words in (
        (("add", other, *ADD), 3, "thesis.tex and no record"),
        (("add", new, *ADD, "--filler", "pros"), 2, "did you mean 'prose'"),
        (("add", new, *ADD, "--method", "dac"), 2, "did you mean 'dca'"),
        (("add", new, *ADD[:2], "--lengths", "100", *ADD[4:]), 2, "expected at least"),
        (("show", new), 3, "have no answers to tasks"),
        (("show", tmp_path / "none"), 3, "has no record"),
        (("show", other, "--page", new / "p", "--picture", new / "p"), 2, "are both"),
    ):
        assert_error(run("leaderboard", *args), code, words)
    assert [each.read_bytes() for each in new.iterdir()] == [b""]
    (tmp_path / "bare").mkdir()
    file(tmp_path / "bare" / "a.jsonl", *answers("quest", 1024, 1))
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.png"
    assert_error(run("leaderboard", "show", tmp_path / "bare", "--picture", picture), 3, "nothing to draw")
    assert not picture.exists()
