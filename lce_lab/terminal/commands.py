"""The laboratory's commands beside `lce eval` and `lce leaderboard`, entry points of `lce.commands`, and their output.

Heavy modules are imported inside the functions, so that `--help` answers at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import click
from click import argument

from lce.errors import CapacityError, WindowWarning
from lce.files import named
from lce.sizes import size_text
from lce.terminal import options
from lce.terminal.options import flag
from lce.terminal.output import Output, aligned, note
from lce.terminal.reading import read_text
from lce_lab.stages import bars
from lce_lab.terminal import inspecting
from lce_lab.terminal.bench import show_bench
from lce_lab.terminal.options import method_options, methods_options, named_options

if TYPE_CHECKING:
    from lce.methods.choices import Choice
    from lce_lab.calibrate import Recall
    from lce_lab.eval.recommend import Probe, Recommendation
    from lce_lab.study.explain import Explanation

FOUND = ("method", "tokens", "right", "95% interval", "questions", "s a text", "read a token")
ROWS = (
    "",
    "A row is a method: the tokens of its texts, the share of its questions answered right and where that share lies",
    "in 19 of 20 such trials, the seconds of a text with its questions, and what is read of the text's keys and",
    "values to write a token. The first row is full attention within the window: the most that a method can reach.",
    "The facts are made up, and easy to tell from the text around them: in a document of yours fewer may be found.",
)


@click.command()
@options.model_option
@methods_options
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


@click.command()
@options.model_option
@flag("--length TOKENS", "Of the texts.  [default: 1.125 to 1.5 windows, as the time allows]", type=options.COUNT)
@flag("--seconds N", "Ask for about so long.", type=click.FloatRange(min=0), default=300.0)
@flag("--task NAME", "One of `lce eval tasks`.", default="several_facts")
@flag("--filler prose|noise|essays:DIR", "The text that facts are hidden in.", default="noise")
@flag("--seed", "The same seed makes the same texts.", type=int, default=0)
@options.loading_options
@options.output_options
def recommend(model: str, loading: dict[str, Any], output: Output, **how: Any) -> None:
    """Find the method for a model: which finds most facts in texts beyond the model's window.

    Methods take turns, a text each, with eight questions; some with RoPE scaling or three quarters of the window. The
    first row is the ceiling: full attention, within half of the window. A method whose turn would end too late is not
    asked, and says so. The last line names the method to take: what --method auto takes for this length, unless the
    questions tell another one apart as better. The answer is kept in the user's cache, and --method auto takes it for
    this model from then on. Few questions have wide intervals: give more --seconds. `lce eval run` measures any method
    on any task.
    """
    about = f"{model} is asked for facts in texts beyond its window, by several methods"
    output.figures(f"lce: {about}, {how['seconds']:,.0f} s at most")
    from lce_lab.eval.recommend import recommend as ask
    from lce_lab.eval.report import fails

    with output.noting(WindowWarning), output.bar("seconds of asking", "") as bar:
        found = ask(model, progress=bar, tell=lambda line: output.figures(f"lce: {line}"), **how, **loading)
    length, why = f"{found.length:,}", _why(found)
    reason = fails(found.ceiling.score) if found.ceiling else None
    if found.ceiling and reason:
        note(f"{reason}, at {found.ceiling.length:,} tokens: what methods find says little; try another --task")
    if found.left:
        names, text = ", ".join(choice.spelled for choice in found.left), f"a text of {length} tokens takes "
        remedy = f"about {found.needed:,.0f} s; give more --seconds, or a smaller --window to compare methods in"
        note(f"there was no time for {names}: {text}{remedy}")
    settings = {name: how[name] for name in ("task", "filler", "seed")} | {"dtype": loading["dtype"]}
    kept = _kept(found, reason is None, settings)
    more: dict[str, Any] = {
        "alike": [_named(each.choice) for each in found.alike],
        "not_asked": [*map(_named, found.left)],
    }
    more |= {"affords": [*found.affords], "kept": kept}
    probes = {"ceiling": found.ceiling and _probe(found.ceiling), "probes": [*map(_probe, found.probes)]}
    advice = {"length": found.length, "recommended": _named(found.chosen), "auto": _named(found.usual), "why": why}
    output.object({**probes, **more, **advice})
    asked = [*map(_row, filter(None, (found.ceiling, *found.probes)))]
    left = [(choice.spelled, length, "not asked", *[""] * (len(FOUND) - 3)) for choice in found.left]
    output.text(*(line.rstrip() for line in aligned([FOUND, *asked, *left])), *(ROWS if asked else []))
    output.text("", f"take --method {found.chosen.spelled}: {why}")
    if kept is not None:
        output.figures(f"lce: kept in {named(kept)}: --method auto takes it for this model and texts about as long")


def _kept(found: Recommendation, is_telling: bool, settings: dict[str, Any]) -> str | None:
    """Keep an answer for `auto`, and return the file; None if it tells little, or is for a user's own RoPE scaling."""
    from lce.methods.measured import keep

    if found.fingerprint is None or not found.probes or not is_telling:
        return None
    try:
        path = keep(found.fingerprint, found.measurement(settings))
    except CapacityError as error:
        note(f"--method auto will not know this: {error}")
        return None
    return None if path is None else str(path)


def _why(found: Recommendation) -> str:
    usual, texts = found.usual.spelled, f"texts of {found.length:,} tokens"
    if not found.probes:
        return f"no method was asked; --method auto takes it for {texts}: {found.usual.reason}"
    n = len(found.probes[0].values)
    asked = f"{n} question{'s' * (n > 1)}"
    if found.chosen != found.usual:
        alike = "; of those that find as many it reads least a token" if found.alike[1:] else ""
        return f"{asked} in {texts} tell it apart from {usual}, which --method auto takes{alike}"
    others = ", ".join(each.choice.spelled for each in found.alike if each.choice != found.usual)
    worse = f"{asked} tell all others apart as worse" if found.probes[1:] else "no other was asked"
    more = f"{asked} cannot tell {others} apart from it" if others else worse
    return f"--method auto takes it for {texts}, and {more}"


def _named(choice: Choice) -> dict[str, Any]:
    return {"method": choice.method, "knobs": dict(choice.knobs), **choice.loading}


def _probe(probe: Probe) -> dict[str, Any]:
    score = probe.score
    figures = {"questions": score.samples, "mean": score.mean, "low": score.low, "high": score.high}
    about = {**_named(probe.choice), "length": probe.length}
    return {**about, **figures, "seconds": probe.seconds, "read_bytes": score.read_bytes}


def _row(probe: Probe) -> tuple[str, ...]:
    score, read = probe.score, size_text(round(probe.read_bytes))
    right = f"{score.mean:.0%}", f"{score.low:.0%} to {score.high:.0%}", f"{score.samples}"
    return (probe.choice.spelled, f"{probe.length:,}", *right, f"{probe.seconds:.1f}", read)


@click.command()
@options.model_option
@flag("--prompt-file -f FILE", "The UTF-8 text that is asked about; - is stdin.", required=True)
@flag("--prompt -p TEXT", "The question, as for `lce generate`.", required=True)
@flag("--expect TEXT", "What a right answer has in it.", required=True)
@flag("--fact TEXT", "A part of the text that the answer depends on.  [default: --expect]")
@flag("--chat", "Ask in the model's chat format.", is_flag=True)
@flag("--max-tokens -n TOKENS", "Tokens of an answer at most.", type=options.COUNT, default=64)
@options.planned_methods_options
@options.loading_options
@options.output_options
def check(
    model: str, methods: dict[str, Any], loading: dict[str, Any], output: Output, prompt_file: str, **asked: Any
) -> None:
    """Find out why an answer about a text is wrong, in about the time of two readings, and what to try next.

    The method reads the text and answers. If the answer lacks what is expected, full attention is asked about a part of
    the text within the window: where it fails too, the method is not the cause. Else the text is beyond what the
    method reads, or the chunks with the fact were not chosen, or the fact is seen at distances that do not suit.
    """
    from lce_lab.eval.check import Question
    from lce_lab.eval.check import check as find

    words = {"text": read_text(prompt_file), "question": asked["prompt"], "expect": asked["expect"]}
    how = Question(**words, fact=asked["fact"] or asked["expect"], chat=asked["chat"], max_tokens=asked["max_tokens"])
    with output.noting(WindowWarning), output.bar("read", " tok") as bar:
        found = find(model, how, methods, progress=bar, tell=lambda x: output.figures(f"lce: {x}"), **loading)
    output.object(found)
    width = max(map(len, found.answers))
    output.text(*(f"{name:{width}}  {answer!r}" for name, answer in found.answers.items()), "", found.reason)
    output.text(*(f"try {each}" for each in found.next))


@click.command()
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

    with bars(output.bar) as progress:
        note = lambda text: output.figures(f"lce: {text}")  # noqa: E731
        text, asked = read_text(text_file), Calibration(**learning)
        recalls = learn(model, text, str(out.path), asked, force=out.force, progress=progress, note=note, **loading)
    output.object([dataclasses.asdict(recall) for recall in recalls])
    output.text(*recall_lines(recalls))


def recall_lines(recalls: Sequence[Recall]) -> list[str]:
    """Return the top-k recall of low-dimensional keys as text: a line for each layer, then the mean."""
    rows = [(str(recall.layer), recall.calibrated, recall.pca) for recall in recalls]
    rows.append(("mean", fmean(recall.calibrated for recall in recalls), fmean(recall.pca for recall in recalls)))
    head = f"{'layer':<8}{'calibrated':>12}{'pca':>10}  recall of the best {recalls[0].top_k} tokens"
    return [head, *(f"{layer:<8}{calibrated:>12.1%}{pca:>10.1%}" for layer, calibrated, pca in rows)]


@click.command()
@options.model_option
@options.prompt_options
@method_options
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


@click.command()
@options.model_option
@options.given_prompt_options
@methods_options
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


@click.command()
@named_options
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
    from lce.methods import knob_values
    from lce_lab.study.explain import explain as measured

    found = measured(named[0], knobs=named[1], **setting)
    if plot.path is not None:
        from lce_lab.study.pictures import draw_distances

        draw_distances(found, plot.path, force=plot.force)
    about = {name: getattr(found, name) for name in ("window", "tokens", "block", "head", "seed")}
    method = {"method": found.method.name, "knobs": knob_values(found.method)}
    output.object({**method, **about, "distances": found.rows()})  # null: the key is not attended
    output.text(*_matrix(found))


def _matrix(explanation: Explanation) -> list[str]:
    rows = [["." if d is None else str(d) for d in row] for row in explanation.rows()]
    heads = [str(index) for index in range(explanation.tokens)]
    width = max(len(cell) for row in [heads, *rows] for cell in row)
    label = max(len(heads[-1]), len("i\\j"))
    lines = [
        f"{name:>{label}} |" + "".join(f" {cell:>{width}}" for cell in row)
        for name, row in zip(["i\\j", *heads], [heads, *rows], strict=True)
    ]
    caption = f"{explanation.setting}; the distance at which query i sees key j:"
    rule = "".join("+" if sign == "|" else "-" for sign in lines[0])
    return [explanation.title, caption, "", lines[0], rule, *lines[1:]]


@click.command()
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
