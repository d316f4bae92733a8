"""Stage 3: the demo model on the GPU beside the CPU, every tier beside none, and what contexts go through."""

from __future__ import annotations

import gc
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lce
from gpu_stages.setup import Setup

ROOT = Path(__file__).parent.parent.parent
METHODS = ("full", "longheads", "infllm", "esa", "dca", "quest", "streaming")
TIERED = ("longheads", "quest", "infllm", "esa", "dca")
NEAR = 1e-3  # largest difference of float32 logits between devices, as a share of the largest logit
LEAST_SHARE = 0.98  # of tokens with logits so near: where two chunks score alike, rounding decides


class Demo:
    """Engines over the embedded model, sharing its weights, on one device."""

    def __init__(self, device: torch.device, window: int | None) -> None:
        self.device = device
        self.window = window
        self.first: dict[Any, lce.Engine] = {}

    def engine(self, method: str, dtype: str = "float32", **options: Any) -> lce.Engine:
        sharing = self.first.get(dtype)
        options |= {"device": self.device, "dtype": dtype, "window": self.window}
        engine = lce.load("demo", method, sharing=sharing, **options)
        self.first.setdefault(dtype, engine)
        return engine


@cache
def on_cpu(window: int | None) -> Demo:
    warnings.simplefilter("ignore")  # texts are longer than windows
    return Demo(torch.device("cpu"), window)


def cpu_logits(window: int | None, method: str, ids: list[int]) -> Any:
    """As an array: tensors would share memory between processes."""
    return on_cpu(window).engine(method).logits(ids).numpy()


def cpu_text(window: int | None, method: str, text: str) -> str:
    return on_cpu(window).engine(method).generate(text, max_tokens=24).text


@contextmanager
def in_another_process(setup: Setup) -> Iterator[Callable[..., Callable[[], Any]]]:
    """What begins work and returns what waits for its result. Without a GPU the work is done when it is waited for.

    Kernels for the CPU take a minute to compile: they do so beside what the GPU does.
    """
    if not setup.cuda:
        yield partial
        return
    pool = ProcessPoolExecutor(1, get_context("spawn"))
    try:
        yield lambda work, *args: pool.submit(work, *args).result
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def run(setup: Setup) -> None:
    text = (ROOT / "examples" / "haystack.txt").read_text()
    window = 128 if setup.tiny else None
    demo = Demo(setup.device, window)
    ids = demo.engine("full").tokenizer.encode(text)[: 300 if setup.tiny else 4000]
    some, whole = ids[: 200 if setup.tiny else 2048], text[-600:] if setup.tiny else text
    methods = ("longheads",) if setup.tiny else METHODS
    with in_another_process(setup) as begin:
        logits = {method: begin(cpu_logits, window, method, some) for method in methods}
        said = begin(cpu_text, window, "longheads", whole)
        on_the_gpu(setup, demo, methods, ids)
        for method in methods:
            with setup.record.attempt(f"logits beside the CPU: {method}") as cell:
                cell.update(beside(demo.engine(method).logits(some), torch.from_numpy(logits[method]())))
        with setup.record.attempt("text beside the CPU: longheads") as cell:
            ours, theirs = demo.engine("longheads").generate(whole, max_tokens=24).text, said()
            cell.update(text=ours, cpu=theirs, ok=ours == theirs)


def on_the_gpu(setup: Setup, demo: Demo, methods: Sequence[str], ids: list[int]) -> None:
    """What is compared with the GPU's own results."""
    tiered = ("longheads",) if setup.tiny else TIERED
    for method in tiered:
        with setup.record.attempt(f"tiers: {method} float32") as cell:
            cell.update(tiers(demo, method, "float32", ids))
    for method in methods:
        with setup.record.attempt(f"graph beside eager: {method}") as cell:
            cell.update(graph_beside_eager(setup, demo, method, ids))
    for method in tiered:
        with setup.record.attempt(f"dropped contexts: {method}") as cell:
            cell.update(dropped(demo, method, ids, 1 if setup.tiny else 10))
    for method in () if setup.tiny else tiered:
        with setup.record.attempt(f"tiers: {method} bfloat16") as cell:
            cell.update(tiers(demo, method, "bfloat16", ids))


def beside(logits: Tensor, other: Tensor) -> dict[str, Any]:
    """Logits `[T, vocab]` of two devices."""
    errors = (logits.cpu() - other.cpu()).abs().amax(-1) / other.abs().max().cpu()
    share = float((errors <= NEAR).double().mean())
    return {
        "largest": float(errors.max()), "median": float(errors.median()), "within": share, "ok": share >= LEAST_SHARE,
    }  # fmt: skip


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def answer(engine: lce.Engine, context: lce.Context, n: int = 12) -> tuple[list[int], Tensor]:
    """The next greedy tokens behind a context, and the logits after the last one that was read."""
    found = engine.generate([], context=context, max_tokens=n).token_ids
    logits = context.logits
    assert logits is not None
    return found, logits.clone()


def tiers(demo: Demo, method: str, dtype: str, ids: list[int]) -> dict[str, Any]:
    """The same logits with any budget, from a saved, an opened, a forked and a resumed context.

    `ok` allows rounding, because a recorded step may add up in another order than an eager one; bits are told beside.
    """
    plain = demo.engine(method, dtype)
    context = plain.prefill(ids, length=len(ids) + 64)
    want = answer(plain, context.fork())
    cell: dict[str, Any] = {"tokens": want[0]}

    def check(name: str, make: Callable[[], tuple[list[int], Tensor]]) -> None:
        try:
            tokens, logits = make()
            difference = float((logits - want[1]).abs().max() / want[1].abs().max())
            cell[name] = {
                "same bits": torch.equal(logits, want[1]), "same tokens": tokens == want[0], "difference": difference,
                "ok": tokens == want[0] and difference <= NEAR,
            }  # fmt: skip
        except Exception as error:
            cell[name] = {"error": f"{type(error).__name__}: {error}", "ok": False}

    def under(**budgets: Any) -> tuple[list[int], Tensor]:
        engine = demo.engine(method, dtype, **budgets)
        with engine.prefill(ids) as held:
            found = answer(engine, held)
            moved = {name: vars(traffic) for name, traffic in held.cache.traffic.items()}
            cell.setdefault("traffic", {})[", ".join(budgets)] = moved
            return found

    with folder() as spill:
        layout = plain.layout
        page = layout.page_bytes
        least = layout.least_budget + 8 * page
        beyond = {} if plain.device.type == "cuda" else {"spill_dir": spill}  # a CPU's device and host are one memory
        check("device", lambda: under(kv_device_budget=least, **beyond))
        check("host", lambda: under(kv_device_budget=least, kv_host_budget=16 * page + least, spill_dir=spill))
        check("disk", lambda: under(kv_device_budget=least, kv_host_budget=least, spill_dir=spill))
        small = demo.engine(method, dtype, kv_device_budget=least, kv_host_budget=least, spill_dir=spill)
        context.save(spill / "context.lce")
        check("opened", lambda: answer(plain, plain.open_context(spill / "context.lce")))
        check("opened under budgets", lambda: answer(small, small.open_context(spill / "context.lce")))
        check("saved again", lambda: saved_again(small, spill))
        check("forked under budgets", lambda: answer(small, small.open_context(spill / "context.lce").fork()))
        check("resumed", lambda: resumed(plain, ids, spill / "resumed.lce"))
    check("went on", lambda: answer(plain, context))
    checks = [x for x in cell.values() if isinstance(x, dict) and "ok" in x]
    cell["same bits"] = all(x.get("same bits", False) for x in checks)
    cell["ok"] = all(x["ok"] for x in checks)
    return cell


def saved_again(engine: lce.Engine, spill: Path) -> tuple[list[int], Tensor]:
    """An opened context that answered goes into a file of its own; it began where that of the file begins."""
    with engine.open_context(spill / "context.lce") as opened:
        n = len(opened)
        engine.generate([], context=opened, max_tokens=3)
        opened.save(spill / "again.lce")
    with engine.open_context(spill / "again.lce") as again:
        tokens, logits = answer(engine, again, 9)
        return again.token_ids[n : n + 3] + tokens, logits


class Stop(Exception):
    pass


def resumed(engine: lce.Engine, ids: list[int], path: Path) -> tuple[list[int], Tensor]:
    """A prefill into a file that fails half-way, made again, and opened."""

    def fail(done: int, total: int) -> None:
        if done * 2 > total:
            raise Stop

    with suppress(Stop):
        engine.prefill_file(ids, path, length=len(ids) + 64, checkpoint_every=engine.block, progress=fail)
    engine.prefill_file(ids, path, length=len(ids) + 64, checkpoint_every=engine.block)
    return answer(engine, engine.open_context(path))


def graph_beside_eager(setup: Setup, demo: Demo, method: str, ids: list[int]) -> dict[str, Any]:
    """Greedy decoding as it runs by itself beside decoding under a profile, which no recorded graph serves."""
    engine = demo.engine(method)
    n = 6 if setup.tiny else 150  # beyond a chunk's border
    context = engine.prefill(ids[:-7], length=len(ids) + n + 8)
    fork = context.fork()
    tokens, logits = answer(engine, context, n)
    with lce.profiled(engine):
        eager_tokens, eager = answer(engine, fork, n)
    first = next((i for i, (a, b) in enumerate(zip(tokens, eager_tokens, strict=True)) if a != b), None)
    difference = float((logits - eager).abs().max() / eager.abs().max())
    return {
        "tokens": n,
        "first other token": first,
        "difference": difference,
        "ok": first is None and difference < NEAR,
    }


def dropped(demo: Demo, method: str, ids: list[int], times: int) -> dict[str, Any]:
    """A context is dropped while its next pages are on their way; another one, in the same memory, is unharmed."""
    layout = demo.engine(method).layout
    spill = None if demo.device.type == "cuda" else tempfile.gettempdir()
    engine = demo.engine(method, kv_device_budget=layout.least_budget + 8 * layout.page_bytes, spill_dir=spill)
    want = answer(engine, engine.prefill(ids))  # a context without budgets may decode by other kernels
    same = []
    for _ in range(times):
        victim = engine.prefill(ids)
        engine.generate([], context=victim, max_tokens=3)
        victim.cache.begin()
        for layer in range(engine.model.config.n_layers):
            victim.cache.prefetch(layer)
        del victim
        gc.collect()
        tokens, logits = answer(engine, engine.prefill(ids))
        same.append(tokens == want[0] and torch.equal(logits, want[1]))
    return {"same": same, "ok": all(same)}
