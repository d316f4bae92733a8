"""The group of all commands, and how commands end.

Every failure is one line on stderr and an exit code; `--debug` adds the traceback. Commands of other packages are the
entry points of the group `lce.commands`, each a `click.Command`.
"""

import errno
import io
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from typing import Any, NoReturn

import click

from lce.errors import CapacityError, DataError, LceError, ModelError, RankError, UsageError, user_line
from lce.plugins import plugins

INTERRUPTED = 130
GROUP = "lce.commands"

# The words of other programs, and what lce says.
_MEANT = dict.fromkeys(("run", "ask"), "lce chat -m MODEL, or lce generate -m MODEL -p PROMPT")
_MEANT |= dict.fromkeys("pull list ls ps show".split(), "lce info MODEL; a hub id is downloaded when it is first used")
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.ENOMEM}
_NO_MEMORY = ("not enough memory", "DefaultCPUAllocator", "out of memory", "start new thread", "failed to map")


class Listing(click.Group):
    """A group whose help lists each command with its whole first sentence. `titles` maps a title to commands."""

    titles: Mapping[str, str] = {}
    rest = "Commands"  # the title of all other commands

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        left = {name: command for name in self.list_commands(ctx) if (command := self.get_command(ctx, name))}
        width = max(map(len, left))
        for title, names in {**self.titles, self.rest: " ".join(left)}.items():
            found = [(name, left.pop(name)) for name in names.split() if name in left]
            if rows := [(f"{name:{width}}", each.get_short_help_str(999)) for name, each in found if not each.hidden]:
                with formatter.section(title):
                    formatter.write_dl(rows)


class Root(Listing):
    """The command group `lce`: its own commands, and those of other packages, which are imported when called."""

    titles: Mapping[str, str] = {
        "Run a model": "generate chat",
        "Keep what was read": "prefill",
        "Serve": "serve",
        "Models": "info plan quantize warm",
        "Study methods": "methods recommend check eval leaderboard bench trace inspect explain reproduce calibrate",
    }
    rest = "Other packages"

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Run a command line and exit the process."""
        kwargs["standalone_mode"] = False
        try:
            code = super().main(*args, **kwargs)
        except click.ClickException as error:
            _show(error)
            code = error.exit_code
        except click.Abort:  # Ctrl-C while the command line was being read
            code = report_failure(KeyboardInterrupt())
        except OSError as error:  # the help text could not be written
            code = report_failure(error)
        sys.exit(code)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *plugins(GROUP)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if (own := super().get_command(ctx, cmd_name)) is not None:
            return own
        return load(point) if (point := plugins(GROUP).get(cmd_name)) else None

    def invoke(self, ctx: click.Context) -> None:
        try:
            super().invoke(ctx)
            sys.stdout.flush()
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except (Exception, KeyboardInterrupt) as error:
            if logging.getLogger("lce").level == logging.DEBUG:
                traceback.print_exception(error)
            ctx.exit(report_failure(error))


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


def prepare_streams() -> None:
    """Make stdout and stderr safe to write; a closed one becomes /dev/null. Of several ranks the first alone prints."""
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # it lives as long as the process
        else:
            stream.reconfigure(errors="replace")
    if sys.stderr is sys.__stderr__ and isinstance(sys.stderr, io.TextIOWrapper):  # its descriptor stays open
        notes = io.BufferedWriter(_Notes(sys.stderr.fileno(), "w", closefd=False))
        sys.stderr = io.TextIOWrapper(notes, sys.stderr.encoding, "replace", line_buffering=True)
    if "--ranks" in sys.argv and os.environ.get("RANK", "0") != "0":
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115


class _Notes(io.FileIO):
    """Stderr as a file whose failed writes are dropped: a note that cannot be written does not end the command."""

    def write(self, text: Any, /) -> int:
        try:
            return super().write(text)
        except OSError:
            return memoryview(text).nbytes


def keep_interrupts() -> None:
    """Make Ctrl-C during a finaliser (`__del__`) end the command soon; Python would print a traceback and go on."""
    show = sys.unraisablehook

    def interrupt_again(ignored: "sys.UnraisableHookArgs") -> None:
        if issubclass(ignored.exc_type, KeyboardInterrupt):
            main = threading.main_thread().ident
            again = threading.Timer(0.01, signal.pthread_kill, (main, signal.SIGINT))  # a signal also interrupts a wait
            again.daemon = True
            again.start()
        else:
            show(ignored)

    sys.unraisablehook = interrupt_again


def leave(code: int = INTERRUPTED) -> NoReturn:
    """Exit without Python's shutdown: another Ctrl-C would print a traceback there, and threads at work may abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def report_failure(error: BaseException) -> int:
    """Print one line about a failed command to stderr and return the exit code."""
    try:
        sys.stdout.flush()
    except OSError:  # stdout is broken: unwritten text goes to /dev/null, so that Python's exit does not fail too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    notes: list[str] = getattr(error, "__notes__", [])  # such as how to resume an interrupted command
    cause: BaseException | None = error  # Ctrl-C while a compiled module is imported raises ImportError
    while cause is not None and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__cause__ or cause.__context__
    if cause is None and isinstance(error, BrokenPipeError):  # another program closed our stdout, as `head` does
        return 0
    code, line = (INTERRUPTED, "\nlce: interrupted") if cause else classify(error)
    known = isinstance(error, UsageError | ModelError | DataError | RankError) or getattr(error, "told", False)
    alone = sys.stdout is sys.stderr and isinstance(error, Exception) and not known  # the first rank cannot know it
    click.echo("; ".join([line, *notes]), file=sys.__stderr__ if alone else sys.stderr)
    return code


def classify(error: BaseException) -> tuple[int, str]:
    """Return the exit code for an exception, and the line to print."""
    text, code = str(error).strip().partition("\n")[0], LceError.exit_code
    tells_memory = isinstance(error, RuntimeError | ImportError) and any(sign in text for sign in _NO_MEMORY)
    if isinstance(error, LceError):
        code, text = error.exit_code, " ".join(str(error).split())
    elif tells_memory or isinstance(error, MemoryError):
        code, text = CapacityError.exit_code, f"not enough memory: {text or 'an allocation failed'}"
    elif isinstance(error, OSError):
        code = CapacityError.exit_code if error.errno in _NO_SPACE else code
        text = f"{error.strerror or text}{f': {error.filename}' if error.filename else ''}"
    elif line := user_line(error):
        text = f"{line}; correct the file, or run with --debug for the traceback"
    else:
        text = f"internal error: {type(error).__name__}: {text}; run with --debug for the traceback"
    return code, f"lce: error: {text}"


def _show(error: click.ClickException) -> None:
    """Print a usage error as one line. Messages of several lines, such as help, are printed unchanged."""
    message = error.format_message()
    if "\n" in message:
        return error.show()
    context = error.ctx if isinstance(error, click.UsageError) else None
    hint = f" (see {context.command_path} --help)" if context else ""
    if message.startswith("No such command") and (meant := _MEANT.get(message.split("'")[1])):
        message += f" lce says it as {meant}."
    elif isinstance(error, click.NoSuchOption):
        takes_knobs = context and any("-o" in param.opts for param in context.command.params)
        if error.option_name == "--prefill-method":
            message += " It is for lce generate, chat, prefill and plan."
        elif takes_knobs and not error.possibilities and error.option_name.startswith("--"):
            message += f" Knobs of a method are given as -o {error.option_name.lstrip('-').replace('-', '_')}=VALUE."
    click.echo(f"lce: error: {message}{hint}", err=True)
