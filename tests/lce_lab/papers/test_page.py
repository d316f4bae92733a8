"""docs/reproduce.md is complete and true: its commands, and the names of code on it."""

import re
from pathlib import Path

import click
import pytest

from lce.cli import cli
from lce_lab.papers import ENTRIES

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (.+) \|$", PAGE, re.MULTILINE)
NAMED = sorted(set(re.findall(r"((?:`[\w.]+`, )*`[\w.]+`) in `(lce/[\w/]+\.py)`", PAGE)))


def test_every_entry_has_one_row_and_every_row_an_entry() -> None:
    assert sorted([id for row in ROWS for id in re.findall(r"`(\w+:\w+)`", row)]) == sorted(ENTRIES)


def test_rows_say_where_something_is_or_why_it_is_not() -> None:
    for row in ROWS:
        where = row.split(" | ")[-1].strip()
        assert where.startswith(("`", "here", "---", "out of scope: ")) or "not at hand" in row, row


@pytest.mark.parametrize(("names", "file"), NAMED)
def test_every_name_of_code_exists(names: str, file: str) -> None:
    words = set(re.findall(r"\w+", (ROOT / file).read_text(encoding="utf-8")))
    assert {part for name in re.findall(r"[\w.]+", names) for part in name.split(".")} <= words


def test_tables_and_equations_are_numbered_without_gaps() -> None:
    for paper, tables, equations in (("LongHeads", 8, 3), ("Dual Chunk Attention", 7, 9), ("ESA", 9, 18)):
        section = PAGE.partition(f"\n## {paper}\n")[2].partition("\n## ")[0]
        assert numbered(section, "Table") == set(range(1, tables + 1))
        assert numbered(section, "Equation") == set(range(1, equations + 1))


def numbered(section: str, what: str) -> set[int]:
    """The numbers of a section's tables or equations: `Tables 6 and 7`, `Equations 10 to 18`."""
    found: set[int] = set()
    for first, word, last in re.findall(rf"^\| {what}s? (\d+)(?: (and|to) (\d+))?", section, re.MULTILINE):
        found |= set(range(int(first), int(last or first) + 1)) if word == "to" else {int(first), int(last or first)}
    return found


def test_the_commands_on_the_page_exist() -> None:
    commands = set(cli.list_commands(click.Context(cli)))
    assert "reproduce" in commands
    for command in re.findall(r"`lce (\w+)", PAGE):
        assert command in commands, command
