"""Tables of what methods selected: rows by method, budget and length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lce
from lce.lab.eval.record import Record
from lce.lab.eval.report import Report
from lce.lab.eval.selection import measure
from lce.lab.eval.suite import MadeSuite, make_tasks
from tests.lab.eval.test_report import file, line


def engine(chunks: int, placement: str = "side_by_side") -> str:
    method = f"LongHeads(chunk_size=8, chunks={chunks}, placement='{placement}')"
    return f"Engine(Watched(inner={method}), window=64, block=512, cpu, torch.float32)"


def look(index: int = 0, recall: float = 0.5, **more: Any) -> dict[str, Any]:
    """A line as `lce eval selection --record` writes it."""
    sample = {
        "task": "made", "filler": "prose", "length": 512, "samples": 2, "seed": 0, "judge": "constant",
        "states": "own", "model": "abcdef0123", "engine": engine(4), "rope": "RopeConfig(kind='none')", "index": index,
    }  # fmt: skip
    seen = {
        "queries": 3, "recall": [[recall, recall]], "tokens": [[32.0, 32.0]], "read_bytes": 2**20, "scored_bytes": 0,
        "full_bytes": 2**22, "hit1": [[1.0, 0.0]], "score": 1.0, "prompt": f"{index}", "method": "longheads",
        "checkpoint": "m/tiny",
    }  # fmt: skip
    return sample | seen | more


def test_rows_are_methods_with_their_knobs_and_lengths(tmp_path: Path) -> None:
    lines = [look(i, i / 2, length=length) for length in (1024, 512) for i in (0, 1)]
    lines += [look(0, 0.9, engine=engine(8), read_bytes=2**21), look(0, 0.3, engine=engine(4, "constant"))]
    lines += [look(0, judge="true"), look(0, task="text", text="abc", queries=7)]
    first, again = file(tmp_path / "a", *lines[:5]), file(tmp_path / "b", *lines[3:])
    report = Report.read([file(tmp_path / "answers", line(0)), first, again])
    assert len(report.tables) == 1, "answers are beside"
    table, judged, text = report.selections
    assert (table.model, table.title) == ("tiny abcdef01", "selection, made")
    assert (judged.title, text.title) == ("selection, made, judge=true", "selection, text")
    plain, wide, constant = (f"longheads chunks={n} placement={p}" for n, p in (
        (4, "side_by_side"), (8, "side_by_side"), (4, "constant")
    ))  # fmt: skip
    assert [(row.method, row.length, row.selection.recall) for row in table.rows] == [
        (plain, 512, 0.25), (wide, 512, 0.9), (constant, 512, 0.3), (plain, 1024, 0.25),
    ]  # fmt: skip
    assert table.rows[0].selection.samples == 2, "a text that is in both files counts once"
    assert [row.line for row in table.rows[:3]] == [*["longheads placement=side_by_side"] * 2, table.methods[1]]
    assert table.notes == ["At 512 tokens the methods were not watched at the same texts."]


def test_a_record_says_what_its_measurement_said(tiny_model: Path, tmp_path: Path) -> None:
    (task,) = make_tasks(["passkey"])
    suite, record = MadeSuite(samples=1), Record(tmp_path / "record")
    method = lce.methods.LongHeads(chunk_size=8, chunks=4)
    found = measure(
        str(tiny_model), method, lambda engine: suite.make(engine, task, 300), length=300,
        setting=suite.setting(task, 300), record=record,
    )  # fmt: skip
    (table,) = Report.read([record.path]).selections
    assert [(row.method, row.selection) for row in table.rows] == [("longheads", found)]
    assert table.model.startswith(tiny_model.name)
