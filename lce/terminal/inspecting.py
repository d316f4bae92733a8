"""`lce inspect`: a recording as a page or as JSON, and the page served with an engine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

import lce
from lce.errors import UsageError
from lce.files import named, write_whole
from lce.sizes import size_text
from lce.terminal.options import new_file
from lce.terminal.output import Output, note
from lce.terminal.reading import read_prompt

NOT_LIVE = ("path", "force", "json_file", "marks", "max_tokens", "spread", "judge", "names", "knobs")


def write_recording(
    model: str, methods: Sequence[lce.Method], prompt: dict[str, str | None], out: str | None, json_file: str | None,
    loading: dict[str, Any], output: Output, **what: Any,
) -> None:  # fmt: skip
    """Record a prompt under some methods; write a page, JSON, or both. `-` as `json_file` is stdout."""
    from lce.lab.study.recording import Recorder, RecordingRequest
    from lce.lab.study.web_page import store_of, write_page

    if out is None and json_file is None:
        raise UsageError("nothing to write; give --out page.html, --json FILE, or --live")
    _check_different({"--prompt-file": prompt["prompt_file"], "--out": out, "--json": json_file})
    if out is not None:
        store_of(out)
    if json_file != "-":
        new_file(json_file, force=True)
    request = RecordingRequest(read_prompt(**prompt), **what)
    with output.noting(), output.bars() as bars:
        recording = Recorder(model, **loading).record(request, methods, progress=bars)
    for run in recording["runs"]:
        stats, text = run["stats"], "".join(each["text"] for each in run["generated"])
        times = f"prefill {stats['prefill_s']:.2f} s, recorded in {stats['recorded_s']:.2f} s"
        output.figures(f"{run['label']}: {stats['prompt_tokens']:,} prompt tokens | {times} | {text!r}")
    if json_file is not None:
        text = json.dumps(recording, separators=(",", ":"), allow_nan=False)
        if json_file == "-":
            click.echo(text)
        else:
            write_whole(Path(json_file), text.encode())
    if out is not None:
        n_bytes, beside = write_page(recording, out), store_of(out)
        more = f", with {named(beside)} beside it" if beside.is_dir() else ""
        output.figures(f"{named(out)}: {size_text(n_bytes)}{more}")


def _check_different(files: dict[str, str | None]) -> None:
    """Refuse options that name the same file, since one output would overwrite the other."""
    options: dict[str, str] = {}
    for option, file in files.items():
        if file not in (None, "-"):
            same = options.setdefault(os.path.realpath(file), option)
            if same != option:
                raise UsageError(f"{same} and {option} are both {named(file)}; name another file")


def serve_live(
    model: str, prompt: dict[str, str | None], port: int, most_prompt: int, loading: dict[str, Any], output: Output,
    **unused: Any,
) -> None:  # fmt: skip
    """Serve the page until Ctrl-C. Only the address goes to stdout."""
    from lce.lab.study.live import Limits, Live
    from lce.lab.study.live_server import LiveServer

    _note_unused()
    text = "" if set(prompt.values()) == {None} else read_prompt(**prompt)
    with output.noting():
        server = LiveServer(Live(model, Limits(prompt_tokens=most_prompt), **loading), port, text)
        try:
            click.echo(server.address)
            sys.stdout.flush()
            output.figures("lce: open this address in a browser of this machine; Ctrl-C ends it")
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            output.figures("\nlce: ended")
        finally:
            server.close()


def _note_unused() -> None:
    """Note which options of the command line have no effect on a served page."""
    ctx = click.get_current_context()
    given = {name for name in NOT_LIVE if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    unused = [param.opts[0] for param in ctx.command.params if param.name in given]
    if unused:
        note(f"{', '.join(unused)}: not used with --live; choose them in the page")
