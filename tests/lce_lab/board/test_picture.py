"""The picture of a leaderboard."""

import struct
from itertools import pairwise
from pathlib import Path

import pytest

from lce_lab.board.picture import _apart, draw
from tests.lce_lab.board.test_ranking import CEILING, answers, at, board


def test_it_is_a_png_1000_pixels_wide(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = [each for m, x in (("dca", 0.8), ("quest", 0.2)) for each in answers(m, 1024, *at(x), read_bytes=2**20)]
    found = board(tmp_path, *CEILING, *lines)
    picture = draw([found])
    assert picture is not None
    assert picture.startswith(b"\x89PNG\r\n")
    assert struct.unpack(">I", picture[16:20]) == (1000,)


def test_there_is_none_without_a_quality(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert draw([board(tmp_path, *answers("quest", 1024, *at(0.8), read_bytes=9))]) is None


@pytest.mark.parametrize("places", [[0.5] * 5, [0.0, 0.98, 0.99, 1.0], [0.1, 0.2, 0.9], [0.3]])
def test_labels_are_apart_and_within_the_panel(places: list[float]) -> None:
    moved = _apart(places, 0.1)
    assert all(b - a > 0.0999 for a, b in pairwise(moved))
    assert moved[0] >= -1e-9
    assert moved[-1] <= 1
    assert _apart([0.1, 0.2, 0.9], 0.1) == pytest.approx([0.1, 0.2, 0.9])
