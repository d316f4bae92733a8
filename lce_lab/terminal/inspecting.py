"""`lce inspect` and `lce trace`: recordings as pages, JSON, lines and pictures, and a page served by an engine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn

import click
from click.core import ParameterSource

import lce
from lce.errors import UsageError
from lce.files import named, write_whole
from lce.sizes import size_text
from lce.terminal.exits import leave
from lce.terminal.options import NewFile, new_file
from lce.terminal.output import Output, note
from lce.terminal.reading import read_prompt
from lce_lab.stages import bars

Prompt = dict[str, str | None]  # the options that give a prompt, by name
NOTED = 64 << 20  # The least bytes of a recording about which a note is printed before the work.
LONG_S = 10.0  # The least seconds of one.
# The arguments of `lce inspect` that have no effect with --live.
NOT_LIVE = ("path", "force", "json_file", "marks", "max_tokens", "spread", "judge", "names", "knobs")


def write_recording(
    model: str,
    methods: Any,
    prompt: Prompt,
    out: NewFile,
    json_file: str | None,
    loading: Any,
    output: Output,
    **what: Any,
) -> None:
    """Record a prompt under some methods, and write a page, JSON, or both. A `json_file` of "-" is stdout."""
    from lce_lab.study.recording import Recorder, RecordingRequest
    from lce_lab.study.web_page import store_of, write_page

    if out.path is None and json_file is None:
        raise UsageError("nothing to write; give --out page.html, --json FILE, or --live")
    options: dict[str, str] = {}  # file -> the option that names the file; no file may be named twice
    for option, file in {"--prompt-file": prompt["prompt_file"], "--out": out.path, "--json": json_file}.items():
        if file not in (None, "-") and (same := options.setdefault(os.path.realpath(file), option)) != option:
            raise UsageError(f"{same} and {option} are both {named(file)}; name another file")
    if out.path is not None:
        store_of(out.path)
    if json_file != "-":
        new_file(json_file, out.force)
    request = RecordingRequest(read_prompt(**prompt), **what)
    with output.noting(), bars(output.bar) as progress:
        recording = Recorder(model, **loading).record(request, methods, progress=progress, expect=_note_costs)
    for run in recording["runs"]:
        stats, text = run["stats"], "".join(each["text"] for each in run["generated"])
        times = f"prefill {stats['prefill_s']:.2f} s, recorded in {stats['recorded_s']:.2f} s"
        output.figures(f"{run['label']}: {stats['prompt_tokens']:,} prompt tokens | {times} | {text!r}")
    if json_file is not None:
        text = json.dumps(recording, separators=(",", ":"), allow_nan=False)
        if json_file == "-":
            click.echo(text)
        else:
            write_whole(Path(json_file), text.encode(), force=out.force)
    if out.path is not None:
        n_bytes, beside = write_page(recording, out.path, force=out.force), store_of(out.path)
        more = f", with {named(beside)} beside it" if beside.is_dir() else ""
        output.figures(f"{named(out.path)}: {size_text(n_bytes)}{more}")


def _note_costs(n_bytes: int, seconds: float) -> None:
    if n_bytes > NOTED or seconds > LONG_S:
        time = f"in about {max(10, round(seconds, -1)):,.0f} s, " if seconds else ""
        size = f"{size_text(n_bytes)} of JSON"
        note(f"{time}{size} will be recorded, half of it as a page; --spread 50, larger chunks give less")


def serve_live(
    model: str, prompt: Prompt, port: int, most_prompt: int, loading: dict[str, Any], output: Output, **_not_live: Any
) -> NoReturn:
    """Serve the page of `lce inspect --live`, with an engine. Only its URL goes to stdout; Ctrl-C ends it."""
    from lce_lab.study.live import Live
    from lce_lab.study.live_server import LiveServer

    ctx = click.get_current_context()
    given = {name for name in NOT_LIVE if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    if unused := [param.opts[0] for param in ctx.command.params if param.name in given]:
        note(f"{', '.join(unused)}: not used with --live; choose them in the page")
    text = "" if set(prompt.values()) == {None} else read_prompt(**prompt)
    with output.noting():
        server = LiveServer(Live(model, most_prompt, **loading), port, text)
        try:
            click.echo(server.address)
            sys.stdout.flush()
            output.figures("lce: open this address in a browser of this machine; Ctrl-C ends it")
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            output.figures("\nlce: ended")
        finally:
            server.close()
    leave(0)


def show_trace(
    model: str, method: lce.Method, prompt: str, plot: NewFile, loading: dict[str, Any], output: Output, **what: Any
) -> None:
    """Print the chunks or tokens chosen for the last tokens of a text: a line for each token, layer and head."""
    from lce_lab.study.pictures import draw_choices, drawable
    from lce_lab.study.recording import Recorder, RecordingRequest

    if plot.path is not None:
        drawable(plot.path)
    request = RecordingRequest(prompt, max_tokens=0, spread=0, **what)
    with output.noting(), bars(output.bar) as progress:
        recording = Recorder(model, **loading).record(request, [method], progress=progress)
    run = recording["runs"][0]
    if plot.path is not None:
        draw_choices(recording, plot.path, force=plot.force)
    found, setting = list(_rows(recording)), {name: run[name] for name in ("chunk_size", "first")}
    hits = _hits(recording, found)
    output.object({**setting, "marks": recording["marks"], "rows": found, "hits": hits})
    output.text(f"choice c: tokens {run['first']} + {run['chunk_size']} c and on; choice (rank, score)")
    output.text(*map(_row_line, found), *(_hit_line(recording["marks"], hit) for hit in hits))


def _rows(recording: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield an object per traced token, layer and head with what the head chose. Rank 0 is the best; -1 is unknown."""
    run, n_heads = recording["runs"][0], recording["model"]["heads"]
    looks = {int(query): look for segment in run["segments"] for query, look in segment["looks"].items()}
    for query in run["looked"]:
        for layer, found in enumerate(looks[query]["layers"]):
            for head, each in enumerate(found["heads"]):
                own = head * len(found["chosen"]) // n_heads
                lists = [found[name][own] if found["chosen"] else [] for name in ("chosen", "ranks", "scores")]
                distances = [] if each["distances"] is None else looks[query]["distances"][each["distances"]]
                row = {"token": query, "layer": layer, "head": head}
                row |= dict(zip(("choices", "ranks", "scores"), lists, strict=True)) | {"distances": distances}
                yield row | {name: each[name] for name in ("mass", "best", "marked", "recall", "reachable", "why")}


def _hits(recording: dict[str, Any], found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each mark (a span of the text) and layer, how often heads of the traced tokens attend the mark.

    `attended` is the share of heads that attend a token of the mark, `hit1` and `hit5` of those that give the mark's
    choice the best score or one of the five best (None: nothing is chosen), `mass` the mean true attention to the mark.
    """
    lines = []
    for (number, mark), layer in product(enumerate(recording["marks"]), range(recording["model"]["layers"])):
        some = [each for row in found if row["layer"] == layer for each in row["marked"] if each[0] == number]
        ranks = [rank for _, _, rank, _ in some if rank >= 0]
        if some:
            line = {"mark": number, "label": mark["label"], "layer": layer, "queries_and_heads": len(some)}
            line["attended"] = fmean(share > 0 for *_, share in some)
            line |= {f"hit{n}": fmean(rank < n for rank in ranks) if ranks else None for n in (1, 5)}
            lines.append({**line, "mass": fmean(mass for _, mass, _, _ in some)})
    return lines


def _row_line(row: dict[str, Any]) -> str:
    known = [
        f"{choice} ({rank + 1}, {score:.3g})" if rank is not None and rank >= 0 else str(choice)
        for choice, rank, score in zip(row["choices"], row["ranks"], row["scores"], strict=True)
    ]
    return f"token {row['token']:,}, layer {row['layer']}, head {row['head']}: {', '.join(known) or 'no choice'}"


def _hit_line(marks: list[dict[str, Any]], hit: dict[str, Any]) -> str:
    mark = marks[hit["mark"]]
    rates = "".join(f", {name} {hit[name]:.0%}" for name in ("hit1", "hit5") if hit[name] is not None)
    where = f"{hit['label']!r} at tokens {mark['start']:,} to {mark['stop'] - 1:,}, layer {hit['layer']}"
    return f"{where}: attended by {hit['attended']:.0%} of heads, true attention {hit['mass']:.4f}{rates}"
