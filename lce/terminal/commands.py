"""Finds commands of other packages: the entry points of the group `lce.commands`, each a `click.Command`.

A source tree that is not installed has no entry points. There they are read from the `setup.cfg` beside the package,
which is also where an installation has them from.
"""

from __future__ import annotations

from configparser import ConfigParser
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import click

from lce.errors import UsageError

GROUP = "lce.commands"
TREE = Path(__file__).parents[2]


def others(tree: Path = TREE) -> dict[str, EntryPoint]:
    """Return the commands of other packages by name. Those of a source tree come before those that are installed."""
    parser = ConfigParser(delimiters="=", interpolation=None)
    parser.read(tree / "setup.cfg", encoding="utf-8")
    lines = parser.get("options.entry_points", GROUP, fallback="").strip().splitlines()
    pairs = [map(str.strip, line.split("=", 1)) for line in lines]
    installed = {point.name: point for point in entry_points(group=GROUP)}
    return installed | {name: EntryPoint(name, value, GROUP) for name, value in pairs}


def load(point: EntryPoint) -> click.Command:
    """Import a command. One that cannot be imported becomes a command that says why, so that it hides no other."""
    try:
        command = point.load()
        if isinstance(command, click.Command):
            return command
        reason = f"it is a {type(command).__name__}, not a click.Command"
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"

    def fail() -> None:
        raise UsageError(f"the command {point.name!r}, {point.value}, cannot be used: {reason}; repair its package")

    anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(point.name, callback=fail, help=f"Cannot be used: {reason}", context_settings=anything)
