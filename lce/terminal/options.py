"""The options that the command line's subcommands share, and the texts that they read."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from lce.errors import DataError, UsageError, nearest
from lce.terminal.exits import DEBUG

F = TypeVar("F", bound=Callable[..., Any])


def note_debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[DEBUG] = True


def pairs(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for value in values:
        key, _, text = value.partition("=")
        if not key or not text:
            raise click.BadParameter(f"{value!r} is not key=value, for example chunk_size=128")
        found[key] = text
    return found


def knobs_of(name: str, knobs: dict[str, str], names: list[str]) -> dict[str, str]:
    """The knobs of one of several methods: those for all of them, and over these its own, `METHOD.KEY`."""
    chosen = {key: value for key, value in knobs.items() if "." not in key}
    for key, value in knobs.items():
        owner, dot, own = key.partition(".")
        if dot and owner not in names:
            raise UsageError(f"-o {key}={value} is for a method that is not asked; {nearest(owner, names)}")
        if dot and owner == name:
            chosen[own] = value
    return chosen


def names(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> list[str]:
    return list(dict.fromkeys(name.strip() for value in values for name in value.split(",") if name.strip()))


def lengths(_ctx: click.Context, _param: click.Parameter, value: str) -> list[int]:
    found = []
    for text in value.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,12})(k?)\s*", text, re.IGNORECASE)
        if not match:
            raise click.BadParameter(f"{text!r} is not a number of tokens, for example 512 or 2k")
        found.append(int(match[1]) * (1024 if match[2] else 1))
    return found


def length(ctx: click.Context, param: click.Parameter, value: str) -> int:
    found = lengths(ctx, param, value)
    if len(found) > 1:
        raise click.BadParameter(f"{value!r} is more than one number of tokens")
    return found[0]


def stacked(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator, shown in this order."""

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


debug_option = click.option(
    "--debug", is_flag=True, expose_value=False, callback=note_debug, help="Show the traceback of an error."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout, and nothing else there.")
quiet_option = click.option("--quiet", is_flag=True, help="No progress and no figures on stderr.")
model_option = click.option("--model", required=True, metavar="PATH|demo", help="Folder of a safetensors checkpoint.")
knob_option = click.option(
    "-o", "knobs", multiple=True, callback=pairs, metavar="KEY=VALUE", help="A knob of the method; repeatable."
)
size_options = stacked(
    click.option("--device", default="auto", show_default=True, metavar="auto|cpu|cuda", help="Where to compute."),
    click.option(
        "--dtype",
        default="auto",
        show_default=True,
        metavar="auto|float32|bfloat16|float16",
        help="Precision; auto is the checkpoint's own.",
    ),
    click.option("--block", type=int, help="Tokens prefilled in one step.  [default: what suits the method]"),
    click.option("--window", type=int, help="Positions the model can be trusted on.  [default: the checkpoint's]"),
)
budget_options = stacked(
    click.option("--kv-device-budget", metavar="SIZE", help="Keys and values on the device, for example 8GiB."),
    click.option("--kv-host-budget", metavar="SIZE", help="Keys and values in the host's memory."),
    click.option("--spill-dir", metavar="DIR", help="Where keys and values go that memory may not hold."),
)
loading_options = stacked(
    size_options,
    click.option(
        "--attention",
        default="auto",
        show_default=True,
        metavar="auto|flash|torch|reference",
        help="What computes attention.",
    ),
    click.option(
        "--rope",
        metavar="none|linear|ntk|dynamic|yarn|llama3",
        help="RoPE scaling.  [default: the checkpoint's]",
    ),
    click.option("--rope-factor", type=float, help="How far RoPE scaling stretches the window."),
    budget_options,
)
sampling_options = stacked(
    click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the likeliest token."),
    click.option(
        "--top-p", type=float, default=1.0, show_default=True, help="Likeliest tokens of this mass; 1 is off."
    ),
    click.option("--top-k", type=int, default=0, show_default=True, help="This many likeliest tokens; 0 is off."),
    click.option("--min-p", type=float, default=0.0, show_default=True, help="Share of the likeliest one's; 0 is off."),
    click.option("--seed", type=int, help="Draw the same tokens each time."),
    click.option("--stop", multiple=True, metavar="TEXT", help="End the text before this; repeatable."),
)


def read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    """The text that the options name. Raises `UsageError` for none, `DataError` for one that cannot be read."""
    if prompt == "-" and prompt_file == "-":
        raise UsageError("--prompt and --prompt-file are both stdin; give one of them")
    if prompt == "":
        raise UsageError("--prompt is empty; expected some text")
    if prompt is None and prompt_file is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise UsageError("no prompt; give --prompt TEXT, --prompt-file FILE, or text on stdin")
        prompt = "-"
    parts = []
    if prompt_file is not None:
        parts.append(read_text(prompt_file))
    if prompt is not None:
        parts.append(read_text("-") if prompt == "-" else prompt)
    return "\n".join(parts)


def read_text(name: str) -> str:
    """A UTF-8 file, or stdin for "-", without the line break at its end."""
    what = "stdin" if name == "-" else name
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{what} is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {what}: {getattr(error, 'strerror', None) or error}") from error
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise DataError(f"{what} is empty; expected some text")
    return text
