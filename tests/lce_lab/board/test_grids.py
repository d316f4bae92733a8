"""A board's tables, legend, page and picture: what is grey or unknown, and that no record writes markup."""

import re
import struct
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from lce_lab.board.grids import UNKNOWN, legend, page, ranking, tasks
from lce_lab.board.picture import _apart, draw
from tests.lce_lab.board.test_ranking import CEILING, answers, at, board

ODD = "</table><script>alert(1)</script>\"' onload=x &amp; <img src=http://x/y>"
HARD = answers("full", 500, *at(0.2), ceiling=True)  # a task that full attention fails within the window
BOTH = [each for m, x in (("dca", 0.8), ("quest", 0.2)) for each in answers(m, 1024, *at(x), read_bytes=2**20)]


class Tags(HTMLParser):
    """The elements of a page, all of which are closed, in order."""

    VOID = ("meta", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.open: list[str] = []
        self.attributes: set[str] = set()
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_cells_that_do_not_count_are_grey_on_a_page(tmp_path: Path) -> None:
    quest = answers("quest", 1024, *at(0.75))
    assert '<td class="grey">0.75</td>' in page([board(tmp_path, *HARD, *quest)], None)
    assert "<td>0.75</td>" in page([board(tmp_path, *CEILING, *quest)], None)


def test_names_of_a_stranger_are_text(tmp_path: Path) -> None:
    kinds = {"task": ODD, "kind": ODD, "method": ODD, "checkpoint": ODD, "filler": ODD, "mode": ODD}
    engine = f"Engine(Quest(page='{ODD}'), window=512, block=512, cpu, torch.float32)"
    plain = page([board(tmp_path, *CEILING, *answers("quest", 1024, *at(0.5)))], b"PNG")
    other = [{**each, **kinds, "engine": engine} for each in answers("quest", 1024, *at(0.5))]
    tops = [{**each, **kinds, "method": "full"} for each in CEILING]
    hostile = page([board(tmp_path, *tops, *other)], b"PNG")
    assert (Tags(hostile).found, Tags(hostile).attributes) == (Tags(plain).found, Tags(plain).attributes)
    assert "script" not in Tags(hostile).found


def test_it_needs_no_network_and_no_scripts(tmp_path: Path) -> None:
    text = page([board(tmp_path, *CEILING, *answers("quest", 1024, *at(0.5)))], b"\x89PNG")
    assert all(x in text for x in ("default-src 'none'", 'name="viewport"'))
    assert re.findall(r'(?:src|href)="([^"]{0,22})', text) == ["data:image/png;base64,"]
    assert not re.search("https?:|<script", text)


def test_cells_that_do_not_count_are_grey(tmp_path: Path) -> None:
    hard = [*answers("full", 500, *at(0.2), task="hard", ceiling=True), *answers("quest", 1024, *at(1), task="hard")]
    (grid,) = tasks(board(tmp_path, *CEILING, *BOTH, *hard))
    assert (grid.title, grid.head) == ("1,024 tokens", ["method", "hard", "made"])
    assert [[(cell.text, cell.grey) for cell in row] for row in grid.rows] == [
        [("dca", False), (UNKNOWN, False), ("0.80", False)],
        [("quest", False), ("1.00", True), ("0.20", False)],
        [("ceiling", False), ("0.20", False), ("1.00", False)],
    ]


def test_questions_of_one_text_share_a_title(tmp_path: Path) -> None:
    how = {"task": "medley", "mode": "shared", "filler": "essays"}
    kinds = [{**answers("quest", 1024, 1, kind=kind, **how)[0], "index": i} for i, kind in enumerate(("keys", "pairs"))]
    (grid,) = tasks(board(tmp_path, *kinds))
    assert (grid.title, grid.head) == ("1,024 tokens, medley, essays, mode shared", ["method", "keys", "pairs"])


def test_the_ranking_has_a_column_for_each_length_that_counts(tmp_path: Path) -> None:
    same = [each for method in ("dca", "quest") for each in answers(method, 500, *at(1))]
    found = board(tmp_path, *CEILING, *BOTH, *same)
    grid = ranking(found)
    assert grid.head == ["method", "rank", "reach", "quality at 1,024", "read a token", "prefill"]
    first, *rest, read, prefill = [cell.text for cell in grid.rows[0]]
    assert (first, *rest[:2], read, prefill) == ("dca", "1", "500", "1.0 MiB", UNKNOWN)
    assert rest[2].startswith("0.80 (0.")
    rank, reach, quality, _ = legend(found)
    most = "quality at 1,024 tokens, the longest length that most were asked at"
    assert most in rank, "full was asked within the window alone"
    assert "that all were asked at" in legend(board(tmp_path / "all", *CEILING, *BOTH))[0]
    assert "at 500 tokens" in reach
    assert "A cell of a task has 20 answers." in quality


def test_the_legend_says_why_nothing_is_ranked(tmp_path: Path) -> None:
    quest, why = answers("quest", 1024, *at(1)), "`full` was not asked within the window"
    assert legend(board(tmp_path, *quest)) == [f"Nothing is ranked: {why}."]
    assert "`full` fails every task" in legend(board(tmp_path, *HARD, *quest))[0]


def test_it_is_a_png_1000_pixels_wide_or_none_without_a_quality(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = draw([board(tmp_path, *CEILING, *BOTH)]) or b""
    assert picture.startswith(b"\x89PNG\r\n")
    assert struct.unpack(">I", picture[16:20]) == (1000,)
    assert draw([board(tmp_path / "none", *answers("quest", 1024, *at(0.8), read_bytes=9))]) is None


@pytest.mark.parametrize("places", [[0.5] * 5, [0.0, 0.98, 0.99, 1.0], [0.1, 0.2, 0.9], [0.3]])
def test_labels_are_apart_and_within_the_panel(places: list[float]) -> None:
    moved = _apart(places, 0.1)
    assert all(b - a > 0.0999 for a, b in pairwise(moved))
    assert -1e-9 <= moved[0] <= moved[-1] <= 1
    assert _apart([0.1, 0.2, 0.9], 0.1) == pytest.approx([0.1, 0.2, 0.9])
