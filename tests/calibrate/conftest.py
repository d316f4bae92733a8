from __future__ import annotations

from pathlib import Path

import pytest

from lce.calibrate import calibrate
from tests.calibrate.texts import TEXT, TINY, bytes_of


@pytest.fixture
def whole(tiny_model: Path, tmp_path: Path) -> dict[str, bytes]:
    """The maps of an undisturbed calibration."""
    out = tmp_path / "whole.safetensors"
    calibrate(tiny_model, TEXT, out, TINY)
    return bytes_of(out)


@pytest.fixture
def begun(tiny_model: Path, tmp_path: Path) -> Path:
    """The work folder of a calibration that was interrupted when all pieces and one layer were finished."""

    def interrupt(what: str, done: int, total: int) -> None:
        if (what, done) == ("learning", 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(tiny_model, TEXT, tmp_path / "maps.safetensors", TINY, progress=interrupt)
    return tmp_path / "maps.safetensors.work"
