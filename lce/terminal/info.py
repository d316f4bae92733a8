"""The output of `lce info` about a model folder or a context file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lce.errors import shown
from lce.files import named
from lce.lab.eval.naming import knob_values
from lce.sizes import size_text

if TYPE_CHECKING:
    from lce import ContextInfo, ModelInfo


def model_object(model: ModelInfo) -> dict[str, Any]:
    """Return a model as JSON; null for parts that the folder lacks."""
    plain = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    methods = {name: knob_values(method) for name, method in model.methods.items()}
    return {
        "kind": "model", **plain, "folder": str(model.folder), "rope": dataclasses.asdict(model.rope),
        "methods": methods, "refused": dict(model.refused),
    }  # fmt: skip


def model_lines(model: ModelInfo) -> list[str]:
    """Return a model as text: its properties, then each method's knobs for its window."""
    sliding = f", sliding window {model.sliding_window:,}" if model.sliding_window else ""
    size = model.weight_bytes
    rows = {
        "model": named(model.folder),
        "family": f"{model.family} ({model.architecture})",
        "layers": f"{model.n_layers}, hidden size {model.hidden_size:,}",
        "heads": f"{model.n_heads} over {model.n_kv_heads} of keys and values, dimension {model.head_dim}",
        "window": f"{model.window:,} tokens{sliding}",
        "rope": _rope(model.rope.kind, model.rope.factor, f", theta {model.rope.theta:,.0f}"),
        "parameters": f"{model.parameters:,}",
        "weights": "none" if size is None else f"{size_text(size)} in {model.weights or model.dtype}",
        "fingerprint": model.fingerprint or "none",
        "in contexts": model.identity or "none",
        "tokenizer": f"{model.tokenizer}, {model.vocab_size:,} tokens" if model.tokenizer else "none",
        "chat template": "yes" if model.chat_template else "no: it continues text",
    }
    methods = {f"  {name}": _pairs(knob_values(method)) or "(no options)" for name, method in model.methods.items()}
    refused = {f"  {name}": reason for name, reason in model.refused.items()}
    title = f"methods, with their knobs for a window of {model.window:,}"
    return [*_table(rows), "", title, *_table(methods | refused)]


def context_object(context: ContextInfo, ends: Sequence[str] | None) -> dict[str, Any]:
    """Return a context file as JSON; `ends` are the first and last words of the text, if a model decoded them."""
    plain = dataclasses.asdict(context)
    return {"kind": "context", **plain, "path": str(context.path), "knobs": dict(context.knobs), "text": ends}


def context_lines(context: ContextInfo, ends: Sequence[str] | None) -> list[str]:
    """Return a context file as text."""
    working = f"under work: {context.cached:,} tokens are read; prefill again to go on"
    rows = {
        "context": named(context.path),
        "state": "complete" if context.complete else working,
        "tokens": f"{context.tokens:,}",
        "method": f"{_word(context.method)} {_pairs(context.knobs)}".strip(),
        "window": f"{context.window:,} tokens",
        "rope": _rope(_word(context.rope), context.rope_factor),
        "dtype": _word(context.dtype),
        "kv dtype": _word(context.kv_dtype),
        "model": _word(context.model),
        "size": f"{size_text(context.file_bytes)}, {context.file_bytes // max(1, context.cached):,} bytes a token",
        "written by": f"lce {_word(context.lce)}, format {shown(context.format)}",
    }
    if context.announced > context.tokens:
        rows["announced"] = f"{context.announced:,} tokens in the end"
    if ends is not None:
        rows |= {"begins": shown(ends[0]), "ends": shown(ends[1])}
    return _table(rows)


def _word(text: str) -> str:
    """Return a word of a file, which is not trusted, escaped."""
    return shown(text)[1:-1]


def _rope(kind: str, factor: float, more: str = "") -> str:
    return f"{kind}{'' if kind == 'none' else f', factor {factor:g}'}{more}"


def _pairs(knobs: Mapping[str, Any]) -> str:
    from lce.methods.registry import spelled

    texts = {name: _word(value) if isinstance(value, str) else spelled(value) for name, value in knobs.items()}
    return " ".join(f"{name}={text}" for name, text in texts.items())


def _table(rows: Mapping[str, str]) -> list[str]:
    width = max(map(len, rows), default=0)
    return [f"{name:<{width}}  {text}" for name, text in rows.items()]
