"""Every benchmark reads files of its own layout, asks as published, and scores what it wrote; docs and code agree."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from lce.errors import DataError, UsageError
from lce_lab.eval.metrics import METRICS
from lce_lab.eval.published import BENCHMARKS, Benchmark, base, find
from lce_lab.eval.published.base import Row
from lce_lab.eval.published.scoring import score_file, scored
from lce_lab.eval.sample import Sample
from tests.lce_lab.eval.published.layouts import LAYOUTS, Letters, write

ROOT = Path(__file__).parents[4]


def read(folder: Path, benchmark: str, task: str, variant: str = "") -> list[Sample]:
    return list(find(benchmark).read(folder, find(benchmark).task(task), variant, Letters()))


def written(folder: Path, benchmark: str, task: str, variant: str = "") -> list[Sample]:
    write(folder, benchmark, task)
    return read(folder, benchmark, task, variant)


def test_file_registry_and_docs_agree() -> None:
    page = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    page = page.partition("## Published benchmarks")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE) == list(BENCHMARKS)
    folder = ROOT / "lce_lab" / "eval" / "published"
    others = {"__init__", "base", "scoring", "suite", "haystack"}
    homes = {type(benchmark).__module__.rpartition(".")[2] for benchmark in BENCHMARKS.values()}
    assert homes == {path.stem for path in folder.glob("*.py")} - others
    for benchmark in BENCHMARKS.values():
        assert all(metric in METRICS for task in benchmark.tasks for metric in task.metrics)
        assert benchmark.source in page


def test_unknown_prompts_get_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean '0shot'"):
        find("longbench-v2").variant("0sht")


@pytest.mark.parametrize(
    ("suite", "task"),
    [
        pytest.param(suite, task, marks=[pytest.mark.slow] if "longbook" in task else [])
        for suite, tasks in LAYOUTS.items()
        for task in tasks
    ],
)
def test_a_perfect_answer_scores_100(tmp_path: Path, suite: str, task: str) -> None:
    """Its answer, written in the benchmark's own layout of predictions and read again."""
    if task in ("gov_report", "vcsum", "news_summ", "longbook_sum_eng"):
        pytest.importorskip("rouge_score" if suite != "longbench" else "rouge")
    own, of = find(suite), find(suite).task(task)
    found = written(tmp_path, suite, task)
    assert found
    assert of in own.present(tmp_path)
    path = tmp_path / f"{task}.jsonl"
    lines = [own.prediction(sample, LAYOUTS[suite][task].perfect(sample)) for sample in found]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    score = score_file(own, path)
    assert (score.task, score.samples, score.score) == (task, len(found), pytest.approx(100, abs=1e-4))
    worst = scored(of, (x for line in [own.prediction(sample, "") for sample in found] for x in _reread(own, of, line)))
    assert worst.score < 100


def _reread(own: Any, task: Any, line: dict[str, Any]) -> Any:
    return own.answered(Row(line, "a line"), 0, task)


def test_the_prompts_of_longbench(tmp_path: Path) -> None:
    (sample,) = written(tmp_path, "longbench", "trec")
    assert sample.prompt == (
        "Please determine the type of the question below. Here are some examples of questions.\n\n"
        "Question: {b}\nType: City\nQuestion: a?\nType:"
    )
    assert (sample.template, sample.fixed, sample.max_tokens) == ("none", True, 64)
    assert sample.answers == ("City", "", "City", "Person")
    assert sample.beginning.endswith("Type: City")


def test_longbench_e_has_lengths(tmp_path: Path) -> None:
    assert [sample.group for sample in written(tmp_path, "longbench-e", "qasper")] == ["0-4k", "4-8k", "8k+"]


def test_longbench_averages_over_categories() -> None:
    scores = {task.name: 10.0 for task in find("longbench").tasks} | {"lcc": 70.0}
    found = find("longbench").averages(scores)
    assert found == pytest.approx(dict.fromkeys(("average (English)", "average (Chinese)"), (5 * 10 + 40) / 6))
    assert find("longbench").averages({"lcc": 1.0}) == {}


def test_infinitebench_finds_the_call_and_the_letter(tmp_path: Path) -> None:
    (sample,) = written(tmp_path, "infinitebench", "code_run")
    assert sample.prompt.startswith("There is a function called func_1 in the following Python code.\n\ndef")
    assert sample.prompt.endswith("Please compute the exact value of func_1(-3). The value of func_1(-3) is")
    (sample,) = written(tmp_path, "infinitebench", "code_debug")
    assert sample.answers == ("beta", "B")
    (sample,) = written(tmp_path, "infinitebench", "math_find", "gpt4")
    assert sample.before == "What is the smallest number in the following list?\n\n"


def test_leval_asks_about_a_document_and_about_the_world(tmp_path: Path) -> None:
    loyalty, fact = written(tmp_path, "l-eval", "sci_fi")
    assert loyalty.beginning == "Document is as follows. The story."
    assert (loyalty.answers, fact.answers) == (("true",), ("false",))
    assert fact.prompt.startswith("Is it so, based on the real-world knowledge")
    (published,) = _reread(find("l-eval"), find("l-eval").task("tpo"), {"evaluation": "exam", "gt": "A", "x_pred": "A"})
    assert published.prediction == "A"
    assert not list(_reread(find("l-eval"), find("l-eval").task("tpo"), {"evaluation": "human"}))


def test_needlebench_puts_needles_at_depths(tmp_path: Path) -> None:
    found = written(tmp_path, "needlebench", "single_en", "4k")
    first, last = found[0], found[10]
    assert (len(found), first.depth, last.depth, first.group) == (10 * 4 * 11, 0, 1, "1000")
    needle = f"\nNeedle {first.answers[0][1:]} is {first.answers[0]}.\n"
    assert first.document.startswith(needle)
    assert last.document.endswith(needle)
    assert len(first.document) == 1000 - 500
    chain = written(tmp_path, "needlebench", "multi_reasoning_3_en", "4k")[5]
    assert len(set(re.findall(r"Name\d+", chain.document))) == 3 + 1
    assert chain.answers[0] in chain.document


def test_opencompass_writes_one_object(tmp_path: Path) -> None:
    path = tmp_path / "Length1000Depth0_origin_en_4k.json"
    entries = [{"prediction": "k1", "gold": "\nNeedle*k1"}, {"prediction": "", "gold": "n*k"}]
    path.write_text(json.dumps({str(number): entry for number, entry in enumerate(entries)}))
    assert score_file(find("needlebench"), path).score == 50


def test_counting_stars_reads_what_was_corrected(tmp_path: Path) -> None:
    (sample,) = written(tmp_path, "counting-stars", "reasoning_en")
    assert sample.answers == ("5/6", "9/8")
    own, task = find("counting-stars"), find("counting-stars").task("reasoning_en")
    (published,) = _reread(own, task, {"answer": "", "reference_counting_results": list(range(1, 33))})
    assert published.answers[:2] == ("1/16", "2/116")
    with pytest.raises(DataError, match="does not tell the counts that are corrected"):
        list(_reread(own, task, {"answer": "", "reference_counting_results": [5, 9]}))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"context": "x"}\n', "line 1 of .* has no 'input'"),
        (b'{"context": 1, "input": "x", "answers": ["a"]}', "'context' of line 1 .* is 1; expected a text"),
        (b'{"context": "x", "input": "x", "answers": []}', "'answers' of line 1"),
        (b'{"context": "x", "input": "x", "answers": ["\xff"]}', "byte 44 is not UTF-8"),
        (b"[1]\n", "line 1 .* expected a JSON object"),
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b'\n{"context"', "line 2 .* not valid JSON"),
    ],
)
def test_broken_files_are_refused_in_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "qasper.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read(tmp_path, "longbench", "qasper")
    assert "\n" not in str(caught.value)


def test_a_line_without_end_is_refused_before_it_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "LONGEST_LINE", 100)
    path = tmp_path / "longbook_qa_eng.jsonl"
    path.write_bytes(b'{"a": 1}\n' + b" " * 100 + b"\n")
    with pytest.raises(DataError, match=r"^line 2 of .* is longer than 100 bytes; expected a JSON object on each line"):
        list(base.json_rows(path))
    path.write_bytes(b'{"a": 1}'.ljust(99) + b"\n" + b'{"a": 2}'.ljust(100))
    assert [row.content["a"] for row in base.json_rows(path)] == [1, 2]


@pytest.mark.parametrize("benchmark", BENCHMARKS.values(), ids=BENCHMARKS)
def test_a_missing_file_says_what_goes_where(tmp_path: Path, benchmark: Benchmark) -> None:
    with pytest.raises(DataError) as one:
        benchmark.present(tmp_path)
    with pytest.raises(DataError) as other:
        list(benchmark.read(tmp_path, benchmark.tasks[0], "", Letters()))
    for message in (str(one.value), str(other.value)):
        assert all(x in message for x in (benchmark.layout, benchmark.data))


def test_two_files_of_one_task_are_refused(tmp_path: Path) -> None:
    for length in (64000, 128000):
        (tmp_path / f"Counting_Stars_EN_acquisition_{length}_32_32.jsonl").touch()
    with pytest.raises(DataError, match="are both of one task"):
        read(tmp_path, "counting-stars", "acquisition_en")


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "qasper.jsonl")
    with pytest.raises(DataError, match=r"is a FIFO; expected a regular file"):
        read(tmp_path, "longbench", "qasper")
