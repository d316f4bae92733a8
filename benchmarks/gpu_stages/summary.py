"""Summarises the stages' figures in a short text: checks, speeds, and lce's bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Stage = Mapping[str, Any]
Results = Mapping[int, Stage]
# Seconds a token of the LongHeads paper: Llama-2-7B on an A100, at 4k, 16k, 32k; full is flash attention.
PAPER = {"longheads": (0.03, 0.08, 0.11), "full": (0.03, 0.11, 0.21)}


def summary(results: Results) -> str:
    parts = (hardware, kernels, statuses, checks, models, speeds, offloading, profiles, neighbour, bars)
    return "\n".join(line for part in parts for line in part(results)) + "\n"


def cells(stage: Stage) -> dict[str, dict[str, Any]]:
    """Return a stage's figures that are dictionaries."""
    return {name: x for name, x in stage.items() if isinstance(x, dict)}


def table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    for row in [head, *rows]:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def number(x: Any, digits: int = 3) -> str:
    return f"{x:.{digits}g}" if isinstance(x, int | float) else "–"


def hardware(results: Results) -> Iterator[str]:
    stage = results.get(0, {})
    machine, packages = stage.get("machine", {}), stage.get("packages", {})
    if machine:
        yield f"{machine.get('gpu', 'no GPU')}, {machine['cores']} cores, Python {machine['python']}; " + ", ".join(
            f"{name} {packages.get(name)}" for name in ("torch", "triton", "numba", "transformers")
        )
    for name in ("copy", "product", "transfers", "launches"):
        for what, x in stage.get(name, {}).items():
            if what != "seconds":
                yield f"{name}: {what} {number(x) if what != 'error' else last(x)}"


def kernels(results: Results) -> Iterator[str]:
    """Yield rates of single kernels, in TB/s or TFLOP/s."""
    for label, cell in cells(results.get(0, {})).items():
        if label.startswith("kernels: "):
            for what, x in cells(cell).items():
                rates = [f"{name.removesuffix(' per s')} {x[name] / 1e12:.3g}" for name in x if name.endswith("per s")]
                wrong = [f"{name}: {x[name]}" for name in x if name.endswith("error")]
                yield f"{label}: {what}: {', '.join(rates + wrong)}"
            if "error" in cell:
                yield f"{label}: {last(cell['error'])}"


def statuses(results: Results) -> Iterator[str]:
    yield ""
    for key, stage in sorted(results.items()):
        yield f"stage {key}: {stage['status']}" + (f"; {last(stage['error'])}" if "error" in stage else "")


def last(error: str) -> str:
    return (error.strip().splitlines() or [""])[-1][:160]


def checks(results: Results) -> Iterator[str]:
    """Yield the number of checks of stages 1 to 3 that hold, and the checks that fail."""
    tests = results.get(1, {})
    if "tests" in tests:
        yield f"tests: {tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped"
        if tests.get("stopped at the limit"):
            yield f"  {len(tests['stopped at the limit'])} of {len(tests['exit status'])} processes had no time for all"
        yield from (f"  failed: {name}: {last(text)}" for name, text in tests["failures"].items())
    for key, name in ((2, "exactness"), (3, "demo")):
        found = {label: cell for label, cell in cells(results.get(key, {})).items() if "ok" in cell or "error" in cell}
        if found:
            yield f"{name}: {sum(cell.get('ok') is True for cell in found.values())} of {len(found)} hold"
        for label, cell in found.items():
            if "error" in cell:
                yield f"  failed: {label}: {last(cell['error'])}"
            elif not cell["ok"]:
                wrong = [f"{part}: {x}" for part, x in cell.items() if isinstance(x, dict) and x.get("ok") is False]
                yield f"  wrong: {label}: {', '.join(wrong) or {k: x for k, x in cell.items() if k != 'seconds'}}"[:300]
    bits = [cell.get("same bits") for label, cell in cells(results.get(3, {})).items() if label.startswith("tiers")]
    if bits:
        yield f"tiers: the same bits in {bits.count(True)} of {len(bits)}"


def ceiling(results: Results) -> float | None:
    """Return the device's bytes read plus written a second in a copy."""
    return results.get(0, {}).get("copy", {}).get("bytes_per_s")


def share(results: Results, cell: Mapping[str, Any]) -> float | None:
    """Return a decode step's necessary bytes a second, as a share of the ceiling."""
    most, time = ceiling(results), cell.get("decode ms")
    return cell["decode bytes"] / (time / 1e3) / most if most and time else None


def over(results: Results, cell: Mapping[str, Any], what: str) -> float | None:
    """Return a method's speed over full attention's at the same length; above 1 is faster."""
    full = results.get(4, {}).get(f"full at {cell.get('length')}", {})
    if not cell.get(what) or not full.get(what) or full.get("decoded at") != cell.get("decoded at"):
        return None
    return full[what] / cell[what] if what == "decode ms" else cell[what] / full[what]


def models(results: Results) -> Iterator[str]:
    """Yield a table of stage 8, transformers' rows in it and the ceilings below; then lanes, weights and first use."""
    stage, head = (
        results.get(8, {}),
        ["method", "tokens", "block", "prefill tok/s", "first", "decode ms", "first", "GB"],
    )
    rows = [
        [
            cell["method"], f"{cell['length']:,}", number(cell.get("block"), 5), number(cell.get("prefill tok/s"), 5),
            number(cell.get("first prefill tok/s"), 5), number(cell.get("decode ms")),
            number(cell.get("first decode ms")), number(cell.get("peak memory bytes", 0) / 1e9 or None),
        ]
        for cell in cells(stage).values() if "length" in cell
    ]  # fmt: skip
    if rows:
        yield ""
        yield from table(head, rows)
        most = results.get(0, {}).get("product", {}).get("flops"), ceiling(results)
        flops, copied = (number(x and x / 1e12) for x in most)
        yield f"ceilings: products {flops} TFLOP/s, copies {copied} TB/s"
    for key, what in ((8, "method"), (9, "lanes"), (10, "weights"), (11, "first use")):
        for label, cell in cells(results.get(key, {})).items():
            if "error" in cell:
                yield f"{what}: {label}: {last(cell['error'])}"
            elif key > 8:
                shown = {name: number(x, 4) if not isinstance(x, list) else x for name, x in cell.items() if x}
                yield f"{what}: {label}: " + ", ".join(f"{name} {x}" for name, x in shown.items())


def speeds(results: Results) -> Iterator[str]:
    head = ["method", "tokens", "prefill tok/s", "over full", "TFLOP/s", "decode ms", "events ms", "over full",
            "of copying", "graph", "peak GB", "A100, paper: ms"]  # fmt: skip
    rows, notes = [], []
    for label, cell in cells(results.get(4, {})).items():
        if "length" not in cell:
            continue
        paper = dict(zip((4096, 16384, 32768), PAPER.get(cell["method"], ()), strict=False)).get(cell["length"])
        rows.append([
            cell["method"], f"{cell['length']:,}", number(cell.get("prefill tok/s"), 4),
            number(over(results, cell, "prefill tok/s")), number(cell.get("prefill flop/s", 0) / 1e12 or None),
            number(cell.get("decode ms")), number(cell.get("events ms a token")),
            number(over(results, cell, "decode ms")), number(share(results, cell)),
            f"{cell['graph'][:24]} {cell.get('replayed', '')}".strip() if "graph" in cell else "–",
            number(cell.get("peak memory bytes", 0) / 1e9 or None), number(paper and paper * 1e3),
        ])  # fmt: skip
        if "error" in cell or "note" in cell:
            notes.append(f"{label}: {cell.get('note') or last(cell['error'])}")
    if rows:
        yield ""
        yield from table(head, rows)
        yield from notes


def offloading(results: Results) -> Iterator[str]:
    for label, cell in cells(results.get(5, {})).items():
        if "decode ms" not in cell and "error" not in cell:
            continue
        found = {"prefill tok/s": cell.get("prefill tok/s"), "decode ms": cell.get("decode ms")}
        text = ", ".join(f"{what} {number(x)}" for what, x in found.items())
        peak = number(cell.get("peak memory bytes", 0) / 1e9 or None)
        note = cell.get("note") or (last(cell["error"]) if "error" in cell else "")
        yield f"offload: {label}: {text}, at {cell.get('decoded at')}, peak {peak} GB; {note}"


def profiles(results: Results) -> Iterator[str]:
    for label, cell in cells(results.get(6, {})).items():
        if "error" in cell:
            yield f"profile: {label}: {last(cell['error'])}"
        for step in ("decode", "block"):
            found, device = cell.get(step, {}), cell.get(step, {}).get("device", {})
            if found:
                yield (
                    f"profile: {label} {step}: {number(found['ms without the profiler'])} ms, GPU busy "
                    f"{number(device.get('busy ms'))} ms, {number(found['launches'])} launches, "
                    f"{number(found['graph launches'])} graphs, waits {found['waits']}"
                )
                for kernel in device.get("top", [])[:5]:
                    yield f"    {number(kernel['ms'])} ms in {number(kernel['calls'])}: {kernel['name'][:80]}"


def neighbour(results: Results) -> Iterator[str]:
    stage = results.get(7, {})
    if "logits" in stage:
        yield f"transformers: logits differ by {number(stage['logits'].get('difference'))} of the largest"
    for label, cell in cells(stage).items():
        if " at " in label:
            speed = f"prefill {number(cell.get('prefill tok/s'), 4)} tok/s, decode {number(cell.get('decode ms'))} ms"
            yield f"{label}: {speed}" + (f"; {last(cell['error'])}" if "error" in cell else "")


def beside(results: Results, what: str) -> float | None:
    """Return the least ratio of lce's speed to transformers' at the same length."""
    stage = results.get(7, {})
    found = []
    for label, cell in cells(stage).items():
        theirs = stage.get(label.replace("lce at", "transformers at"), {}).get(what)
        if label.startswith("lce at") and cell.get(what) and theirs:
            found.append(theirs / cell[what] if what == "decode ms" else cell[what] / theirs)
    return min(found, default=None)


def offload_ratio(results: Results) -> float | None:
    """Return the ratio of decode times, offloaded over resident, if both have the same length."""
    kept = [results.get(5, {}).get(f"longheads {name}", {}) for name in ("offloaded", "resident")]
    times = [cell.get("decode ms") for cell in kept]
    return times[0] / times[1] if all(times) and kept[0]["decoded at"] == kept[1]["decoded at"] else None


def at(
    name: str, length: int, figure: Callable[[Results, Mapping[str, Any]], float | None]
) -> Callable[[Results], Any]:
    return lambda results: figure(results, results.get(4, {}).get(f"{name} at {length}", {}))


# The figure, how to get it, at least or at most, and the bar.
BARS: tuple[tuple[str, Callable[[Results], Any], str, float], ...] = (
    ("full decode, of copying, 32k", at("full", 32768, share), ">=", 0.8),
    ("full decode, of copying, 128k", at("full", 131072, share), ">=", 0.8),
    ("longheads decode, of copying, 32k", at("longheads", 32768, share), ">=", 0.7),
    ("longheads decode, of copying, 128k", at("longheads", 131072, share), ">=", 0.7),
    ("longheads over full, decode, 32k", at("longheads", 32768, lambda r, c: over(r, c, "decode ms")), ">=", 1.7),
    ("longheads over full, decode, 128k", at("longheads", 131072, lambda r, c: over(r, c, "decode ms")), ">=", 4.0),
    ("lce over transformers, prefill", lambda results: beside(results, "prefill tok/s"), ">=", 1.0),
    ("lce over transformers, decode", lambda results: beside(results, "decode ms"), ">=", 1.0),
    ("128k, 4 GiB on the GPU over resident, decode time", offload_ratio, "<=", 2.0),
)


def bars(results: Results) -> Iterator[str]:
    rows = []
    for what, figure, relation, bar in BARS:
        x = figure(results)
        held = "not measured" if x is None else "held" if (x >= bar if relation == ">=" else x <= bar) else "MISSED"
        rows.append([what, number(x), f"{relation} {bar:g}", held])
    yield ""
    yield from table(["bar", "figure", "wanted", ""], rows)
