"""A record of answers: what is asked once is not asked again."""

import errno
import fcntl
import gc
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import lce
from lce.errors import CapacityError, DataError
from lce_lab.eval.naming import engine_parts
from lce_lab.eval.record import Answer, Loss, Record, renewed_engine, text_hash
from tests.command import assert_error, run, start
from tests.interrupts import interrupted, places


def test_what_cannot_be_a_record_is_refused(tmp_path: Path) -> None:
    record = Record(tmp_path / "none" / "answers")
    for use in (record.prepare, lambda: record.add({}, Answer(True))):
        with pytest.raises(DataError, match=r"cannot write .*No such file or directory; name another file"):
            use()


SAMPLE = {"task": "t", "index": 1, "engine": "Engine(X(a=1), window=8)"}
LINE = json.dumps({**SAMPLE, "right": True}) + "\n"


def test_an_answer_to_another_prompt_is_not_given(tmp_path: Path) -> None:
    file = tmp_path / "answers"
    answer = Answer(True, text_hash("the prompt"), "x", "\x00 \ud800 y")
    Record(file).add(SAMPLE, answer)
    asked = ((SAMPLE, "the prompt"), (SAMPLE, "another prompt"), ({**SAMPLE, "index": 2}, "the prompt"))
    assert [Record(file).get(*each) for each in asked] == [answer, None, None]


@pytest.mark.parametrize("cut", [*range(0, len(LINE), 7), len(LINE) - 1])
def test_a_line_cut_anywhere_is_overwritten_and_others_stay(cut: int, tmp_path: Path) -> None:
    file = tmp_path / "answers"
    file.write_text(LINE + LINE.replace("1", "2")[:cut])
    Record(file).add({**SAMPLE, "index": 3}, Answer(False))
    first, second = file.read_text().splitlines(keepends=True)
    assert (first, json.loads(second)["index"]) == (LINE, 3)


DAMAGED = ["", "{}", "some notes", "\ud800", '{"task": ', '{"task": "t"}', '{"task": "t", "nll": 1, "tokens": "x"}']
OTHERS = ["some notes", '{"name": "a config"}', "{}", "x\n", '{"task": 3}\nnotes', "\0" * 9]


@pytest.mark.parametrize("text", [*(f"{LINE}{line}\n{LINE}" for line in DAMAGED), *OTHERS])
def test_another_file_is_refused_and_stays_as_it_is(text: str, tmp_path: Path) -> None:
    file, content = tmp_path / "answers", text.encode("utf-8", "surrogatepass")
    file.write_bytes(content)
    with pytest.raises(DataError, match=f"is no record: line {2 if text.startswith(LINE) else 1} is ") as caught:
        Record(file)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500
    assert file.read_bytes() == content


WRONG = {"score": "NaN 5 -0.1 1e999", "read_bytes": "1e30", "method": "5", "checkpoint": '["x"]', "kind": "{}"}
WRONG |= {"task_knobs": "5", "depths": '"x"', "knobs": "[" * 100_000}


@pytest.mark.parametrize(("name", "value"), [(name, x) for name, texts in WRONG.items() for x in texts.split()])
def test_a_field_of_another_type_is_refused(name: str, value: str, tmp_path: Path) -> None:
    file = tmp_path / "answers"
    file.write_text(f'{{"task": "x", "right": true, "{name}": {value}}}\n')
    with pytest.raises(DataError, match="is no record: line 1 is "):
        Record(file)


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever part of the line is written before the disk is full."""
    file = tmp_path / "answers"
    file.write_text(LINE)
    record, real = Record(file), os.pwrite
    for part in range(0, len(LINE), 5):
        written: Iterator[int] = iter([part])

        def pwrite(descriptor: int, data: bytes, offset: int, written: Iterator[int] = written) -> int:
            n = next(written, None)
            if n is None:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(descriptor, data[:n], offset)

        monkeypatch.setattr(os, "pwrite", pwrite)
        with pytest.raises(CapacityError, match="answers: No space left on device"):
            record.add({**SAMPLE, "index": 9}, Answer(True))
        assert file.read_text() == LINE
    monkeypatch.undo()
    assert record.get({**SAMPLE, "index": 9}, "") is None
    record.add({**SAMPLE, "index": 9}, Answer(True))
    assert len(file.read_text().splitlines()) == 2


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of a file that is closed with its object
def test_ctrl_c_anywhere_leaves_whole_lines(tmp_path: Path) -> None:
    """Two answers are added in one go: after an interruption the file has neither or both, and takes them again."""
    two = [({**SAMPLE, "index": index}, Answer(True)) for index in (8, 9)]

    def record(name: str) -> Record:
        (tmp_path / name).write_text(LINE)
        return Record(tmp_path / name)

    first = record("first")
    for number, (place, nth) in enumerate(places(lambda: first.add_all(two), 1, "record.py")):
        stopped = record(str(number))
        interrupted(lambda stopped=stopped: stopped.add_all(two), place, nth)  # type: ignore[misc]
        assert stopped.path.read_text() in (LINE, first.path.read_text())
        Record(stopped.path).add_all(two)
        assert set(stopped.path.read_text().splitlines()) == set(first.path.read_text().splitlines())
    gc.collect()  # of frames that were interrupted, while the warnings are ignored


def test_what_is_no_regular_file_is_refused_before_any_work(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "answers").write_text(LINE)
    (tmp_path / "link").symlink_to("answers")
    for name in (tmp_path / "pipe", tmp_path / "link", tmp_path, Path("/dev/full"), Path("/dev/zero")):
        args = ("eval", "passkey", "--model", "none", "--lengths", "100", "--record", name)
        assert_error(run(*args), 3, str(name), "expected a regular file")


def test_two_processes_add_to_one_file(tmp_path: Path) -> None:
    file = tmp_path / "answers"
    script = (
        "import sys\nfrom lce_lab.eval.record import Answer, Record\nrecord = Record(sys.argv[1])\n"
        "for i in range(40): record.add({'task': sys.argv[2], 'index': i}, Answer(True, answer='x' * 5000))\n"
    )
    both = [start(script, file, who) for who in "ab"]
    assert [process.communicate() and process.returncode for process in both] == [0, 0]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert sorted((line["task"], line["index"]) for line in lines) == [(who, i) for who in "ab" for i in range(40)]


def test_a_lock_that_stays_is_an_error_and_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lce_lab.eval.record.LOCK_PAUSE_S", 0.001)
    file = tmp_path / "answers"
    file.write_text(LINE)
    with file.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="is being written by another process"):
            Record(file).add(SAMPLE, Answer(True))
        threading.Timer(0.02, fcntl.flock, (held, fcntl.LOCK_UN)).start()
        Record(file).add({**SAMPLE, "index": 2}, Answer(True))
    assert len(file.read_text().splitlines()) == 2


def test_a_number_that_is_none_is_not_written(tmp_path: Path) -> None:
    record = Record(tmp_path / "answers")
    for found in (Answer(True, score=float("nan")), Loss(float("nan"), 8)):
        with pytest.raises(DataError, match=r"cannot record .*nan.*: a number is NaN or"):
            record.add(SAMPLE, found)
    assert not record.path.exists()


def test_an_engine_of_before_is_the_same_engine(tmp_path: Path) -> None:
    """Answers recorded under the former names of knobs count for the method as it is spelled now."""
    before = (
        "Pages(select='bounds', place='grouped', page=16, budget=4096, sinks=16, local=16, share='head', "
        "queries='alone', repr_tokens=None, compress=None, low_dim=None, maps=None, judge=None, seed=None, group=8, "
        "chunk_size=None, far=None, growth=None, grows_from=None, grows_to=None, top_p=None)"
    )
    now = lce.methods.make("pages", {"placement": "grouped"}).resolve(8192)
    for text in ("Engine({}, window=8192, block=257, cpu, torch.bfloat16)", "Engine(Observed(inner={}), window=8192)"):
        assert renewed_engine(text.format(before)) == text.format(repr(now))
        assert renewed_engine(text.format(repr(now))) == text.format(repr(now))
    kind, parts = engine_parts({"engine": f"Engine({now!r}, window=8192, block=257, cpu, torch.bfloat16)"})
    assert kind == "Pages"
    named = [parts[knob] for knob in ("select", "placement", "placement.group", "budget")]
    assert named == ["bounds", "grouped", "8", "4096"]
