"""What `lce serve` does: checks its options, loads the model while the server already answers, and ends in order."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import click

import lce
from lce.errors import UsageError, WindowWarning, shown
from lce.sizes import in_bytes, size_text
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
    model: str,
    methods: Mapping[str, Any],
    loading: Mapping[str, Any],
    output: Output,
    *,
    host: str,
    port: int,
    api_key: str | None,
    cors: tuple[str, ...],
    lanes: int | None,
    queue: int,
    cache_dir: str | None,
    cache_budget: str,
    cache_memory: str | None,
    repeatable: bool,
    context: tuple[str, ...],
    ping: float,
    name: str | None,
    drain: float,
    replicas: int,
    open_metrics: bool,
) -> None:
    """Serve a model until a signal comes. Raises KeyboardInterrupt after Ctrl-C, when all is closed."""
    with _extra("serve", "starlette", "uvicorn", "prometheus_client", "llguidance", "h11"):
        import llguidance  # noqa: F401
        import prometheus_client  # noqa: F401

        from lce_serve import running
        from lce_serve.door import DoorService, door
        from lce_serve.service import Load, Service, Settings, served_name
    if api_key is not None and not api_key.strip():
        raise UsageError("the API key is empty; give --api-key KEY, or unset LCE_API_KEY")
    if not running.is_loopback(host.strip("[]")) and api_key is None:
        raise UsageError(f"--host {host} is open to other machines; give --api-key KEY, or set LCE_API_KEY")
    served, host = name or served_name(model), host.strip("[]")
    hosts = (*Settings.hosts, host.lower())
    settings = Settings(served, api_key, cors, hosts, open_metrics, ping_s=ping, drain_s=drain)
    batch: dict[str, Any] = {"max_lanes": lanes, "max_waiting": queue}
    batch |= {"cache_dir": cache_dir, "cache_budget": cache_budget, "repeatable": repeatable}
    if cache_memory is not None:
        batch["cache_memory"] = in_bytes(cache_memory, "--cache-memory") // replicas
    load = Load({"model": model, **methods, **loading}, batch, contexts_of(context))
    with running.bound(host, port) as sock, ExitStack() as closing:
        lce.info(model)  # an unusable model is refused at once
        if replicas == 1:
            service, app = Service(settings), None
            begin = partial(load.begin, service.named)
        else:
            service = DoorService(settings)
            begin, app = partial(closing.enter_context(_local()).begin, load, settings, replicas), door(service)
        server = running.Server(service, app)
        loader = _Loader(service, server, begin)
        closing.callback(loader.close)
        loader.start()
        click.echo(f"lce: serving {served} on {running.address(sock)}", err=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", WindowWarning)  # the server refuses such texts
            server.listen(sock)
    if loader.failure is not None:
        raise loader.failure


@contextmanager
def _extra(name: str, *packages: str) -> Iterator[None]:
    """Name the extra `lce[NAME]` if one of its packages is missing."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in packages:
            raise
        raise UsageError(
            f"lce serve needs {error.name}; install it by pip install -e '.[{name}]' in lce's folder"
        ) from None


def _local() -> Any:
    """Return what runs replicas on this machine."""
    with _extra("ray", "ray", "fastapi"):
        from lce_serve.ray import Local
    return Local()


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
            found = self._batch.gauges() if hasattr(self._batch, "gauges") else {}
            if found.get("unsaved"):
                size = size_text(int(found["unsaved_bytes"]))
                click.echo(f"lce: contexts of ended requests that are saved now: {found['unsaved']} ({size})", err=True)
            self._batch.close()
