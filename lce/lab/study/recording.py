"""A recording: what a real prompt made a real model attend, under one or more methods, as JSON.

docs/inspect.md has the format. What is recorded is what the run chose, in its own blocks; a run is changed by nothing
but the heads that are switched off.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lce
from lce.errors import UsageError, shown
from lce.lab.study.looking import Looks
from lce.lab.study.packing import MOST_BYTES
from lce.lab.study.watching import Inspected, Watch
from lce.methods import make
from lce.methods.mass import Judge
from lce.sizes import count

if TYPE_CHECKING:
    from lce import Engine, Generation, Method

FORMAT = 1
TOP = 5  # likeliest tokens beside each generated one
MOST_GENERATED = 4096
MOST_MARKS = 32  # places
UNITS = 32  # of the window, by which true attention is counted where nothing is chosen

Recording = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """What is asked of a model, and how closely it is looked at.

    `marks` are texts whose places are marked, for example the answer in a document; each must be in the prompt. `off`
    are pairs of a layer and a head that are switched off. Looked at closely are the queries of generated tokens, the
    last `last` of the prompt, and `spread` evenly spread ones. `judge` says which full attention is the truth, as in
    `lce.methods.mass`.
    """

    prompt: str | Sequence[int]
    max_tokens: int = 16
    marks: Sequence[str] = ()
    off: Sequence[tuple[int, int]] = ()
    spread: int = 200
    last: int = 64
    judge: Judge = "constant"

    def __post_init__(self) -> None:
        count(self.max_tokens, "max_tokens", least=0)
        if self.max_tokens > MOST_GENERATED:
            raise UsageError(f"max_tokens is {self.max_tokens:,}; expected {MOST_GENERATED:,} or less in a recording")

    def looked(self, n_tokens: int) -> list[int]:
        """The queries of a prompt that are looked at."""
        tail = max(0, n_tokens - self.last)
        spread = {tail * i // max(1, self.spread) for i in range(self.spread)} if tail else set()
        return sorted(spread | set(range(tail, n_tokens)))


class Recorder:
    """Records runs of one model; its weights are read once. `loading` are options of `lce.load`.

    A run whose choices and scores take more than `most_bytes` ends with a `CapacityError`.
    """

    def __init__(self, model: str | Path, *, most_bytes: int = MOST_BYTES, **loading: Any) -> None:
        self.model, self.most_bytes, self.loading = model, most_bytes, loading
        self._first: Engine | None = None

    def first(self) -> Engine:
        """The engine whose weights the others use: its tokenizer and config are those of all."""
        if self._first is None:
            self._first = lce.load(self.model, **self.loading)
        return self._first

    def engine(self, method: Method, watch: Watch, window: int | None = None) -> Engine:
        """An engine whose method is watched, with the weights of those before it."""
        loading = self.loading if window is None else {**self.loading, "window": window}
        engine = lce.load(self.model, Inspected(method, watch), sharing=self._first, **loading)
        self._first = self._first or engine
        return engine

    def record(
        self, asked: Asked, methods: Sequence[Method | str], *, window: int | None = None,
        progress: Callable[[str, int, int], None] | None = None, check: Callable[[], None] | None = None,
    ) -> Recording:  # fmt: skip
        """Run the prompt with each method. `check` is called often, and ends the call by what it raises.

        Raises `UsageError` for what cannot be asked, and `CapacityError` where the choices take too much memory.
        """
        if not methods:
            raise UsageError("no method is given; expected one of `lce methods`, or several")
        tell = progress or (lambda stage, done, total: None)
        found: Recording = {"format": FORMAT, "lce": lce.__version__}
        runs: list[dict[str, Any]] = []
        for method in methods:
            watch = Watch(self.most_bytes)
            engine = self.engine(make(method) if isinstance(method, str) else method, watch, window)
            ids = prompt_ids(engine, asked.prompt)
            check_heads(asked.off, engine)
            texts = token_texts(engine, ids)
            marks = spans_of_marks(texts, asked.marks)
            if not runs:
                found |= {
                    "model": facts(engine, str(self.model)), "judge": asked.judge, "tokens": texts,
                    "marks": [{"start": a, "stop": b, "label": label} for a, b, label in marks],
                }  # fmt: skip
            runs.append(_Run(engine, watch, asked, ids, [mark[:2] for mark in marks], tell, check).recorded())
        return found | {"runs": runs}


def record(
    model: str | Path, methods: Sequence[Method | str], prompt: str | Sequence[int], **options: Any
) -> Recording:
    """The recording of one prompt. `options` are those of `Asked`, `window`, `progress`, `check`, and of `lce.load`.

    Example: `record("demo", ["longheads", "dca"], text, max_tokens=8, marks=["10932"])`.
    """
    own = {each.name for each in fields(Asked)}
    asked = Asked(prompt, **{name: value for name, value in options.items() if name in own})
    how = {name: options[name] for name in ("window", "progress", "check") if name in options}
    loading = {name: value for name, value in options.items() if name not in own | how.keys()}
    return Recorder(model, **loading).record(asked, methods, **how)


@dataclass
class _Run:
    """One prompt under one method."""

    engine: Engine
    watch: Watch
    asked: Asked
    ids: list[int]
    marks: list[tuple[int, int]]
    tell: Callable[[str, int, int], None]
    check: Callable[[], None] | None
    started: float = field(default_factory=time.perf_counter)

    def recorded(self) -> dict[str, Any]:
        engine, asked, watch, n = self.engine, self.asked, self.watch, len(self.ids)
        watch.begin(n, asked.looked(n), asked.off, self.check)
        method, label = engine.method.inner, engine.method.label  # type: ignore[attr-defined]  # it is Inspected
        bar = lambda done, total: self.tell(label, done, total)  # noqa: E731
        result: Generation | None = None
        if asked.max_tokens:
            result = engine.generate(self.ids, max_tokens=asked.max_tokens, logprobs=TOP, progress=bar)
        else:
            engine.prefill(self.ids, progress=bar)
        run_s = time.perf_counter() - self.started
        choices = watch.choices
        assert choices is not None, "the prompt has tokens"
        first, size = unit = method.choices if choices.layers else (0, max(1, engine.window // UNITS))
        progress = lambda done, total: self.tell("true attention", done, total)  # noqa: E731
        looks = Looks(watch, unit, self.marks, asked.judge, progress).made()
        knobs = {each.name: _plain(getattr(method, each.name)) for each in fields(method)}
        return {
            "label": label_of(method), "method": method.label, "knobs": knobs, "window": engine.window,
            "chunk_size": size, "first": first, "placement": getattr(method, "placement", None),
            "blocks": [[block.start, block.stop] for block in choices.blocks],
            "generated": [] if result is None else self._generated(result),
            "layers": [{"chooses": layer in choices.layers} for layer in sorted(watch.layers)],
            "choosing": choices.layers, "choosers": choices.choosers, "k": choices.most, "bits": choices.bits,
            "warning": None if result is None else result.warning,
            "off": [list(pair) for pair in asked.off], "looked": sorted(looks),
            "always": self._always(), "segments": _segments(choices, looks),
            "stats": {
                "prompt_tokens": n, "prefill_s": round(result.stats.prefill_s if result else run_s, 4),
                "decode_s": round(result.stats.decode_s if result else 0.0, 4),
                "recorded_s": round(time.perf_counter() - self.started, 4),
            },
        }  # fmt: skip

    def _generated(self, result: Generation) -> list[dict[str, Any]]:
        """The generated tokens as text, with their log-probabilities and the likeliest tokens beside them."""
        texts = token_texts(self.engine, [*self.ids, *result.token_ids])[len(self.ids) :]
        of = self.engine.tokenizer
        return [
            {
                "text": text, "logprob": round(each.logprob, 4),
                "top": [[_token_text(of, token_id), round(logprob, 4)] for token_id, logprob in each.top],
            }
            for text, each in zip(texts, result.logprobs or [], strict=False)
        ]  # fmt: skip

    def _always(self) -> list[dict[str, Any]]:
        """What all queries attend whatever is chosen, layers that are alike together."""
        found: list[dict[str, Any]] = []
        for layer, notes in sorted(self.watch.layers.items()):
            if notes.spans is None:
                continue
            same = next((entry for entry in found if entry["runs"] == notes.spans.runs), None)
            if same is None:
                found.append({"layers": [layer], "runs": notes.spans.runs})
            else:
                same["layers"].append(layer)
        return found


def _segments(choices: Any, looks: dict[int, Any]) -> list[dict[str, Any]]:
    return [
        {
            "start": each.start, "stop": each.stop, "rows": len(each.choices), "data": each.data,
            "looks": {str(query): looks[query] for query in range(each.start, each.stop) if query in looks},
        }
        for each in choices.segments()
    ]  # fmt: skip


def facts(engine: Engine, name: str) -> dict[str, Any]:
    """What a recording says of a model."""
    config = engine.model.config
    return {
        "name": name, "layers": config.n_layers, "heads": config.n_heads, "kv_heads": config.n_kv_heads,
        "window": config.window,
    }  # fmt: skip


def label_of(method: Method) -> str:
    """The method and the knobs that are not at their defaults: `longheads(chunk_size=16)`."""
    knobs = {each.name: _plain(getattr(method, each.name)) for each in fields(method)}
    defaults = {each.name: _plain(each.default) for each in fields(method)}
    set_ones = [f"{name}={value}" for name, value in knobs.items() if value != defaults.get(name)]
    return f"{method.label}({', '.join(set_ones)})" if set_ones else method.label


def _plain(value: Any) -> Any:
    """A knob's value as JSON has it; what is no number and no text is left out."""
    return value if isinstance(value, bool | int | float | str) else None


def prompt_ids(engine: Engine, prompt: str | Sequence[int]) -> list[int]:
    """The prompt as token ids. Raises `UsageError` where it is empty."""
    ids = engine.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    if not prompt or not ids:
        raise UsageError("the prompt is empty; expected some text")
    return ids


def check_heads(off: Sequence[tuple[int, int]], engine: Engine) -> None:
    """Raise `UsageError` for heads that the model does not have."""
    config = engine.model.config
    for layer, head in off:
        if not (0 <= layer < config.n_layers and 0 <= head < config.n_heads):
            raise UsageError(
                f"layer {layer} has no head {head}; expected layers 0 to {config.n_layers - 1} and heads 0 to "
                f"{config.n_heads - 1}"
            )


def token_texts(engine: Engine, ids: Sequence[int]) -> list[str]:
    """The text that each token adds; an id as a number where the model has no tokenizer."""
    stream = engine.tokenizer.stream(skip_special=False)
    texts = [stream.push(token_id) for token_id in ids]
    texts[-1] += stream.finish()
    return texts if any(texts) else [f"{token_id} " for token_id in ids]


def _token_text(tokenizer: Any, token_id: int) -> str:
    stream = tokenizer.stream(skip_special=False)
    text: str = stream.push(token_id) + stream.finish()
    return text or str(token_id)


def spans_of_marks(texts: Sequence[str], marks: Sequence[str]) -> list[tuple[int, int, str]]:
    """Every place of each mark in a text, as the tokens that have a part of it: `(start, stop, mark)`.

    Raises `UsageError` for a mark that is not there.
    """
    whole, starts, at = "".join(texts), [], 0
    for text in texts:
        starts.append(at)
        at += len(text)
    found = []
    for mark in marks:
        begin = whole.find(mark) if mark else -1
        if begin < 0:
            raise UsageError(f"the mark {shown(mark)} is not in the prompt; expected a part of its text")
        while begin >= 0:
            end = begin + len(mark)
            found.append((bisect_right(starts, begin) - 1, bisect_left(starts, end), mark))
            begin = whole.find(mark, end)
            if len(found) > MOST_MARKS:
                raise UsageError(
                    f"the mark {shown(mark)} is in the prompt more than {MOST_MARKS} times; give more of it"
                )
    return sorted(found)
