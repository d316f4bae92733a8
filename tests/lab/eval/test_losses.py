"""Tables of perplexity from its records: the same figures, by setting, and what is not comparable."""

from __future__ import annotations

from pathlib import Path

import pytest

import lce
from lce.lab.eval.losses import Column, LossTable
from lce.lab.eval.perplexity import Text, stream, windows
from lce.lab.eval.record import Record
from lce.lab.eval.report import Report
from lce.methods import LongHeads
from tests.checkpoints import tokens

IDS = tokens(300)
TEXTS = [Text("one", IDS), Text("two", IDS[129::-1])]


@pytest.fixture(scope="module")
def engines(tiny_model: Path) -> list[lce.Engine]:
    full = lce.load(tiny_model, block=32)
    return [full, lce.load(tiny_model, LongHeads(chunk_size=8, chunks=4), block=32, sharing=full)]


def tables(*files: Path) -> dict[str, LossTable]:
    return {table.setting: table for table in Report.read(files).perplexities}


def test_tables_have_the_figures_that_were_measured(engines: list[lce.Engine], tmp_path: Path) -> None:
    record = Record(tmp_path / "losses.jsonl")
    expected: dict[str, list[float]] = {}
    for engine in engines:
        for scored in ("last", "all"):
            how = {"longest": 120, "stride": 40, "scored": scored, "record": record}
            for length in (40, 120):  # of 40 tokens, both settings score the same
                found = windows(engine, TEXTS, length=length, about={"checkpoint": "m/tiny"}, **how)  # type: ignore[arg-type]
                expected.setdefault(scored, []).append(found.perplexity)
        runs = stream(engine, TEXTS, lengths=[32, 64, 128], stride=32, record=record)
        expected.setdefault("stream", []).extend(run.perplexity for run in runs)
    found = tables(record.path, record.path)
    last, whole, by_position = found.values()
    assert list(found) == ["the last 40 tokens of windows", "all tokens of windows", "by position in a stream"]
    for table, setting in ((last, "last"), (whole, "all"), (by_position, "stream")):
        assert table.methods == ["full", "longheads"]
        assert table.windows == (64,)
        assert table.model.startswith("tiny ")
        assert not table.notes
        values = [table.cells[method, column].perplexity for method in table.methods for column in table.columns]
        assert values == pytest.approx(expected[setting])
    assert by_position.columns == [Column(0, 32), Column(32, 64), Column(64, 128)]


def test_methods_that_read_other_texts_are_told(engines: list[lce.Engine], tmp_path: Path) -> None:
    record = Record(tmp_path / "losses.jsonl")
    for engine, most in zip(engines, (2, 3), strict=True):
        windows(engine, TEXTS, length=40, stride=20, most=most, record=record)
    (table,) = tables(record.path).values()
    assert table.notes == ["At 40 tokens the methods were not asked the same texts."]
