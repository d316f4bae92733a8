"""The options that several commands share.

A decorator such as `loading_options` declares a group of options and packs their values into one argument of the
command: the flags of sampling arrive as one `lce.Sampling`, `--method` and its knobs as one `lce.Method`. Packing
happens when the command runs, so that `--help` imports nothing heavy.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click import argument, option

import lce
from lce.errors import DataError, UsageError, nearest
from lce.terminal.exits import DEBUG
from lce.terminal.output import Output

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]


def packed(name: str, make: Callable[..., Any], *options: Decorator) -> Decorator:
    """Options, shown in this order, that reach the command as one argument: `name=make(**their values)`.

    Example: with `packed("corner", Point, click.option("--x"), click.option("--y"))` the command takes a `corner`.
    """

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def run(**values: Any) -> Any:
            group = {key: values.pop(key) for key in names if key in values}
            return command(**values, **{name: make(**group)})

        for declare in reversed(options):
            declare(run)
        names = [param.name for param in vars(run)["__click_params__"][-len(options) :]]
        return run

    return decorate


def parse_knobs(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """The callback of `-o`: key=value texts as a mapping."""
    knobs = {}
    for value in values:
        key, _, text = value.partition("=")
        if not key or not text:
            raise click.BadParameter(f"{value!r} is not key=value, for example chunk_size=128")
        knobs[key] = text
    return knobs


def parse_names(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> list[str]:
    """The callback of a repeatable option that also takes lists with commas: each name once."""
    return list(dict.fromkeys(name.strip() for value in values for name in value.split(",") if name.strip()))


def parse_length(_ctx: click.Context, _param: click.Parameter, value: str) -> int:
    """The callback of an option that takes a number of tokens: "2k" is 2048."""
    if "," in value:
        raise click.BadParameter(f"{value!r} is more than one number of tokens")
    match = re.fullmatch(r"\s*([0-9]{1,12})(k?)\s*", value, re.IGNORECASE)
    if not match:
        raise click.BadParameter(f"{value!r} is not a number of tokens, for example 512 or 2k")
    return int(match[1]) * (1024 if match[2] else 1)


def parse_lengths(ctx: click.Context, param: click.Parameter, value: str) -> list[int]:
    """The callback of --lengths: "512, 2k" is [512, 2048]."""
    return [parse_length(ctx, param, text) for text in value.split(",")]


def knobs_for(name: str, knobs: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """The knobs of one of several methods: KEY=VALUE is for all of them, and NAME.KEY=VALUE for one overrides it."""
    chosen = {key: value for key, value in knobs.items() if "." not in key}
    for key, value in knobs.items():
        owner, dot, own_key = key.partition(".")
        if dot and owner not in names:
            raise UsageError(f"-o {key}={value} is for a method that --method does not name; {nearest(owner, names)}")
        if dot and owner == name:
            chosen[own_key] = value
    return chosen


def read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    """The prompt that the options name. Raises `UsageError` for none, `DataError` for one that cannot be read."""
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
    """The text of a UTF-8 file, or of stdin for "-", without the line break at its end."""
    source = "stdin" if name == "-" else name
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{source} is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}; convert it to UTF-8"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read {source}: {reason}; check the path and its permissions") from error
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise DataError(f"{source} is empty; expected some text")
    return text


def _note_debug(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[DEBUG] = True


def _method(method: str, knobs: dict[str, str]) -> lce.Method:
    return lce.methods.make(method, knobs)


def _methods(names: list[str], knobs: dict[str, str]) -> list[lce.Method]:
    return [_method(name, knobs_for(name, knobs, names)) for name in names]


model_option = option("--model", required=True, metavar="PATH|demo", help="Folder of a safetensors checkpoint.")
_METHOD = option("--method", default="full", metavar="NAME", help="One of `lce methods`.")
_METHODS = option(
    "--method", "names", multiple=True, default=["full"], callback=parse_names, metavar="NAME",
    help="One of `lce methods`; repeatable, or a list with commas.",
)  # fmt: skip
_KNOBS = option(
    "-o", "knobs", multiple=True, callback=parse_knobs, metavar="KEY=VALUE", help="A knob of the method; repeatable."
)
_COMPUTING = (
    option("--device", default="auto", metavar="auto|cpu|cuda", help="Where to compute."),
    option(
        "--dtype", default="auto", metavar="auto|float32|bfloat16|float16", help="Precision; auto is the checkpoint's."
    ),
    option("--block", type=int, help="Tokens prefilled in one step.  [default: what suits the method]"),
    option("--window", type=int, help="Positions the model can be trusted on.  [default: the checkpoint's]"),
)
_ATTENTION = (
    option("--attention", default="auto", metavar="NAME", help="What computes attention: torch, flash or reference."),
    option("--rope", metavar="none|linear|ntk|dynamic|yarn|llama3", help="RoPE scaling.  [default: the checkpoint's]"),
    option("--rope-factor", type=float, help="How far RoPE scaling stretches the window."),
)
_BUDGETS = (
    option("--kv-device-budget", metavar="SIZE", help="Limit of keys and values on the device, for example 8GiB."),
    option("--kv-host-budget", metavar="SIZE", help="Limit of keys and values in host memory."),
    option("--spill-dir", metavar="DIR", help="Folder for keys and values beyond the limits."),
)
_SAMPLING = (
    option("--temperature", type=float, default=0.0, help="0 takes the likeliest token."),
    option("--top-p", type=float, default=1.0, help="Keep the likeliest tokens of this probability in all; 1 is off."),
    option("--top-k", type=int, default=0, help="Keep this many likeliest tokens; 0 is off."),
    option("--min-p", type=float, default=0.0, help="Keep tokens this likely relative to the likeliest; 0 is off."),
    option("--seed", type=int, help="The same seed draws the same tokens."),
    option("--stop", multiple=True, metavar="TEXT", help="End the text before this; repeatable."),
)
_PROMPT = (
    option("--prompt", metavar="TEXT|-", help="The text to read; - is stdin."),
    option("--prompt-file", "-f", metavar="FILE", help="A UTF-8 file with the text; - is stdin."),
)
_JSON = option("--json", is_flag=True, help="Print JSON on stdout, and nothing else there.")
_QUIET = option("--quiet", is_flag=True, help="No progress and no figures on stderr.")
debug_option = option(
    "--debug", is_flag=True, expose_value=False, callback=_note_debug, help="Show an error's traceback."
)

prompt_options = packed("prompt", read_prompt, *_PROMPT)
method_argument = packed("method", _method, argument("method"), _KNOBS)
method_options = packed("method", _method, _METHOD, _KNOBS)
methods_options = packed("methods", _methods, _METHODS, _KNOBS)
sampling_options = packed("sampling", lambda **values: lce.Sampling(**values), *_SAMPLING)
loading_options = packed("loading", dict, *_COMPUTING, *_ATTENTION, *_BUDGETS)
planning_options = packed("planning", dict, *_COMPUTING, *_BUDGETS)
output_options = packed("output", Output, _JSON, _QUIET, debug_option)
json_options = packed("output", Output, _JSON, debug_option)
