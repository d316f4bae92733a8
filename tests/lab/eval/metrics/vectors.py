"""Runs a metric over vectors that were worked out by hand."""

from __future__ import annotations

import pytest

from lce.lab.eval.metrics import METRICS


def check(metric: str, prediction: str, references: tuple[str, ...], score: float) -> None:
    assert METRICS[metric](prediction, references) == pytest.approx(score)
