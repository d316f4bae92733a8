"""The command `lce serve`, an entry point of `lce.commands`."""

from __future__ import annotations

from typing import Any

import click

from lce.engine.options import CACHE_BUDGET
from lce.terminal import options
from lce.terminal.options import flag


@click.command()
@options.loaded_model_option
@flag("--host ADDRESS", "Where to listen; other than loopback only with a key.", default="127.0.0.1")
@flag("--port N", "The port; 0 is any.", type=click.IntRange(0, 65_535), default=8000)
@flag("--api-key KEY", "The key that clients must give.  [default: LCE_API_KEY]", envvar="LCE_API_KEY")
@flag("--open-metrics", "/metrics needs no key, for routers and Prometheus.", is_flag=True)
@flag("--cors ORIGIN", "Web pages of this origin may ask; repeatable.", multiple=True)
@flag("--name NAME", "The model's name for clients.  [default: the last part of --model]")
@flag("--lanes N", "Requests that run at once.  [default: 8, on a GPU 64]", type=options.COUNT)
@flag("--queue N", "Requests that wait; more are refused with 429.", type=options.INDEX, default=256)
@flag("--replicas N", "Engines in processes of their own; needs lce[ray].", type=options.COUNT, default=1)
@flag("--cache-dir DIR", "Keep contexts of ended requests here, for later runs too.")
@flag("--cache-budget SIZE", "The most bytes in that folder.", default=CACHE_BUDGET)
@flag("--cache-memory SIZE", "The most memory for them.  [default: a quarter of what is free]")
@flag("--repeatable", "Answers depend on their requests alone: answers in a history are read again.", is_flag=True)
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
