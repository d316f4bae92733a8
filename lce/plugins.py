"""Finds what other packages add to lce: the entry points of the groups `lce.commands`, `lce.methods`, `lce.selectors`.

A source tree that is not installed has no entry points. They are then read from the `setup.cfg` beside the package, as
an installation does.
"""

from configparser import ConfigParser
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

TREE = Path(__file__).parents[1]


def plugins(group: str, tree: Path = TREE) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name. Those of a source tree come before those that are installed."""
    parser = ConfigParser(delimiters="=", interpolation=None)
    parser.read(tree / "setup.cfg", encoding="utf-8")
    lines = parser.get("options.entry_points", group, fallback="").strip().splitlines()
    pairs = [map(str.strip, line.split("=", 1)) for line in lines]
    installed = {point.name: point for point in entry_points(group=group)}
    return installed | {name: EntryPoint(name, value, group) for name, value in pairs}
