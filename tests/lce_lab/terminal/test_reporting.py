"""`lce eval report`: Markdown, JSON and pictures."""

import json
from pathlib import Path

import pytest

from lce_lab.terminal.measuring import number
from tests.command import assert_error, ran, run
from tests.lce_lab.eval.test_report import QUEST, file, line
from tests.lce_lab.eval.test_selection import engine, look


def test_eval_report_as_markdown_and_as_json(tmp_path: Path) -> None:
    quest = {"engine": QUEST, "method": "quest", "depths": [0, 0.5]}
    made = [
        line(i, float(i > 1), length=length, depth=i / 2 % 1, read_bytes=length * 1024, **quest)
        for length in (512, 1024)
        for i in range(4)
    ]
    ceiling = [line(i, length=500, ceiling=True) for i in range(20)]
    path = file(tmp_path / "record", *made, *ceiling)
    assert run("eval", "report", path).stdout == (
        "## made: tiny abcdef01\n\n"
        "| method | 512 | 1,024 | holds to |\n"
        "| --- | ---: | ---: | ---: |\n"
        "| `quest` | 0.50 (0.15–0.85) | 0.50 (0.15–0.85) | - |\n"
        "| ceiling: `full` at 500 | 1.00 (0.84–1.00) |  |  |\n\n"
        "| read by a decode step | 512 | 1,024 |\n"
        "| --- | ---: | ---: |\n"
        "| `quest` | 512.0 KiB | 1.0 MiB |\n\n"
        "| `quest`: depth | 512 | 1,024 |\n"
        "| --- | ---: | ---: |\n"
        "| 0% | 0.50 | 0.50 |\n"
        "| 50% | 0.50 | 0.50 |\n\n"
        "- 4 samples a cell; 95% intervals (Wilson).\n"
        "- A method holds to the longest length up to which it has 90% of the ceiling's score.\n"
    )
    (table,) = json.loads(run("eval", "report", path, "--json").stdout)["tables"]
    assert [(cell["mean"], cell["discriminates"]) for cell in table["cells"]] == [(0.5, True)] * 2
    assert (table["discriminates"], table["ceiling"]["length"], table["holds_to"]) == (True, 500, {"quest": 0})


def test_several_tasks_stand_side_by_side(tmp_path: Path) -> None:
    """A mean is of the tasks that the model can do; a task alone at its length has no such table."""
    lines = [
        line(i, score, length=length, task=task, engine=name, method=method)
        for name, method, score in (("Engine(Full(), window=512)", "full", 1.0), (QUEST, "quest", 0.0))
        for task, length in (("made", 512), ("hard", 512), ("other", 512), ("other", 600))
        for i in range(4)
    ] + [
        line(i, float(task != "hard"), length=500, task=task, ceiling=True)
        for task in ("made", "hard", "other")
        for i in range(20)
    ]
    table = run("eval", "report", file(tmp_path / "record", *lines)).stdout.partition("\n\n## ")[0]
    assert table == (
        "## 3 tasks at 512 tokens: tiny abcdef01\n\n"
        "| task | `full` within the window | `full` | `quest` |\n"
        "| --- | ---: | ---: | ---: |\n"
        "| `made` | 1.00 | 1.00 | 0.00 |\n"
        "| `hard` (cannot rank methods) | 0.00 | 1.00 | 0.00 |\n"
        "| `other` | 1.00 | 1.00 | 0.00 |\n"
        "| mean of 2 |  | 1.00 | 0.00 |"
    )


def test_what_why_asked_again_does_not_stand_beside_tasks(tmp_path: Path) -> None:
    """Each change is a method, asked what another one missed: a column that says nothing of the others' tasks."""
    asked = [line(i, task=task) for task in ("made", "other") for i in range(2)]
    again = line(0, 0.0, document=0, again=[1], engine=QUEST, method="quest")
    first, *others = run("eval", "report", file(tmp_path / "record", *asked, again)).stdout.split("\n## ")
    assert first.splitlines()[0] == "## 2 tasks at 512 tokens: tiny abcdef01"
    assert "quest" not in first
    assert others[-1].startswith("made, asked again by lce eval why: ")


def test_the_means_of_methods_are_compared_on_the_same_samples(tmp_path: Path) -> None:
    """`quest` misses what `full` misses, and one sample more of each task: a small difference that is told."""
    lines = [
        line(i, float(i > most), task=task, engine=name, method=method, prompt=f"{task} {i}")
        for name, method, most in (("Engine(Full(), window=512)", "full", 9), (QUEST, "quest", 14))
        for task in ("made", "other")
        for i in range(40)
    ] + [line(i, length=500, task=task, ceiling=True) for task in ("made", "other") for i in range(20)]
    table = run("eval", "report", file(tmp_path / "record", *lines)).stdout.partition("\n\n## ")[0]
    mean, paired = (row.split(" | ") for row in table.splitlines()[-2:])
    assert mean == ["| mean of 2", "", "0.75", "0.62 |"]
    assert (paired[0], paired[2]) == ("| minus `full`, paired", "")
    assert paired[3].startswith("-0.12 (-0.20 to -0.0")


def test_eval_report_of_perplexities(tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog, and then over the moon. " * 12)
    record, answers = tmp_path / "losses.jsonl", file(tmp_path / "answers.jsonl", line(0))
    args = ("--text", tmp_path / "text.txt", "--stride", "16", "--lengths", "32,128", "--windows", "3")
    methods = ("--method", "full,longheads", "--record", record, "--json")
    measured = run("eval", "perplexity", "--model", tiny_model, *args, *methods)
    values = [each["perplexity"] for each in json.loads(measured.stdout)]
    result = ran("eval", "report", answers, record, "--plots", tmp_path / "plots")
    tables = result.stdout.split("## ")
    assert [table.partition(":")[0] for table in tables[1:]] == ["made", "perplexity, the last 16 tokens of windows"]
    shown = [cell.split(" ")[0] for row in tables[2].splitlines()[4:6] for cell in row.split(" | ")[1:]]
    assert shown == [number(value) for value in values]
    assert "- The window has 64 tokens." in tables[2]
    assert len(list((tmp_path / "plots").glob("*.png"))) == result.stderr.count("lce: wrote ") == 3
    (table,) = json.loads(run("eval", "report", record, "--json").stdout)["perplexities"]
    assert [cell["perplexity"] for cell in table["cells"]] == pytest.approx(values)


def test_eval_report_of_selections(tmp_path: Path) -> None:
    lines = [look(i, n / 10, length=512 * n, engine=engine(n), read_bytes=n << 20) for i in (0, 1) for n in (4, 8)]
    record, answers = file(tmp_path / "looks.jsonl", *lines), file(tmp_path / "answers.jsonl", line(0))
    assert ran("eval", "report", answers, record).stdout.partition("\n## selection, made: tiny abcdef01\n")[2] == (
        "\n| method | length | tokens | reads | of full | recall "
        "| hit@1 | hit@5 | fact | cover | Gini | found | score |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        "| `longheads chunks=4` | 2,048 | 32 | 4.0 MiB | 100% | 0.40 (0.06–0.87) "
        "| 0.50 (0.09–0.91) |  |  |  |  |  | 1.00 (0.34–1.00) |\n"
        "| `longheads chunks=8` | 4,096 | 32 | 8.0 MiB | 200% | 0.80 (0.22–0.98) "
        "| 0.50 (0.09–0.91) |  |  |  |  |  | 1.00 (0.34–1.00) |\n\n"
        "- Means over the queries of 2 texts, layers and heads; bytes are of all layers.\n"
        "- In brackets: 95% intervals over texts.\n"
    )
    alone = run("eval", "report", file(tmp_path / "alone", look(0))).stdout
    assert "| 0.50 | 0.50 |" in alone
    assert "In brackets" not in alone
    (table,) = json.loads(run("eval", "report", record, "--json").stdout)["selections"]
    recalls = {row["method"]: row["recall"] for row in table["rows"]}
    assert recalls == {"longheads chunks=4": 0.4, "longheads chunks=8": 0.8}


def test_a_task_that_does_not_discriminate_has_scores(tmp_path: Path) -> None:
    lines = [line(i, 0.0, length=length) for i in range(4) for length in (512, 1024)]
    shown = run("eval", "report", file(tmp_path / "record", *lines)).stdout
    assert all(x in shown for x in ("| `full` | 0.00 (0.00–0.49) | 0.00 (0.00–0.49) |", "cannot rank methods"))


def test_eval_report_refuses_what_is_no_record(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("notes\n")
    assert_error(run("eval", "report", tmp_path / "text"), 3, "is no record")
    assert_error(run("eval", "report", tmp_path / "none"), 3, "there is no file")
    (tmp_path / "empty").touch()
    assert_error(run("eval", "report", tmp_path / "empty"), 3, "no answers")
    assert_error(run("eval", "report", tmp_path), 3, "is a folder")
    record = file(tmp_path / "record", line(0))
    assert_error(run("eval", "report", record, "--plots", tmp_path / "text"), 2, "no folder")
    assert_error(run("eval", "report"), 2, "FILE")
