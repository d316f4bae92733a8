"""Replicas on Ray Serve: one engine in each, and a door in front of them.

    serve run lce_serve.ray:app model=smollm2 method=self_extend replicas=2

`Replica` answers by the application of `lce serve`. `Router` gives a request to a replica by `lce_serve.affinity`.
`app` builds both for a Ray cluster, behind Ray's proxy; `Local` starts them on this machine for `lce serve --replicas`.
"""

from __future__ import annotations

import logging
import math
import os
import re
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from dataclasses import replace
from importlib import import_module
from typing import Any, Self

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # before Ray is imported: nothing is reported to its makers

import pydantic
import ray

import psutil  # isort: skip  # Ray brings it, and finds it once it is imported
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, ReplicaUnavailableError
from ray.serve.request_router import RequestRouter
from starlette.types import ASGIApp, Message

import lce
from lce.engine.options import CACHE_BUDGET
from lce.errors import USER_MODULE, BusyError, LceError
from lce.system import free_host_memory, usable_cores
from lce_serve.affinity import Affinity, Known, ranked
from lce_serve.app import application
from lce_serve.door import DoorService, ReplicaLost, answered, door
from lce_serve.orphans import watch
from lce_serve.service import Load, Service, Settings, served_name

SAVING_S = 60.0  # seconds that a replica may take to save its contexts when it is stopped
OTHERS = 64  # requests that a replica takes beyond its lanes and its queue: those that generate nothing, and refusals
HEALTH_S = 2.0  # between two looks at a replica


class Router(RequestRouter):
    """The router of Ray Serve by `lce_serve.affinity`. It counts the requests that it has given to each replica."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._known, self._n_requests, self._slack = Known(), Counter[str](), 0

    def initialize_state(self, slack: int) -> None:
        """Set `slack`, the number of requests that a replica may have more than another one."""
        self._slack = slack

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Return the replicas, each as a list of one, the best one for a request first."""
        replicas = {each.replica_id.unique_id: each for each in candidate_replicas}
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        n_requests = {name: self._n_requests[name] for name in replicas}
        return [[replicas[name]] for name in ranked(_affinity(pending_request), n_requests, self._known, self._slack)]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        self._known.note(_affinity(pending_request), replica_id.unique_id)

    def on_send_request(self, replica_id: Any) -> None:
        super().on_send_request(replica_id)
        self._n_requests[replica_id.unique_id] += 1

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        self._n_requests[replica_id.unique_id] -= 1


def _affinity(pending_request: Any) -> Affinity:
    """Return the affinity that a request of `Handle.ask` carries."""
    args = () if pending_request is None else pending_request.args
    return args[0] if args and isinstance(args[0], Affinity) else Affinity()


class Replica:
    """One engine with its batch, in a process of its own, which answers as a server of its own does.

    `n_replicas` share the memory of a machine.
    """

    def __init__(self, load: Load, settings: Settings, n_replicas: int = 1) -> None:
        memory = (free_host_memory() or 8 << 30) // (4 * n_replicas)
        self._name: str = serve.get_replica_context().replica_id.unique_id
        self._service = Service(settings)
        self._batch = replace(load, batch={"cache_memory": memory, **load.batch}).begin(self._service.named)
        self._service.serve(self._batch)
        self._app = application(self._service)

    async def answer(self, affinity: Affinity, head: dict[str, Any], body: bytes) -> AsyncGenerator[Message]:
        """Yield the messages of an answer. `affinity` is for the router."""
        async with aclosing(answered(self._app, head, body, self._name)) as messages:
            async for message in messages:
                yield message

    def figures(self) -> tuple[str, str]:
        """Return the replica's name, and its figures in Prometheus' text form."""
        return self._name, self._service.metrics.text().decode()

    def __del__(self) -> None:
        """Close the batch, which saves contexts, when Ray stops the replica."""
        if hasattr(self, "_batch"):
            self._batch.close()


class Handle:
    """The replicas of a deployment, as a door asks them."""

    def __init__(self, deployment: Any) -> None:
        self._deployment = deployment.options(stream=True, method_name="answer")

    async def ask(self, affinity: Affinity, head: dict[str, Any], body: bytes) -> AsyncGenerator[Message]:
        answer = self._deployment.remote(affinity, head, body)
        try:
            async for message in answer:
                yield message
        except (RayActorError, ReplicaUnavailableError) as error:
            raise ReplicaLost(str(error)) from None
        except BackPressureError:
            raise BusyError("all replicas have as many requests as they take; ask again later") from None
        finally:
            answer.cancel()

    async def figures(self) -> Mapping[str, str]:
        found = self._deployment.broadcast("figures").results_async(timeout_s=10, return_exceptions=True)
        return dict(each for each in await found if not isinstance(each, BaseException))


def deployment(load: Load, settings: Settings, n_replicas: int, target: float = math.inf, **options: Any) -> Any:
    """Return the deployment of the replicas. `options` are those of `ray.serve.deployment`."""
    lanes, queue = load.batch.get("max_lanes") or 8, load.batch.get("max_waiting", 256)
    made = serve.deployment(
        Replica,
        name="Replica",
        max_ongoing_requests=lanes + queue + OTHERS,
        max_queued_requests=queue + OTHERS,
        request_router_config=RequestRouterConfig(
            request_router_class=Router, request_router_kwargs={"slack": int(min(lanes, target))}
        ),
        health_check_period_s=HEALTH_S,
        graceful_shutdown_timeout_s=settings.drain_s + SAVING_S,
        **options,
    )
    return made.bind(load, settings, n_replicas)


class Arguments(pydantic.BaseModel, extra="forbid"):
    """The arguments of `app`. `load` has further arguments of `lce.load`; the rest is as in `lce serve`.

    There are `replicas` replicas, or `min_replicas` to `max_replicas`: a new one starts when the replicas have `target`
    requests each, on average. Each computes with `threads` threads, and with `gpus` GPUs.
    """

    model: str
    method: str = "full"
    method_options: dict[str, Any] = {}
    load: dict[str, Any] = {}
    name: str | None = None
    api_key: str | None = None  # by default LCE_API_KEY of the environment
    cors: tuple[str, ...] = ()
    hosts: tuple[str, ...] = Settings.hosts
    open_metrics: bool = False
    lanes: int | None = None
    queue: int = 256
    cache_dir: str | None = None
    cache_budget: str = CACHE_BUDGET
    repeatable: bool = False
    contexts: dict[str, str] = {}
    ping: float = 5.0
    drain: float = 30.0
    replicas: int = 1
    min_replicas: int = 1
    max_replicas: int | None = None
    target: float = 8.0
    threads: int = 1
    gpus: float = 0.0


def app(arguments: dict[str, Any]) -> Any:
    """Return the application for `serve run lce_serve.ray:app model=... ` and for the `args` of a Serve config."""
    given = Arguments.model_validate(arguments)
    method = lce.methods.make(given.method, given.method_options)
    batch: dict[str, Any] = {"max_lanes": given.lanes, "max_waiting": given.queue}
    batch |= {"cache_dir": given.cache_dir, "cache_budget": given.cache_budget, "repeatable": given.repeatable}
    loading = {"model": given.model, "method": method, "threads": given.threads, **given.load}
    load, key = Load(loading, batch, given.contexts), given.api_key or os.environ.get("LCE_API_KEY")
    served, metrics = given.name or served_name(given.model), given.open_metrics
    settings = Settings(served, key, given.cors, given.hosts, metrics, ping_s=given.ping, drain_s=given.drain)
    how: dict[str, Any] = {"num_replicas": given.replicas}
    if given.max_replicas is not None:
        most = {"max_replicas": given.max_replicas, "target_ongoing_requests": given.target}
        how = {"autoscaling_config": AutoscalingConfig(min_replicas=given.min_replicas, **most)}
    resources = {"num_cpus": given.threads, "num_gpus": given.gpus}
    n_replicas = given.max_replicas or given.replicas
    replicas = deployment(load, settings, n_replicas, given.target, ray_actor_options=resources, **how)
    ingress = serve.deployment(serve.ingress()(Ingress), name="Ingress", max_ongoing_requests=settings.most_connections)
    return ingress.options(ray_actor_options={"num_cpus": 0}).bind(replicas, settings)


class Ingress:
    """The door of a cluster's replicas, behind Ray's proxy."""

    def __init__(self, replicas: Any, settings: Settings) -> None:
        self._service = DoorService(settings)
        self._service.serve(Handle(replicas))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return door(self._service)


class Local(Handle):
    """Replicas on a Ray of their own on this machine, for `lce serve --replicas`.

    Enter it in the main thread, before the server listens: Ray ends with the thread that began it, and sets signal
    handlers, in the place of which the server sets its own.
    """

    def __init__(self) -> None:
        logging.getLogger("ray.serve").setLevel(logging.ERROR)

    def __enter__(self) -> Self:
        ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        self._watcher = watch(each.pid for each in psutil.Process().children(recursive=True))
        return self

    def __exit__(self, *error: object) -> None:
        ray.shutdown()
        self._watcher.kill()
        self._watcher.wait()

    def begin(self, load: Load, settings: Settings, n_replicas: int) -> Self:
        """Start replicas, which share the machine's threads; return when they are loaded."""
        threads = max(1, (load.loading.get("threads") or usable_cores()) // n_replicas)
        load = replace(load, loading={**load.loading, "threads": threads})
        ship_code(load.loading.values())
        quiet = {"log_level": "ERROR"}
        serve.start(proxy_location="Disabled", logging_config=quiet)
        how: dict[str, Any] = {"num_replicas": n_replicas, "max_constructor_retry_count": 1}
        bound = deployment(load, settings, n_replicas, ray_actor_options={"num_cpus": 0}, **how)
        try:
            super().__init__(serve.run(bound, route_prefix=None, logging_config=quiet))
        except RuntimeError as error:
            told = serve.status().applications["default"].deployments["Replica"].message
            raise _failure(told or str(error)) from None
        return self

    def close(self) -> None:
        """Stop the replicas, which save their contexts."""
        serve.delete("default")


def ship_code(values: Iterable[Any]) -> None:
    """Have Ray send the code of methods in users' files, which other processes cannot import."""
    for module in {type(value).__module__ for value in values}:
        if module.startswith(USER_MODULE):
            ray.cloudpickle.register_pickle_by_value(sys.modules[module])


def _failure(traceback: str) -> LceError:
    """Return the error of lce at the end of a replica's traceback, with its exit code."""
    found = re.findall(r"^(lce\.[\w.]+)\.(\w+): (.+)$", traceback, re.MULTILINE)
    if not found:
        return LceError(f"a replica cannot start: {traceback.strip().splitlines()[-1]}")
    module, name, line = found[-1]
    error = LceError(line)
    error.exit_code = getattr(import_module(module), name, LceError).exit_code
    return error
