"""Stage 6: the GPU's launches, gaps, waits and kernels during five decode steps and one block of prefill."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import lce
from gpu_stages.drawn import engine_of, methods, random_ids
from gpu_stages.setup import Setup
from gpu_stages.speed import warm_up

METHODS = ("longheads", "full", "infllm")
LENGTH, TOKENS, MOST_KERNELS = 32768, 5, 14
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchCooperativeKernel")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def run(setup: Setup) -> None:
    length = 200 if setup.tiny else LENGTH
    shape = "tiny" if setup.tiny else "llama-2-7b"
    first = None
    for name, method in methods(METHODS[:1] if setup.tiny else METHODS).items():
        with setup.record.attempt(name) as cell:
            engine = engine_of(shape, method, setup.device, sharing=first)
            first = first or engine
            warm_up(engine, setup)
            context = engine.prefill(random_ids(engine, length), length=length + 2 * engine.setup.block + 64)
            engine.generate([], context=context, max_tokens=8)
            cell["decode"] = profiled(setup, f"decode-{name}", lambda e=engine, c=context: steps(e, c), TOKENS)
            some = random_ids(engine, engine.setup.block, seed=1)
            cell["block"] = profiled(setup, None, lambda e=engine, c=context, i=some: e.prefill(i, context=c), 1)
            cell["block"]["tokens"] = engine.setup.block
            context.close()


def steps(engine: lce.Engine, context: lce.Context) -> None:
    engine.generate([], context=context, max_tokens=TOKENS)


def profiled(setup: Setup, trace: str | None, work: Callable[[], object], n: int) -> dict[str, Any]:
    """Return the figures a step of `work`, which takes `n` steps; first without a profiler, which costs much time."""
    setup.synchronize()
    started = time.perf_counter()
    work()
    setup.synchronize()
    plain = (time.perf_counter() - started) / n
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setup.cuda else [])]
    with profile(activities=activities) as taken:
        work()
        setup.synchronize()
    if trace is not None and setup.cuda:
        taken.export_chrome_trace(str(setup.out / f"trace-{trace}.json.gz"))
    events = taken.events() or []
    on_device = [event for event in events if event.device_type == DeviceType.CUDA]
    calls = Counter(event.name for event in events if event.device_type == DeviceType.CPU)
    return {
        "ms without the profiler": plain * 1e3,
        "device": on_the_device(on_device, n),
        "launches": sum(count for name, count in calls.items() if name.startswith(LAUNCHES)) / n,
        "graph launches": calls["cudaGraphLaunch"] / n,
        "waits": {name: calls[name] / n for name in WAITS if calls[name]},
        "operators": sum(count for name, count in calls.items() if name.startswith("aten::")) / n,
    }


def on_the_device(events: list[Any], n: int) -> dict[str, Any]:
    """Return busy time, the union of kernels' and copies' intervals, and the gaps between the first and the last.

    Kernels are listed by total time. Times are in milliseconds a step.
    """
    if not events:
        return {}
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    busy, end, longest = 0.0, spans[0][0], 0.0
    for start, stop in spans:
        longest = max(longest, start - end)
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    total: Counter[str] = Counter()
    number: Counter[str] = Counter()
    for event in events:
        total[event.name] += event.time_range.end - event.time_range.start
        number[event.name] += 1
    return {
        "busy ms": busy / n / 1e3,
        "span ms": (end - spans[0][0]) / n / 1e3,
        "longest gap ms": longest / 1e3,
        "kernels and copies": len(events) / n,
        "copies": {name: count / n for name, count in number.items() if name.startswith(("Memcpy", "Memset"))},
        "top": [
            {"name": name[:120], "ms": time / n / 1e3, "calls": number[name] / n}
            for name, time in total.most_common(MOST_KERNELS)
        ],
    }
