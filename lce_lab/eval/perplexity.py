"""Measures the perplexity of texts by length, in two settings: sliding windows and streams.

Sliding windows are the setting of papers that measure on PG19 (Press et al., 2022; stride 256 in Chen et al., 2023, and
in the code of Dual Chunk Attention). A window of `length` tokens slides over the text in steps of `stride`. Each window
is read as a text of its own, without a beginning token. If `scored` is `last`, the last `stride` tokens of a window are
scored, so each token of the text is scored once, after at least `length - stride` earlier tokens. If `scored` is `all`,
as in the code of Dual Chunk Attention, all tokens of a window are scored. Windows of any length end at the same tokens.

A stream is one pass over a text that scores each token after all earlier tokens. Perplexities are by token position.

The perplexity is `exp` of the mean negative log-likelihood of a token. The 95% interval is Student's t interval over
windows, or over runs of up to `stride` successive tokens of a stream, weighted by size. The interval is too narrow if
windows are alike (neighbours in one text) or overlap (with `all`).
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import NormalDist
from typing import Any, NamedTuple

import lce
from lce.errors import UsageError, nearest
from lce_lab.eval.naming import described, engine_key, method_names, model_names, told
from lce_lab.eval.record import Loss, Record

LossLine = tuple[Mapping[str, Any], Loss]  # a sample, and its measurement
Text = Sequence[int]  # the token ids of a text, without a beginning token
STRIDE = 256
SCORED = ("last", "all")


@dataclass(frozen=True)
class Perplexity:
    """A perplexity: in windows of `length` tokens, or of the tokens `first..length-1` of texts read in one pass.

    `samples` is the number of windows, or of runs of successive tokens with one line each in the record; `tokens` is
    the number of scored tokens. `low` and `high` are the ends of the 95% interval, or None if there is one sample.
    `losses` has the mean negative log-likelihood of a token in each sample, to compare methods sample by sample.
    """

    method: str
    setting: str  # "windows" or "stream"
    first: int
    length: int
    samples: int
    tokens: int
    perplexity: float
    low: float | None
    high: float | None
    losses: tuple[float, ...] = ()

    @classmethod
    def of(cls, method: str, setting: str, first: int, length: int, losses: Sequence[Loss]) -> Perplexity:
        n, tokens = len(losses), sum(loss.tokens for loss in losses)
        ends: tuple[float | None, float | None] = (None, None)
        mean = math.fsum(loss.nll for loss in losses) / tokens
        if n > 1:
            squares = math.fsum((loss.nll - mean * loss.tokens) ** 2 for loss in losses)
            spread = student(n - 1) * math.sqrt(squares * n / (n - 1)) / tokens
            ends = _exp(mean - spread), _exp(mean + spread)
        means = tuple(loss.nll / loss.tokens for loss in losses)
        return cls(method, setting, first, length, n, tokens, _exp(mean), *ends, means)


def student(freedom: int) -> float:
    """Return the 97.5% quantile of Student's t to 0.2%: tabulated to 4 degrees, then Abramowitz and Stegun 26.7.5."""
    exact = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764}
    if freedom in exact:
        return exact[freedom]
    z = NormalDist().inv_cdf(0.975)
    second, third = (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + (z**3 + z) / (4 * freedom) + second / freedom**2 + third / freedom**3


def windows(
    engine: lce.Engine,
    texts: Sequence[Text],
    *,
    length: int,
    longest: int = 0,
    stride: int = STRIDE,
    scored: str = "last",
    most: int | None = None,
    record: Record | None = None,
    about: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Return the perplexity in windows of `length` tokens that end where windows of `longest` tokens end.

    At most `most` windows of all texts together are read, spread evenly. Windows in `record` are not read again.
    `about` has further fields of `Loss` to record. Raises `UsageError` if no text has `longest` tokens.
    """
    check(stride, scored)
    found, record, losses = ends(texts, max(length, longest), stride, most), record or Record(), list[Loss]()
    first = max(1, length - stride) if scored == "last" else 1
    for done, (text, end) in enumerate(found, 1):
        ids = text[end - length : end]
        asked = {**_asked(engine, "windows"), "length": length, "first": first, "text": _hash(ids)}
        loss = record.get(asked)
        if loss is None:
            record.prepare()
            logprobs = engine.score(ids, first=first).logprobs
            loss = Loss(-float(logprobs.double().sum()), len(logprobs), **told(engine), **(about or {}))
            record.add(asked, loss)
        losses.append(loss)
        if progress:
            progress(done, len(found))
    return Perplexity.of(engine.method.name, "windows", 0, length, losses)


def stream(
    engine: lce.Engine,
    texts: Sequence[Text],
    *,
    lengths: Sequence[int],
    stride: int = STRIDE,
    record: Record | None = None,
    about: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Perplexity]:
    """Return perplexities by position, from one pass over the first `max(lengths)` tokens of each text.

    The perplexity for one of `lengths` is that of the tokens between the next smaller length and this length. Lengths
    that no text reaches are left out. For `record` and `about`, see `windows`.
    """
    check(stride, "last")
    borders, record = sorted(set(lengths)), record or Record()
    by_border: dict[int, list[Loss]] = {border: [] for border in borders}
    total, before = sum(min(len(text), borders[-1]) for text in texts), 0
    for text in texts:

        def tell(done: int, _: int, before: int = before) -> None:
            if progress:
                progress(before + done, total)

        ids = text[: borders[-1]]
        runs = list(_runs(len(ids), borders, stride))
        whole = {**_asked(engine, "stream"), "length": len(ids), "text": _hash(ids)}
        keys = [{**whole, "first": first, "stop": stop} for first, stop, _ in runs]
        losses = [record.get(key) for key in keys]
        if None in losses:
            record.prepare()
            nll = -engine.score(ids, progress=tell).logprobs.double()  # nll[i] is the loss of token i + 1
            sums = [(float(nll[first - 1 : stop - 1].sum()), stop - first) for first, stop, _ in runs]
            losses = [Loss(nll=loss, tokens=count, **told(engine), **(about or {})) for loss, count in sums]
            record.add_all([pair for pair in zip(keys, losses, strict=True) if not record.get(pair[0])])
        for (_, _, border), loss in zip(runs, losses, strict=True):
            by_border[border].append(loss)
        tell(len(ids), total)
        before += len(ids)
    spans = [(first, border) for first, border in pairwise([0, *borders]) if by_border[border]]
    found = [Perplexity.of(engine.method.name, "stream", *span, by_border[span[1]]) for span in spans]
    if not found:
        raise UsageError(f"no text has two tokens; expected texts of {borders[-1]} tokens")
    return found


def _runs(n: int, borders: Sequence[int], stride: int) -> Iterator[tuple[int, int, int]]:
    """Divide the tokens `1..n-1` into runs at multiples of `stride` and at `borders`; yield `first, stop, border`."""
    first = 1
    for border in borders:
        while first < min(border, n):
            stop = min((first // stride + 1) * stride, border, n)
            yield first, stop, border
            first = stop


def ends(texts: Sequence[Text], length: int, stride: int, most: int | None = None) -> list[tuple[Text, int]]:
    """Return (text, end) for each window of `length` tokens, or for `most` of these windows, spread evenly."""
    found = [(text, end) for text in texts for end in range(length, len(text) + 1, stride)]
    if not found:
        longest = max(map(len, texts), default=0)
        missing = f"no text has {length:,} tokens, the longest has {longest:,}"
        raise UsageError(f"{missing}; give a longer text or smaller lengths")
    if most is not None and most < len(found):
        return [found[(2 * i + 1) * len(found) // (2 * most)] for i in range(most)]
    return found


def check(stride: int, scored: str) -> None:
    """Raise `UsageError` for an invalid `stride` or `scored`."""
    if stride < 1:
        raise UsageError(f"stride is {stride}; expected 1 or more")
    if scored not in SCORED:
        raise UsageError(f"unknown scored {scored!r}; {nearest(scored, SCORED)}")


def _hash(ids: Text) -> str:
    return hashlib.sha256(array("q", ids).tobytes()).hexdigest()[:16]


def _asked(engine: lce.Engine, setting: str) -> dict[str, Any]:
    return {"task": "perplexity", "setting": setting, **described(engine)}


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


class Column(NamedTuple):
    """A column of a `LossTable`: windows of `length` tokens, or the tokens `first..length-1` of streams."""

    first: int
    length: int


@dataclass
class LossTable:
    """The perplexities of one model in one setting, by method and column. A cell counts each recorded window once.

    Settings are windows with the last `stride` tokens scored, windows with all tokens scored, and streams, in ranges of
    positions that end at powers of two. A note names columns for which methods read different windows.
    """

    model: str
    setting: str
    cells: dict[tuple[str, Column], Perplexity] = field(default_factory=dict)
    windows: tuple[int, ...] = ()  # the context windows of the engines, in tokens
    notes: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        return f"perplexity, {self.setting}"

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(method for method, _ in self.cells))

    @property
    def columns(self) -> list[Column]:
        return sorted({column for _, column in self.cells}, key=lambda column: column.length)


def loss_tables(lines: Sequence[LossLine]) -> Iterator[LossTable]:
    """Yield one table per model and setting, in the order of `lines`."""
    names, models = method_names(lines), model_names(lines)
    for model, name in models.items():
        for setting, group in _settings([line for line in lines if str(line[0].get("model")) == model]):
            windows = {loss.window for _, loss in group if loss.window}
            table = LossTable(name, setting, windows=tuple(sorted(windows)))
            by_border: dict[int, list[LossLine]] = {}
            for sample, loss in group:  # by a window's length, or by a position in a stream, rounded up to 2**n
                window = sample["length"] if sample["setting"] == "windows" else 0
                by_border.setdefault(window or 1 << (sample["stop"] - 1).bit_length(), []).append((sample, loss))
            for border, members in sorted(by_border.items()):
                kind, column = members[0][0]["setting"], Column(0, border)
                if kind == "stream":  # the last column ends where the longest text ends
                    first, stop = min(x["first"] for x, _ in members), max(x["stop"] for x, _ in members)
                    column = Column(first if first > 1 else 0, stop)
                found: dict[str, dict[str, Loss]] = {}
                for sample, loss in members:
                    window = f"{sample['text']} {sample['first']} {sample.get('stop')}"
                    found.setdefault(names[engine_key(sample)], {})[window] = loss
                for method, losses in found.items():
                    table.cells[method, column] = Perplexity.of(method, kind, *column, list(losses.values()))
                if len(set(map(frozenset, found.values()))) > 1:
                    table.notes.append(f"At {column.length:,} tokens the methods were not asked the same texts.")
            order = list(dict.fromkeys(names[engine_key(sample)] for sample, _ in group))
            table.cells = dict(sorted(table.cells.items(), key=lambda cell: order.index(cell[0][0])))
            yield table


def _settings(lines: Sequence[LossLine]) -> Iterator[tuple[str, list[LossLine]]]:
    """Yield each setting's name and lines. A window of at most `stride` tokens is in both settings, last and all."""
    windows = [line for line in lines if line[0]["setting"] == "windows"]
    strides = sorted({sample["length"] - sample["first"] for sample, _ in windows if sample["first"] > 1})
    for stride in strides:
        last = [line for line in windows if line[0]["first"] == max(1, line[0]["length"] - stride)]
        yield f"the last {stride:,} tokens of windows", last
    whole = [line for line in windows if line[0]["first"] == 1]
    if any(sample["length"] - 1 > max(strides, default=0) for sample, _ in whole):
        yield "all tokens of windows", whole
    if streams := [line for line in lines if line[0]["setting"] == "stream"]:
        yield "by position in a stream", streams
