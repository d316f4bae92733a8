"""Progress: a callback as it is, or a bar on stderr."""

from pathlib import Path
from typing import Any

import pytest

import lce
from lce.errors import UsageError
from lce.progress import check_progress, notice, reported, silence, stages
from tests.checkpoints import tokens


@pytest.mark.parametrize("call", ["generate", "stream", "prefill", "prefill_file"])
def test_true_draws_a_bar(tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], call: str) -> None:
    engine = lce.load(tiny_model, "longheads", block=32)
    path = (tmp_path / "c.lce",) if call == "prefill_file" else ()
    made: Any = getattr(engine, call)(tokens(100), *path, progress=True)
    if call == "stream":
        made.finish()
    out, err = capfd.readouterr()
    assert out == ""
    assert "prefill" in err
    assert "100" in err
    getattr(engine, call)(tokens(100), *[tmp_path / "d.lce" for _ in path], progress=False)
    assert capfd.readouterr() == ("", "")


def test_a_callback_is_called_as_it_is() -> None:
    told: list[tuple[int, int]] = []
    with reported(lambda done, total: told.append((done, total)), "x") as progress:
        progress(1, 2)
    for nothing in (None, False):
        with reported(nothing, "x") as progress:
            progress(2, 2)
    assert told == [(1, 2)]


def test_stages_are_one_bar_after_another(capfd: pytest.CaptureFixture[str]) -> None:
    tell = stages(True)
    for stage in ("reading", "learning"):
        for done in range(1, 4):
            tell(stage, done, 3)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("3/3") == 2
    assert err.index("reading") < err.index("learning")
    stages(None)("reading", 1, 1)
    told: list[tuple[str, int, int]] = []
    stages(lambda *units: told.append(units))("reading", 1, 2)
    assert told == [("reading", 1, 2)]


@pytest.mark.parametrize("value", [3, "x", [], int, object()])
def test_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match=r"progress is .*; expected True, or a function"):
        check_progress(value)


def test_notices_are_silenced(capsys: pytest.CaptureFixture[str]) -> None:
    for silent in (True, False):
        silence(silent)
        notice(f"silent: {silent}")
    assert capsys.readouterr().err == "lce: silent: False\n"
