"""The options of `lce.load` and `lce.plan`. Each is a field with a default, help and a parser.

Each field is a flag of the command line and a keyword in Python. Nothing here imports torch, so `lce --help` is fast.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import wraps
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from lce.errors import UsageError, nearest, shown
from lce.files import path_of
from lce.models.config import ROPE_KINDS, Factor
from lce.sizes import MOST, count, in_bytes

if TYPE_CHECKING:
    import torch

    from lce.methods.base import Method

    Devices = str | torch.device | Sequence[str | torch.device] | None

MOST_FACTOR = 1_000_000  # the largest `rope_factor`
CACHE_BUDGET = "10GiB"  # of the files of kept contexts

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
Parser = Callable[[Any, str], Any]  # takes a user's value and the option's name


def option(
    default: Any = MISSING,
    help: str = "",
    metavar: str = "",
    *,
    more: str = "",
    parse: Parser | None = None,
    factory: Any = MISSING,
    **how: Any,
) -> Any:
    """Declare an option: a field of a `Record`.

    `help` and `metavar` are the flag's; an option without help has no flag. `more` is for Python alone. `parse` returns
    the value that the record holds, or raises `UsageError`. `how` is passed on to `click.option`.
    """
    about = {"help": help, "metavar": metavar, "more": more, "parse": parse, "how": how}
    return field(default=default, default_factory=factory, metadata=about)


class Record:
    """A frozen dataclass of options. It holds what the options' parsers return; a default None is "not given".

    The type of a field also allows what a user may give, such as "4k"; the parsed value is an int.
    """

    def __post_init__(self) -> None:
        for name, each in options_of(type(self)).items():
            value, parse = getattr(self, name), each.metadata.get("parse")
            if parse is not None and value is not each.default:
                object.__setattr__(self, name, parse(value, name))


def takes(record: Callable[P, T]) -> Callable[[Callable[[T], R]], Callable[P, R]]:
    """Decorate a function of one `Record`, so that its arguments are the record's fields; its docstring lists them."""

    def decorate(work: Callable[[T], R]) -> Callable[P, R]:
        signature = inspect.signature(record)

        @wraps(work)
        def call(*args: P.args, **options: P.kwargs) -> R:
            knobs = "; a method's knobs go in method_options" if "method_options" in signature.parameters else ""
            check_names(options, signature.parameters, "option", knobs)
            return work(record(*args, **options))

        returned = inspect.signature(work).return_annotation
        call.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
        call.__doc__ = f"{inspect.getdoc(work)}\n\n{described(cast('type[Record]', record))}"
        return call

    return decorate


def described(record: type[Record]) -> str:
    """Return a list of a record's options, with what each does in Python."""
    found = []
    for name, each in options_of(record).items():
        help, more = each.metadata.get("help", ""), each.metadata.get("more", "")
        if help or more:  # where Python has another default than the command line, `more` says so
            text = f"- `{name}`: {help.partition('  [')[0] if more else help} {more}"
            found.append(fill(" ".join(text.split()), 110, subsequent_indent="  "))
    return "\n".join(found)


def options_of(record: type[Record]) -> dict[str, Field[Any]]:
    """Return a record's fields by name."""
    return {each.name: each for each in fields(record)}  # type: ignore[arg-type]  # subclasses are dataclasses


def check_names(given: Mapping[str, Any], valid: Iterable[str], what: str, more: str = "") -> None:
    """Raise `UsageError` if a key of `given` is not in `valid`. `what` is its word for a key, `more` its end."""
    unknown = next((name for name in given if name not in valid), None)
    if unknown is not None:
        raise UsageError(f"unknown {what} {shown(unknown)}; {nearest(str(unknown), valid)}{more}")


@dataclass(frozen=True)
class Counted:
    """A parser of a number such as 4096 or "4k"."""

    least: int = 1
    most: int = MOST

    def __call__(self, value: Any, name: str) -> int:
        return count(value, name, self.least, self.most)


def number(value: Any) -> float:
    """Return a number as a float. Raises `TypeError` for a bool, and for any value that is not a number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError
    return float(value)


@dataclass(frozen=True)
class Checked:
    """A parser: `kind` converts a value, or raises, and `holds` says whether the result can be used."""

    expected: str
    holds: Callable[[Any], bool]
    kind: Callable[[Any], Any] = number
    type: Any = float  # of the flag

    def __call__(self, value: Any, name: str) -> Any:
        try:
            if self.holds(found := self.kind(value)):
                return found
        except (TypeError, ValueError, OverflowError, AttributeError):
            pass
        raise UsageError(f"{name} is {shown(value)}; expected {self.expected}")


def _rope_kind(kind: Any, name: str) -> str:
    if str(kind) not in ROPE_KINDS:
        raise UsageError(f"unknown {name} {shown(kind)}; {nearest(str(kind), ROPE_KINDS)}")
    return str(kind)


def _factor(value: Any) -> Factor:
    """Return a factor of RoPE scaling: a number, "auto", or the number in a text."""
    return "auto" if value == "auto" else float(value) if isinstance(value, str) else number(value)


_EXPECTED = f"1 or more, and {MOST_FACTOR:,} or less, or auto"
_FACTOR = Checked(_EXPECTED, lambda x: x == "auto" or 1 <= x <= MOST_FACTOR, _factor, _factor)


@dataclass(frozen=True, kw_only=True)
class SizeOptions(Record):
    """The options of `lce.plan` and `lce.operations`: those of `lce.load` on which sizes in memory depend."""

    device: Devices = option(
        "auto",
        "Where to compute; several GPUs share the model's layers.",
        "auto|cpu|cuda|cuda:0,cuda:1",
        more='A name, a `torch.device`, or several: "cuda:0,cuda:1", a list, or "cuda:all".',
    )
    dtype: str | torch.dtype | None = option(
        "auto", "Precision; auto is the checkpoint's.", "auto|float32|bfloat16|float16"
    )
    weights: str | None = option(
        "auto",
        "Round matrices to 8 or 4 bits; auto is as stored.",
        "auto|int8|int4",
        more="Rounded matrices take 0.5 and 0.3 of their bytes in bfloat16. They are computed with on CPUs alone.",
    )
    block: int | str | None = option(
        None,
        "Tokens prefilled in one step.  [default: what suits the method, or fills a GPU]",
        "TOKENS",
        parse=Counted(),
    )
    window: int | str | None = option(
        None, "Positions the model can be trusted on.  [default: the checkpoint's]", "TOKENS", parse=Counted(2)
    )
    rope: str | None = option(
        None, "RoPE scaling.  [default: the checkpoint's]", "|".join(ROPE_KINDS), parse=_rope_kind
    )
    rope_factor: float | str | None = option(
        None,
        "How far RoPE scaling stretches the window; auto is as far as a text needs.  [default: auto, if --rope is new]",
        "FACTOR|auto",
        more='"auto" is the length over the window: `length`, if given, else what is announced for each context.',
        parse=_FACTOR,
    )
    kv_device_budget: int | str | None = option(
        None,
        "Limit of keys and values on a device, for example 8GiB.",
        "SIZE",
        more="It is for each context. On the CPU both limits are of the same memory, and the smaller one counts.",
        parse=in_bytes,
    )
    kv_host_budget: int | str | None = option(None, "Limit of keys and values in host memory.", "SIZE", parse=in_bytes)
    spill_dir: str | Path | None = option(
        None,
        "Folder for keys and values beyond the limits.",
        "DIR",
        more="A file there is removed with its context.",
        parse=path_of,
    )
    kv_dtype: str | torch.dtype | None = option(
        "auto",
        "Keys and values as computed; or in 8 bits: old ones in host memory beside "
        "a GPU, in that folder and in context files (int8), or all of them everywhere (int8-device).",
        "auto|int8|int8-device",
        more="8 bits take half the bytes of 16. With int8-device decoding reads half the bytes, too.",
    )
    method_options: Mapping[str, Any] | None = option(
        None, more='The knobs of a method given by its name: `method="longheads", method_options={"chunk_size": 128}`.'
    )
    prefill_method: str | Method | None = option(
        None,
        more='A method of spans, such as "full", by which prompts are read; `method` then attends generated tokens '
        "alone. See `lce.methods.Handover`.",
    )


@dataclass(frozen=True, kw_only=True)
class LoadOptions(SizeOptions):
    """The options of `lce.load`. A new option is a field here, or in `SizeOptions` if sizes in memory depend on it."""

    attention: str | None = option(
        "auto",
        "What computes attention: compiled, triton, flash, torch or reference.",
        "NAME",
        more="auto is the fastest here.",
    )
    threads: int | None = option(
        None,
        "Threads, at most the cores it may use.  [default: OMP_NUM_THREADS, or these cores]",
        more="The whole process computes with so many from now on; None keeps the present number.",
        parse=Counted(most=1024),
    )
    length: int | str | None = option(
        None,
        more='The most tokens of a text, answers included, for which a method or factor "auto" is chosen; None: any.',
        parse=Counted(),
    )
    ranks: object = option(
        None,
        "Share the model among all processes of torchrun: see docs/parallel.md.",
        more='Each process makes the same calls. "all", or a group of torch.distributed; None is this process alone.',
        is_flag=True,
    )
