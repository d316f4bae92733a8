"""Records what a real model attends on a real prompt, under one or more methods, as JSON.

docs/inspect.md describes the format. A recording has the run's choices, by block. Recording does not change a run,
except that heads can be switched off.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lce
from lce.errors import UsageError, shown
from lce.lab.study.looks import looks_of
from lce.lab.study.run_observer import RunObserver
from lce.lab.study.segments import MOST_BYTES
from lce.methods import Observed, make
from lce.methods.mass import Judge
from lce.sizes import count

if TYPE_CHECKING:
    from lce import Engine, Generation, Method

FORMAT = 1
TOP = 5  # likeliest tokens listed with each generated one
MOST_GENERATED = 4096
MOST_MARKS = 32  # places
UNITS = 32  # parts of the window that stand for choices if a method chooses nothing

Recording = dict[str, Any]


@dataclass(frozen=True)
class RecordingRequest:
    """A prompt to record, and the queries to look at.

    `marks` are texts whose places are marked, for example the answer in a document; the prompt must contain each. `off`
    has pairs of a layer and a head to switch off. The queries of generated tokens, the last `last` of the prompt, and
    `spread` evenly spread ones are looked at. `judge` says which full attention is the truth, as in `lce.methods.mass`.
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
        """Return the prompt's queries to look at."""
        tail = max(0, n_tokens - self.last)
        spread = {tail * i // max(1, self.spread) for i in range(self.spread)} if tail else set()
        return sorted(spread | set(range(tail, n_tokens)))


class Recorder:
    """A recorder of one model's runs; weights are read once. `loading` are options of `lce.load`.

    A run whose choices and scores take more than `most_bytes` ends with a `CapacityError`.
    """

    def __init__(self, model: str | Path, *, most_bytes: int = MOST_BYTES, **loading: Any) -> None:
        self.model, self.most_bytes, self.loading = model, most_bytes, loading
        self._first: Engine | None = None

    def first(self) -> Engine:
        """Return the engine whose weights, tokenizer and config later engines share."""
        if self._first is None:
            self._first = lce.load(self.model, **self.loading)
        return self._first

    def engine(self, method: Method, observer: RunObserver, window: int | None = None) -> Engine:
        """Return an engine with an observed method and the shared weights."""
        loading = self.loading if window is None else {**self.loading, "window": window}
        engine = lce.load(self.model, Observed(method, observer), sharing=self._first, **loading)
        self._first = self._first or engine
        return engine

    def record(
        self, request: RecordingRequest, methods: Sequence[Method | str], *, window: int | None = None,
        progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
        check: Callable[[], None] = lambda: None,
    ) -> Recording:  # fmt: skip
        """Run the prompt with each method. `check` is called often; an error that it raises ends the call.

        Raises `UsageError` for an invalid request, and `CapacityError` if the choices take too much memory.
        """
        if not methods:
            raise UsageError("no method is given; expected one of `lce methods`, or several")
        found: Recording = {"format": FORMAT, "lce": lce.__version__}
        runs: list[dict[str, Any]] = []
        for method in methods:
            observer = RunObserver(self.most_bytes)
            engine = self.engine(make(method) if isinstance(method, str) else method, observer, window)
            ids = prompt_ids(engine, request.prompt)
            check_heads(request.off, engine)
            texts = token_texts(engine, ids)
            marks = spans_of_marks(texts, request.marks)
            if not runs:
                found |= {
                    "model": facts(engine, str(self.model)), "judge": request.judge, "tokens": texts,
                    "marks": [{"start": a, "stop": b, "label": label} for a, b, label in marks],
                }  # fmt: skip
            observer.begin(len(ids), request.looked(len(ids)), request.off, check)
            runs.append(_run(engine, observer, request, ids, [(a, b) for a, b, _ in marks], progress))
        return found | {"runs": runs}


def record(
    model: str | Path, methods: Sequence[Method | str], prompt: str | Sequence[int], **options: Any
) -> Recording:
    """Record one prompt. `options` are those of `RecordingRequest`, `window`, `progress`, `check`, and of `lce.load`.

    Example: `record("demo", ["longheads", "dca"], text, max_tokens=8, marks=["10932"])`.
    """
    asking = {each.name for each in fields(RecordingRequest)}
    request = RecordingRequest(prompt, **{name: options.pop(name) for name in asking & options.keys()})
    how = {name: options.pop(name) for name in ("window", "progress", "check") if name in options}
    return Recorder(model, **options).record(request, methods, **how)


def _run(
    engine: Engine, observer: RunObserver, request: RecordingRequest, ids: list[int], marks: list[tuple[int, int]],
    progress: Callable[[str, int, int], None],
) -> dict[str, Any]:  # fmt: skip
    """Run one prompt under one method; return the run's part of a recording."""
    assert isinstance(engine.method, Observed)
    started, method = time.perf_counter(), engine.method.inner
    bar = partial(progress, method.label)
    result: Generation | None = None
    if request.max_tokens:
        result = engine.generate(ids, max_tokens=request.max_tokens, logprobs=TOP, progress=bar)
    else:
        engine.prefill(ids, progress=bar)
    run_s = time.perf_counter() - started
    choices = observer.choices
    assert choices is not None, "the prompt has tokens"
    first, size = unit = method.choices if choices.layers else (0, max(1, engine.window // UNITS))
    looks = looks_of(observer, unit, marks, request.judge, partial(progress, "true attention"))
    return {
        "label": label_of(method), "method": method.label, "knobs": _plain_knobs(method), "window": engine.window,
        "chunk_size": size, "first": first, "placement": getattr(method, "placement", None),
        "blocks": [[block.start, block.stop] for block in choices.blocks],
        "generated": [] if result is None else _generated(engine, ids, result),
        "layers": [{"chooses": layer in choices.layers} for layer in sorted(observer.layers)],
        "choosing": choices.layers, "choosers": choices.choosers, "k": choices.most, "bits": choices.bits,
        "warning": None if result is None else result.warning,
        "off": [list(pair) for pair in request.off], "looked": sorted(looks), "always": choices.always(),
        "segments": [
            {
                "start": each.start, "stop": each.stop, "rows": len(each.choices), "data": each.data,
                "looks": {str(query): looks[query] for query in range(each.start, each.stop) if query in looks},
            }
            for each in choices.segments()
        ],
        "stats": {
            "prompt_tokens": len(ids), "prefill_s": round(result.stats.prefill_s if result else run_s, 4),
            "decode_s": round(result.stats.decode_s if result else 0.0, 4),
            "recorded_s": round(time.perf_counter() - started, 4),
        },
    }  # fmt: skip


def _generated(engine: Engine, ids: list[int], result: Generation) -> list[dict[str, Any]]:
    """Return the generated tokens as text, with log-probabilities and the likeliest tokens."""
    texts = token_texts(engine, [*ids, *result.token_ids])[len(ids) :]
    return [
        {
            "text": text, "logprob": round(each.logprob, 4),
            "top": [[_token_text(engine, token_id), round(logprob, 4)] for token_id, logprob in each.top],
        }
        for text, each in zip(texts, result.logprobs or [], strict=False)
    ]  # fmt: skip


def facts(engine: Engine, name: str) -> dict[str, Any]:
    """Return a recording's facts about a model."""
    config = engine.model.config
    return {
        "name": name, "layers": config.n_layers, "heads": config.n_heads, "kv_heads": config.n_kv_heads,
        "window": config.window,
    }  # fmt: skip


def label_of(method: Method) -> str:
    """Return the method and its knobs other than defaults, such as `longheads(chunk_size=16)`."""
    defaults = {each.name: _plain(each.default) for each in fields(method)}
    knobs = [f"{name}={value}" for name, value in _plain_knobs(method).items() if value != defaults[name]]
    return f"{method.label}({', '.join(knobs)})" if knobs else method.label


def _plain_knobs(method: Method) -> dict[str, Any]:
    return {each.name: _plain(getattr(method, each.name)) for each in fields(method)}


def _plain(value: Any) -> Any:
    """Return a knob's value for JSON; None for anything but a number or text."""
    return value if isinstance(value, bool | int | float | str) else None


def prompt_ids(engine: Engine, prompt: str | Sequence[int]) -> list[int]:
    """Return the prompt as token ids. Raises `UsageError` for an empty prompt."""
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
    """Return the text that each token adds; without a tokenizer, the id as a number."""
    stream = engine.tokenizer.stream(skip_special=False)
    texts = [stream.push(token_id) for token_id in ids]
    texts[-1] += stream.finish()
    return texts if any(texts) else [f"{token_id} " for token_id in ids]


def _token_text(engine: Engine, token_id: int) -> str:
    stream = engine.tokenizer.stream(skip_special=False)
    text: str = stream.push(token_id) + stream.finish()
    return text or str(token_id)


def spans_of_marks(texts: Sequence[str], marks: Sequence[str]) -> list[tuple[int, int, str]]:
    """Return every place of each mark in a text, as `(start, stop, mark)` of the tokens that contain the mark.

    Raises `UsageError` for a mark that is not in the text.
    """
    whole, starts = "".join(texts), [0, *accumulate(map(len, texts))][:-1]
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
