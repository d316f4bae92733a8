"""Pictures of explanations: their kinds, what they show, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from lce.errors import CapacityError
from lce.lab.study.explain import Explanation, explain
from lce.methods import make
from tests.command import assert_error, run

ARGS = ("explain", "dca", "--tokens", "12", "--window", "10", "-o", "chunk_size=6")


@pytest.mark.parametrize(
    ("name", "start"), [("a.png", b"\x89PNG\r\n"), ("b.SVG", b"<?xml"), ("c.pdf", b"%PDF-")], ids=lambda x: str(x)
)
def test_draws_a_picture(name: str, start: bytes, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = run(*ARGS, "--plot", tmp_path / name)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == run(*ARGS).stdout
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes().startswith(start)


def test_a_picture_shows_the_distances(tmp_path: Path) -> None:
    """White where nothing is attended, a colour of its own beyond the window, numbers while they are legible."""
    pytest.importorskip("matplotlib")
    from matplotlib import colors
    from matplotlib.figure import Figure

    from lce.lab.study.picture import BEYOND, draw

    figures: list[Figure] = []

    def drawn(tokens: int) -> tuple[Figure, Explanation]:
        found = explain(make("full"), tokens=tokens, window=12)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure))
            draw(found, tmp_path / "x.png")
        return figures[-1], found

    figure, found = drawn(20)
    axes = figure.axes[0]
    image = axes.images[0]
    colour = image.to_rgba(image.get_array())
    white, beyond = torch.tensor(colors.to_rgba("white")), torch.tensor(colors.to_rgba(BEYOND))
    shown = torch.from_numpy(colour.copy()).float()
    assert torch.equal(torch.isclose(shown, white).all(-1), ~found.attended)
    assert torch.equal(torch.isclose(shown, beyond).all(-1), found.distance >= 12)
    numbers = {text.get_position()[::-1]: text.get_text() for text in axes.texts}
    assert numbers == {(i, j): str(i - j) for i in range(20) for j in range(i + 1)}
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("key j", "query i")
    assert axes.get_title().startswith("full()")
    assert drawn(33)[0].axes[0].texts[:] == []


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from lce.lab.study.picture import draw

    with pytest.raises(CapacityError, match="No such file"):
        draw(explain(make("full"), tokens=3), tmp_path / "none" / "x.png")


def test_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert_error(run(*ARGS, "--plot", tmp_path / "a.png"), 2, "pip install 'lce[plot]'")
