"""The command `lce`: one function a subcommand, each a few calls of the public face.

Whatever is heavy is imported inside the functions, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

import lce
from lce import report
from lce.errors import DataError, UsageError
from lce.exits import DEBUG, INTERRUPTED, Root, leave_interrupted, prepare_streams

F = TypeVar("F", bound=Callable[..., Any])


def main() -> NoReturn:
    """The console script."""
    prepare_streams()
    try:
        cli.main(prog_name="lce")
    except SystemExit as end:
        if end.code == INTERRUPTED:
            leave_interrupted()
        raise


def _note_debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[DEBUG] = True


def _pairs(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    pairs = {}
    for value in values:
        key, _, text = value.partition("=")
        if not key or not text:
            raise click.BadParameter(f"{value!r} is not key=value, for example chunk_size=128")
        pairs[key] = text
    return pairs


def _names(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> list[str]:
    return list(dict.fromkeys(name.strip() for value in values for name in value.split(",") if name.strip()))


def _lengths(_ctx: click.Context, _param: click.Parameter, value: str) -> list[int]:
    lengths = []
    for text in value.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,12})(k?)\s*", text, re.IGNORECASE)
        if not match:
            raise click.BadParameter(f"{text!r} is not a number of tokens, for example 512 or 2k")
        lengths.append(int(match[1]) * (1024 if match[2] else 1))
    return lengths


def stacked(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator, shown in this order."""

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


debug_option = click.option(
    "--debug", is_flag=True, expose_value=False, callback=_note_debug, help="Show the traceback of an error."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout, and nothing else there.")
quiet_option = click.option("--quiet", is_flag=True, help="No progress and no figures on stderr.")
model_option = click.option("--model", required=True, metavar="PATH|demo", help="Folder of a safetensors checkpoint.")
knob_option = click.option(
    "-o", "knobs", multiple=True, callback=_pairs, metavar="KEY=VALUE", help="A knob of the method; repeatable."
)
loading_options = stacked(
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


@click.group("lce", cls=Root, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(lce.__version__, message="%(prog)s %(version)s")
@debug_option
def cli() -> None:
    """Run language models on texts far longer than they were trained for."""


@cli.command()
@model_option
@click.option("--prompt", metavar="TEXT|-", help="The text to go on from; - reads stdin.")
@click.option("--prompt-file", "-f", metavar="FILE", help="A UTF-8 file with the text; - reads stdin.")
@click.option("--max-tokens", type=int, default=256, show_default=True, help="Write at most this many tokens.")
@click.option("--method", default="full", show_default=True, metavar="NAME", help="One of `lce methods`.")
@knob_option
@sampling_options
@loading_options
@json_option
@quiet_option
@debug_option
def generate(
    model: str, prompt: str | None, prompt_file: str | None, max_tokens: int, method: str, knobs: dict[str, str],
    temperature: float, top_p: float, top_k: int, min_p: float, seed: int | None, stop: tuple[str, ...],
    as_json: bool, quiet: bool, **loading: Any,
) -> None:  # fmt: skip
    """Go on from a prompt.

    The text alone goes to stdout, as it is written; progress and figures go to stderr.

    With both --prompt-file and --prompt, the file's text comes first and the prompt on a line of its own after it.
    With neither, stdin is read. The line break that ends a file or stdin is not part of the prompt.
    """
    text = read_prompt(prompt, prompt_file)
    sampling = lce.Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, stop=stop)
    engine = lce.load(model, lce.methods.make(method, knobs), **loading)
    with report.Bar("prefill", " tok", shown=not quiet) as bar:
        stream = engine.stream(text, max_tokens=max_tokens, sampling=sampling, progress=bar)
        if as_json:
            for _ in stream:
                pass
            click.echo(json.dumps(report.generation_object(stream.result, engine.method)))
        else:
            write_out(stream)
    if not quiet:
        click.echo(report.figures(stream.result.stats), err=True)


@cli.group("eval")
def evaluation() -> None:
    """Measure a model with a method."""


@evaluation.command()
@model_option
@click.option(
    "--method",
    "names",
    multiple=True,
    default=["full"],
    show_default=True,
    callback=_names,
    metavar="NAME",
    help="One of `lce methods`; repeatable, or a list with commas.",
)
@knob_option
@click.option("--lengths", required=True, callback=_lengths, metavar="LIST", help="Tokens, with commas; 2k is 2048.")
@click.option("--samples", type=int, default=50, show_default=True, help="Prompts for each method and length.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed makes the same prompts.")
@click.option("--task", default="passkey", show_default=True, help="What is hidden in the text.")
@click.option("--filler", default="prose", show_default=True, metavar="prose|noise", help="The text it is hidden in.")
@loading_options
@json_option
@quiet_option
@debug_option
def passkey(
    model: str, names: list[str], knobs: dict[str, str], lengths: list[int], samples: int, seed: int, task: str,
    filler: str, as_json: bool, quiet: bool, **loading: Any,
) -> None:  # fmt: skip
    """Hide a fact in texts of some lengths and ask for it; the share of right answers.

    Every method gets the same prompts. Knobs given with -o go to each of the methods.
    """
    from lce.eval.passkey import evaluate

    methods = [lce.methods.make(name, knobs) for name in names]
    scores = []
    if not as_json:
        click.echo(report.SCORE_HEADER)
    for method in methods:
        engine = lce.load(model, method, **loading)
        for length in lengths:
            with report.Bar(f"{method.name} {length:,}", " samples", shown=not quiet) as bar:
                score = evaluate(engine, length=length, n=samples, seed=seed, task=task, filler=filler, progress=bar)
            scores.append(score.as_dict())
            if not as_json:
                click.echo(report.score_row(score))
    if as_json:
        click.echo(json.dumps(scores))


@cli.command()
@json_option
@debug_option
def methods(as_json: bool) -> None:
    """List the methods, their knobs and defaults."""
    known = []
    for name in lce.methods.available():
        try:
            known.append(report.method_object(name, lce.methods.find(name)))
        except UsageError as error:  # one package's broken method hides no other
            click.echo(f"lce: warning: {error}", err=True)
    if as_json:
        click.echo(json.dumps(known))
    else:
        click.echo("\n\n".join("\n".join(report.method_lines(method)) for method in known))
        click.echo("\nA knob that is none is derived from the model's window.")


def write_out(pieces: lce.Stream) -> None:
    """Pieces of text to stdout as they come, and a line break after them even where they are cut off."""
    written = False
    try:
        for piece in pieces:
            sys.stdout.write(piece.text)
            sys.stdout.flush()
            written = True
    except BaseException:
        if written:
            sys.stdout.write("\n")
        raise
    click.echo()


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
