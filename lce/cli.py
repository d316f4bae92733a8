"""The command `lce`: one function per subcommand, each of which makes a few calls of the public API.

Heavy modules are imported inside the functions, so that `--help` answers at once.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any, NoReturn

import click
from click import argument

import lce
from lce.errors import CapacityError, UsageError
from lce.kernels import levels
from lce.terminal import figures, operations, options
from lce.terminal.chat import ChatLoop, chat_prompt_options, chat_sampling, empty_or_unasked
from lce.terminal.exits import INTERRUPTED, Root, keep_interrupts, leave, prepare_streams, report_failure
from lce.terminal.methods import MethodOption, ends
from lce.terminal.options import flag
from lce.terminal.output import Output, note
from lce.terminal.ranks import quieten
from lce.terminal.reading import read_text
from lce_lab.terminal import inspecting
from lce_lab.terminal.bench import show_bench
from lce_lab.terminal.evaluation import evaluation
from lce_lab.terminal.leaderboard import leaderboard

QUESTIONS = 1024  # tokens that a prefilled text may get behind it, where --method auto chooses by the length


def main() -> NoReturn:
    """Run the command line and exit. This is the entry point of the console script `lce`."""
    try:
        prepare_streams()
        quieten(sys.argv)
        keep_interrupts()
        cli.main(prog_name="lce")
    except KeyboardInterrupt as error:  # Ctrl-C before or after the command itself
        report_failure(error)
        leave()
    except SystemExit as end:
        if end.code == INTERRUPTED:
            leave()
        raise


_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}


@click.group("lce", cls=Root, context_settings=_SETTINGS)
@click.version_option(lce.__version__, message="%(prog)s %(version)s")
@options.debug_option
def cli() -> None:
    """Run language models on texts far longer than they were trained for."""


cli.add_command(evaluation)
cli.add_command(leaderboard)


@cli.command()
@options.model_option
@chat_prompt_options
@options.context_option
@options.target_options(
    "save", "Keep the text and the answer as a context, to continue with --context.", required=False
)
@flag("--max-tokens -n TOKENS", "Write at most this many tokens.", type=options.COUNT, default=256)
@options.method_or_context_options
@options.sampling_options
@options.divided_loading_options
@options.output_options
def generate(
    model: str,
    prompt: str | list[Any],
    context_file: str | None,
    save: options.NewFile,
    method: MethodOption,
    loading: dict[str, Any],
    output: Output,
    **how: Any,
) -> None:
    """Continue a prompt, or answer it with --chat.

    The text alone goes to stdout, as it is written; progress and figures go to stderr.

    The prompt is TEXT, or --prompt. With a --prompt-file too, the file's text comes first and the prompt on a line of
    its own after it. With neither, stdin is read. The line break that ends a file or stdin is not part of the prompt.

    With --context, the method, its knobs, the window, RoPE scaling and dtype are those of the file.
    """
    engine, context = method.load(model, context_file, loading, str(prompt), how["max_tokens"])
    with output.noting(), output.bar("prefill", " tok") as bar:
        asked: lce.Context | lce.Conversation
        if isinstance(prompt, str):
            ids = engine.tokenizer.encode(prompt, bos=None if context is None else False)
            asked = engine.new_context(len(ids) + how["max_tokens"]) if context is None else context
            stream, n_tokens = engine.stream(ids, context=asked, progress=bar, **how), len(asked) + len(ids)
        else:
            asked = engine.conversation(context=context)
            stream, n_tokens = asked.stream(prompt, progress=bar, **how), asked.tokens_read + len(asked.context or ())
        if save.path is not None:
            engine.files.check_space(Path(save.path), n_tokens + how["max_tokens"])
        output.generation(stream)
    if save.path is not None:
        asked.save(save.path, force=save.force)
    output.object({**figures.generation_object(stream.result, engine.method), "context": save.path})
    if hint := empty_or_unasked(prompt, stream.result.text, engine.tokenizer):
        output.figures(hint)
    output.figures(figures.generation_line(stream.result.stats))


@cli.command()
@argument("text", nargs=-1)
@options.loaded_model_option
@flag("--system TEXT", "The system message.")
@options.context_option
@flag("--max-tokens -n TOKENS", "Tokens of one answer at most.", type=options.COUNT, default=1024)
@options.method_or_context_options
@options.given_sampling_options
@options.loading_options
@options.output_options
def chat(
    model: str,
    text: tuple[str, ...],
    system: str | None,
    context_file: str | None,
    sampling: dict[str, Any],
    method: MethodOption,
    loading: dict[str, Any],
    output: Output,
    **answering: Any,
) -> None:
    """Talk with a model that has a chat template. TEXT is the first message.

    A line of stdin is a message; /help lists the commands. Each turn reads only what is new. The answers alone go to
    stdout. Ctrl-C stops an answer, Ctrl-D ends the chat.

    Options of sampling that are left out are as the model's generation_config.json has them. If it has none, a
    frequency_penalty of 0.5 is all. --temperature 0 is greedy.
    """
    first = " ".join(text)
    if text and not first.strip():
        raise UsageError("the first message is empty; give some text, or leave it out")
    lce.Sampling(**sampling)  # raises an error for a wrong option before the model is loaded
    engine, context = method.load(model, context_file, loading)
    with output.noting():
        conversation = engine.conversation(system, context=context)
        answering["sampling"] = chat_sampling(engine, sampling, output)
        ChatLoop(conversation, output, answering).run(first)


@cli.command()
@options.model_option
@options.prompt_options
@options.context_option
@options.target_options("out", "Where the context goes, for example document.lce.")
@flag("--checkpoint-every TOKENS", "Save now and then, to resume from.", type=options.COUNT)
@flag("--keep SHARE", "Keep this share of keys and values, chosen by repeating the text (KVzip).", type=float)
@flag("--length TOKENS", "Final length of the context; for --rope dynamic and --method auto.", type=options.COUNT)
@options.method_or_context_options
@options.divided_loading_options
@options.output_options
def prefill(
    model: str,
    prompt: str,
    context_file: str | None,
    out: options.NewFile,
    method: MethodOption,
    loading: dict[str, Any],
    output: Output,
    **how: Any,
) -> None:
    """Prefill a text once, into a file that can be asked many times: `lce generate --context FILE`.

    The file fits only this model, method and its knobs, RoPE scaling and dtype. With --checkpoint-every, an interrupted
    prefill resumes when the same command is run again. With --context, the new file is that context and the text behind
    it. --method auto chooses for the text and 1,024 tokens of questions and answers, or for --length, if given.

    --keep 0.5 makes a file of half the size: the model repeats the text, and each head keeps what it attends most.
    """
    if context_file is not None and how["checkpoint_every"] is not None:
        raise UsageError("--checkpoint-every is for a text that is read from its beginning; leave it or --context out")
    room = {"more": QUESTIONS} if how["length"] is None else {"least": how["length"]}
    engine, context = method.load(model, context_file, loading, prompt, **room)
    with output.noting() as notes, output.bar("prefill", " tok") as bar:
        stats = engine.prefill_file(prompt, str(out.path), context=context, force=out.force, progress=bar, **how)
    output.object({"context": out.path, "stats": figures.stats_object(stats), "warning": next(iter(notes), None)})
    if not output.json:
        output.figures(figures.prefill_line(stats))


@cli.command()
@argument("file", metavar="FILE|MODEL")
@flag("--model -m PATH|ID|demo", "The model of a context file, to show how its text begins and ends.")
@flag("--check", "Read all weights of a MODEL, and compare them with what `lce quantize` wrote.", is_flag=True)
@options.json_options
def info(file: str, model: str | None, check: bool, output: Output) -> None:
    """Show what a context FILE or a MODEL holds.

    Of a context only the header is read, of a model config.json, the tokenizer and the headers of the weights; of a
    model on the hub no weights are downloaded. --check reads all weights. Only folders of `lce quantize` have
    checksums; of others it says whether they can be read.
    """
    with output.bar("check", "B") as bar:
        found = lce.info(file, check, progress=bar)
    if isinstance(found, lce.ModelInfo):
        if model is not None:
            raise UsageError("--model is for a context file, and FILE|MODEL is a model already; leave one of them out")
        output.object(figures.model_object(found))
        output.text(*figures.model_lines(found))
    else:
        if model is not None and found.method_file is not None:
            note(f"the text is not shown, because it was read with code, {found.method_file}, which is not run here")
            model = None
        shown = None if model is None or not found.complete else ends(model, found)
        output.object(figures.context_object(found, shown))
        output.text(*figures.context_lines(found, shown))


@cli.command()
@options.model_option
@options.methods_options
@flag("--lengths LIST", "Tokens of the texts.", default="512,2k,8k", type=options.COUNTS)
@flag("--repeats N", "Timed runs of each method and length.", type=options.COUNT, default=3)
@flag("--new-tokens N", "Tokens to decode in a run.", type=options.COUNT, default=32)
@flag("--seed", "The same seed makes the same texts.", type=int, default=0)
@flag("--profile", "Also show where a decode step's and a prefill block's time goes.", is_flag=True)
@options.loading_options
@flag("--json FILE|-", "Write JSON to this file, or - to stdout and no table.", dest="json_file")
@options.FORCE
@options.quiet_options
def bench(**what: Any) -> None:
    """Measure prefill and decode, for some methods at some lengths, beside what the machine can do.

    Prints Markdown: medians and spread, and the share of the machine's own speed of reading memory (decode) or of
    multiplying matrices (prefill), measured in the same run. Texts are random tokens. Methods take turns, after one run
    each that is not timed. Ctrl-C prints what was measured so far.
    """
    show_bench(**what)


@cli.command()
@options.model_option
@flag("--length TOKENS", "Of the texts.  [default: 1.125 to 1.5 windows, as the time allows]", type=options.COUNT)
@flag("--seconds N", "Ask for about so long.", type=click.FloatRange(min=0), default=120.0)
@flag("--task NAME", "One of `lce eval tasks`.", default="several_facts")
@flag("--filler prose|noise|essays:DIR", "The text that facts are hidden in.", default="noise")
@flag("--seed", "The same seed makes the same texts.", type=int, default=0)
@options.loading_options
@options.output_options
def recommend(**how: Any) -> None:
    """Find the method for a model: which finds most facts in texts beyond the model's window.

    Methods take turns, a text each, with eight questions. The first row is the ceiling: full attention, within half of
    the window. A method whose turn would end too late is not asked. Of methods that the questions cannot tell apart,
    the one that reads least a token is named. Few questions have wide intervals: give more --seconds. `lce eval run`
    measures any method on any task.
    """
    from lce_lab.terminal.recommending import show_recommendation

    show_recommendation(**how)


@cli.command()
@options.model_option
@flag("--text -t FILE", "A UTF-8 text to learn from; - is stdin.", dest="text_file", required=True)
@options.target_options("out", "The map file to write.")
@flag("--low-dim N", "Dimensions of a token's low-dimensional key.", type=options.COUNT, default=128)
@flag("--tokens N", "Read at most this much of the text.", type=options.COUNT, default=50_000)
@flag("--epochs N", "Passes over the text.", type=options.COUNT, default=10)
@flag("--batch N", "Queries and keys of one step.", type=options.COUNT, default=128)
@flag("--lr", "Adam's step size; it falls to 0.", type=float, default=5e-4)
@flag("--seed", "The same seed learns the same maps.", type=int, default=0)
@flag("--far N", "Distance at which esa places far keys.  [default: half the window]", type=options.COUNT)
@flag("--piece N", "Tokens of the text read at once.  [default: the window, 4096 at most]", type=options.COUNT)
@options.loading_options
@options.output_options
def calibrate(
    model: str, text_file: str, out: options.NewFile, loading: dict[str, Any], output: Output, **learning: Any
) -> None:
    """Learn the maps to low-dimensional keys, by which `esa` finds single tokens of a long text.

    Writes the maps to --out. Prints, for each layer, the share of the best tokens that they find in held-out text, and
    the share that PCA finds. An interrupted calibration resumes when the same command is run again. Maps fit the --far,
    the --window and the RoPE scaling that they were learned with. A --piece beyond the window is read while tokens are
    chosen by exact scores, as the paper reads; one of the window or less by full attention.
    """
    from lce_lab.calibrate import Calibration
    from lce_lab.calibrate import calibrate as learn

    with output.bars() as bars:
        note = lambda text: output.figures(f"lce: {text}")  # noqa: E731
        text, asked = read_text(text_file), Calibration(**learning)
        recalls = learn(model, text, str(out.path), asked, force=out.force, progress=bars, note=note, **loading)
    output.object([dataclasses.asdict(recall) for recall in recalls])
    output.text(*figures.recall_lines(recalls))


@cli.command()
@options.model_option
@options.prompt_options
@options.method_options
@flag("--last N", "Of so many of the last tokens.", type=options.COUNT, default=1)
@flag("--mark TEXT", "Also say how often this part of the text is chosen.", dest="marks", multiple=True)
@options.target_options("plot", "Also draw the choices, as .png, .svg or .pdf; needs lce[plot].", required=False)
@options.loading_options
@options.output_options
def trace(**what: Any) -> None:
    """Show what each head of each layer chose for the last tokens of a text, with scores and ranks.

    A choice is a chunk, a page, a memory block, or a token with esa; tokens that every query attends are not listed.
    Rank 1 is the best score of all that the query could choose; in --json it is 0. With --json there is also the true
    attention of each choice, the distances at which it is seen, and why a head misses what it misses; `lce inspect`
    shows all of it in a browser.
    """
    inspecting.show_trace(**what)


@cli.command()
@options.model_option
@options.given_prompt_options
@options.methods_options
@options.target_options("out", "The page to write, for example page.html.", required=False)
@flag("--json FILE|-", "Write the recording as JSON, - is stdout; see docs/inspect.md.", dest="json_file")
@flag("--mark TEXT", "Mark this part of the text, as the answer; repeatable.", dest="marks", multiple=True)
@flag("--max-tokens -n TOKENS", "Write at most this many tokens.", type=options.INDEX, default=16)
@flag("--spread N", "Tokens, evenly spread, to look at closely.", type=options.INDEX, default=200)
@flag("--judge", "Whose attention is true.", type=click.Choice(["constant", "true"]), default="constant")
@flag("--live", "Serve the page on this machine, with the engine behind it.", is_flag=True)
@flag("--port N", "The port of --live; 0 is any.", type=options.INDEX, default=0)
@flag("--max-tokens-prompt TOKENS", "Longest text of --live.", type=options.COUNT, default="64k")
@options.loading_options
@options.quiet_options
def inspect(live: bool, port: int, max_tokens_prompt: int, **what: Any) -> None:
    """Show what a model attends, token by token: one page for a browser, which needs no network.

    It runs the prompt with each --method, side by side in the page, and records what every head of every layer chose,
    at which distances it saw it, and what full attention would have looked at. Where that is more than some MiB, it is
    beside the page, in NAME.data.

    With --live the page is served on 127.0.0.1 and asks for text, method and knobs itself; only who has the printed
    address can use it.
    """
    if live:
        inspecting.serve_live(port=port, most_prompt=max_tokens_prompt, **what)
    else:
        inspecting.write_recording(**what)


@cli.command()
@options.named_options
@flag("--tokens N", "Length of the made-up text.", type=options.COUNT, default=24)
@flag("--window N", "Positions of the model, and knobs by default for them.", type=options.COUNT)
@flag("--block N", "Tokens prefilled in one step.", type=options.COUNT)
@flag("--head N", "Which of 4 query heads, over 2 KV heads.", type=options.INDEX, default=0)
@flag("--seed", "Another seed makes another text.", type=int, default=0)
@options.target_options("plot", "Also draw the matrix, as .png, .svg or .pdf; needs lce[plot].", required=False)
@options.json_options
def explain(named: tuple[str, dict[str, str]], plot: options.NewFile, output: Output, **setting: Any) -> None:
    """Show which keys a METHOD attends, and the distances at which it sees them.

    The method runs on a short made-up text without a model, and the matrix is read from its output. A row is a query
    and a column a key; a cell is the distance in positions, or a dot if the query does not attend the key. The text is
    random vectors, so methods that select keys by content select among random ones.

    Without --window the knobs are those of a small example that shows the method's idea; -o changes single ones. With
    --window they are the method's defaults for it.
    """
    from lce_lab.study import explain as inspection

    method, knobs = named
    explanation = inspection.explain(method, knobs=knobs, **setting)
    if plot.path is not None:
        from lce_lab.study.pictures import draw_distances

        draw_distances(explanation, plot.path, force=plot.force)
    output.object(figures.explanation_object(explanation))
    output.text(*figures.explanation_lines(explanation))


@cli.command()
@options.model_option
@options.planned_methods_options
@flag("--tokens N", "Prompt and answer; 2k is 2048.", required=True, type=options.COUNT)
@flag("--operations", "Also count operations and bytes read, by phase.", dest="counts_operations", is_flag=True)
@options.planning_options
@options.json_options
def plan(
    model: str, methods: dict[str, Any], tokens: int, counts_operations: bool, planning: dict[str, Any], output: Output
) -> None:
    """Print the memory and disk that a text of some length takes, and the longest text that fits.

    Only config.json of the model is read, or the header of its GGUF file; --dtype auto is the dtype that it names, or
    float32. Exits with 4 if the text
    does not fit. Says so if the method cannot read so long a text. Activations are those of the model: what choosing
    keys takes is not counted. --operations counts multiply-adds and
    bytes read of the prefill and of the last decode step, by what they are for, beside plain causal attention.
    """
    planned = lce.plan(model, tokens=tokens, **methods, **planning)
    counted = lce.operations(model, tokens=tokens, **methods, **planning) if counts_operations else None
    more = {"operations": operations.operations_object(counted)} if counted else {}
    output.object(figures.plan_object(planned) | more)
    output.text(*figures.plan_lines(planned), *(["", *operations.operations_lines(counted)] if counted else []))
    if planned.refusal is not None:
        raise CapacityError(planned.refusal)


@cli.command()
@options.model_option
@flag("--weights int8|int4", "Bits of a weight.", default="int4")
@flag("--out DIR", "A new folder, or an empty one.", required=True)
@options.output_options
def quantize(model: str, weights: str, out: str, output: Output) -> None:
    """Write a checkpoint with its matrices in 8 or 4 bits, to load without rounding them each time.

    `--model DIR` then computes what `--model MODEL --weights int4` does, and opens the same contexts.
    """
    with output.bar("quantize", "B") as bar:
        lce.quantize(model, out, weights, progress=bar)
    found = lce.info(out)
    assert isinstance(found, lce.ModelInfo)
    output.object(figures.model_object(found))
    output.figures(figures.quantised_line(found))


@cli.command()
@flag(
    "--level LEVEL",
    f"{', '.join(levels.NAMES)}, or all that a wheel has; repeatable.  [default: this processor's]",
    type=click.Choice([*levels.NAMES, "all"]),
    multiple=True,
)
@options.output_options
def warm(level: tuple[str, ...], output: Output) -> None:
    """Compile the CPU kernels that are missing, ahead of their first use: in a container's image, for example.

    They are kept beside the package if this user may write there, else in the user's cache. Installing lce compiles
    those of its processor; --level is for images that run elsewhere. Kernels for GPUs are not among them: Triton
    compiles those when they are first used.
    """
    from lce.kernels.building import build

    named = [each for name in level for each in (levels.LEVELS if name == "all" else [name])]
    asked = [levels.find(name) for name in dict.fromkeys(named)] or [levels.asked()]
    found = []
    for each in asked:
        with output.bar(f"kernels for {each.name}", " kernels") as bar:
            found.append(build(each, bar))
        output.figures(f"lce: {found[-1].line}")
    output.object([dataclasses.asdict(built) | {"folder": str(built.folder)} for built in found])


@cli.command()
@options.loaded_model_option
@flag("--host ADDRESS", "Where to listen; other than loopback only with a key.", default="127.0.0.1")
@flag("--port N", "The port; 0 is any.", type=options.INDEX, default=8000)
@flag("--api-key KEY", "The key that clients must give.  [default: LCE_API_KEY]", envvar="LCE_API_KEY")
@flag("--open-metrics", "/metrics needs no key, for routers and Prometheus.", is_flag=True)
@flag("--cors ORIGIN", "Web pages of this origin may ask; repeatable.", multiple=True)
@flag("--name NAME", "The model's name for clients.  [default: the last part of --model]")
@flag("--lanes N", "Requests that run at once.", type=options.COUNT, default=8)
@flag("--queue N", "Requests that wait; more are refused with 429.", type=options.INDEX, default=256)
@flag("--replicas N", "Engines in processes of their own; needs lce[ray].", type=options.COUNT, default=1)
@flag("--cache-dir DIR", "Keep contexts of ended requests here, for later runs too.")
@flag("--cache-budget SIZE", "The most bytes in that folder.", default="50GiB")
@flag("--context NAME=FILE", "Serve this file of `lce prefill` as MODEL@NAME; repeatable.", multiple=True)
@flag("--ping SECONDS", "The longest silence of a stream.", type=click.FloatRange(min=0.1), default=5.0)
@flag("--drain SECONDS", "How long streams may go on after a signal.", type=click.FloatRange(min=0), default=30.0)
@options.planned_methods_options
@options.loading_options
@options.quiet_options
def serve(**what: Any) -> None:
    """Serve a model over HTTP, with the APIs of OpenAI and Anthropic. Needs lce[serve].

    It listens on this machine alone, unless it has a key. The address goes to stderr, and a line of JSON for each
    request. SIGTERM and Ctrl-C end it when the streams that run have ended; a second signal ends it at once.
    """
    from lce_serve.serving import serve as run

    run(**what)


@cli.command()
@argument("name", required=False, metavar="[NAME|FILE.py]", callback=options.parse_name)
@options.json_options
def methods(name: str | None, output: Output) -> None:
    """List the methods, or show the one called NAME: its knobs, their defaults, and what they mean."""
    listed = []
    for each in lce.methods.available() if name is None else [name]:
        try:
            listed.append(figures.method_object(each, lce.methods.find(each)))
        except UsageError as error:  # a package's broken method must not hide the other methods
            if name is not None:
                raise
            click.echo(f"lce: warning: {error}", err=True)
    output.object(listed if name is None else listed[0])
    for method in listed:
        output.text(*figures.method_lines(method), "")
    output.text("A knob that is none is derived from the model's window.")


@cli.command()
@argument("id", required=False, metavar="[ID]")
@flag("--model -m PATH|ID|demo", "A folder, a .gguf file, or a hub id.", default="demo")
@flag("--data PATH", "The paper's data, or texts of your own; repeatable.", multiple=True)
@flag("--lengths LIST", "Tokens.  [default: the paper's, by the window]", type=options.COUNTS)
@flag("--sizes N", "The window that rows' sizes are fractions of.  [default: the model's]", type=options.COUNT)
@flag("--samples N", "Samples of a row and length.  [default: the entry's]", type=options.COUNT)
@flag("--seed", "The same seed makes the same samples.", type=int, default=0)
@flag("--record FILE", "Keep the answers in this file; samples that it has are skipped.")
@flag("--dry-run", "Print the commands and run none.", is_flag=True)
@options.knobs_option
@options.loading_options
@options.output_options
def reproduce(id: str | None, output: Output, lengths: list[int] | None, **setting: Any) -> None:
    """Run the table or figure ID of a paper, beside the paper's numbers; without ID, list them.

    -o KEY=VALUE is a knob of all rows that have it and do not vary it, -o METHOD.KEY=VALUE of one method's.
    """
    from lce_lab.terminal import reproducing

    if id is None:
        return reproducing.list_entries(output)
    reproducing.reproduce(id, output, lengths=lengths or (), **setting)
