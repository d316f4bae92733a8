"""The page of a leaderboard: it needs nothing else, and a stranger's record cannot write markup into it."""

import re
from html.parser import HTMLParser
from pathlib import Path

from lce_lab.board.grids import page
from tests.lce_lab.board.test_ranking import CEILING, answers, at, board

ODD = "</table><script>alert(1)</script>\"' onload=x &amp; <img src=http://x/y>"


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


def test_cells_that_do_not_count_are_grey(tmp_path: Path) -> None:
    lines = [*answers("full", 500, *at(0.2), ceiling=True), *answers("quest", 1024, *at(0.75))]
    text = page([board(tmp_path, *lines)], None)
    assert '<td class="grey">0.75</td>' in text
    counting = page([board(tmp_path, *CEILING, *answers("quest", 1024, *at(0.75)))], None)
    assert "<td>0.75</td>" in counting


def test_names_of_a_stranger_are_text(tmp_path: Path) -> None:
    kinds = {"task": ODD, "kind": ODD, "method": ODD, "checkpoint": ODD, "filler": ODD, "mode": ODD}
    engine = f"Engine(Quest(page='{ODD}'), window=512, block=512, cpu, torch.float32)"
    plain = page([board(tmp_path, *CEILING, *answers("quest", 1024, *at(0.5)))], b"PNG")
    other = [{**each, **kinds, "engine": engine} for each in answers("quest", 1024, *at(0.5))]
    tops = [{**each, **kinds, "method": "full"} for each in CEILING]
    hostile = page([board(tmp_path, *tops, *other)], b"PNG")
    assert Tags(hostile).found == Tags(plain).found
    assert Tags(hostile).attributes == Tags(plain).attributes
    assert "script" not in Tags(hostile).found


def test_it_needs_no_network_and_no_scripts(tmp_path: Path) -> None:
    text = page([board(tmp_path, *CEILING, *answers("quest", 1024, *at(0.5)))], b"\x89PNG")
    assert "default-src 'none'" in text
    assert 'name="viewport"' in text
    assert re.findall(r'(?:src|href)="([^"]{0,22})', text) == ["data:image/png;base64,"]
    assert not re.search("https?:|<script", text)
