"""Commands of other packages: entry points of `lce.commands`, installed or in a source tree."""

from importlib.metadata import EntryPoint
from pathlib import Path

import click
import pytest

from lce.errors import UsageError
from lce.plugins import plugins
from lce.terminal import exits


def test_a_source_tree_names_its_commands(tmp_path: Path) -> None:
    text = "[options.entry_points]\nlce.commands =\n    hello = one.two:three\n    trace = mine:trace\n"
    (tmp_path / "setup.cfg").write_text(text)
    found = plugins(exits.GROUP, tmp_path)
    assert (found["hello"].value, found["trace"].value) == ("one.two:three", "mine:trace")


def test_our_tree_has_the_commands_of_server_and_laboratory() -> None:
    names = "bench calibrate eval explain inspect leaderboard recommend reproduce serve trace".split()
    found = plugins(exits.GROUP)
    assert set(names) <= set(found)
    assert all(isinstance(found[name].load(), click.Command) for name in names)


@pytest.mark.parametrize(
    ("value", "reason"),
    [("not_there.at_all:run", "No module named 'not_there'"), ("json:dumps", "it is a function, not a click.Command")],
)
def test_a_broken_command_says_why(value: str, reason: str) -> None:
    command = exits.load(EntryPoint("hello", value, exits.GROUP))
    assert reason in (command.help or "")
    with pytest.raises(UsageError, match=reason):
        command.main(["--any", "thing"], standalone_mode=False)
