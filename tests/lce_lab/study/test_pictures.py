"""Pictures of explanations and of choices: what they show, and what is refused."""

import sys
from pathlib import Path

import pytest
import torch

from lce.errors import CapacityError, UsageError
from lce.methods import LongHeads, make
from lce_lab.study.explain import Explanation, explain
from lce_lab.study.recording import record
from tests.command import assert_error, run
from tests.lce_lab.study.recordings import recording

pytest.importorskip("matplotlib")

from lce_lab.study.pictures import BEYOND, draw_choices, draw_distances

ARGS = ("explain", "dca", "--tokens", "12", "--window", "10", "-o", "chunk_size=6")


def test_draws_a_picture(tmp_path: Path) -> None:
    expected, kinds = (0, "", run(*ARGS).stdout), {"a.png": b"\x89PNG\r\n", "b.SVG": b"<?xml", "c.pdf": b"%PDF-"}
    for name, start in kinds.items():
        result = run(*ARGS, "--plot", tmp_path / name)
        assert (result.exit_code, result.stderr, result.stdout) == expected
        assert (tmp_path / name).read_bytes().startswith(start)
    assert {path.name for path in tmp_path.iterdir()} == {*kinds}


def test_a_picture_shows_the_distances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """White where nothing is attended, a colour of its own beyond the window, numbers while they are legible."""
    from matplotlib import colors
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure))

    def drawn(tokens: int) -> tuple[Figure, Explanation]:
        found = explain(make("full"), tokens=tokens, window=12)
        draw_distances(found, tmp_path / "x.png", force=True)
        return figures[-1], found

    figure, found = drawn(20)
    axes = figure.axes[0]
    image = axes.images[0]
    shown = torch.from_numpy(image.to_rgba(image.get_array()).copy()).float()
    white, beyond = torch.tensor(colors.to_rgba("white")), torch.tensor(colors.to_rgba(BEYOND))
    assert torch.equal(torch.isclose(shown, white).all(-1), ~found.attended)
    assert torch.equal(torch.isclose(shown, beyond).all(-1), found.distance >= 12)
    numbers = {text.get_position()[::-1]: text.get_text() for text in axes.texts}
    assert numbers == {(i, j): str(i - j) for i in range(20) for j in range(i + 1)}
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("key j", "query i")
    assert axes.get_title().startswith("full()")
    assert drawn(33)[0].axes[0].texts[:] == []


def test_cells_and_bands_of_choices(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    method = LongHeads(chunk_size=4, chunks=4, share="head")
    found = record(tiny_model, [method], "the old dogs " * 9, max_tokens=0, spread=0, last=2, marks=["old dogs"])
    images, bands = [], []
    monkeypatch.setattr(Axes, "imshow", lambda self, x, **_: images.append(x))
    monkeypatch.setattr(Axes, "axvspan", lambda self, a, b, **_: bands.append((a, b)))
    draw_choices(found, tmp_path / "choices.svg")
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
    made = recording(tokens=60)
    shown = made["runs"][0]["looked"] = made["runs"][0]["looked"][:3]
    for query, token in zip(shown, ("$$", "$\\frac{$", "$x^$"), strict=True):
        made["tokens"][query] = token
    draw_choices(made, tmp_path / "choices.svg")


def test_what_cannot_be_drawn(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = record(tiny_model, ["full"], "the old dogs", max_tokens=0, spread=0, last=1)
    assert found["runs"][0]["label"] == "full", "no knob was set"
    with pytest.raises(UsageError, match="full chooses nothing in this text"):
        draw_choices(found, tmp_path / "choices.png")
    with pytest.raises(UsageError, match=r"unknown kind of picture '\.gif'"):
        draw_choices(found, tmp_path / "choices.gif")
    with pytest.raises(CapacityError, match="No such file"):
        draw_distances(explain(make("full"), tokens=3), tmp_path / "none" / "x.png")
    (tmp_path / "y.png").write_text("precious")
    with pytest.raises(UsageError, match=r"y\.png exists; name another file, or give --force"):
        draw_distances(explain(make("full"), tokens=3), tmp_path / "y.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert_error(run(*ARGS, "--plot", tmp_path / "a.png"), 2, "pip install 'lce[plot]'")
