"""The figures of a report."""

from __future__ import annotations

from lce.lab.bench.report import Spread, StepTimes


def test_spread() -> None:
    assert Spread.of([3.0, 1.0, 7.0]) == Spread(3.0, 1.0, 7.0)
    assert Spread.of([2.0, 4.0]).median == 3.0


def test_the_total_of_a_step() -> None:
    assert StepTimes("full", 8, "decode", 1, {"products": 0.25, "Python and other": 0.5}).total_s == 0.75
