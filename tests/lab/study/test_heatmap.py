"""Pictures of choices: what is drawn, and what cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from lce.errors import UsageError
from lce.lab.study.heatmap import draw
from lce.lab.study.recording import record
from lce.methods import LongHeads
from tests.lab.study.recordings import recording

TEXT = "the old dogs " * 9


def test_cells_rings_and_bands(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    found = record(
        tiny_model, [LongHeads(chunk_size=4, chunks=4)], TEXT, max_tokens=0, spread=0, last=2, marks=["old dogs"]
    )
    images, bands = [], []
    monkeypatch.setattr(Axes, "imshow", lambda self, x, **_: images.append(x))
    monkeypatch.setattr(Axes, "axvspan", lambda self, a, b, **_: bands.append((a, b)))
    draw(found, tmp_path / "choices.svg")
    assert len(images) == 2
    query = found["runs"][0]["looked"][-1]
    look = found["runs"][0]["segments"][-1]["looks"][str(query)]
    for layer, each in enumerate(look["layers"]):
        for head, chosen in enumerate(each["chosen"]):
            row = images[1][4 * layer + head]
            assert [c for c, x in enumerate(row.tolist()) if x == x] == chosen
            assert row[chosen].tolist() == each["heads"][head]["mass"]
    assert len(bands) == 2 * len(found["marks"])
    assert (tmp_path / "choices.svg").exists()


def test_dollars_of_a_text_are_no_formulas(tmp_path: Path) -> None:
    for token in ("$$", "$\\frac{$", "$x^$"):
        made = recording(tokens=60)
        made["tokens"][58:] = [token] * 2
        draw(made, tmp_path / "choices.svg")


def test_what_cannot_be_drawn(tiny_model: Path, tmp_path: Path) -> None:
    found = record(tiny_model, ["full"], "the old dogs", max_tokens=0, spread=0, last=1)
    with pytest.raises(UsageError, match="full chooses nothing in this text"):
        draw(found, tmp_path / "choices.png")
    with pytest.raises(UsageError, match=r"unknown kind of picture '\.gif'"):
        draw(found, tmp_path / "choices.gif")
