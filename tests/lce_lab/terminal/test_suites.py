"""`lce eval run`, `tasks`, `published`, `score` and `benchmarks`; and the help of all commands `lce eval ...`."""

import json
import re
from pathlib import Path

import pytest

from lce_lab.eval.tasks import TASKS
from tests.command import assert_error, output, ran, run
from tests.lce_lab.eval.published.layouts import write

RUN = ("eval", "run", "--model", "demo", "--window", "256", "--samples", "2", "--quiet")


def test_eval_run_prints_a_line_a_cell_and_the_ceiling_first(tmp_path: Path) -> None:
    args = (*RUN, "--task", "passkey,common_words", "--method", "full,longheads", "--lengths", "300", "-t", "common=2")
    result = ran(*args, "--record", tmp_path / "record")
    assert result.stderr.count("lce: note: 300 tokens are more than the 256 that the method full") == 1
    head, *rows = result.stdout.splitlines()
    assert head.split()[:4] == ["task", "method", "length", "samples"]
    assert [row.split()[0] for row in rows] == ["passkey"] * 4 + ["common_words"] * 4
    assert rows[0].split()[1:3] == ["full,", "ceiling"]
    assert "100.0%" in rows[0], "the demo model finds a pass key within 256 tokens"
    why = "no method is measurably below `full` within the window"
    assert rows[3] == f"passkey at 300 tokens cannot rank methods: {why}"
    assert all(row.split()[4].endswith("%") for row in rows[5:7]), "a score is shown even if it says little"
    assert "common_words at 300 tokens cannot rank methods: `full` " in rows[7]
    (word,) = [line for line in result.stderr.splitlines() if line.startswith("lce: note: common_words: `full` ")]
    assert all(x in word for x in ("in 2 samples at 2", "scores beyond it say little; ask another --task"))
    lines = [json.loads(line) for line in (tmp_path / "record").read_text().splitlines()]
    assert (len(lines), {line["checkpoint"] for line in lines}) == (2 * 2 * 3, {"demo"})
    cells = json.loads(run(*args, "--record", tmp_path / "record", "--json").stdout)
    assert [cell["ceiling"] for cell in cells] == [True, False, False] * 2
    assert [cell.get("discriminates") for cell in cells] == [None, False, False, None, False, False]
    alone = run(*RUN, "--method", "full", "--lengths", "300", "--record", tmp_path / "record", "--json")
    found = [cell.get("discriminates") for cell in json.loads(alone.stdout)]
    assert found == [None, True], "one method is not compared"
    assert cells[3]["task_knobs"] == {"common": 2, "ratio": 10}
    assert len((tmp_path / "record").read_text().splitlines()) == 12


@pytest.mark.slow
def test_lengths_within_the_window_have_ceilings_of_their_own(tmp_path: Path) -> None:
    args = (*RUN, "--method", "longheads", "--lengths", "240,120,500", "--record", tmp_path / "record")
    *own, beyond = [cell["length"] for cell in json.loads(run(*args, "--json").stdout) if cell["ceiling"]]
    assert own == [120, 240]
    assert 240 < beyond <= 256
    shown = run("eval", "report", tmp_path / "record").stdout
    row = next(row for row in shown.splitlines() if row.startswith("| `full` |"))
    assert [cell.split()[0] for cell in row.split("|")[2:4]] == ["1.00", "1.00"]


@pytest.mark.slow
def test_a_run_names_the_time_left_over_all_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded answers do not count, and the tokens to read are the unit."""
    args = ["--method", "full,dca", "--task", "passkey,code", "--no-ceiling", "--record", tmp_path / "record"]
    monkeypatch.setattr("lce.terminal.output.FIRST_LINE_S", 0.0)
    monkeypatch.setattr("lce.terminal.output.NEXT_LINE_S", 0.0)
    found = run(*RUN[:-1], *args, "--lengths", "250").stderr
    said = [line.partition(" tok/s")[0] for line in found.splitlines() if " left" in line]
    steps = {"passkey, full": (250, 500), "passkey, dca": (500, 750, 1000), "code, full": (1000, 1250, 1500)}
    steps["code, dca"] = (1500, 1750)
    expected = [f"{cell} at 250: {done:,} of 2,000," for cell, some in steps.items() for done in some]
    assert [" ".join(line.split()[:-1]) for line in said] == expected
    assert "code, dca at 200: 1,400 of 1,600, " in run(*RUN[:-1], *args, "--lengths", "250,200").stderr


def test_two_shards_make_the_report_of_one_run(tmp_path: Path) -> None:
    args = (*RUN, "--task", "several_keys", "--lengths", "250", "--mode", "shared", "--questions", "2", "--no-ceiling")
    for shard, name in (("0/1", "whole"), ("0/2", "first"), ("1/2", "second")):
        ran(*args, "--shard", shard, "--record", tmp_path / name, "--contexts", tmp_path / f"{name} contexts")
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
    assert next(task for task in listed if task["name"] == "variables")["knobs"] == {"hops": 2, "chains": 2}
    text = run("eval", "tasks").stdout
    assert "metric recall; hidden in a filler; hops=2 chains=2" in text
    assert all(f"{task['summary']}" in text for task in listed)


def test_the_docs_have_every_task_with_its_metric() -> None:
    page = (Path(__file__).parents[3] / "docs" / "evaluation.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]*`) \|[^|]*\| `([\w.]+)` \|", page.partition("\n## Records")[0], re.MULTILINE)
    named = {name: metric for names, metric in rows for name in re.findall(r"`(\w+)`", names)}
    assert named == {name: task.metrics[0] for name, task in TASKS.items()}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder, "longbench", "passage_retrieval_zh")
    row = {"input": "", "answers": ["abcdefgh ijkl"], "all_classes": None}
    rows = [{**row, "context": "red " * n, "length": n} for n in (3, 4, 40)]
    (folder / "lcc.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.slow
def test_a_run_resumes_is_shared_out_and_scores_what_it_wrote(tiny_model: Path, data: Path, tmp_path: Path) -> None:
    args = ["eval", "published", "longbench", "--data", data, "--model", tiny_model, "--method", "full,streaming"]
    args += ["--max-length", "100"]
    record, kept = tmp_path / "answers.jsonl", tmp_path / "pred"
    found = json.loads(ran(*args, "--json", "--record", record, "--predictions", kept).stdout)
    tasks = {"passage_retrieval_zh": 1, "lcc": 3}
    cells = [(method, *task) for task in tasks.items() for method in ("full", "streaming")]
    assert [(x["method"], x["task"], x["samples"]) for x in found] == cells
    assert all(0 <= x["low"] <= x["score"] <= x["high"] <= 100 for x in found)
    before = record.read_bytes()
    again = run(*args, "--record", record)
    assert record.read_bytes() == before
    assert again.stdout.splitlines()[0].split()[:5] == ["task", "method", "length", "samples", "score"]
    assert len(again.stdout.splitlines()) == 5
    halves = [tmp_path / f"half{i}.jsonl" for i in (0, 1)]
    for i, half in enumerate(halves):
        ran(*args, "--record", half, "--shard", f"{i}/2")
    assert sorted(b"".join(half.read_bytes() for half in halves).splitlines()) == sorted(before.splitlines())
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
    ran("eval", "score", other, "--suite", "longbench", "--task", "qasper")
    assert_error(run("eval", "score", path, "--suite", "longbench", "--metric", "start"), 2, "did you mean 'starts'")
    assert_error(run("eval", "score", tmp_path / "no.jsonl", "--suite", "ruler", "--task", "vt"), 3, "no.jsonl")
    assert_error(run("eval", "score", tmp_path / "none.jsonl", "--suite", "ruler"), 3, "none.jsonl")
    (tmp_path / "empty").mkdir()
    assert_error(run("eval", "score", tmp_path / "empty", "--suite", "ruler"), 3, "has no file of predictions of RULER")


def test_a_broken_file_of_a_folder_is_named_and_the_others_are_scored(tmp_path: Path) -> None:
    row = json.dumps({"pred": "red", "answers": ["red"], "all_classes": None})
    for name, text in (("qasper", row), ("hotpotqa", f'{row}\n{{"pred": '), ("musique", row)):
        (tmp_path / f"{name}.jsonl").write_text(f"{text}\n")
    found = run("eval", "score", tmp_path, "--suite", "longbench")
    assert found.exit_code == 3
    scored = [line.split()[:3] for line in found.stdout.splitlines()[1:]]
    assert scored == [["musique", "1", "100.00"], ["qasper", "1", "100.00"]]
    named, error = found.stderr.splitlines()
    assert all(x in named for x in ("not scored: line 2 of", "hotpotqa.jsonl"))
    assert error.startswith("lce: error: 1 of 3 files of")
    assert_error(run("eval", "score", tmp_path / "hotpotqa.jsonl", "--suite", "longbench"), 3, "line 2 of")


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
        assert all(x in text for x in (f"{suite['name']}: {suite['title']}", suite["files"]))


def test_the_help_of_every_command_imports_nothing_heavy() -> None:
    check = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from lce_lab.terminal.evaluation import evaluation\n"
        "for name in evaluation.commands:\n"
        "    result = CliRunner().invoke(evaluation, [name, '--help'])\n"
        "    assert result.exit_code == 0 and result.stdout.startswith('Usage: eval'), (name, result)\n"
        "print({'torch', 'numba', 'matplotlib'} & sys.modules.keys())\n"
    )
    assert output(check) == "set()\n"
