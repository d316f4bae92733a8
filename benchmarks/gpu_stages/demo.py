"""Stage 3: the demo model on the GPU beside the CPU, with and without tiers, and operations on contexts."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lce
from gpu_stages.setup import Setup, graph_figures, last_lines
from lce.attention import Attention
from lce.cache.limits import Limits
from lce.engine.lanes import one_by_one
from lce.engine.sizing import resolved

ROOT = Path(__file__).parent.parent.parent
METHODS = ("full", "longheads", "infllm", "esa", "dca", "quest", "streaming")
TIERED = ("longheads", "quest", "infllm", "esa", "dca")
NEAR = 1e-3  # largest difference of float32 logits between devices, as a share of the largest logit
LEAST_SHARE = 0.98  # of tokens with logits so near; rounding decides between chunks with equal scores


class Demo:
    """Engines over the embedded model, sharing its weights, on one device."""

    def __init__(self, device: torch.device, tiny: bool) -> None:
        self.device = device
        self.sizes = {"window": 256, "block": 64} if tiny else {}
        self.first: dict[Any, lce.Engine] = {}

    def engine(self, method: str, dtype: str = "float32", **options: Any) -> lce.Engine:
        sharing = self.first.get(dtype)
        block = resolved("demo", method).block  # a small one also on GPUs, so that texts have several blocks
        options |= {"device": self.device, "dtype": dtype, "block": block, **self.sizes}
        engine = lce.load("demo", method, sharing=sharing, **options)
        self.first.setdefault(dtype, engine)
        return engine


def run(setup: Setup) -> None:
    text = (ROOT / "examples" / "haystack.txt").read_text()
    demo, cpu = Demo(setup.device, setup.tiny), setup.workers(1)
    n = 200 if setup.tiny else 2400  # beyond the budgets of `tiers`
    ids = demo.engine("full").tokenizer.encode(text)[:n]
    methods = ("longheads",) if setup.tiny else METHODS
    some, whole = ids[: 150 if setup.tiny else 2048], text[-600:] if setup.tiny else text
    # Meanwhile another process compiles and computes the CPU's side.
    logits = {method: cpu.submit(cpu_logits, setup.tiny, method, some) for method in methods}
    said = cpu.submit(cpu_text, setup.tiny, whole)
    tiered = ("longheads",) if setup.tiny else TIERED
    for method in methods:
        with setup.record.attempt(f"graph beside eager: {method}") as cell:
            cell.update(graph_beside_eager(setup, demo, method, ids))
    for method in tiered:
        with setup.record.attempt(f"tiers: {method} float32") as cell:
            cell.update(tiers(demo, method, "float32", ids))
    for method in tiered:
        with setup.record.attempt(f"dropped contexts: {method}") as cell:
            cell.update(dropped(demo, method, ids, 1 if setup.tiny else 4))
    for method in methods:
        with setup.record.attempt(f"logits beside the CPU: {method}") as cell:
            theirs = torch.from_numpy(logits[method].result(timeout=max(0.1, setup.left() - 4)))
            cell.update(beside(demo.engine(method).logits(some), theirs))
    with setup.record.attempt("text beside the CPU: longheads") as cell:
        cell["text"] = demo.engine("longheads").generate(whole, max_tokens=24).text
        cell["cpu"] = said.result(timeout=max(0.1, setup.left() - 4))
        cell["ok"] = cell["text"] == cell["cpu"]
    cpu.shutdown(wait=False, cancel_futures=True)
    for method in () if setup.tiny else tiered:
        with setup.record.attempt(f"tiers: {method} bfloat16") as cell:
            cell.update(tiers(demo, method, "bfloat16", ids))


_cpu: dict[bool, Demo] = {}  # of the process that computes the CPU's side


def cpu_demo(tiny: bool) -> Demo:
    return _cpu.setdefault(tiny, Demo(torch.device("cpu"), tiny))


def cpu_logits(tiny: bool, method: str, ids: list[int]) -> Any:
    """Return the CPU's logits as a NumPy array."""
    return cpu_demo(tiny).engine(method).logits(ids).numpy()


def cpu_text(tiny: bool, prompt: str) -> str:
    return cpu_demo(tiny).engine("longheads").generate(prompt, max_tokens=24).text


def beside(logits: Tensor, other: Tensor) -> dict[str, Any]:
    """Compare logits `[T, vocab]` of two devices."""
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
    """Return the next greedy tokens behind a context, and the logits after the last token read."""
    found = engine.generate([], context=context, max_tokens=n).token_ids
    logits = context.logits
    assert logits is not None
    return found, logits.clone()


def tiers(demo: Demo, method: str, dtype: str, ids: list[int]) -> dict[str, Any]:
    """Compare logits with any budget, from a saved, an opened, a forked and a resumed context.

    Pages in tiers are read by eager steps, so all are compared with eager steps, to the bit. Recorded steps add up in
    another order; for them `ok` allows rounding.
    """
    plain = demo.engine(method, dtype)
    context = plain.prefill(ids, length=len(ids) + 64)
    with one_by_one():
        want = answer(plain, context.fork())
    cell: dict[str, Any] = {"tokens": want[0]}

    def check(name: str, make: Callable[[], tuple[list[int], Tensor]], recorded: bool = False) -> None:
        try:
            with nullcontext() if recorded else one_by_one():
                tokens, logits = make()
            difference = float((logits - want[1]).abs().max() / want[1].abs().max())
            cell[name] = {
                "same bits": torch.equal(logits, want[1]), "same tokens": tokens == want[0], "difference": difference,
                "ok": tokens == want[0] and difference <= NEAR,
            }  # fmt: skip
            if recorded:  # another order of sums
                del cell[name]["same bits"]
        except Exception as error:
            cell[name] = {"error": last_lines(error), "ok": False}

    def under(**budgets: Any) -> tuple[list[int], Tensor]:
        engine = demo.engine(method, dtype, **budgets)
        with engine.prefill(ids) as held:
            found = answer(engine, held)
            moved = {name: vars(traffic) for name, traffic in held.cache.traffic.items()}
            cell.setdefault("traffic", {})[", ".join(budgets)] = moved
            if not moved:
                raise RuntimeError("nothing was in tiers: the budget is too large for this check")
            return found

    with folder() as spill:
        layout = plain.setup.layout
        page = layout.page_bytes
        least = Limits(layout).least_budget + 8 * page
        on_gpu = plain.setup.device.type == "cuda"  # a CPU's device and host are one memory
        beyond = {} if on_gpu else {"spill_dir": spill}
        check("device", lambda: under(kv_device_budget=least, **beyond))
        check("host", lambda: under(kv_device_budget=least, kv_host_budget=16 * page + least, spill_dir=spill))
        check("disk", lambda: under(kv_device_budget=least, kv_host_budget=least, spill_dir=spill))
        small = demo.engine(method, dtype, kv_device_budget=least, kv_host_budget=least, spill_dir=spill)
        context.save(spill / "context.lce")
        check("opened", lambda: answer(plain, plain.open_context(spill / "context.lce")))
        check("opened under budgets", lambda: answer(small, small.open_context(spill / "context.lce")))
        check("saved again", lambda: saved_again(small, spill))
        check("forked under budgets", lambda: answer(small, small.open_context(spill / "context.lce").fork()))
        if dtype == "float32":  # in bfloat16 the next token may differ
            check("opened, recorded", lambda: answer(plain, plain.open_context(spill / "context.lce")), True)
        check("resumed", lambda: resumed(plain, ids, spill / "resumed.lce"))
    if dtype == "float32":
        check("forked, recorded", lambda: answer(plain, context.fork()), True)
    check("went on", lambda: answer(plain, context))
    checks = [x for x in cell.values() if isinstance(x, dict) and "ok" in x]
    cell["same bits"] = all(x.get("same bits", "error" not in x) for x in checks)
    cell["ok"] = all(x["ok"] for x in checks)
    return cell


def saved_again(engine: lce.Engine, spill: Path) -> tuple[list[int], Tensor]:
    """Open a context, let it answer, save it to another file, and answer from that file."""
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
    """Repeat a prefill into a file that failed half-way, and answer from the file."""

    def fail(done: int, total: int) -> None:
        if done * 2 > total:
            raise Stop

    with suppress(Stop):
        engine.prefill_file(ids, path, length=len(ids) + 64, checkpoint_every=engine.setup.block, progress=fail)
    engine.prefill_file(ids, path, length=len(ids) + 64, checkpoint_every=engine.setup.block)
    return answer(engine, engine.open_context(path))


def graph_beside_eager(setup: Setup, demo: Demo, method: str, ids: list[int]) -> dict[str, Any]:
    """Compare greedy decoding by default with decoding kernel by kernel."""
    engine = demo.engine(method)
    n = 6 if setup.tiny else 150  # beyond a chunk's border
    context = engine.prefill(ids[:-7], length=len(ids) + n + 8)
    fork = context.fork()
    tokens, logits = answer(engine, context, n)
    with one_by_one():
        eager_tokens, eager = answer(engine, fork, n)
    first = next((i for i, (a, b) in enumerate(zip(tokens, eager_tokens, strict=True)) if a != b), None)
    difference = float((logits - eager).abs().max() / eager.abs().max())
    figures = graph_figures(engine)
    expected = setup.cuda and engine.method.promised("recorded") and Attention.choose("auto").decodes
    return {
        "tokens": n,
        "first other token": first,
        "difference": difference,
        **figures,
        "ok": first is None and difference < NEAR and (not expected or figures.get("replayed", 0) > 0),
    }


def dropped(demo: Demo, method: str, ids: list[int], times: int) -> dict[str, Any]:
    """Drop a context while its next pages are in transfer; another context, in the same memory, is unharmed."""
    plain = demo.engine(method)
    with one_by_one():  # as pages in tiers are read
        want = answer(plain, plain.prefill(ids))
    layout = plain.setup.layout
    spill = None if plain.setup.device.type == "cuda" else tempfile.gettempdir()
    engine = demo.engine(method, kv_device_budget=Limits(layout).least_budget + 8 * layout.page_bytes, spill_dir=spill)
    same = []
    for _ in range(times):
        victim = engine.prefill(ids)
        engine.generate([], context=victim, max_tokens=3)
        victim.cache.begin()
        for layer in range(plain.setup.model.config.n_layers):
            victim.cache.prefetch(layer)
        del victim
        gc.collect()
        tokens, logits = answer(engine, engine.prefill(ids))
        same.append(tokens == want[0] and torch.equal(logits, want[1]))
    return {"same": same, "ok": all(same)}
