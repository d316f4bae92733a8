"""The command `lce`: one function a subcommand, each a few calls of the public face.

Whatever is heavy is imported inside the functions, so that `--help` answers at once.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any, NoReturn

import click

import lce
from lce.errors import CapacityError, UsageError
from lce.terminal import options, report
from lce.terminal.exits import INTERRUPTED, Root, leave_interrupted, prepare_streams


def main() -> NoReturn:
    """The console script."""
    prepare_streams()
    try:
        cli.main(prog_name="lce")
    except SystemExit as end:
        if end.code == INTERRUPTED:
            leave_interrupted()
        raise


@click.group("lce", cls=Root, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(lce.__version__, message="%(prog)s %(version)s")
@options.debug_option
def cli() -> None:
    """Run language models on texts far longer than they were trained for."""


@cli.command()
@options.model_option
@click.option("--prompt", metavar="TEXT|-", help="The text to go on from; - reads stdin.")
@click.option("--prompt-file", "-f", metavar="FILE", help="A UTF-8 file with the text; - reads stdin.")
@click.option("--context", "context_file", metavar="FILE", help="Go on from what `lce prefill` read, as it is.")
@click.option("--max-tokens", type=int, default=256, show_default=True, help="Write at most this many tokens.")
@click.option("--method", default="full", show_default=True, metavar="NAME", help="One of `lce methods`.")
@options.knob_option
@options.sampling_options
@options.loading_options
@options.json_option
@options.quiet_option
@options.debug_option
def generate(
    model: str, prompt: str | None, prompt_file: str | None, context_file: str | None, max_tokens: int, method: str,
    knobs: dict[str, str], temperature: float, top_p: float, top_k: int, min_p: float, seed: int | None,
    stop: tuple[str, ...], as_json: bool, quiet: bool, **loading: Any,
) -> None:  # fmt: skip
    """Go on from a prompt.

    The text alone goes to stdout, as it is written; progress and figures go to stderr.

    With both --prompt-file and --prompt, the file's text comes first and the prompt on a line of its own after it.
    With neither, stdin is read. The line break that ends a file or stdin is not part of the prompt.
    """
    text = options.read_prompt(prompt, prompt_file)
    sampling = lce.Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, stop=stop)
    engine = lce.load(model, lce.methods.make(method, knobs), **loading)
    context = None if context_file is None else engine.open_context(context_file)
    with report.Bar("prefill", " tok", shown=not quiet) as bar:
        stream = engine.stream(text, context=context, max_tokens=max_tokens, sampling=sampling, progress=bar)
        if as_json:
            for _ in stream:
                pass
            click.echo(json.dumps(report.generation_object(stream.result, engine.method)))
        else:
            write_out(stream)
    if not quiet:
        click.echo(report.figures(stream.result.stats), err=True)


@cli.command()
@options.model_option
@click.option("--prompt", metavar="TEXT|-", help="The text to read; - reads stdin.")
@click.option("--prompt-file", "-f", metavar="FILE", help="A UTF-8 file with the text; - reads stdin.")
@click.option("--out", required=True, metavar="FILE", help="Where the context goes, for example document.lce.")
@click.option("--checkpoint-every", type=int, metavar="TOKENS", help="Interrupted, go on from the last so many.")
@click.option("--length", type=int, metavar="TOKENS", help="How long the context will become; for --rope dynamic.")
@click.option("--method", default="full", show_default=True, metavar="NAME", help="One of `lce methods`.")
@options.knob_option
@options.loading_options
@options.json_option
@options.quiet_option
@options.debug_option
def prefill(
    model: str, prompt: str | None, prompt_file: str | None, out: str, checkpoint_every: int | None,
    length: int | None, method: str, knobs: dict[str, str], as_json: bool, quiet: bool, **loading: Any,
) -> None:  # fmt: skip
    """Read a text once, into a file that can be asked many times: `lce generate --context FILE`.

    The file fits this model, method and its knobs, RoPE scaling and dtype, and no other. With --checkpoint-every, the
    same command goes on where it was interrupted.
    """
    text = options.read_prompt(prompt, prompt_file)
    engine = lce.load(model, lce.methods.make(method, knobs), **loading)
    with report.Bar("prefill", " tok", shown=not quiet) as bar:
        figures = engine.prefill_file(text, out, length=length, checkpoint_every=checkpoint_every, progress=bar)
    if as_json:
        click.echo(json.dumps({"context": out, "stats": dataclasses.asdict(figures)}))
    elif not quiet:
        click.echo(report.prefill_figures(figures), err=True)


@cli.group("eval")
def evaluation() -> None:
    """Measure a model with a method."""


@evaluation.command()
@options.model_option
@click.option(
    "--method",
    "names",
    multiple=True,
    default=["full"],
    show_default=True,
    callback=options.names,
    metavar="NAME",
    help="One of `lce methods`; repeatable, or a list with commas.",
)
@options.knob_option
@click.option(
    "--lengths", required=True, callback=options.lengths, metavar="LIST", help="Tokens, with commas; 2k is 2048."
)
@click.option("--samples", type=int, default=50, show_default=True, help="Prompts for each method and length.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed makes the same prompts.")
@click.option("--task", default="passkey", show_default=True, help="What is hidden in the text.")
@click.option("--filler", default="prose", show_default=True, metavar="prose|noise", help="The text it is hidden in.")
@click.option("--record", metavar="FILE", help="Write each answer down, and do not ask again what stands there.")
@options.loading_options
@options.json_option
@options.quiet_option
@options.debug_option
def passkey(
    model: str, names: list[str], knobs: dict[str, str], lengths: list[int], samples: int, seed: int, task: str,
    filler: str, record: str | None, as_json: bool, quiet: bool, **loading: Any,
) -> None:  # fmt: skip
    """Hide a fact in texts of some lengths and ask for it; the share of right answers.

    Every method gets the same prompts. Knobs given with -o go to each of the methods, -o METHOD.KEY=VALUE to one. With
    --record, an evaluation that was interrupted goes on where it was.
    """
    from lce.eval.passkey import evaluate
    from lce.eval.record import Record

    asked: dict[str, Any] = {"n": samples, "seed": seed, "task": task, "filler": filler}
    asked["record"] = Record(record) if record else None
    methods = [lce.methods.make(name, options.knobs_of(name, knobs, names)) for name in names]
    scores = []
    if not as_json:
        click.echo(report.SCORE_HEADER)
    for method in methods:
        engine = lce.load(model, method, **loading)
        for length in lengths:
            with report.Bar(f"{method.name} {length:,}", " samples", shown=not quiet) as bar:
                score = evaluate(engine, length=length, progress=bar, **asked)
            scores.append(score)
            if not as_json:
                click.echo(report.score_row(score))
    if as_json:
        click.echo(json.dumps([score.as_dict() for score in scores]))
    elif len(names) > 1 and len(lengths) > 1:
        click.echo("\n" + "\n".join(report.score_table(scores)))


@cli.command()
@options.model_option
@click.option(
    "--text", "-t", "text_file", required=True, metavar="FILE", help="A UTF-8 text to learn from; - is stdin."
)
@click.option("--out", required=True, metavar="FILE", help="The map file to write.")
@click.option("--low-dim", type=int, default=128, show_default=True, help="Numbers kept of a token in each layer.")
@click.option("--tokens", type=int, default=50_000, show_default=True, help="Read at most this much of the text.")
@click.option("--epochs", type=int, default=10, show_default=True, help="Times that each token is learned from.")
@click.option("--batch", type=int, default=128, show_default=True, help="Queries, and keys, of one step.")
@click.option("--lr", type=float, default=5e-4, show_default=True, help="Adam's step size.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed learns the same maps.")
@options.loading_options
@options.json_option
@options.quiet_option
@options.debug_option
def calibrate(
    model: str, text_file: str, out: str, low_dim: int, tokens: int, epochs: int, batch: int, lr: float, seed: int,
    as_json: bool, quiet: bool, **loading: Any,
) -> None:  # fmt: skip
    """Learn the low-dimensional keys by which a method finds single tokens of a long text.

    Writes their maps to --out and prints, for each layer, the share of the best tokens that they find in text that was
    held out, beside that of PCA. Interrupted, it goes on where it was when the same command is run again.
    """
    from lce.calibrate import Calibration, calibrate

    learning = Calibration(low_dim=low_dim, tokens=tokens, epochs=epochs, batch=batch, lr=lr, seed=seed)
    text = options.read_text(text_file)
    with report.Bars(shown=not quiet) as bars:
        recalls = calibrate(model, text, out, learning, progress=bars, **loading)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(recall) for recall in recalls]))
    else:
        click.echo("\n".join(report.recall_lines(recalls)))


@cli.command()
@click.argument("method")
@options.knob_option
@click.option("--tokens", type=int, default=24, show_default=True, help="Length of the made-up text.")
@click.option("--window", type=int, default=12, show_default=True, help="Positions the model can be trusted on.")
@click.option("--block", type=int, help="Tokens prefilled in one step.  [default: what suits the method]")
@click.option("--head", type=int, default=0, show_default=True, help="Which of 4 query heads, over 2 KV heads.")
@click.option("--seed", type=int, default=0, show_default=True, help="Another text for the method to choose from.")
@click.option("--plot", metavar="FILE", help="Draw it too, as .png, .svg or .pdf; needs lce[plot].")
@options.json_option
@options.debug_option
def explain(method: str, knobs: dict[str, str], plot: str | None, as_json: bool, **how: Any) -> None:
    """Show which keys a METHOD attends, and the distances at which it sees them.

    The method is run on a short made-up text without a model, and the matrix is read off its output: a row a query, a
    column a key, the distance in positions, or a dot where the query does not attend the key. Choices of keys by their
    content are those of random vectors.
    """
    from lce.inspect.explain import explain as explained

    explanation = explained(lce.methods.make(method, knobs), **how)
    if plot is not None:
        from lce.inspect.picture import draw

        draw(explanation, plot)
    if as_json:
        click.echo(json.dumps(report.explanation_object(explanation)))
    else:
        click.echo("\n".join(report.explanation_lines(explanation)))


@cli.command()
@options.model_option
@click.option("--method", default="full", show_default=True, metavar="NAME", help="One of `lce methods`.")
@options.knob_option
@click.option(
    "--tokens", required=True, callback=options.length, metavar="N", help="Prompt and answer in all; 32k is 32768."
)
@options.size_options
@options.budget_options
@options.json_option
@options.debug_option
def plan(model: str, method: str, knobs: dict[str, str], as_json: bool, **sizes: Any) -> None:
    """Say what a text of some length will take of memory and disk, and the longest that fits.

    Of the model only config.json is read; --dtype auto is the one that it announces, or float32. Exits with 4 where the
    text does not fit. What a pass computes on its way is not counted: leave it a few hundred MiB.
    """
    planned = lce.plan(model, lce.methods.make(method, knobs), **sizes)
    if as_json:
        click.echo(json.dumps(report.plan_object(planned)))
    else:
        click.echo("\n".join(report.plan_lines(planned)))
    if planned.refusal is not None:
        raise CapacityError(planned.refusal)


@cli.command()
@options.json_option
@options.debug_option
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
