"""The commands `lce eval ...`, one function each. Heavy modules are imported in the functions, so `--help` is fast."""

from __future__ import annotations

from copy import copy
from typing import Any

import click
from click import argument

from lce.files import named
from lce.terminal import options
from lce.terminal.exits import Listing
from lce.terminal.options import flag
from lce.terminal.output import Output
from lce.terminal.reading import read_text
from lce_lab.terminal import options as own
from lce_lab.terminal.options import cluster_options, methods_options

DISTANCES = "at distances up to half of the window, or at true distances"
STATES = "those of the method itself, or of the true attention, the same for all methods"
lengths_option = flag("--lengths LIST", "Such as 512,2k (2k is 2048).", required=True, type=options.COUNTS)
record_option = flag("--record FILE", "Keep the answers in this file; samples that it has are skipped.")


@click.group("eval", cls=Listing)
def evaluation() -> None:
    """Measure a model with a method."""


@evaluation.command()
@options.model_option
@methods_options
@lengths_option
@own.asked_options
@flag("--text FILE", "Read this text instead of a task's.")
@flag("--queries N", "Queries of --text that are looked at.", type=options.COUNT, default=32)
@flag("--judge", f"True attention: {DISTANCES}.", type=click.Choice(["constant", "true"]), default="constant")
@flag("--states", f"Hidden states: {STATES}.", type=click.Choice(["own", "judge"]), default="own")
@flag("--record FILE", "Keep what was seen in this file; texts that it has are skipped.")
@flag("--by-layer", "A line for each layer, too.", is_flag=True)
@options.loading_options
@options.output_options
def selection(text: str | None, **how: Any) -> None:
    """Measure what methods select: the share of true attention that they read, and what that costs.

    Looks at the queries that write the answers of samples, or at queries spread over a text. A row has the tokens that
    a query attends, the bytes that it reads in all layers and their share of what full attention reads, the recall of
    true attention; how often a chunk with a fact in it has the best score (hit@1) or one of the five best; the share of
    the facts' tokens attended; how many chunks the heads choose together (cover) and how unevenly (Gini); the share of
    the best tokens that low-dim scores find; and the score of the answers.
    """
    from lce_lab.terminal.measuring import show_selection

    show_selection(text=None if text is None else read_text(text), **how)


@evaluation.command()
@options.model_option
@own.selecting_options
@lengths_option
@own.suite_options
@flag("--kind NAME", "Of a text's questions, those of this task alone: for --task medley.", default="")
@record_option
@flag("--each", "Every sample with its answers, too.", is_flag=True)
@options.loading_options
@options.output_options
def why(**how: Any) -> None:
    """Tell why methods miss answers: selection, budget, placement, window, or the model.

    What a method misses is asked again with a selection that cheats at the same budget and placement, with a larger
    budget, in another placement, in a smaller window, and with everything attended. The first that answers names the
    cause.
    """
    from lce_lab.terminal.measuring import show_causes

    show_causes(**how)


@evaluation.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="ARGUMENTS")
def harness(arguments: tuple[str, ...]) -> None:
    """Run lm-evaluation-harness, which has lce as its model `lce`. Needs lce[harness].

    Takes the arguments of the command lm_eval: `lce eval harness run --help` shows them. Example: lce eval harness run
    --model lce --model_args pretrained=PATH,method=longheads,chunk_size=256 --tasks NAME
    """
    from lce_lab.eval.harness import main

    main(arguments)


@evaluation.command()
@options.model_option
@methods_options
@lengths_option
@flag("--text -t FILE", "A UTF-8 text; - is stdin.", dest="files", required=True, multiple=True)
@flag("--stride TOKENS", "From one window to the next.", type=options.COUNT, default=256)
@flag("--scored last|all", "Tokens of a window: the last stride, or all.", default="last")
@flag("--windows N", "At most so many windows, spread evenly.", dest="most", type=options.COUNT)
@flag("--longest TOKENS", "Windows end where windows of so many tokens do.", type=options.COUNT)
@flag("--stream", "One pass over each text; the mean by position, up to each length.", dest="streams", is_flag=True)
@flag("--record FILE", "Keep the losses in this file; windows that it has are skipped.")
@options.loading_options
@options.output_options
def perplexity(**how: Any) -> None:
    """Measure the perplexity of texts by length.

    A window of each length slides over the texts, and its last --stride tokens are scored, the papers' setting on PG19.
    Windows of all lengths end at the same tokens. With --stream, each text is read once instead, and each token is
    scored behind all before it. --text is repeatable. With --record, an interrupted evaluation resumes when the same
    command is run again.
    """
    from lce_lab.terminal.measuring import show_perplexities

    show_perplexities(**how)


@evaluation.command("run")
@options.model_option
@methods_options
@lengths_option
@own.suite_options
@record_option
@flag("--ceiling/--no-ceiling", "First measure `full` within the window, for each task.", default=True)
@cluster_options
@options.loading_options
@options.output_options
def run_suite(suite: dict[str, Any], record: str | None, cluster: dict[str, Any], **how: Any) -> None:
    """Ask every method samples of some tasks and lengths, and print the mean scores with 95% intervals.

    Every method gets the same samples. For each task, full attention is asked first within the window: where it fails
    there, scores say little of the methods, and a note says so. With --record, an interrupted run resumes when the same
    command is run again, and `lce eval report FILE` makes tables and pictures. With --ray, processes of a Ray cluster
    ask the samples, and the answers are the same.
    """
    from lce_lab.terminal.jobs import filling
    from lce_lab.terminal.suites import SuiteRun

    SuiteRun(**suite, **how).measure(record, filling(**cluster))


passkey = copy(run_suite)
passkey.help = "The short name of `lce eval run --task passkey`."
evaluation.add_command(passkey, "passkey")


@evaluation.command()
@options.json_options
def tasks(output: Output) -> None:
    """List the tasks of `lce eval run`: what they ask, their metrics, and their knobs with the defaults."""
    from lce_lab.eval.tasks import TASKS
    from lce_lab.terminal import suites

    found = [suites.task_object(name) for name in TASKS]
    output.object(found)
    for task in found:
        output.text(*suites.task_lines(task))


@evaluation.command()
@argument("files", nargs=-1, required=True, metavar="FILE...")
@flag("--plots DIR", "Also draw pictures in this folder; needs lce[plot].")
@options.json_options
def report(files: tuple[str, ...], plots: str | None, output: Output) -> None:
    """Print the answers of records as Markdown tables: methods by lengths, with intervals, ceilings and bytes read.

    The FILEs are what --record wrote, such as all shards of a run; samples that are in several count once.
    """
    from lce_lab.eval.report import Report
    from lce_lab.terminal import reporting

    found = Report.read(files)
    pictures = []
    if plots is not None:
        from lce_lab.eval.plots import draw_all

        pictures = draw_all(found, plots)
    output.object(reporting.report_object(found))
    output.text(*reporting.report_lines(found))
    for path in pictures:
        output.figures(f"lce: wrote {named(path)}")


@evaluation.command()
@options.model_option
@methods_options
@own.benchmark_options
@record_option
@flag("--predictions DIR", "Also write the answers here, as the benchmark's own code does.")
@cluster_options
@options.loading_options
@options.output_options
def published(suite: dict[str, Any], record: str | None, cluster: dict[str, Any], **how: Any) -> None:
    """Ask every method the published benchmark SUITE, from your copy of its files, and print its scores.

    Prompts, answer lengths, metrics and averages are the benchmark's own; scores are 0 to 100. `lce eval benchmarks`
    lists the names and the files. With --record, an interrupted run resumes when the same command is run again.
    """
    from lce_lab.terminal.jobs import filling
    from lce_lab.terminal.suites import SuiteRun

    SuiteRun(**suite, **how).measure(record, filling(**cluster))


@evaluation.command()
@argument("file", metavar="FILE|DIR")
@flag("--suite NAME", "One of `lce eval benchmarks`.", required=True)
@flag("--task NAME", "The task that was asked.  [default: what the file's name tells]")
@flag("--metric NAME", "Score by another metric.  [default: the task's own]")
@options.json_options
def score(file: str, suite: str, task: str | None, metric: str | None, output: Output) -> None:
    """Score predictions of a published benchmark, in its own layout. No model is loaded.

    FILE is what the benchmark's code wrote for one task, such as pred/MODEL/qasper.jsonl of LongBench; DIR has one for
    each task. A file with a broken line is named, the others are scored, and the exit code is 3.
    """
    from lce_lab.eval.published import find
    from lce_lab.terminal.suites import score_predictions

    score_predictions(find(suite), file, task, metric, output)


@evaluation.command()
@options.json_options
def benchmarks(output: Output) -> None:
    """List the published benchmarks: their tasks, and which files of theirs go where."""
    from lce_lab.eval.published import BENCHMARKS
    from lce_lab.terminal.suites import benchmark_lines, benchmark_object

    output.object([benchmark_object(benchmark) for benchmark in BENCHMARKS.values()])
    for benchmark in BENCHMARKS.values():
        output.text(*benchmark_lines(benchmark))
