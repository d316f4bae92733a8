"""The paper's own data: a published benchmark in the user's copy of its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lce.errors import DataError
from lce.lab.papers import Arm, Setting, find
from lce.lab.papers.benchmark import Published
from tests.command import run
from tests.lab.eval.published.layouts import write

ARM = Arm("LongHeads", "longheads")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for task in ("passkey", "math_find"):
        write(tmp_path, "infinitebench", task)
    return tmp_path


def test_scores_are_those_of_the_command(tiny_model: Path, data: Path) -> None:
    setting = Setting(str(tiny_model), data=[str(data)], limit=1)
    measure = Published("infinitebench", ("passkey",))
    (cell,) = measure.cells(ARM, [0], setting)
    command = measure.command(ARM, [0], setting)
    assert command.startswith(f"lce eval published infinitebench --data {data} --task passkey --samples 1 --model ")
    (found,) = json.loads(run(*command.split()[1:], "--json", "--quiet").stdout)[:1]
    assert (cell.label, cell.value, cell.low, cell.high) == ("passkey", found["score"], found["low"], found["high"])


def test_one_number_where_the_paper_has_one(tiny_model: Path, data: Path) -> None:
    setting = Setting(str(tiny_model), data=[str(data)])
    each = list(Published("infinitebench", ("passkey", "math_find")).cells(ARM, [0], setting))
    (mean,) = Published("infinitebench", ("passkey", "math_find"), average="mean").cells(ARM, [0], setting)
    assert mean.value == pytest.approx(sum(cell.value or 0.0 for cell in each) / 2)
    assert (mean.label, mean.n) == ("mean", 2)
    (share,) = Published("infinitebench", ("passkey", "math_find"), average="mean", most=1.0).cells(ARM, [0], setting)
    assert share.value == pytest.approx((mean.value or 0.0) / 100)


def test_lengths_cut_the_prompts(tiny_model: Path, data: Path) -> None:
    setting = Setting(str(tiny_model), lengths=(40, 60), data=[str(data)])
    measure = Published("infinitebench", ("passkey",))
    assert [cell.length for cell in measure.cells(ARM, [40, 60], setting)] == [40, 60]
    assert "--max-length 40" in measure.command(ARM, [40], setting)


def test_missing_files_are_told_before_any_work(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"missing; put there what is published at"):
        find("esa:table1").check(Setting(str(tiny_model), data=[str(tmp_path)], knobs={"compress": "pca"}))
