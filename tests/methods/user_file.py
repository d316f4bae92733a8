"""A user's own file with a method, in a registry of the test's own."""

from pathlib import Path

import pytest

from lce.methods import registry

TEXT = """from __future__ import annotations
from dataclasses import dataclass
import lce
from lce.methods import knob, register

@register("mine")
@dataclass(frozen=True)
class Mine(lce.SelectiveMethod):
    factor: float | None = knob(1.0, "multiplies the mean key")

    def summarise(self, q, k, v, step):
        return self.factor * k.mean(dim=2).repeat_interleave(len(q) // len(k), dim=0)
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    path = tmp_path / "mine.py"
    path.write_text(TEXT)
    return path
