"""Records what a model attends on a prompt, under one or more methods, as JSON (docs/inspect.md)."""

from __future__ import annotations

import base64
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lce
from lce.errors import UsageError, shown
from lce.methods import Observed, make
from lce.sizes import count
from lce_lab.analysis.mass import Judge
from lce_lab.study.looks import looks_of
from lce_lab.study.run_observer import RunObserver
from lce_lab.study.segments import MOST_BYTES

if TYPE_CHECKING:
    from lce import Context, Engine, Generation, Method

FORMAT = 1
TOP = 5  # How many of the likeliest tokens are listed with each generated token.
MOST_GENERATED = 4096
MOST_MARKS = 32  # The largest number of marked places in a text.
UNITS = 32  # For a method that chooses no chunks, full attention's weights are summed over pieces of 1/32 window.

PIECE, MOST_SHORT = 2048, 8192  # tokens read to estimate the time; of the shortest text of which it is estimated
LONGER = 2.0  # Recording a text takes so many times as long as the first piece would suggest: later tokens attend more.

Recording = dict[str, Any]
Progress = Callable[[str, int, int], None]  # called with the stage, the units done and their total
Check = Callable[[], None]  # called often; an error that it raises ends the run


@dataclass(frozen=True)
class RecordingRequest:
    """A prompt to record, and the queries of the prompt to analyse.

    `marks` are texts to mark wherever they occur in the prompt, for example the answer; the prompt must contain each.
    `off` has pairs of a layer and a head to switch off. A recording analyses the queries of generated tokens, of
    the last `last` tokens of the prompt, and of `spread` tokens spread evenly over the rest. Methods are compared with
    full attention. `judge` sets the distances of full attention: i - j, or ("constant") at most half the window.
    `sampling` says how tokens are drawn; None takes the likeliest.
    """

    prompt: str | Sequence[int]
    max_tokens: int = 16
    marks: Sequence[str] = ()
    off: Sequence[tuple[int, int]] = ()
    spread: int = 200
    last: int = 64
    judge: Judge = "constant"
    sampling: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        count(self.max_tokens, "max_tokens", 0, MOST_GENERATED)

    def looked(self, n_tokens: int) -> list[int]:
        """Return the indices of the queries to analyse in a prompt of `n_tokens` tokens."""
        tail = max(0, n_tokens - self.last)
        return sorted({tail * i // self.spread for i in range(self.spread)} | set(range(tail, n_tokens)))


@dataclass(frozen=True)
class _Text:
    ids: list[int]
    texts: list[str]
    marks: list[tuple[int, int, str]]

    @classmethod
    def of(cls, engine: Engine, ids: list[int], request: RecordingRequest) -> _Text:
        texts = token_texts(engine, ids)
        return cls(ids, texts, spans_of_marks(texts, request.marks))

    def observer(self, request: RecordingRequest, check: Check, most_bytes: int = MOST_BYTES) -> RunObserver:
        return RunObserver(len(self.ids), request.looked(len(self.ids)), request.off, check, most_bytes)

    def recording(self, engine: Engine, name: str, request: RecordingRequest, runs: list[dict[str, Any]]) -> Recording:
        marks = [{"start": a, "stop": b, "label": label} for a, b, label in self.marks]
        about = {"format": FORMAT, "lce": lce.__version__, "model": facts(engine, name), "judge": request.judge}
        return {**about, "tokens": self.texts, "marks": marks, "runs": runs}


class Recorder:
    """A recorder of runs of one model; all runs share the model's weights. `loading` are options of `lce.load`.

    A run ends with a `CapacityError` if recorded chunk numbers and scores take more than `most_bytes`.
    """

    def __init__(self, model: str | Path, *, most_bytes: int = MOST_BYTES, **loading: Any) -> None:
        self.model, self.most_bytes, self.loading = model, most_bytes, loading
        self.engine = lce.load(model, **loading)

    def engine_of(self, method: Method) -> Engine:
        """Return an engine of the model with a method. Raises `UsageError` for knobs out of their range."""
        return lce.load(self.model, method, sharing=self.engine, **self.loading)

    def record(
        self,
        request: RecordingRequest,
        methods: Sequence[Method | str],
        *,
        progress: Progress = lambda stage, done, total: None,
        check: Check = lambda: None,
        expect: Callable[[int, float], None] = lambda n_bytes, seconds: None,
    ) -> Recording:
        """Record the request's prompt under each method. `check` is called often and can end the call by an error.

        Before all work `expect` is called with the recording's estimated bytes and seconds. Raises `UsageError` for an
        invalid request, and `CapacityError` if the recorded data takes, or by far would take, too much memory.
        """
        if not methods:
            raise UsageError("no method is given; expected one of `lce methods`, or several")
        ids = prompt_ids(self.engine, request.prompt)
        check_heads(request.off, self.engine)
        text, prepared = _Text.of(self.engine, ids, request), []
        for method in methods:
            observer = text.observer(request, check, self.most_bytes)
            observed = Observed(make(method) if isinstance(method, str) else method, observer)
            prepared.append((self.engine_of(observed), observer))
        n_bytes = sum(observer.expected_bytes(engine, request.max_tokens) for engine, observer in prepared)
        expect(n_bytes, sum(self._seconds(ids, engine.method) for engine, _ in prepared))
        return text.recording(
            self.engine, str(self.model), request, [_run(*each, request, text, progress) for each in prepared]
        )

    def _seconds(self, ids: Sequence[int], method: Method) -> float:
        """Estimate the seconds that a recording takes, by the prefill of a piece; 0 for a short text."""
        if len(ids) < MOST_SHORT:
            return 0.0
        assert isinstance(method, Observed)
        engine, began = self.engine_of(method.inner), time.perf_counter()
        engine.prefill(ids[:PIECE]).close()
        return LONGER * len(ids) / PIECE * (time.perf_counter() - began)


def record(
    model: str | Path, methods: Sequence[Method | str], prompt: str | Sequence[int], **options: Any
) -> Recording:
    """Record one prompt. `options` are those of `RecordingRequest`, `Recorder.record`, and `lce.load`.

    Example: `record("demo", ["longheads", "dca"], text, max_tokens=8, marks=["10932"])`.
    """
    asking = {each.name for each in fields(RecordingRequest)}
    request = RecordingRequest(prompt, **{name: options.pop(name) for name in asking & options.keys()})
    how = {name: options.pop(name) for name in ("progress", "check", "expect") if name in options}
    return Recorder(model, **options).record(request, methods, **how)


def record_after(
    context: Context | None,
    engine: Engine,
    request: RecordingRequest,
    name: str,
    *,
    check: Check = lambda: None,
    **how: int,
) -> Recording:
    """Record a prompt that continues a context, under the method of its engine; `name` is the model's.

    The recording has the text of the context, and no query of it. `context` gets the prompt and the answer. See
    `Recorder` for `check`, and for `most_bytes`, which `how` may have.
    """
    before = [] if context is None else context.token_ids
    text = _Text.of(engine, [*before, *prompt_ids(engine, request.prompt)], request)
    observer = text.observer(request, check, **how)
    observed = lce.Engine(engine.setup.observed(observer))
    observer.expected_bytes(observed, request.max_tokens, len(before))
    return text.recording(engine, name, request, [_run(observed, observer, request, text, lambda *_: None, context)])


def _run(
    engine: Engine,
    observer: RunObserver,
    request: RecordingRequest,
    text: _Text,
    progress: Progress,
    context: Any = None,
) -> dict[str, Any]:
    """Run the tokens of a text that `context` does not have, and return the recorded data of the run."""
    assert isinstance(engine.method, Observed)
    started, method = time.perf_counter(), engine.method.inner
    bar = partial(progress, method.label)
    result, choices, new = lce.Generation(), observer.choices, text.ids[len(context or ()) :]
    if request.max_tokens:
        how: Any = {"max_tokens": request.max_tokens, "sampling": request.sampling, "logprobs": TOP}
        result = engine.generate(new, context=context, progress=bar, **how)
    else:
        engine.prefill(new, context=context, progress=bar)
        result.stats.prefill_s = time.perf_counter() - started
    first, size = unit = method.choices if choices.layers else (0, max(1, engine.window // UNITS))
    places = [(start, stop) for start, stop, _ in text.marks]
    looks = looks_of(observer, unit, places, request.judge, partial(progress, "true attention"))
    segments = []
    for start, stop, rows in choices.segments():
        data = base64.b64encode(rows.tobytes()).decode("ascii")
        own = {str(query): looks[query] for query in range(start, stop) if query in looks}
        segments.append({"start": start, "stop": stop, "rows": len(rows), "data": data, "looks": own})
    seconds = {"prefill_s": result.stats.prefill_s, "decode_s": result.stats.decode_s}
    seconds["recorded_s"] = time.perf_counter() - started
    placement = method.selection.placement.name if isinstance(method, lce.methods.ChunkMethod) else None
    knobs = {"label": label_of(method), "method": method.label, "knobs": _plain(lce.methods.settings(method))}
    about = {"window": engine.window, "chunk_size": size, "first": first, "placement": placement}
    chosen = {"choosing": choices.layers, **dict(zip(("choosers", "k", "bits"), choices.sizes(), strict=True))}
    return {
        **knobs,
        **about,
        "blocks": [[block.start, block.stop] for block in choices.blocks],
        "generated": _generated(engine, text.ids, result),
        "layers": [{"chooses": layer in choices.layers} for layer in sorted(observer.layers)],
        **chosen,
        "warning": result.warning,
        "off": [list(pair) for pair in request.off],
        "looked": sorted(looks),
        "always": choices.always(),
        "segments": segments,
        "stats": {"prompt_tokens": len(text.ids)} | {name: round(x, 4) for name, x in seconds.items()},
    }


def _generated(engine: Engine, ids: list[int], result: Generation) -> list[dict[str, Any]]:
    def text_of(token_id: int) -> str:
        stream = engine.tokenizer.stream(skip_special=False)
        return stream.push(token_id) + stream.finish() or str(token_id)

    texts = token_texts(engine, [*ids, *result.token_ids])[len(ids) :]
    return [
        {"text": text, "logprob": round(x.logprob, 4), "top": [[text_of(token), round(p, 4)] for token, p in x.top]}
        for text, x in zip(texts, result.logprobs or [], strict=False)
    ]


def facts(engine: Engine, name: str) -> dict[str, Any]:
    """Return what a recording says about its model: name, numbers of layers and heads, and window."""
    c = engine.setup.model.config
    return {"name": name, "layers": c.n_layers, "heads": c.n_heads, "kv_heads": c.n_kv_heads, "window": c.window}


def label_of(method: Method) -> str:
    """Return a method's label with the knobs that differ from their defaults, such as `longheads(chunk_size=16)`."""
    usual = _plain({each.name: each.default for each in lce.methods.knobs_of(type(method))})
    values = _plain(lce.methods.settings(method))
    knobs = ", ".join(f"{name}={value}" for name, value in values.items() if value != usual[name])
    return f"{method.label}({knobs})" if knobs else method.label


def _plain(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Return knobs for JSON: None for values that are no bool, number or text."""
    return {name: x if isinstance(x, bool | int | float | str) else None for name, x in knobs.items()}


def prompt_ids(engine: Engine, prompt: str | Sequence[int]) -> list[int]:
    """Return the prompt as token ids. Raises `UsageError` for an empty prompt."""
    ids = engine.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    if not prompt or not ids:
        raise UsageError("the prompt is empty; expected some text")
    return ids


def check_heads(off: Sequence[tuple[int, int]], engine: Engine) -> None:
    """Raise `UsageError` if the model lacks a head of `off`, which has pairs of a layer and a head."""
    layers, heads = engine.setup.model.config.n_layers, engine.setup.model.config.n_heads
    for layer, head in off:
        if not (0 <= layer < layers and 0 <= head < heads):
            expected = f"expected layers 0 to {layers - 1} and heads 0 to {heads - 1}"
            raise UsageError(f"layer {layer} has no head {head}; {expected}")


def token_texts(engine: Engine, ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds, or the ids as text if the model has no tokenizer."""
    stream = engine.tokenizer.stream(skip_special=False)
    texts = [stream.push(token_id) for token_id in ids]
    texts[-1] += stream.finish()
    return texts if any(texts) else [f"{token_id} " for token_id in ids]


def spans_of_marks(texts: Sequence[str], marks: Sequence[str]) -> list[tuple[int, int, str]]:
    """Return `(start, stop, mark)`, sorted, of the tokens that contain each occurrence of each mark in the texts."""
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
                raise UsageError(f"the mark {shown(mark)} is there more than {MOST_MARKS} times; give more of it")
    return sorted(found)
