"""All errors that lce raises on purpose, with their exit codes.

    LceError                 1   something failed
    ├── UsageError           2   an option, name or value that cannot be used
    ├── ModelError           3   a checkpoint, config or tokenizer that is missing, damaged or unsupported
    ├── DataError            3   a text, a context file or a file of learned maps that cannot be used
    ├── CapacityError        4   not enough memory or disk
    ├── BusyError            1   a batch's queue is full, or the batch is closed
    └── RankError            1   another rank of a divided model has failed

The number is the exit code of the command line. A message is one line that says what was wrong, what was expected and
what to do. `UsageError` is a `ValueError`, too, because a caller gave the value; the others are about files, models and
machines, and derive from `LceError` alone. Ctrl-C stays Python's own KeyboardInterrupt and exits with 130.
`WindowWarning` is the only warning.
"""

import difflib
import reprlib
from collections.abc import Iterable
from traceback import walk_tb

USER_MODULE = "lce_user_file_"  # the beginning of the names of modules that users' files become


class LceError(Exception):
    """Base of all errors that lce raises on purpose."""

    exit_code = 1


class UsageError(LceError, ValueError):
    """The error for an option, a name or a value that cannot be used. It is a `ValueError` too."""

    exit_code = 2


class ModelError(LceError):
    """The error for a checkpoint, config or tokenizer that is missing, damaged or unsupported."""

    exit_code = 3


class DataError(LceError):
    """The error for a text, a context file or a file of learned maps that cannot be used."""

    exit_code = 3


class CapacityError(LceError):
    """The error for a request that needs more memory or disk space than is available."""

    exit_code = 4


class BusyError(LceError):
    """The error for a request that a batch does not take now: its queue is full, or it is closed. Ask again later."""


class RankError(LceError):
    """The error for a failure of another rank, where several share a model. Its exit code is that of the failure."""

    def __init__(self, text: str, exit_code: int = LceError.exit_code) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class WindowWarning(UserWarning):
    """The warning that a text is longer than the method can read of this model."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return the hint that ends an error message about an unknown `name`: `did you mean 'x'? valid: a, b, x`."""
    names = sorted(valid)
    known, wrong = {x.lower(): x for x in names}, name[:64].lower()
    begun = [x for x in known if x.startswith(wrong)] if len(wrong) >= 3 else []
    close = difflib.get_close_matches(wrong, known, n=1, cutoff=0.65) or begun
    hint = f"did you mean {known[close[0]]!r}? " if close else ""
    return f"{hint}valid: {', '.join(names)}"


def shown(value: object, most: int = 120) -> str:
    """Return `repr(value)` for an error message: one printable line, shortened to about `most` characters."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = most
    short.maxlevel = 2
    text = short.repr(value)
    escaped = text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return escaped if len(escaped) <= 2 * most else f"{escaped[:most]}...{escaped[-most // 4 :]}"


def user_line(error: BaseException) -> str:
    """Return the line of a user's file that raised an error, as `FILE, line 7: ValueError: text`; "" if none did."""
    frames = walk_tb(error.__traceback__)
    found = [(x.f_code.co_filename, line) for x, line in frames if USER_MODULE in str(x.f_globals.get("__name__"))]
    if isinstance(error, SyntaxError) and error.filename:
        found.append((error.filename, error.lineno or 1))
    if not found:
        return ""
    file, line = found[-1]
    return f"{file}, line {line}: {type(error).__name__}: {' '.join(str(getattr(error, 'msg', error)).split())[:240]}"
