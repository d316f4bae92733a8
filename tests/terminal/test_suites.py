"""`lce eval run` and `lce eval tasks`."""

from __future__ import annotations

import json
import re
from pathlib import Path

from lce.lab.eval.tasks import TASKS
from tests.command import assert_error, run

RUN = ("eval", "run", "--model", "demo", "--window", "256", "--samples", "2", "--quiet")


def test_eval_run_prints_a_line_a_cell_and_the_ceiling_first(tmp_path: Path) -> None:
    args = (*RUN, "--task", "passkey,common_words", "--method", "full,longheads", "--lengths", "300", "-t", "common=2")
    result = run(*args, "--record", tmp_path / "record")
    assert result.exit_code == 0, result.stderr
    assert result.stderr.count("lce: note: 300 tokens are more than the 256 that the method full") == 1
    head, *rows = result.stdout.splitlines()
    assert head.split()[:4] == ["task", "method", "length", "samples"]
    assert [row.split()[0] for row in rows] == ["passkey"] * 4 + ["common_words"] * 4
    assert rows[0].split()[1:3] == ["full,", "ceiling"]
    assert "100.0%" in rows[0], "the demo model finds a pass key within 256 tokens"
    assert rows[3] == "passkey does not discriminate at 300: every method reaches the ceiling"
    assert "common_words does not discriminate: `full` " in rows[5]
    assert rows[6].split()[2:5] == ["300", "2", "-"], "a score that says nothing is not shown"
    lines = [json.loads(line) for line in (tmp_path / "record").read_text().splitlines()]
    assert len(lines) == 2 * 2 * 3
    assert {line["checkpoint"] for line in lines} == {"demo"}
    again = run(*args, "--record", tmp_path / "record", "--json")
    cells = json.loads(again.stdout)
    assert [cell["ceiling"] for cell in cells] == [True, False, False] * 2
    assert [cell.get("discriminates") for cell in cells] == [None, False, False, None, False, False]
    alone = run(*RUN, "--method", "full", "--lengths", "300", "--record", tmp_path / "record", "--json")
    assert [cell.get("discriminates") for cell in json.loads(alone.stdout)] == [None, True], (
        "one method is not compared"
    )
    assert cells[3]["task_knobs"] == {"common": 2, "ratio": 10}
    assert len((tmp_path / "record").read_text().splitlines()) == 12


def test_two_shards_make_the_report_of_one_run(tmp_path: Path) -> None:
    args = (*RUN, "--task", "several_keys", "--lengths", "250", "--mode", "shared", "--questions", "2", "--no-ceiling")
    for shard, name in (("0/1", "whole"), ("0/2", "first"), ("1/2", "second")):
        result = run(*args, "--shard", shard, "--record", tmp_path / name, "--contexts", tmp_path / f"{name} contexts")
        assert result.exit_code == 0, result.stderr
    one, two = run("eval", "report", tmp_path / "whole"), run("eval", "report", tmp_path / "second", tmp_path / "first")
    assert one.stdout == two.stdout
    assert one.stdout.startswith("## several_keys, mode shared: demo ")


def test_eval_run_refuses_what_it_cannot_use_before_it_prints(tmp_path: Path) -> None:
    for args, code, words in (
        (("--task", "passkeys"), 2, "did you mean 'passkey'"),
        (("--task", ","), 2, "lce eval tasks"),
        (("-t", "hop=3"), 2, "no task has the knob 'hop'"),
        (("--depths", "0,x"), 2, "--depths is '0,x'"),
        (("--shard", "2/2"), 2, "expected i/n"),
        (("--mode", "singel"), 2, "did you mean 'single'"),
        (("--filler", "pros"), 2, "did you mean 'prose'"),
        (("--filler", f"essays:{tmp_path}"), 3, "has no text"),
        (("--record", tmp_path / "none" / "record"), 3, "No such file"),
        (("--task", "several_keys", "--lengths", "300,20"), 2, "expected at least"),
        (("--task", "several_keys", "--window", "64"), 2, "which --no-ceiling leaves out"),
    ):
        assert_error(run(*RUN, "--lengths", "200", *args, "--json"), code, words)


def test_eval_tasks_lists_them_with_their_knobs() -> None:
    listed = json.loads(run("eval", "tasks", "--json").stdout)
    assert [task["name"] for task in listed] == list(TASKS)
    variables = next(task for task in listed if task["name"] == "variables")
    assert variables["knobs"] == {"hops": 2, "chains": 2}
    text = run("eval", "tasks").stdout
    assert "metric recall; hidden in a filler; hops=2 chains=2" in text
    assert all(f"{task['summary']}" in text for task in listed)


def test_the_docs_have_every_task_with_its_metric() -> None:
    page = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]*`) \|[^|]*\| `(\w+)` \|", page.partition("\n## Records")[0], re.MULTILINE)
    named = {name: metric for names, metric in rows for name in re.findall(r"`(\w+)`", names)}
    assert named == {name: task.metrics[0] for name, task in TASKS.items()}
