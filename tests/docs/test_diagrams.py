"""Diagrams and glossary are true: drawn from their text as it is now, with names that the code has."""

import ast
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


GLOSSARY = (DOCS / "glossary.md").read_text(encoding="utf-8")


def named() -> set[str]:
    """The names in the last column of tables that end in `in the code`, and those after a colon elsewhere."""
    found: set[str] = set()
    for table in re.findall(r"^\|.*\n\|[-:| ]+\n(?:\|.*\n)+", GLOSSARY, re.MULTILINE):
        head, _, *rows = table.strip().splitlines()
        for row in rows:
            cells = [cell.strip() for cell in row.strip("|").split(" | ")]
            text = cells[-1] if head.endswith("in the code |") else " ".join(re.findall(r": `[\w.]+`", row))
            found |= set(re.findall(r"`([A-Za-z_][\w.]*)`", text))
    return found


def members() -> dict[str, set[str]]:
    """Every class of lce with its fields, methods and attributes."""
    found: dict[str, set[str]] = {}
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                inner = list(ast.walk(node))
                names = {each.name for each in inner if isinstance(each, ast.FunctionDef)}
                names |= {each.id for each in inner if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
                names |= {each.attr for each in inner if isinstance(each, ast.Attribute)}
                found.setdefault(node.name, set()).update(names)
    return found


def test_names_of_the_glossary_are_in_the_code() -> None:
    assert len(named()) > 40
    of_class = members()
    for name in named():
        owner, _, member = name.partition(".")
        assert owner in words(), name
        assert not member or member in of_class[owner], name


def test_symbols_are_those_of_the_code() -> None:
    """Each letter that docs/architecture.md uses for a size has its row."""
    rows = set(re.findall(r"^\| ([A-Z]) \|", GLOSSARY, re.MULTILINE))
    assert {"H", "G", "T", "N", "D", "M", "L", "K", "P", "W", "R"} <= rows
