"""Options that the laboratory's commands share: methods, tasks, suites, published benchmarks and clusters."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click
from click import argument

import lce
from lce.errors import UsageError
from lce.terminal.options import COUNT, KNOBS, flag, knobs_option, packed, parse_name
from lce.terminal.reading import method_name
from lce_lab.terminal.methods import methods_of


def _each_once(_ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> list[str]:
    """Return each name once: the callback of a repeatable option that also takes lists with commas."""
    names = list(dict.fromkeys(name.strip() for value in values for name in value.split(",") if name.strip()))
    if values and not names:
        known = "lce eval tasks" if param.name == "tasks" else "lce methods"
        raise click.BadParameter(f"no name is given; expected one of `{known}`")
    return names if param.name == "tasks" else list(dict.fromkeys(map(method_name, names)))


_METHOD = flag("--method NAME", "One of `lce methods`, or a file FILE.py.", default="full", callback=parse_name)
_NAMES = "One of `lce methods`, FILE.py, or all that serve the model; repeatable, or a list with commas."
_METHODS = flag("--method NAME", _NAMES, ["full"], dest="names", multiple=True, callback=_each_once)


def _methods(names: list[str], knobs: dict[str, str], *, selecting: bool = False) -> list[lce.Method]:
    """Return the named methods; `all` stands for those that serve the running command's model."""
    given = click.get_current_context().params
    decisive = ("model", "window", "rope", "rope_factor")
    loading: dict[str, Any] = {name: given[name] for name in decisive if name in given}
    return methods_of(names, knobs, loading, selecting=selecting)


_NAME = argument("method", callback=parse_name)
named_options = packed("named", lambda method, knobs: (method, knobs), _NAME, knobs_option)
method_options = packed("method", lambda method, knobs: lce.methods.make(method, knobs), _METHOD, knobs_option)
methods_options = packed("methods", _methods, _METHODS, knobs_option)
selecting_options = packed("methods", partial(_methods, selecting=True), _METHODS, knobs_option)


def _suite(
    tasks: list[str], task_knobs: dict[str, str], depths: str | None, mode: str, shard: str, contexts: Any, **how: Any
) -> dict[str, Any]:
    from lce_lab.eval.running import Asking, Shard
    from lce_lab.eval.suite import MadeSuite, make_tasks

    try:
        places = tuple(float(text) for text in depths.split(",")) if depths else ()
    except ValueError:
        raise UsageError(f"--depths is {depths!r}; expected numbers from 0 to 1 with commas, such as 0,0.5,1") from None
    suite = MadeSuite(depths=places, asking=Asking(mode, Shard.parse(shard), contexts), **how)
    return {"tasks": make_tasks(tasks, task_knobs), "suite": suite}


def _benchmark(
    suite: str, data: str, tasks: list[str], samples: int | None, prompts: str | None, mode: str, shard: str, **how: Any
) -> dict[str, Any]:
    from lce_lab.eval.published import find
    from lce_lab.eval.published.suite import PublishedSuite
    from lce_lab.eval.running import Asking, Shard

    benchmark, asking = find(suite), Asking(mode, Shard.parse(shard))
    variant = benchmark.variant(prompts)
    found = PublishedSuite(benchmark, Path(data), variant, most=samples, asking=asking, **how)
    return {"tasks": found.tasks(tasks), "suite": found}


def _asked(task: str, task_knobs: dict[str, str], **how: Any) -> tuple[Any, Any]:
    from lce_lab.eval.suite import MadeSuite, make_tasks

    return make_tasks([task], task_knobs)[0], MadeSuite(**how)


_TASKS: dict[str, Any] = {"dest": "tasks", "multiple": True, "callback": _each_once}
_SHARD = flag("--shard I/N", "Ask the I-th of N parts, counted from 0.", default="0/1")
_SUITE = (
    flag("--task NAME", "One of `lce eval tasks`, or all; repeatable, or a list with commas.", ["passkey"], **_TASKS),
    flag("-t KEY=VALUE", "A knob of all tasks, or TASK.KEY=VALUE of one; repeatable.", dest="task_knobs", **KNOBS),
    flag("--samples N", "Documents for each task and length.", type=COUNT, default=20),
    flag("--seed", "The same seed makes the same samples.", type=int, default=0),
    flag("--filler prose|noise|essays:DIR", "The text that facts are hidden in.", default="prose"),
    flag("--depths LIST", "Where one fact stands, in turn: 0,0.5,1.  [default: even depths]"),
    flag("--mode single|shared|turns", "How questions of a document are asked.", default="single"),
    flag("--questions N", "Questions of a document.  [default: 1; 4 if not single]", type=COUNT),
    flag("--contexts DIR", "With --mode shared or turns: save documents here, and open them again."),
    _SHARD,
)
_TEMPLATE = "What is around a prompt: the benchmark's own, the model's chat template, nothing, or TEXT with {prompt}."
_PUBLISHED = (
    flag("--data DIR", "Your copy of the benchmark's files.", required=True),
    flag("--task NAME", "Repeatable, or a list with commas.  [default: those whose files are there]", **_TASKS),
    flag("--samples N", "Ask the first N questions of each task.  [default: all]", type=COUNT),
    flag("--prompts NAME", "One of the benchmark's sets of prompts.  [default: the first]"),
    flag("--template auto|chat|none|TEXT", _TEMPLATE, "auto"),
    flag("--max-length TOKENS", "Cut longer prompts as the benchmark cuts them.", type=COUNT),
    flag("--mode single|shared", "Read a document for each question, or once.", default="single"),
    _SHARD,
)
_RAY: dict[str, Any] = {"is_flag": False, "flag_value": "local"}
_CLUSTER = (
    flag("--ray [ADDRESS]", "Ask in a Ray job, on this machine or a cluster: lce[ray].", **_RAY),
    flag("--workers N", "With --ray: engines.  [default: as many as --threads allows]", type=COUNT),
)
suite_options = packed("suite", _suite, *_SUITE)
benchmark_options = packed("suite", _benchmark, argument("suite"), *_PUBLISHED)
cluster_options = packed("cluster", dict, *_CLUSTER)


asked_options = packed(
    "asked",
    _asked,
    flag("--task NAME", "One of `lce eval tasks`.", default="passkey"),
    flag("-t KEY=VALUE", "Its knobs.", dest="task_knobs", **KNOBS),
    flag("--samples N", "Texts for each method and length.", type=COUNT, default=10),
    flag("--seed", "The same seed makes the same texts.", type=int, default=0),
    flag("--filler prose|noise|essays:DIR", "What facts are hidden in.", default="prose"),
)
