"""An entry: its lengths, the paper's numbers beside ours, and its commands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from lce.errors import UsageError
from lce.lab.papers import Arm, Cell, Entry, Setting, find
from lce.lab.papers.entry import NOT_AT_HAND, OfWindow, at_once, by_length


@dataclass(frozen=True)
class Lengths:
    """Measures the length itself."""

    labels: tuple[str, ...] = ("tokens",)
    data: str = ""

    def command(self, arm: Arm, lengths: Sequence[int], setting: Setting) -> str:
        return f"measure {arm.name} {','.join(map(str, lengths))}"

    def cells(self, arm: Arm, lengths: Sequence[int], setting: Setting) -> Iterator[Cell]:
        return (Cell(arm.name, self.labels[0], length, float(length)) for length in lengths)

    def check(self, arms: Sequence[Arm], lengths: Sequence[int], setting: Setting) -> None:
        pass

    def ceiling(self, lengths: Sequence[int], setting: Setting) -> Iterator[Cell]:
        yield Cell("ceiling", self.labels[0], min(lengths), 0.0)


ARMS = (
    Arm("plain", "full", paper=by_length("tokens", (1, 2), 64, ">100")),
    Arm("scaled", "full", rope="ntk", paper=at_once(other_thing=3.0)),
    Arm("unread", "streaming", {"sinks": OfWindow(16), "local": OfWindow(4, 3)}),
)
ENTRY = Entry("dca:table0", "lengths", "lengths", ARMS, (Lengths(),), (1, 2))


def test_cells_stand_beside_the_papers_numbers(tiny_model: Path) -> None:
    setting = Setting(str(tiny_model))
    cells = list(ENTRY.run(setting))
    assert [(cell.row, cell.length, cell.paper) for cell in cells] == [
        ("ceiling", 64, None),
        ("plain", 64, 64),
        ("plain", 128, ">100"),
        ("scaled", 64, None),
        ("scaled", 128, None),
        ("unread", 64, NOT_AT_HAND),
        ("unread", 128, NOT_AT_HAND),
    ]
    assert ENTRY.unmatched(setting) == {"scaled": {"other thing": 3.0}}
    assert [cell.length for cell in ENTRY.run(Setting(str(tiny_model), lengths=[70]))] == [70] * 4


def test_rows_that_scale_rope_have_a_command_a_length(tiny_model: Path) -> None:
    assert ENTRY.commands(Setting(str(tiny_model))) == [
        "measure plain 64,128",
        "measure scaled 64",
        "measure scaled 128",
        "measure unread 64,128",
    ]


def test_the_users_data_takes_the_place_of_the_nearest_measure(tiny_model: Path) -> None:
    entry = Entry("dca:table0", "", "", ARMS, (Lengths(),), (1,), suite=Lengths(("theirs",)))
    own, theirs = Setting(str(tiny_model)), Setting(str(tiny_model), data=["file"])
    assert {cell.label for cell in entry.run(own)} == {"tokens"}
    assert {cell.label for cell in entry.run(theirs)} == {"theirs"}
    assert (entry.is_same(own), entry.is_same(theirs)) == (False, True)
    assert entry.difference(own) == "another measurement than the paper's: tasks made here"
    assert "the paper's data, in file" in entry.difference(theirs)


def test_an_unknown_id_names_the_nearest_one() -> None:
    with pytest.raises(UsageError, match="did you mean 'dca:table1'"):
        find("dca:tabel1")
