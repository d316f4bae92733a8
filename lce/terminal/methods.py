"""Makes the methods that a command line names: one, several, all that serve the model, or that of a context file."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lce
from lce.errors import CapacityError, LceError, UsageError, nearest
from lce.files import named
from lce.terminal.output import note

ALL = "all"


@dataclasses.dataclass(frozen=True)
class MethodOption:
    """The method and the knobs of a command line, and the method that reads prompts; None if it names none."""

    method: str | None
    knobs: Mapping[str, str]
    prefill_method: str | None = None

    def load(
        self,
        model: str,
        context_file: str | None,
        loading: Mapping[str, Any],
        text: str | None = None,
        more: int = 0,
        least: int = 0,
    ) -> tuple[lce.Engine, lce.Context | None]:
        """Return an engine, and the context opened from `context_file`; without a file, an engine and None.

        With a file, the engine has the file's options, overridden by those of the command line. Without a file, the
        default method is `full`, and `auto` chooses for the tokens of `text`, if given, and `more`, but at least for
        `least` tokens. Raises an error for options that contradict the file.
        """
        auto = lce.methods.registry.AUTO
        if context_file is None:
            name = "full" if self.method is None else self.method
            length = None if text is None or name != auto else max(least, _n_tokens(model, text) + more)
            how: Any = {"length": length, **named_methods(name, self.knobs, self.prefill_method), **loading}
            return lce.load(model, **how), None
        from lce.engine.info import describe
        from lce.methods.handover import BETWEEN, PREFILL

        context = describe(context_file)
        if self.method is None and context.method_file is not None:
            where = f"{context.method} of {context.method_file}, which is code and runs only if you name it"
            raise UsageError(f"{named(context_file)} was made with the method {where}; give --method FILE.py")
        own, _, prefill = context.method.partition(BETWEEN)
        name = own if self.method is None or self.method == auto else self.method
        before = self.prefill_method or prefill or None
        same = {False: name == own, True: before == prefill}  # by whether a knob is the method of prefill's
        knobs = {key: value for key, value in context.knobs.items() if same[key.startswith(PREFILL)]}
        how = {**named_methods(name, {**knobs, **self.knobs}, before), **continued(context, loading)}
        engine = lce.load(model, **how)
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
    from lce.models.registry import read_config
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
    engine, opened = MethodOption(None, {}).load(model, str(context.path), {})
    ids = opened.token_ids if opened is not None else []
    return engine.tokenizer.decode(ids[:n_tokens]), engine.tokenizer.decode(ids[-n_tokens:])


def methods_of(
    names: Sequence[str],
    knobs: Mapping[str, str],
    loading: Mapping[str, Any],
    suits: Callable[[lce.Method], bool] = lambda method: True,
) -> list[lce.Method]:
    """Return the methods called `names`. `all` stands for the methods that serve the model and that `suits` accepts.

    `all` excludes methods for analysis, which can be named as well. A method of `all` that lacks something, such as
    the learned maps of `esa`, is left out with a note, unless -o METHOD.KEY=VALUE names the method. With `all`, a knob
    KEY=VALUE is for the methods that have KEY. `loading` are options of `lce.engine.loading.resolved`. Raises
    `UsageError` for wrong names or knobs.
    """
    from lce.engine.loading import resolved

    if ALL not in names:
        return [lce.methods.make(name, knobs_for(name, knobs, names)) for name in names]
    asked = [name for name in names if name != ALL]
    classes = _classes(lce.methods.available())
    others = [name for name in lce.methods.available() if name not in classes or not classes[name].analysis]
    listed = list(dict.fromkeys([*(name for name in ["full", *others] if name not in asked), *asked]))
    check_owned(knobs, listed)
    resolved(method="full", **loading)  # raises an error if the model cannot be read
    serving = [_serving(name, knobs, listed, loading) for name in listed if name not in asked]
    found = [method for method in serving if method is not None and suits(method)]
    return found + [lce.methods.make(name, owned(name, knobs, listed)) for name in asked]


def _classes(names: Sequence[str]) -> dict[str, type[lce.Method]]:
    """Return the classes of methods by name, without the methods of packages that cannot be imported."""
    found = {}
    for name in names:
        with contextlib.suppress(UsageError):
            found[name] = lce.methods.find(name)
    return found


def knobs_for(name: str, knobs: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Return the knobs of the method `name`: KEY=VALUE is for all methods, NAME.KEY=VALUE overrides it for NAME."""
    chosen = {key: value for key, value in knobs.items() if "." not in key}
    for key, value in knobs.items():
        owner, dot, own_key = key.partition(".")
        if dot and owner not in names:
            raise UsageError(f"-o {key}={value} is for a method that --method does not name; {nearest(owner, names)}")
        if dot and owner == name:
            chosen[own_key] = value
    return chosen


def owned(name: str, knobs: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Return the result of `knobs_for` without the KEY=VALUE knobs that the method lacks."""
    cls = lce.methods.find(name)
    own = {field.name for field in dataclasses.fields(cls)} | {f"preset={preset}" for preset in cls.presets}
    some = {key: x for key, x in knobs.items() if "." in key or key in own or f"{key}={x}" in own}
    return knobs_for(name, some, names)


def check_owned(knobs: Mapping[str, str], names: Sequence[str]) -> None:
    """Raise `UsageError` for a KEY=VALUE that no method has, or a METHOD.KEY=VALUE of a method not in `names`."""
    classes = _classes(names).values()
    presets = {preset for cls in classes for preset in cls.presets}
    valid = {field.name for cls in classes for field in dataclasses.fields(cls)} | ({"preset"} if presets else set())
    for key, value in knobs.items():
        if "." in key:
            knobs_for("", {key: value}, names)
        elif key not in valid:
            raise UsageError(f"no method has the knob {key!r}; {nearest(key, sorted(valid))}")
        elif key == "preset" and value not in presets:
            raise UsageError(f"no method has the preset {value!r}; {nearest(value, sorted(presets))}")


def _serving(
    name: str, knobs: Mapping[str, str], names: Sequence[str], loading: Mapping[str, Any]
) -> lce.Method | None:
    """Return the method `name` with its knobs.

    If the method cannot serve the model even with its default knobs, print a note and return None.
    """
    from lce.engine.loading import resolved

    try:
        method = lce.methods.make(name, owned(name, knobs, names))
        resolved(method=method, **loading)
        return method
    except LceError as error:
        serves = False
        with contextlib.suppress(LceError):
            resolved(method=name, **loading)
            serves = True  # the method works with its defaults, so the given knobs are wrong
        if serves or any(key.startswith(f"{name}.") for key in knobs):
            raise
        note(f"--method all leaves {name} out: {error}")
        return None


def check_capacity(model: str, methods: Sequence[lce.Method], tokens: int, loading: Mapping[str, Any]) -> None:
    """Raise `CapacityError` if `tokens` tokens do not fit into memory with a method. `loading` is for `lce.load`."""
    from lce.engine.loading import SizeOptions, resolved

    resolved(model, "full")  # downloads a model whose config is in its weights' file, as a plan does not
    sizes: Any = {name: loading[name] for name in SizeOptions.__annotations__ if name in loading}
    for method in methods:
        if (refusal := lce.plan(model, method, tokens=tokens, **sizes).refusal) is not None:
            raise CapacityError(refusal)
