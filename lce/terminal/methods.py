"""Makes the methods that a command line names: one, several, all that serve the model, or that of a context file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import lce
from lce.errors import UsageError
from lce.files import named
from lce.terminal.output import note


@dataclasses.dataclass(frozen=True)
class Opening:
    """What a command line opens: a model or a context file, the method, its knobs, and options of `lce.load`."""

    model: str
    context_file: str | None
    loading: Mapping[str, Any]
    method: str | None = None
    knobs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    prefill_method: str | None = None

    def load(self, text: str | None = None, more: int = 0, least: int = 0) -> tuple[lce.Engine, lce.Context | None]:
        """Return an engine, and the context opened from the context file; without a file, an engine and None.

        With a file, the engine has the file's options, overridden by those of the command line. Without a file, the
        default method is `full`, and `auto` chooses for the tokens of `text`, if given, and `more`, but at least for
        `least` tokens. Raises an error for options that contradict the file.
        """
        if self.context_file is not None:
            return self._opened(self.context_file)
        name, length = "full" if self.method is None else self.method, None
        if text is not None and name == lce.methods.registry.AUTO:
            length = max(least, _n_tokens(self.model, text) + more)
        how: Any = {"length": length, **named_methods(name, self.knobs, self.prefill_method), **self.loading}
        return lce.load(self.model, **how), None

    def _opened(self, context_file: str) -> tuple[lce.Engine, lce.Context]:
        from lce.engine.info import describe
        from lce.methods.handover import BETWEEN, PREFILL

        context = describe(context_file)
        if self.method is None and context.method_file is not None:
            where = f"{context.method} of {context.method_file}, which is code and runs only if you name it"
            raise UsageError(f"{named(context_file)} was made with the method {where}; give --method FILE.py")
        own, _, prefill = context.method.partition(BETWEEN)
        name = own if self.method in (None, lce.methods.registry.AUTO) else self.method
        before = self.prefill_method or prefill or None
        same = {False: name == own, True: before == prefill}  # by whether a knob is the method of prefill's
        knobs = {key: value for key, value in context.knobs.items() if same[key.startswith(PREFILL)]}
        how = {**named_methods(name, {**knobs, **self.knobs}, before), **continued(context, self.loading)}
        engine = lce.load(self.model, **how)
        return engine, engine.open_context(context_file)


def named_methods(method: str, knobs: Mapping[str, Any], prefill_method: str | None) -> dict[str, Any]:
    """Return the options `method` and `prefill_method` of `lce.load` and `lce.plan`, with the knobs of each.

    The method may be `auto`, without knobs. Knobs of the method of prefill are named `prefill_method.KEY`.
    """
    from lce.methods.handover import PREFILL

    own = {key: value for key, value in knobs.items() if not key.startswith(PREFILL)}
    others = {key.removeprefix(PREFILL): value for key, value in knobs.items() if key not in own}
    if others and prefill_method is None:
        raise UsageError(f"-o {PREFILL}{next(iter(others))} is a knob of the method of prefill; give --prefill-method")
    made = None if prefill_method is None else lce.methods.make(prefill_method, others)
    if method != lce.methods.registry.AUTO:
        return {"method": lce.methods.make(method, own), "prefill_method": made}
    if own:
        raise UsageError(f"-o {next(iter(own))} is a knob of one method, and {method} takes one with its own; name it")
    return {"method": method, "prefill_method": made}


def _n_tokens(model: str, text: str) -> int:
    """Return the number of a text's tokens. Loads no weights."""
    from lce.models.layers import read_config
    from lce.weights.finding import source_of

    source = source_of(model)
    return len(source.tokenizer(read_config(source).vocab_size).encode(text))


def method_name(method: str) -> str:
    """Return the name of a method that a user named by its name or by its Python file. Runs the file, and says so."""
    if not method.endswith(".py"):
        return method
    note(f"{named(method)} runs as your own code: it may do whatever you may")
    return lce.methods.from_file(method).name


def continued(context: lce.ContextInfo, loading: Mapping[str, Any]) -> dict[str, Any]:
    """Return `loading`, options of `lce.load`, with missing options taken from a context file."""
    own: dict[str, Any] = {"window": context.window, "dtype": context.dtype, "weights": context.weights or "auto"}
    own["kv_dtype"] = context.kv_dtype if context.kv_dtype in ("int8", "int8-device") else "auto"
    if loading.get("rope") is None and loading.get("rope_factor") is None:
        own |= {"rope": context.rope, "rope_factor": None if context.rope == "none" else context.rope_factor}
    return {**loading, **{name: value for name, value in own.items() if loading.get(name) in (None, "auto")}}


def ends(model: str, context: lce.ContextInfo, n_tokens: int = 24) -> tuple[str, str]:
    """Return the first and the last `n_tokens` tokens of a context as text, decoded by the model that read them."""
    engine, opened = Opening(model, str(context.path), {}).load()
    ids = opened.token_ids if opened is not None else []
    return engine.tokenizer.decode(ids[:n_tokens]), engine.tokenizer.decode(ids[-n_tokens:])
