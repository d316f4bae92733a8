"""Commands of other packages: the entry points of the group `lce.commands`, each a `click.Command`."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import click

from lce.errors import UsageError

GROUP = "lce.commands"


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
