"""What `lce serve` does: checks its options, loads the model while the server already answers, and ends in order."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from typing import Any

import click

import lce
from lce.errors import UsageError, WindowWarning, shown
from lce.terminal.output import Output


def contexts_of(values: tuple[str, ...]) -> dict[str, str]:
    """Return the files of `--context NAME=FILE` by their names."""
    found: dict[str, str] = {}
    for value in values:
        name, _, path = value.partition("=")
        if not name or not path or name in found:
            raise UsageError(f"--context is {shown(value)}; expected NAME=FILE, each name once")
        found[name] = path
    return found


def serve(
    model: str, methods: Mapping[str, Any], loading: Mapping[str, Any], output: Output, *, host: str, port: int,
    api_key: str | None, cors: tuple[str, ...], lanes: int, queue: int, cache_dir: str | None, cache_budget: str,
    context: tuple[str, ...], ping: float, name: str | None, drain: float,
) -> None:  # fmt: skip
    """Serve a model until a signal comes. Raises KeyboardInterrupt after Ctrl-C, when all is closed."""
    try:
        import llguidance  # noqa: F401
        import prometheus_client  # noqa: F401

        from lce.server import running
        from lce.server.service import Service, Settings
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in (
            "starlette",
            "uvicorn",
            "prometheus_client",
            "llguidance",
            "h11",
        ):
            raise
        raise UsageError(f"lce serve needs {error.name}; install it by pip install 'lce[serve]'") from None
    if api_key is not None and not api_key.strip():
        raise UsageError("the API key is empty; give --api-key KEY, or unset LCE_API_KEY")
    if not running.is_loopback(host) and api_key is None:
        raise UsageError(f"--host {host} is open to other machines; give --api-key KEY, or set LCE_API_KEY")
    files, served = contexts_of(context), name or _name_of(model)
    own = ("localhost", "127.0.0.1", "[::1]", host.lower())
    settings = Settings(served, api_key, cors, own, ping_s=ping, drain_s=drain)
    with running.bound(host, port) as sock:
        service = Service(settings)
        server = running.Server(service)
        loader = _Loader(
            service, server, lambda: _batch(model, methods, loading, files, lanes, queue, cache_dir, cache_budget)
        )
        loader.start()
        click.echo(f"lce: serving {served} on {running.address(sock)}", err=True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", WindowWarning)  # the server refuses such texts
                server.listen(sock)
        finally:
            loader.close()
    if loader.failure is not None:
        raise loader.failure


def _name_of(model: str) -> str:
    """Return the name under which a model is served: the last part of its path or id."""
    return model.rstrip("/").rpartition("/")[2].removesuffix(".gguf").replace("@", "-") or model


def _batch(
    model: str, methods: Mapping[str, Any], loading: Mapping[str, Any], files: Mapping[str, str], lanes: int,
    queue: int, cache_dir: str | None, cache_budget: str,
) -> Any:  # fmt: skip
    """Load a model, and return a batch with the named contexts."""
    engine = lce.load(model, **methods, **loading)
    batch = engine.batch(max_lanes=lanes, max_waiting=queue, cache_dir=cache_dir, cache_budget=cache_budget)
    try:
        for each, path in files.items():
            batch.add_context(each, path)
    except BaseException:
        batch.close()
        raise
    return batch


class _Loader(threading.Thread):
    """A thread that loads the model. If that fails, the server stops, and `failure` has the error."""

    def __init__(self, service: Any, server: Any, load: Any) -> None:
        super().__init__(name="lce-load", daemon=True)
        self._service, self._server, self._load = service, server, load
        self._batch: Any = None
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            self._batch = self._load()
            self._service.serve(self._batch)
            click.echo(f"lce: {self._service.settings.model} is loaded", err=True)
        except BaseException as error:
            self.failure = error
            self._server.drain()

    def close(self) -> None:
        """Close the batch, which saves contexts. A model that is still loading is given up."""
        if self._batch is not None:
            self._batch.close()
