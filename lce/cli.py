"""The command `lce`: one function a subcommand, each a few calls of the public face.

Heavy modules are imported inside the functions, so that `--help` answers at once.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any, NoReturn

import click
from click import argument, option

import lce
from lce.errors import CapacityError, UsageError
from lce.system import wait_passively
from lce.terminal import figures, inspecting, operations, options
from lce.terminal.bench import ReportOutput, report_options
from lce.terminal.chat import ChatLoop, chat_prompt_options
from lce.terminal.contexts import MethodOption, ask, ends
from lce.terminal.evaluation import evaluation
from lce.terminal.exits import INTERRUPTED, Root, keep_interrupts, leave_interrupted, prepare_streams, report_failure
from lce.terminal.output import Output
from lce.terminal.reading import Prompt, read_text


def main() -> NoReturn:
    """Run the console script."""
    try:
        wait_passively()
        prepare_streams()
        keep_interrupts()
        cli.main(prog_name="lce")
    except KeyboardInterrupt as error:  # before or after the command
        report_failure(error)
        leave_interrupted()
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


cli.add_command(evaluation)


@cli.command()
@options.model_option
@chat_prompt_options
@options.context_option
@options.target_options(
    "save", "Keep the text and the answer as a context, to continue with --context.", required=False
)
@options.max_tokens_option
@options.method_or_context_options
@options.sampling_options
@options.loading_options
@options.output_options
def generate(
    model: str, prompt: str | list[Any], context_file: str | None, save: str | None, max_tokens: int,
    method: MethodOption, sampling: lce.Sampling, loading: dict[str, Any], output: Output,
) -> None:  # fmt: skip
    """Continue a prompt, or answer it with --chat.

    The text alone goes to stdout, as it is written; progress and figures go to stderr.

    The prompt is TEXT, or --prompt. With a --prompt-file too, the file's text comes first and the prompt on a line of
    its own after it. With neither, stdin is read. The line break that ends a file or stdin is not part of the prompt.

    With --context, the method, its knobs, the window, RoPE scaling and dtype are those of the file.
    """
    engine = method.load(model, context_file, loading)
    context = None if context_file is None else engine.open_context(context_file)
    with output.noting(), output.bar("prefill", " tok") as bar:
        stream, keep = ask(engine, prompt, context, max_tokens=max_tokens, sampling=sampling, progress=bar)
        output.generation(stream)
    if save is not None:
        keep(save)
    output.object({**figures.generation_object(stream.result, engine.method), "context": save})
    output.figures(figures.generation_line(stream.result.stats))


@cli.command()
@options.model_option
@option("--system", metavar="TEXT", help="The system message.")
@options.context_option
@option("--max-tokens", "-n", type=options.COUNT, default=1024, metavar="TOKENS", help="Tokens of one answer at most.")
@options.method_or_context_options
@options.sampling_options
@options.loading_options
@options.output_options
def chat(
    model: str, system: str | None, context_file: str | None, max_tokens: int, method: MethodOption,
    sampling: lce.Sampling, loading: dict[str, Any], output: Output,
) -> None:  # fmt: skip
    """Talk with a model that has a chat template.

    A line of stdin is a message; /help lists the commands. Each turn reads only what is new. The answers alone go to
    stdout. Ctrl-C stops an answer, Ctrl-D ends the chat.
    """
    engine = method.load(model, context_file, loading)
    context = None if context_file is None else engine.open_context(context_file)
    conversation = engine.conversation(system, context=context)
    saved = set() if context_file is None else {os.path.realpath(context_file)}
    with output.noting():
        ChatLoop(conversation, output, {"max_tokens": max_tokens, "sampling": sampling}, saved).run()


@cli.command()
@options.model_option
@options.prompt_options
@options.context_option
@options.target_options("out", "Where the context goes, for example document.lce.")
@option("--checkpoint-every", type=options.COUNT, metavar="TOKENS", help="Save now and then, to resume from.")
@option("--length", type=options.COUNT, metavar="TOKENS", help="Final length of the context; for --rope dynamic.")
@options.method_or_context_options
@options.loading_options
@options.output_options
def prefill(
    model: str, prompt: str, context_file: str | None, out: str, checkpoint_every: int | None, length: int | None,
    method: MethodOption, loading: dict[str, Any], output: Output,
) -> None:  # fmt: skip
    """Prefill a text once, into a file that can be asked many times: `lce generate --context FILE`.

    The file fits only this model, method and its knobs, RoPE scaling and dtype. With --checkpoint-every, an interrupted
    prefill resumes when the same command is run again. With --context, the new file is that context and the text behind
    it.
    """
    if context_file is not None and checkpoint_every is not None:
        raise UsageError("--checkpoint-every is for a text that is read from its beginning; leave it or --context out")
    engine = method.load(model, context_file, loading)
    context = None if context_file is None else engine.open_context(context_file)
    with output.noting() as notes, output.bar("prefill", " tok") as bar:
        stats = engine.prefill_file(
            prompt, out, context=context, length=length, checkpoint_every=checkpoint_every, progress=bar
        )
    output.object({"context": out, "stats": figures.stats_object(stats), "warning": next(iter(notes), None)})
    if not output.json:
        output.figures(figures.prefill_line(stats))


@cli.command()
@argument("file", metavar="FILE|MODEL")
@option("--model", "-m", metavar="PATH|demo", help="The model of a context file, to show how its text begins and ends.")
@options.json_options
def info(file: str, model: str | None, output: Output) -> None:
    """Show what a context FILE or the folder of a MODEL holds.

    Of a context only the header is read, of a model config.json, the tokenizer and the headers of the weights.
    """
    from lce.terminal import info as about

    found = lce.info(file)
    if isinstance(found, lce.ModelInfo):
        if model is not None:
            raise UsageError("--model is for a context file, and FILE|MODEL is a model already; leave one of them out")
        output.object(about.model_object(found))
        output.text(*about.model_lines(found))
    else:
        shown = None if model is None or not found.complete else ends(model, found)
        output.object(about.context_object(found, shown))
        output.text(*about.context_lines(found, shown))


@cli.command()
@options.model_option
@options.methods_options
@option("--lengths", default="512,2k,8k", type=options.COUNTS, metavar="LIST", help="Tokens of the texts.")
@option("--repeats", type=options.COUNT, default=3, metavar="N", help="Timed runs of each method and length.")
@option("--new-tokens", type=options.COUNT, default=32, metavar="N", help="Tokens to decode in a run.")
@option("--seed", type=int, default=0, help="The same seed makes the same texts.")
@option("--profile", is_flag=True, help="Also show where a decode step's and a prefill block's time goes.")
@options.loading_options
@report_options
def bench(model: str, methods: list[lce.Method], loading: dict[str, Any], output: ReportOutput, **what: Any) -> None:
    """Measure prefill and decode, for some methods at some lengths, beside what the machine can do.

    Prints Markdown: medians and spread, and the share of the machine's own speed of reading memory (decode) or of
    multiplying matrices (prefill), measured in the same run. Texts are random tokens. Methods take turns, after one run
    each that is not timed. Ctrl-C prints what was measured so far.
    """
    from lce.lab.bench import Bench

    output.run(Bench(model, methods, **what, **loading))


@cli.command()
@options.model_option
@option("--text", "-t", "text_file", required=True, metavar="FILE", help="A UTF-8 text to learn from; - is stdin.")
@options.target_options("out", "The map file to write.")
@option("--low-dim", type=options.COUNT, default=128, metavar="N", help="Dimensions of a token's low-dimensional key.")
@option("--tokens", type=options.COUNT, default=50_000, metavar="N", help="Read at most this much of the text.")
@option("--epochs", type=options.COUNT, default=10, metavar="N", help="Passes over the text.")
@option("--batch", type=options.COUNT, default=128, metavar="N", help="Queries and keys of one step.")
@option("--lr", type=float, default=5e-4, help="Adam's step size; it falls to 0.")
@option("--seed", type=int, default=0, help="The same seed learns the same maps.")
@option(
    "--far", type=options.COUNT, metavar="N", help="Distance at which esa places far keys.  [default: half the window]"
)
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

    with output.bars() as bars:
        note = lambda text: output.figures(f"lce: {text}")  # noqa: E731
        recalls = learn(model, read_text(text_file), out, Calibration(**learning), progress=bars, note=note, **loading)
    output.object([dataclasses.asdict(recall) for recall in recalls])
    output.text(*figures.recall_lines(recalls))


@cli.command()
@options.model_option
@options.prompt_options
@options.method_options
@option("--last", type=options.COUNT, default=1, metavar="N", help="Of so many of the last tokens.")
@option("--mark", "marks", multiple=True, metavar="TEXT", help="Also say how often this part of the text is chosen.")
@option("--plot", metavar="FILE", help="Also draw the choices, as .png, .svg or .pdf; needs lce[plot].")
@options.loading_options
@options.output_options
def trace(
    model: str, prompt: str, method: lce.Method, plot: str | None, loading: dict[str, Any], output: Output, **what: Any
) -> None:
    """Show what each head of each layer chose for the last tokens of a text, with scores and ranks.

    A choice is a chunk, a page, a memory block, or a token with esa; tokens that every query attends are not listed.
    Rank 1 is the best score of all that the query could choose; in --json it is 0. With --json there is also the true
    attention of each choice, the distances at which it is seen, and why a head misses what it misses; `lce inspect`
    shows all of it in a browser.
    """
    from lce.terminal.tracing import show_trace

    options.new_file(plot, force=True)
    show_trace(model, method, prompt, plot=plot, loading=loading, output=output, **what)


@cli.command()
@options.model_option
@options.later_prompt_options
@options.methods_options
@options.target_options("out", "The page to write, for example page.html.", required=False)
@option("--json", "json_file", metavar="FILE|-", help="Write the recording as JSON, - is stdout; see docs/inspect.md.")
@option("--mark", "marks", multiple=True, metavar="TEXT", help="Mark this part of the text, as the answer; repeatable.")
@option("--max-tokens", "-n", type=options.INDEX, default=16, metavar="TOKENS", help="Write at most this many tokens.")
@option("--spread", type=options.INDEX, default=200, metavar="N", help="Tokens, evenly spread, to look at closely.")
@option("--judge", type=click.Choice(["constant", "true"]), default="constant", help="Whose attention is true.")
@option("--live", is_flag=True, help="Serve the page on this machine, with the engine behind it.")
@option("--port", type=options.INDEX, default=0, metavar="N", help="The port of --live; 0 is any.")
@option("--max-tokens-prompt", type=options.COUNT, default="64k", metavar="TOKENS", help="Longest text of --live.")
@options.loading_options
@options.quiet_options
def inspect(
    model: str, prompt: Prompt, methods: list[lce.Method], out: str | None, json_file: str | None, live: bool,
    port: int, max_tokens_prompt: int, loading: dict[str, Any], output: Output, **what: Any,
) -> None:  # fmt: skip
    """Show what a model attends, token by token: one page for a browser, which needs no network.

    It runs the prompt with each --method, side by side in the page, and records what every head of every layer chose,
    at which distances it saw it, and what full attention would have looked at. Where that is more than some MiB, it is
    beside the page, in NAME.data.

    With --live the page is served on 127.0.0.1 and asks for text, method and knobs itself; only who has the printed
    address can use it.
    """
    if live:
        inspecting.note_unused()
        text = prompt.read() if prompt.is_given else ""
        return inspecting.serve_live(model, text, port, max_tokens_prompt, loading, output)
    inspecting.write_recording(model, methods, prompt, out, json_file, what, loading, output)


@cli.command()
@options.named_options
@option("--tokens", type=options.COUNT, default=24, metavar="N", help="Length of the made-up text.")
@option("--window", type=options.COUNT, metavar="N", help="Positions of the model, and knobs by default for them.")
@option("--block", type=options.COUNT, metavar="N", help="Tokens prefilled in one step.")
@option("--head", type=options.INDEX, default=0, metavar="N", help="Which of 4 query heads, over 2 KV heads.")
@option("--seed", type=int, default=0, help="Another seed makes another text.")
@option("--plot", metavar="FILE", help="Also draw the matrix, as .png, .svg or .pdf; needs lce[plot].")
@options.json_options
def explain(named: tuple[str, dict[str, str]], plot: str | None, output: Output, **setting: Any) -> None:
    """Show which keys a METHOD attends, and the distances at which it sees them.

    The method runs on a short made-up text without a model, and the matrix is read from its output. A row is a query
    and a column a key; a cell is the distance in positions, or a dot if the query does not attend the key. The text is
    random vectors, so methods that select keys by content select among random ones.

    Without --window the knobs are those of a small example that shows the method's idea; -o changes single ones. With
    --window they are the method's defaults for it.
    """
    from lce.lab.study import explain as inspection

    options.new_file(plot, force=True)
    method, knobs = named
    explanation = inspection.explain(method, knobs=knobs, **setting)
    if plot is not None:
        from lce.lab.study.picture import draw

        draw(explanation, plot)
    output.object(figures.explanation_object(explanation))
    output.text(*figures.explanation_lines(explanation))


@cli.command()
@options.model_option
@options.method_options
@option("--tokens", required=True, type=options.COUNT, metavar="N", help="Prompt and answer; 2k is 2048.")
@option("--operations", "counts_operations", is_flag=True, help="Also count operations and bytes read, by phase.")
@options.planning_options
@options.json_options
def plan(
    model: str, method: lce.Method, tokens: int, counts_operations: bool, planning: dict[str, Any], output: Output
) -> None:
    """Print the memory and disk that a text of some length takes, and the longest text that fits.

    Only config.json of the model is read; --dtype auto is the dtype that it names, or float32. Exits with 4 if the text
    does not fit. Activations are not counted: leave a few hundred MiB for them. --operations counts multiply-adds and
    bytes read of the prefill and of the last decode step, by what they are for, beside plain causal attention.
    """
    planned = lce.plan(model, method, tokens=tokens, **planning)
    counted = lce.operations(model, method, tokens=tokens, **planning) if counts_operations else None
    more = {"operations": operations.operations_object(counted)} if counted else {}
    output.object(figures.plan_object(planned) | more)
    output.text(*figures.plan_lines(planned), *(["", *operations.operations_lines(counted)] if counted else []))
    if planned.refusal is not None:
        raise CapacityError(planned.refusal)


@cli.command()
@options.model_option
@option("--weights", default="int4", metavar="int8|int4", help="Bits of a weight.")
@option("--out", required=True, metavar="DIR", help="A new folder, or an empty one.")
@options.output_options
def quantize(model: str, weights: str, out: str, output: Output) -> None:
    """Write a checkpoint with its matrices in 8 or 4 bits, to load without rounding them each time.

    `--model DIR` then computes what `--model MODEL --weights int4` does, and opens the same contexts.
    """
    with output.bar("quantize", "B") as bar:
        lce.quantize(model, out, weights, progress=bar)
    from lce.terminal.info import model_object

    found = lce.info(out)
    assert isinstance(found, lce.ModelInfo)
    output.object(model_object(found))
    output.figures(figures.quantised_line(found))


@cli.command()
@argument("name", required=False)
@options.json_options
def methods(name: str | None, output: Output) -> None:
    """List the methods, or show the one called NAME: its knobs, their defaults, and what they mean."""
    listed = []
    for each in lce.methods.available() if name is None else [name]:
        try:
            listed.append(figures.method_object(each, lce.methods.find(each)))
        except UsageError as error:  # one package's broken method hides no other
            if name is not None:
                raise
            click.echo(f"lce: warning: {error}", err=True)
    output.object(listed if name is None else listed[0])
    for method in listed:
        output.text(*figures.method_lines(method), "")
    output.text("A knob that is none is derived from the model's window.")


@cli.command()
@argument("id", required=False, metavar="[ID]")
@option("--model", "-m", default="demo", metavar="PATH|demo", help="Folder of a safetensors checkpoint.")
@option("--data", multiple=True, metavar="PATH", help="The paper's data, or texts of your own; repeatable.")
@option("--lengths", type=options.COUNTS, metavar="LIST", help="Tokens.  [default: the paper's, by the window]")
@option("--samples", type=options.COUNT, metavar="N", help="Samples of a row and length.  [default: the entry's]")
@option("--seed", type=int, default=0, help="The same seed makes the same samples.")
@option("--record", metavar="FILE", help="Keep the answers in this file; samples that it has are skipped.")
@option("--dry-run", is_flag=True, help="Print the commands and run none.")
@options.knobs_option
@options.loading_options
@options.output_options
def reproduce(id: str | None, output: Output, lengths: list[int] | None, **setting: Any) -> None:
    """Run the table or figure ID of a paper, beside the paper's numbers; without ID, list them.

    -o KEY=VALUE is a knob of all rows that have it and do not vary it, -o METHOD.KEY=VALUE of one method's.
    """
    from lce.terminal import reproducing

    if id is None:
        return reproducing.list_entries(output)
    reproducing.reproduce(id, output, lengths=lengths or (), **setting)
