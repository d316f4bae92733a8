"""Options that several commands share.

A decorator such as `loading_options` declares a group of options and packs their values into one argument of the
command: the flags of sampling arrive as one `lce.Sampling`, `--method` and its knobs as one `lce.Method`. Packing
happens when the command runs, so that `--help` imports nothing heavy.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click import argument, option

import lce
from lce.errors import LceError, UsageError
from lce.files import check_folder, check_target, named
from lce.sizes import count
from lce.system import default_threads
from lce.terminal.contexts import MethodOption
from lce.terminal.exits import DEBUG
from lce.terminal.methods import methods_of
from lce.terminal.output import Output, note
from lce.terminal.reading import Prompt, read_prompt

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]


class Count(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click
    """A number of things: `4096` or `4k`."""

    name = "count"

    def __init__(self, least: int = 1) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return count(value, max(param.opts, key=len) if param else "the number", self.least)
        except LceError as error:
            raise click.UsageError(str(error), ctx) from None


class Counts(Count):
    """Several numbers with commas: `512,2k` is [512, 2048]."""

    name = "counts"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return [super(Counts, self).convert(text, param, ctx) for text in str(value).split(",")]


COUNT, INDEX, COUNTS = Count(), Count(least=0), Counts()


def packed(name: str, make: Callable[..., Any], *options: Decorator) -> Decorator:
    """Declare options, shown in this order, whose values reach the command as one argument: `name=make(**values)`.

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
    """Parse key=value texts into a mapping: the callback of `-o`."""
    knobs = {}
    for value in values:
        key, _, text = value.partition("=")
        if not key or not text:
            raise click.BadParameter(f"{value!r} is not key=value, for example chunk_size=128")
        knobs[key] = text
    return knobs


def parse_names(_ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> list[str]:
    """Return each name once: the callback of a repeatable option that also takes lists with commas."""
    names = list(dict.fromkeys(name.strip() for value in values for name in value.split(",") if name.strip()))
    if not names:
        known = "lce eval tasks" if param.name == "tasks" else "lce methods"
        raise click.BadParameter(f"no name is given; expected one of `{known}`")
    return names


def parse_optional_names(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> list[str]:
    """Parse names as `parse_names`; return no names if the option is not given."""
    return parse_names(ctx, param, values) if values else []


def _suite(
    tasks: list[str], task_knobs: dict[str, str], depths: str | None, mode: str, shard: str, contexts: str | None,
    **how: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return the tasks of `lce eval run` and the suite that asks them."""
    from lce.lab.eval.running import Asking, Shard
    from lce.lab.eval.suite import MadeSuite, make_tasks

    try:
        places = tuple(float(text) for text in depths.split(",")) if depths else ()
    except ValueError:
        raise UsageError(f"--depths is {depths!r}; expected numbers from 0 to 1 with commas, such as 0,0.5,1") from None
    suite = MadeSuite(depths=places, asking=Asking(mode, Shard.parse(shard), contexts), **how)
    return {"tasks": make_tasks(tasks, task_knobs), "suite": suite}


def new_file(path: str | None, force: bool) -> str | None:
    """Check the path of a file that a command will write, before any work, and return the path; None for none.

    Raises `DataError` for anything but a regular file, and `UsageError` for an existing file unless `force`.
    """
    if path is None:
        return None
    if not path:
        raise UsageError("the file to write has no name; give one, for example document.lce")
    check_target(path)
    if os.path.exists(path):
        if not force:
            raise UsageError(f"{named(path)} exists; name another file, or give --force to replace it")
        note(f"{named(path)} exists and will be replaced")
    check_folder(path)
    return path


def _note_debug(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[DEBUG] = True


def _method(method: str, knobs: dict[str, str]) -> lce.Method:
    return lce.methods.make(method, knobs)


def _named(method: str, knobs: dict[str, str]) -> tuple[str, dict[str, str]]:
    return method, knobs


def _methods(names: list[str], knobs: dict[str, str]) -> list[lce.Method]:
    return methods_of(names, knobs, _of_the_model())


def _selecting(names: list[str], knobs: dict[str, str]) -> list[lce.Method]:
    return methods_of(names, knobs, _of_the_model(), suits=lce.methods.selects)


def _of_the_model() -> dict[str, Any]:
    """Return the running command's model and the options that decide which methods serve the model."""
    given = click.get_current_context().params
    return {name: given[name] for name in ("model", "window", "rope", "rope_factor") if name in given}


def _benchmark(
    suite: str, data: str, tasks: list[str], samples: int | None, prompts: str | None, mode: str, shard: str, **how: Any
) -> dict[str, Any]:
    """Return the tasks of a published benchmark and the suite that asks them."""
    from lce.lab.eval.published import find
    from lce.lab.eval.published.suite import PublishedSuite
    from lce.lab.eval.running import Asking, Shard

    benchmark, asking = find(suite), Asking(mode, Shard.parse(shard))
    variant = benchmark.variant(prompts)
    found = PublishedSuite(benchmark, Path(data), variant, most=samples, asking=asking, **how)
    return {"tasks": found.tasks(tasks), "suite": found}


def _sampling(**values: Any) -> lce.Sampling:
    if values["seed"] is not None and values["temperature"] == 0:
        note("--seed changes nothing at temperature 0, which takes the likeliest token; give --temperature too")
    return lce.Sampling(**values)


def _asked(task: str, task_knobs: dict[str, str], **how: Any) -> tuple[Any, Any]:
    """Return a task of `lce eval selection` or `why` and the suite that makes its samples."""
    from lce.lab.eval.suite import MadeSuite, make_tasks

    return make_tasks([task], task_knobs)[0], MadeSuite(**how)


def _loading(threads: int | None, **values: Any) -> dict[str, Any]:
    return {**values, "threads": threads or default_threads()}


model_option = option("--model", "-m", required=True, metavar="PATH|demo", help="Folder of a safetensors checkpoint.")
max_tokens_option = option(
    "--max-tokens", "-n", type=COUNT, default=256, metavar="TOKENS", help="Write at most this many tokens."
)
context_option = option(
    "--context", "-c", "context_file", metavar="FILE", help="Continue this file of `lce prefill`; it does not change."
)
_METHOD = option("--method", default="full", metavar="NAME", help="One of `lce methods`.")
_METHOD_OR_CONTEXT = option(
    "--method", metavar="NAME", help="One of `lce methods`.  [default: that of --context, without one full]"
)
_METHODS = option(
    "--method", "names", multiple=True, default=["full"], callback=parse_names, metavar="NAME",
    help="One of `lce methods`, or all that serve the model; repeatable, or a list with commas.",
)  # fmt: skip
_KNOBS = option(
    "-o", "knobs", multiple=True, callback=parse_knobs, metavar="KEY=VALUE", help="A knob of the method; repeatable."
)
knobs_option = _KNOBS
_COMPUTING = (
    option(
        "--device", default="auto", metavar="auto|cpu|cuda|cuda:0,cuda:1",
        help="Where to compute; several GPUs share the model's layers.",
    ),
    option(
        "--dtype", default="auto", metavar="auto|float32|bfloat16|float16", help="Precision; auto is the checkpoint's."
    ),
    option(
        "--weights", default="auto", metavar="auto|int8|int4",
        help="Round matrices to 8 or 4 bits; auto is as stored.",
    ),
    option(
        "--block", type=COUNT, metavar="TOKENS",
        help="Tokens prefilled in one step.  [default: what suits the method]",
    ),
    option(
        "--window", type=COUNT, metavar="TOKENS",
        help="Positions the model can be trusted on.  [default: the checkpoint's]",
    ),
)  # fmt: skip
_THREADS = option(
    "--threads",
    type=COUNT,
    help="Threads to compute with.  [default: OMP_NUM_THREADS, or the cores that are free to use]",
)
_ATTENTION = (
    option(
        "--attention",
        default="auto",
        metavar="NAME",
        help="What computes attention: compiled, triton, flash, torch or reference.",
    ),
    option("--rope", metavar="none|linear|ntk|dynamic|yarn|llama3", help="RoPE scaling.  [default: the checkpoint's]"),
    option("--rope-factor", type=float, help="How far RoPE scaling stretches the window."),
)
_BUDGETS = (
    option("--kv-device-budget", metavar="SIZE", help="Limit of keys and values on a device, for example 8GiB."),
    option("--kv-host-budget", metavar="SIZE", help="Limit of keys and values in host memory."),
    option("--spill-dir", metavar="DIR", help="Folder for keys and values beyond the limits."),
    option(
        "--kv-dtype",
        default="auto",
        metavar="auto|int8",
        help="Old keys and values in host memory beside a GPU, in that folder and in context files: as computed, or "
        "rounded to 8 bits.",
    ),
)
_SAMPLING = (
    option("--temperature", type=float, default=0.0, help="0 takes the likeliest token."),
    option("--top-p", type=float, default=1.0, help="Keep the likeliest tokens of this probability in all; 1 is off."),
    option("--top-k", type=INDEX, default=0, metavar="N", help="Keep this many likeliest tokens; 0 is off."),
    option("--min-p", type=float, default=0.0, help="Keep tokens this likely relative to the likeliest; 0 is off."),
    option("--seed", type=int, help="The same seed draws the same tokens."),
    option("--stop", multiple=True, metavar="TEXT", help="End the text before this; repeatable."),
)
PROMPT = (
    argument("text", required=False),
    option("--prompt", "-p", metavar="TEXT|-", help="The text to read, as TEXT is; - is stdin."),
    option("--prompt-file", "-f", metavar="FILE", help="A UTF-8 file with the text; - is stdin."),
)
_SUITE = (
    option(
        "--task", "tasks", multiple=True, default=["passkey"], callback=parse_names, metavar="NAME",
        help="One of `lce eval tasks`, or all; repeatable, or a list with commas.",
    ),
    option(
        "-t", "task_knobs", multiple=True, callback=parse_knobs, metavar="KEY=VALUE",
        help="A knob of all tasks, or TASK.KEY=VALUE of one; repeatable.",
    ),
    option("--samples", type=COUNT, default=20, metavar="N", help="Documents for each task and length."),
    option("--seed", type=int, default=0, help="The same seed makes the same samples."),
    option("--filler", default="prose", metavar="prose|noise|essays:DIR", help="The text that facts are hidden in."),
    option("--depths", metavar="LIST", help="Where one fact stands, in turn: 0,0.5,1.  [default: even depths]"),
    option("--mode", default="single", metavar="single|shared|turns", help="How questions of a document are asked."),
    option("--questions", type=COUNT, metavar="N", help="Questions of a document.  [default: 1; 4 if not single]"),
    option("--contexts", metavar="DIR", help="With --mode shared or turns: save documents here, and open them again."),
    option("--shard", default="0/1", metavar="I/N", help="Ask the I-th of N parts, counted from 0."),
)  # fmt: skip
_PUBLISHED = (
    option("--data", required=True, metavar="DIR", help="Your copy of the benchmark's files."),
    option(
        "--task", "tasks", multiple=True, callback=parse_optional_names, metavar="NAME",
        help="Repeatable, or a list with commas.  [default: those whose files are there]",
    ),
    option("--samples", type=COUNT, metavar="N", help="Ask the first N questions of each task.  [default: all]"),
    option("--prompts", metavar="NAME", help="One of the benchmark's sets of prompts.  [default: the first]"),
    option(
        "--template", default="auto", metavar="auto|chat|none|TEXT",
        help="What is around a prompt: the benchmark's own, the model's chat template, nothing, or TEXT with {prompt}.",
    ),
    option("--max-length", type=COUNT, metavar="TOKENS", help="Cut longer prompts as the benchmark cuts them."),
    option("--mode", default="single", metavar="single|shared", help="Read a document for each question, or once."),
    option("--shard", default="0/1", metavar="I/N", help="Ask the I-th of N parts, counted from 0."),
)  # fmt: skip
_JSON = option("--json", is_flag=True, help="Print JSON on stdout, and nothing else there.")
quiet_option = option("--quiet", is_flag=True, help="No progress and no figures on stderr; notes and errors remain.")
_FORCE = option("--force", is_flag=True, help="Replace a file that exists.")
debug_option = option(
    "--debug", is_flag=True, expose_value=False, callback=_note_debug, help="Show an error's traceback."
)

prompt_options = packed("prompt", read_prompt, *PROMPT)
later_prompt_options = packed("prompt", Prompt, *PROMPT)
named_options = packed("named", _named, argument("method"), _KNOBS)
method_options = packed("method", _method, _METHOD, _KNOBS)
method_or_context_options = packed("method", MethodOption, _METHOD_OR_CONTEXT, _KNOBS)
methods_options = packed("methods", _methods, _METHODS, _KNOBS)
selecting_options = packed("methods", _selecting, _METHODS, _KNOBS)
suite_options = packed("suite", _suite, *_SUITE)
benchmark_options = packed("suite", _benchmark, argument("suite"), *_PUBLISHED)
sampling_options = packed("sampling", _sampling, *_SAMPLING)
loading_options = packed("loading", _loading, *_COMPUTING, *_ATTENTION, *_BUDGETS, _THREADS)
planning_options = packed("planning", dict, *_COMPUTING, *_BUDGETS)
output_options = packed("output", Output, _JSON, quiet_option, debug_option)
quiet_options = packed("output", Output, quiet_option, debug_option)
json_options = packed("output", Output, _JSON, debug_option)


def asked_options(n: int) -> Decorator:
    """Declare the samples of one task, `n` for each length by default; they reach the command as `asked`."""
    return packed(
        "asked", _asked,
        option("--task", default="passkey", metavar="NAME", help="One of `lce eval tasks`."),
        option("-t", "task_knobs", multiple=True, callback=parse_knobs, metavar="KEY=VALUE", help="Its knobs."),
        option("--samples", type=COUNT, default=n, metavar="N", help="Texts for each method and length."),
        option("--seed", type=int, default=0, help="The same seed makes the same texts."),
        option("--filler", default="prose", metavar="prose|noise|essays:DIR", help="What facts are hidden in."),
    )  # fmt: skip


def target_options(name: str, help: str, *, required: bool = True) -> Decorator:
    """Declare `--NAME FILE`, a file to write, and `--force`; they reach the command as one checked path."""
    target = option(f"--{name}", "path", required=required, metavar="FILE", help=help)
    return packed(name, new_file, target, _FORCE)
