"""The diagrams: drawn from their text as it is now, with names that the code has, and floors in their order."""

import re
import tomllib
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.docs.scripts import DOCS, FILES, PACKAGES, load, words
from tests.test_architecture import ROOMS

FOLDER = DOCS / "diagrams"
SOURCES = {path.stem: tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.toml"))}


@pytest.fixture(scope="module")
def draw() -> ModuleType:
    return load("diagrams/draw.py")


@pytest.mark.parametrize("name", SOURCES)
def test_pictures_are_drawn_from_their_text(draw: ModuleType, name: str) -> None:
    """If this fails: `python docs/diagrams/draw.py`."""
    svg = (FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    assert svg == draw.drawn(SOURCES[name])
    assert ElementTree.fromstring(svg).attrib["role"] == "img"
    assert "prefers-color-scheme:dark" in svg


@pytest.mark.parametrize("name", SOURCES)
def test_names_are_in_the_code(name: str) -> None:
    entries = [entry for kind in ("box", "arrow", "note") for entry in SOURCES[name].get(kind, [])]
    spans = re.findall(r"`([A-Za-z_][\w.]*)`", "\n".join(entry.get("text", "") for entry in entries))
    files = {file.stem for file in FILES} | {file.name for package in PACKAGES for file in package.iterdir()}
    assert {word for span in spans for word in span.split(".")} - words() - files == set()


def test_the_floors_are_those_of_the_architecture() -> None:
    """Every room is in the picture once, and stands no lower than the rooms before it in the table."""
    heights = {}
    for entry in SOURCES["floors"]["box"]:
        room = re.match(r"`(\w+)`", entry["text"])
        assert room
        assert room[1] not in heights
        heights[room[1]] = -entry["at"][1]
    assert set(heights) == set(ROOMS)
    ground = [heights[room] for room in ROOMS]
    assert ground == sorted(ground)


def test_a_wrong_source_is_refused(draw: ModuleType) -> None:
    good: dict[str, Any] = {"title": "<a>", "description": "", "size": [10, 10], "box": []}
    assert "&lt;a&gt;" in draw.drawn(good)
    bad = {**good, "box": [{"id": "a", "at": [0, 0], "size": [1, 1], "text": "", "kind": "stor"}]}
    with pytest.raises(ValueError, match="kind 'stor'; expected one of plain, data"):
        draw.drawn(bad)
    with pytest.raises(ValueError, match=r"no end 'b\.r'; expected ID\.SIDE, with an ID of a"):
        draw.drawn({**bad, "box": [{**bad["box"][0], "kind": "step"}], "arrow": [{"from": "b.r", "to": "a.l"}]})
