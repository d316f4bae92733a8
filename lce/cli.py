"""The command `lce`: one function a subcommand, each a few calls of the public face.

Heavy modules are imported inside the functions, so that `--help` answers at once.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

import click
from click import option

import lce
from lce.errors import CapacityError, UsageError
from lce.terminal import figures, options
from lce.terminal.exits import INTERRUPTED, Root, leave_interrupted, prepare_streams
from lce.terminal.output import Output


def main() -> NoReturn:
    """The console script."""
    prepare_streams()
    try:
        cli.main(prog_name="lce")
    except SystemExit as end:
        if end.code == INTERRUPTED:
            leave_interrupted()
        raise


_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}


@click.group("lce", cls=Root, context_settings=_SETTINGS)
@click.version_option(lce.__version__, message="%(prog)s %(version)s")
@options.debug_option
def cli() -> None:
    """Run language models on texts far longer than they were trained for."""


@cli.command()
@options.model_option
@options.prompt_options
@option("--context", "context_file", metavar="FILE", help="Continue this file of `lce prefill`; it does not change.")
@option("--max-tokens", type=int, default=256, help="Write at most this many tokens.")
@options.method_options
@options.sampling_options
@options.loading_options
@options.output_options
def generate(
    model: str, prompt: str, context_file: str | None, max_tokens: int, method: lce.Method, sampling: lce.Sampling,
    loading: dict[str, Any], output: Output,
) -> None:  # fmt: skip
    """Continue a prompt.

    The text alone goes to stdout, as it is written; progress and figures go to stderr.

    With both --prompt-file and --prompt, the file's text comes first and the prompt on a line of its own after it.
    With neither, stdin is read. The line break that ends a file or stdin is not part of the prompt.
    """
    engine = lce.load(model, method, **loading)
    context = None if context_file is None else engine.open_context(context_file)
    with output.bar("prefill", " tok") as bar:
        stream = engine.stream(prompt, context=context, max_tokens=max_tokens, sampling=sampling, progress=bar)
        output.generation(stream)
    output.object(figures.generation_object(stream.result, engine.method))
    output.figures(figures.generation_line(stream.result.stats))


@cli.command()
@options.model_option
@options.prompt_options
@option("--out", required=True, metavar="FILE", help="Where the context goes, for example document.lce.")
@option("--checkpoint-every", type=int, metavar="TOKENS", help="Save after every so many tokens, to resume from.")
@option("--length", type=int, metavar="TOKENS", help="Final length of the context; for --rope dynamic.")
@options.method_options
@options.loading_options
@options.output_options
def prefill(
    model: str, prompt: str, out: str, method: lce.Method, loading: dict[str, Any], output: Output, **reading: Any
) -> None:
    """Prefill a text once, into a file that can be asked many times: `lce generate --context FILE`.

    The file fits only this model, method and its knobs, RoPE scaling and dtype. With --checkpoint-every, an interrupted
    prefill resumes when the same command is run again.
    """
    engine = lce.load(model, method, **loading)
    with output.bar("prefill", " tok") as bar:
        stats = engine.prefill_file(prompt, out, progress=bar, **reading)
    output.object({"context": out, "stats": dataclasses.asdict(stats)})
    if not output.json:
        output.figures(figures.prefill_line(stats))


@cli.group("eval")
def evaluation() -> None:
    """Measure a model with a method."""


@evaluation.command()
@options.model_option
@options.methods_options
@option("--lengths", required=True, callback=options.parse_lengths, metavar="LIST", help="Such as 512,2k (2k is 2048).")
@option("--samples", "n", type=int, default=50, help="Prompts for each method and length.")
@option("--seed", type=int, default=0, help="The same seed makes the same prompts.")
@option("--task", default="passkey", help="What is hidden in the text.")
@option("--filler", default="prose", metavar="prose|noise", help="The text it is hidden in.")
@option("--record", metavar="FILE", help="Keep the answers in this file; samples that it has are skipped.")
@options.loading_options
@options.output_options
def passkey(
    model: str, methods: list[lce.Method], lengths: list[int], record: str | None, loading: dict[str, Any],
    output: Output, **task: Any,
) -> None:  # fmt: skip
    """Hide a fact in texts of some lengths, ask for it, and print the share of right answers.

    Every method gets the same prompts. -o KEY=VALUE is a knob of all methods, -o METHOD.KEY=VALUE of one. With
    --record, an interrupted evaluation resumes when the same command is run again.
    """
    from lce.eval.passkey import evaluate
    from lce.eval.record import Record

    answers = Record(record) if record else None
    scores = []
    output.text(figures.SCORE_HEADER)
    for method in methods:
        engine = lce.load(model, method, **loading)
        for length in lengths:
            with output.bar(f"{method.name} {length:,}", " samples") as bar:
                scores.append(evaluate(engine, length=length, record=answers, progress=bar, **task))
            output.text(figures.score_row(scores[-1]))
    output.object([dataclasses.asdict(score) for score in scores])
    if len(methods) > 1 and len(lengths) > 1:
        output.text("", *figures.score_table(scores))


@cli.command()
@options.model_option
@option("--text", "-t", "text_file", required=True, metavar="FILE", help="A UTF-8 text to learn from; - is stdin.")
@option("--out", required=True, metavar="FILE", help="The map file to write.")
@option("--low-dim", type=int, default=128, help="Dimensions of a token's low-dimensional key.")
@option("--tokens", type=int, default=50_000, help="Read at most this much of the text.")
@option("--epochs", type=int, default=10, help="Passes over the text.")
@option("--batch", type=int, default=128, help="Queries and keys of one step.")
@option("--lr", type=float, default=5e-4, help="Adam's step size; it falls to 0.")
@option("--seed", type=int, default=0, help="The same seed learns the same maps.")
@option("--far", type=int, help="Distance at which esa will place far keys.  [default: half of the window]")
@options.loading_options
@options.output_options
def calibrate(model: str, text_file: str, out: str, loading: dict[str, Any], output: Output, **learning: Any) -> None:
    """Learn the maps to low-dimensional keys, by which `esa` finds single tokens of a long text.

    Writes the maps to --out. Prints, for each layer, the share of the best tokens that they find in held-out text, and
    the share that PCA finds. An interrupted calibration resumes when the same command is run again. Maps fit the --far,
    the --window and the RoPE scaling that they were learned with.
    """
    from lce.calibrate import Calibration
    from lce.calibrate import calibrate as learn

    text = options.read_text(text_file)
    with output.bars() as bars:
        note = lambda text: output.figures(f"lce: {text}")  # noqa: E731
        recalls = learn(model, text, out, Calibration(**learning), progress=bars, note=note, **loading)
    output.object([dataclasses.asdict(recall) for recall in recalls])
    output.text(*figures.recall_lines(recalls))


@cli.command()
@options.method_argument
@option("--tokens", type=int, default=24, help="Length of the made-up text.")
@option("--window", type=int, default=12, help="Positions the model can be trusted on.")
@option("--block", type=int, help="Tokens prefilled in one step.  [default: what suits the method]")
@option("--head", type=int, default=0, help="Which of 4 query heads, over 2 KV heads.")
@option("--seed", type=int, default=0, help="Another seed makes another text.")
@option("--plot", metavar="FILE", help="Also draw the matrix, as .png, .svg or .pdf; needs lce[plot].")
@options.json_options
def explain(method: lce.Method, plot: str | None, output: Output, **setting: Any) -> None:
    """Show which keys a METHOD attends, and the distances at which it sees them.

    The method runs on a short made-up text without a model, and the matrix is read from its output. A row is a query
    and a column a key; a cell is the distance in positions, or a dot if the query does not attend the key. The text is
    random vectors, so methods that select keys by content select among random ones.
    """
    from lce.inspect import explain as inspection

    explanation = inspection.explain(method, **setting)
    if plot is not None:
        from lce.inspect.picture import draw

        draw(explanation, plot)
    output.object(figures.explanation_object(explanation))
    output.text(*figures.explanation_lines(explanation))


@cli.command()
@options.model_option
@options.method_options
@option("--tokens", required=True, callback=options.parse_length, metavar="N", help="Prompt and answer; 2k is 2048.")
@options.planning_options
@options.json_options
def plan(model: str, method: lce.Method, tokens: int, planning: dict[str, Any], output: Output) -> None:
    """Print the memory and disk that a text of some length takes, and the longest text that fits.

    Only config.json of the model is read; --dtype auto is the dtype that it names, or float32. Exits with 4 if the text
    does not fit. Activations are not counted: leave a few hundred MiB for them.
    """
    planned = lce.plan(model, method, tokens=tokens, **planning)
    output.object(figures.plan_object(planned))
    output.text(*figures.plan_lines(planned))
    if planned.refusal is not None:
        raise CapacityError(planned.refusal)


@cli.command()
@options.json_options
def methods(output: Output) -> None:
    """List the methods, their knobs and defaults."""
    listed = []
    for name in lce.methods.available():
        try:
            listed.append(figures.method_object(name, lce.methods.find(name)))
        except UsageError as error:  # one package's broken method hides no other
            click.echo(f"lce: warning: {error}", err=True)
    output.object(listed)
    for method in listed:
        output.text(*figures.method_lines(method), "")
    output.text("A knob that is none is derived from the model's window.")
