"""The setting: sizes from the window, the user's knobs, and RoPE scaling by length."""

from __future__ import annotations

from pathlib import Path

import pytest

from lce.errors import UsageError
from lce.lab.papers import Arm, Entry, Setting
from lce.lab.papers.entry import OfWindow
from lce.methods import make

CHUNKS = Arm("chunks", "longheads", {"chunk_size": OfWindow(16), "chunks": 8})
SCALED = Arm("scaled", "full", rope="linear")


def test_knobs_follow_the_window_and_the_users_fill_in_the_rest(tiny_model: Path) -> None:
    setting = Setting(str(tiny_model), knobs={"chunks": "4", "longheads.share": "group", "eps": "1"})
    assert setting.method(CHUNKS) == make("longheads", {"chunk_size": 4, "chunks": 8, "share": "group"})
    wide = Setting(str(tiny_model), loading={"device": "auto", "window": 256, "spill_dir": "a b", "threads": 2})
    assert wide.method(CHUNKS) == make("longheads", {"chunk_size": 16, "chunks": 8})
    assert wide.options(CHUNKS, 300) == (
        f"--model {tiny_model} --method longheads -o chunk_size=16 -o chunks=8 --window 256 --spill-dir 'a b'"
    )
    assert Setting(str(tiny_model), record="a b").recorded(".looks") == ["--record 'a b.looks'"]


def test_rope_is_scaled_by_the_length_over_the_window(tiny_model: Path) -> None:
    setting = Setting(str(tiny_model))
    assert setting.scaling(SCALED, 64) == {}
    assert setting.scaling(SCALED, 160) == {"rope": "linear", "rope_factor": 2.5}
    assert setting.options(SCALED, 160).endswith("--method full --rope linear --rope-factor 2.5")
    assert setting.engine(SCALED, 160).rope.factor == 2.5
    assert setting.engine(SCALED, 64).rope.kind == "none"
    assert setting.engine(SCALED, 64) is setting.engine(SCALED, 60)


def test_what_no_row_can_use_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    entry = Entry("dca:table0", "", "", (CHUNKS, SCALED), ())
    Setting(str(tiny_model), knobs={"placement": "true", "longheads.rank": "last"}).check(entry)
    for knobs, words in (
        ({"sinks": "4"}, "no row of dca:table0 has this knob"),
        ({"esa.eps": "1"}, "does not run 'esa'"),
        ({"longheads.rnak": "last"}, "did you mean 'rank'"),
        ({"rank": "best"}, "rank=best"),
    ):
        with pytest.raises(UsageError, match=words):
            Setting(str(tiny_model), knobs=knobs).check(entry)
    with pytest.raises(UsageError, match="dca:table0 has no lengths"):
        Setting(str(tiny_model), lengths=[64]).check(entry)
    with pytest.raises(UsageError, match="needs explain"):
        Setting(str(tiny_model)).tool("explain")
