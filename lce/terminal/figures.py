"""Formats the commands' results: tables of text, and JSON objects."""

from __future__ import annotations

import typing
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING
from typing import TYPE_CHECKING, Any, Literal

import lce
from lce.errors import shown
from lce.files import named
from lce.sizes import size_text
from lce.system import peak_memory
from lce.terminal.output import aligned, plain

if TYPE_CHECKING:
    from lce import ContextInfo, Generation, Method, ModelInfo, Plan, Stats
    from lce.engine.operations import Operations
    from lce.engine.setup import Planned
    from lce.methods.costs import PaperFigure
    from lce.methods.knobs import KnobFacts
    from lce.models.config import Factor, LayerKind

COUNTED = {  # the fields of `OperationCount`, with their names in the table
    "projections": "projections around attention",
    "mlp": "MLP",
    "head": "head",
    "attention": "attention",
    "scores": "selection: scores",
    "summaries": "selection: summaries",
    "low_dim": "selection: low-dim maps",
}
READ = {"weight_bytes": "weights", "key_bytes": "keys and values", "state_bytes": "what the method keeps"}
PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def generation_object(generation: Generation, method: Method) -> dict[str, Any]:
    """Return a generation as JSON, with its method and its statistics."""
    used = {"name": method.name, "repr": repr(method), "knobs": lce.methods.knob_values(method)}
    return {**plain(generation), "stats": stats_object(generation.stats), "method": used}


def stats_object(stats: Stats) -> dict[str, Any]:
    """Return the statistics of a run as JSON, with its speeds and the peak memory of the process."""
    found = plain(stats)
    found |= {f"{name}_s": seconds for name, seconds in found.pop("more_s").items()}
    found |= {name: getattr(stats, name) for name in ("prefill_tokens_per_s", "decode_tokens_per_s")}
    return {**found, "peak_memory": peak_memory()}


def method_object(name: str, cls: type[Method]) -> dict[str, Any]:
    """Return a method as JSON: its name, the first paragraph of its docstring, its knobs and its presets."""

    def option(x: KnobFacts) -> dict[str, Any]:
        meaning, default = x.field.metadata.get("meaning"), None if x.default is MISSING else x.default
        beside = f"{x.beside}: {meaning}" if x.beside and meaning else meaning
        return {"name": x.name, "type": type_text(x.type), "default": default, "meaning": beside}

    summary = " ".join((cls.__doc__ or "").partition("\n\n")[0].split())
    knobs = [option(x) for x in lce.methods.knobs_of(cls)]
    return {"name": name, "summary": summary, "options": knobs, "presets": cls.presets}


def method_lines(method: dict[str, Any]) -> list[str]:
    """Format the JSON object of `method_object` as lines of text."""
    from lce.methods.knobs import spelled

    rows = [(f"  {x['name']}={spelled(x['default'])}", x["type"], x["meaning"] or "") for x in method["options"]]
    lines = aligned(rows, str.ljust)
    for name, values in method.get("presets", {}).items():
        lines.append(f"  preset={name}  " + " ".join(f"{knob}={spelled(value)}" for knob, value in values.items()))
    return [method["name"], f"  {method['summary']}", *(lines or ["  (no options)"])]


def plan_object(plan: Plan) -> dict[str, Any]:
    """Return a plan as JSON, with sizes in bytes. An unbounded length or an unknown size is null."""
    tiers = {tier: {"needed": need.needed, **plain(need)} for tier, need in plan.tiers.items()}
    return {**plain(plan), "tiers": tiers, "fits": plan.fits}


def plan_lines(plan: Plan) -> list[str]:
    """Return a plan as text, with a table row for each tier."""
    rows = [["tier", "needed", "available", "keys and values", "budget", "kept besides", "weights", "activations"]]
    for tier, n in plan.tiers.items():
        available = "unknown" if n.available is None else size_text(n.available)
        budget = "none" if n.budget is None else size_text(n.budget)
        more = [size_text(part) for part in (n.besides, n.weights, n.activations)]
        name = f"{tier}, layers {plan.layers[tier][0]} to {plan.layers[tier][1]}" if tier in plan.layers else tier
        rows.append([name, size_text(n.needed), available, size_text(n.keys_and_values), budget, *more])
    longest = "Nothing bounds the length." if plan.longest is None else f"The longest is {plan.longest:,} tokens."
    if plan.readable is not None and (plan.longest is None or plan.readable < plan.longest):
        held = "any number" if plan.longest is None else f"{plan.longest:,}"
        longest = f"Of this model {plan.method} can read {plan.readable:,} tokens; memory holds {held}."
    asked = f"{plan.tokens:,} tokens, read by {plan.method} on {plan.device}, keys and values in {plan.dtype}"
    if plan.rope.kind not in ("none", "longrope"):
        asked = f"{asked}, {plan.rope.kind} with factor {float(plan.rope.factor):.4g}"
    if plan.kv_dtype != plan.dtype:
        where = "everywhere" if plan.kv_dtype == "int8-device" else "below the device"
        asked = f"{asked}, {where} in {plan.kv_dtype}"
    advised = plan.auto and f"For this length --method auto takes {plan.auto.spelled}: {plan.auto.reason}."
    further = advised if plan.warning is None else f"But {plan.warning}."
    last = [f"It fits. {longest}", *filter(None, [further])] if plan.fits else [f"It does not fit. {longest}"]
    return [asked, "", *aligned(rows), "", *last]


def text_object(name: str, n_tokens: int, length: int, made: Planned) -> dict[str, Any]:
    """Return as JSON how long a text is for a model, `length` with questions and answers, and what reads it whole."""
    reads = [each for each, most in made.limits().items() if most is None or length <= most]
    about = {"file": name, "tokens": n_tokens, "with_questions": length, "window": made.reach}
    advice = {"auto": plain(made.choice(length)), "advice": made.choice(length).line(length, made.reach)}
    return {"kind": "text", **about, **advice, "reads": reads, "limits": dict(made.limits())}


def text_lines(text: dict[str, Any]) -> list[str]:
    """Format the JSON object of `text_object` as lines of text."""
    rows = [("text", named(text["file"])), ("tokens", f"{text['tokens']:,}; {text['with_questions']:,} with questions")]
    others = (f"{name} ({n:,})" for name, n in text["limits"].items() if name not in text["reads"])
    rows += [("advice", text["advice"]), ("read whole by", ", ".join(text["reads"]))]
    return aligned([*rows, ("too long for", ", ".join(others) or "none")], str.ljust)


def type_text(hint: Any) -> str:
    """Return a knob's type in words: `int`, `int or none`, `head, group or layer`."""
    if hint is type(None):
        return "none"
    arms = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return " or ".join(x for x in (", ".join(map(str, arms[:-1])), str(arms[-1])) if x)
    return " or ".join(map(type_text, arms)) if arms else getattr(hint, "__name__", str(hint))


def model_object(model: ModelInfo) -> dict[str, Any]:
    """Return a model as JSON. Parts that the folder lacks are null."""
    found = {"kind": "model", **plain(model.config), **plain(model)}
    methods = {name: lce.methods.knob_values(method) for name, method in model.methods.items()}
    left_out = ("config", "published", "generation")
    return {name: x for name, x in found.items() if name not in left_out} | {"methods": methods}


def model_lines(model: ModelInfo) -> list[str]:
    """Return a model as text: its properties, its tensors if they are of several types, and each method's knobs."""
    config, size = model.config, model.weight_bytes
    ours, others = "all files are as `lce quantize` wrote them", "no checksums: all weights can be read and are finite"
    sliding = f", sliding window {config.sliding_window:,}" if config.sliding_window else ""
    rows = {
        "model": named(model.folder),
        "family": f"{model.family} ({config.architecture})",
        "layers": f"{config.n_layers}, hidden size {config.hidden_size:,}{_kinds(config.kinds)}",
        "heads": f"{config.n_heads} over {config.n_kv_heads} of keys and values, dimension {config.head_dim}",
        "window": f"{config.window:,} tokens{sliding}",
        "rope": _rope(config.rope.kind, config.rope.factor, f", theta {config.rope.theta:,.0f}"),
        "parameters": f"{model.parameters:,}",
        "weights": "none" if size is None else f"{size_text(size)} in {model.weights or model.dtype}",
        **({} if model.prefilled_in == model.dtype else {"prefill": f"products in {model.prefilled_in} on this CPU"}),
        **({} if model.checked is None else {"checked": ours if model.checked else others}),
        "fingerprint": model.fingerprint or "none",
        "in contexts": model.identity or "none",
        "tokenizer": f"{model.tokenizer}, {config.vocab_size:,} tokens" if model.tokenizer else "none",
        "chat template": "yes" if model.chat_template else "no: it continues text",
    }
    knobs = {name: _pairs(lce.methods.knob_values(method)) for name, method in model.methods.items()}
    methods = {f"  {name}": text or "(no options)" for name, text in knobs.items()}
    refused = {f"  {name}": reason for name, reason in model.refused.items()}
    title = f"methods, with their knobs for a window of {config.window:,}"
    groups = [(f"  {x.kind}", str(x.count), x.type, size_text(x.n_bytes)) for x in model.tensors]
    mixed = len({group.type for group in model.tensors}) > 1
    tensors = ["", *aligned([("tensors", "count", "type", "size"), *groups])] if mixed else []
    return [*aligned(rows.items(), str.ljust), *tensors, "", title, *aligned((methods | refused).items(), str.ljust)]


def context_lines(context: ContextInfo, ends: Sequence[str] | None) -> list[str]:
    """Return a context file as text: its properties, and, if `ends` are given, the beginning and end of its text."""
    is_fitted = context.rope_factor == "auto"
    working = f"under work: {context.cached:,} tokens are read; prefill again to go on"
    rows = {
        "context": named(context.path),
        "state": "complete" if context.complete else working,
        "tokens": f"{context.tokens:,}",
        "method": f"{_word(context.method)} {_pairs(context.knobs)}".strip(),
        "window": f"{context.window:,} tokens",
        "rope": _rope(_word(context.rope), context.rope_factor, f" for {context.announced:,} tokens" * is_fitted),
        "dtype": _word(context.dtype),
        "kv dtype": _word(context.kv_dtype),
        "model": _word(context.model),
        "size": f"{size_text(context.file_bytes)}, {context.file_bytes // max(1, context.cached):,} bytes a token",
        "written by": f"lce {_word(context.lce)}, format {shown(context.format)}",
    }
    if context.method_file is not None:
        rows["method file"] = context.method_file
    if context.rows < context.cached:
        rows["evicted"] = f"{context.cached - context.rows:,} tokens in each KV head"
    if context.announced > context.tokens:
        rows["announced"] = f"{context.announced:,} tokens in the end"
    if ends is not None:
        rows |= {"begins": shown(ends[0]), "ends": shown(ends[1])}
    return aligned(rows.items(), str.ljust)


def _word(text: str) -> str:
    """Return a word read from a file with its control characters escaped, since files are not trusted."""
    return shown(text)[1:-1]


def _rope(kind: str, factor: Factor, more: str = "") -> str:
    text = factor if isinstance(factor, str) else f"{factor:g}"
    return f"{kind}{'' if kind == 'none' else f', factor {text}'}{more}"


def _kinds(kinds: Sequence[LayerKind]) -> str:
    """Return how many layers differ from plain ones, and how: `; 5 with a sliding window of 512 and theta 10,000`."""
    found = []
    for kind, n in Counter(kinds).items():
        own = [] if kind.sliding_window is None else [f"a sliding window of {kind.sliding_window:,}"]
        if not kind.rotated:
            own.append("no rotation")
        elif kind.rope is not None:
            scaling = "" if kind.rope.kind == "none" else f", rope {_rope(kind.rope.kind, kind.rope.factor)}"
            own.append(f"theta {kind.rope.theta:,.0f}{scaling}")
        found += [f"; {n} with {' and '.join(own)}"] if own else []
    return "".join(found)


def _pairs(knobs: Mapping[str, Any]) -> str:
    from lce.methods.knobs import spelled

    texts = {name: _word(value) if isinstance(value, str) else spelled(value) for name, value in knobs.items()}
    return " ".join(f"{name}={text}" for name, text in texts.items())


def operations_object(counted: Operations) -> dict[str, Any]:
    """Return counted operations and their sums as JSON. Numbers are null if a method does not tell its cost."""
    sums = ("selection", "operations", "flops", "bytes_read", "share")
    works = {"prefill": counted.prefill, "decode": counted.decode}
    phases = {phase: plain(work) | {name: getattr(work, name) for name in sums} for phase, work in works.items()}
    return {**plain(counted), **phases}


def operations_lines(counted: Operations) -> list[str]:
    """Return a table of operations and bytes per token: a row for each kind, columns for prefill and decode."""

    def row(text: str, name: str, shown: Callable[[float], str], *, whole: bool = False) -> list[str]:
        found = [(getattr(work, name), 1 if whole else work.tokens) for work in (counted.prefill, counted.decode)]
        return [text, *("not counted" if n is None else shown(n / tokens) for n, tokens in found)]

    rows = [
        ["a token", "prefill", "decode"],
        *(row(text, name, count_text) for name, text in COUNTED.items()),
        row("multiply-adds", "operations", count_text),
        row("FLOPs, 2 a multiply-add", "flops", count_text),
        row("share of causal attention", "share", "{:.2%}".format, whole=True),
        *(row(f"read: {text}", name, lambda n: size_text(round(n))) for name, text in READ.items()),
        row("bytes read", "bytes_read", lambda n: size_text(round(n))),
    ]
    steps = counted.decode.tokens
    last = "the last token's decode" if steps == 1 else f"the decode of the last {steps:,}"
    asked = f"Counted for {counted.tokens:,} tokens: the prefill in blocks of {counted.block:,}, and {last}."
    return [asked, "", *aligned(rows), *map(_paper_line, counted.paper_figures)]


def count_text(n: float) -> str:
    """Format a count to three digits, such as `13.3 G`."""
    n = float(f"{n:.3g}")
    size, prefix = next(((size, prefix) for size, prefix in PREFIXES if n >= size), (1, ""))
    return f"{n / size:g} {prefix}".strip()


def _paper_line(figure: PaperFigure) -> str:
    value = f"{figure.value:.2%}" if figure.is_share else f"{figure.value:,.0f}"
    return f"In the paper{f', {figure.where}' if figure.where else ''}: {figure.text}: {value}"
