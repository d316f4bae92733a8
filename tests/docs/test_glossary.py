"""docs/glossary.md is true: the names that it gives are in the code, members where it says they are."""

import ast
import re

from tests.docs.scripts import DOCS, FILES, words

PAGE = (DOCS / "glossary.md").read_text(encoding="utf-8")


def named() -> set[str]:
    """The names in the last column of tables that end in `in the code`, and those after a colon elsewhere."""
    found: set[str] = set()
    for table in re.findall(r"^\|.*\n\|[-:| ]+\n(?:\|.*\n)+", PAGE, re.MULTILINE):
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


def test_names_are_in_the_code() -> None:
    assert len(named()) > 40
    of_class = members()
    for name in named():
        owner, _, member = name.partition(".")
        assert owner in words(), name
        assert not member or member in of_class[owner], name


def test_symbols_are_those_of_the_code() -> None:
    """Each letter that docs/architecture.md uses for a size has its row."""
    rows = set(re.findall(r"^\| ([A-Z]) \|", PAGE, re.MULTILINE))
    assert {"H", "G", "T", "N", "D", "M", "L", "K", "P", "W", "R"} <= rows
