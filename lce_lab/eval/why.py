"""Finds why a method missed an answer: its selection, its budget, its placement, or the model.

A missed sample is asked again with one change of the method after the other. The first change that gives a right
answer names the cause:

1. `selection`: the method chooses by true attention (`lce_lab.analysis.oracle.cheating`); budget and placement stay.
2. `budget`: as 1, without `top_p`, then with 2, 4, 8, ... times the budget. With the placement `side_by_side` the
   budget grows only while the window has room.
3. `placement`: as 1, with the chosen chunks at other positions within the window.
4. `window`: the method itself in three quarters of the window, with the knobs that follow from that. The model fails at
   the largest distances of its window.
5. `both`: `rerope` and `dca` attend all tokens, at distances that the model knows. No selection could help, because
   budget and placement were wrong together.
6. `model`: no change gives a right answer, so the model fails even with all tokens attended.

For a method that selects nothing, only changes 4 and 5 are tried. If change 5 gives a right answer, the cause is the
method's placement, or the keys that it drops.

True attention is full attention. In a text longer than the window, its distances are limited to half of the window,
because full attention at true distances fails there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, NamedTuple, cast

import lce
from lce.errors import UsageError, nearest, shown
from lce.methods import ESA, ChunkMethod, InfLLM, Method, Pages, Placement, Quest, ReAttention, SelectiveMethod
from lce_lab.analysis.mass import Judge
from lce_lab.analysis.oracle import cheating, selects
from lce_lab.eval.record import Answer, Record
from lce_lab.eval.running import ALONE, Asking, Shard, answers
from lce_lab.eval.selection import Samples

CAUSES = ("answered", "selection", "budget", "placement", "window", "both", "model")
RIGHT = 0.5  # the score from which an answer counts as right
IN_WINDOW = ("side_by_side", "constant")  # the placements that keep all distances within the window
PAGES_IN_WINDOW = (*IN_WINDOW, "grouped", "dual")  # those of `pages`


class Rung(NamedTuple):
    """A method with one change, and the cause of the miss if the changed method answers right.

    `window` is None for the engine's own. With `is_whole` all samples are asked, since a record may have some of them.
    """

    cause: str
    label: str
    method: Method
    window: int | None = None

    @property
    def is_whole(self) -> bool:
        return self.cause in ("window", "both")


@dataclass
class Verdict:
    """Why a method missed a sample. `by` is the change that gave a right answer; `answers` maps changes to answers."""

    index: int
    depth: float | None
    expected: str
    cause: str = "model"
    by: str | None = None
    answers: dict[str, str] = field(default_factory=dict)

    def add(self, cause: str, label: str, answer: Answer) -> None:
        """Add the answer that one change gave. The first right answer decides the cause."""
        self.answers[label] = answer.answer or ""
        if self.by is None and answer.value >= RIGHT:
            self.cause, self.by = cause, label


@dataclass(frozen=True)
class Causes:
    """The verdicts on a method's samples of one length."""

    method: str
    length: int
    verdicts: list[Verdict]

    @property
    def counts(self) -> dict[str, int]:
        """The number of samples by cause."""
        return {cause: sum(verdict.cause == cause for verdict in self.verdicts) for cause in CAUSES}


def explain(
    model: str,
    method: Method,
    samples: Samples,
    *,
    length: int,
    setting: Mapping[str, Any] | None = None,
    asking: Asking = ALONE,
    kind: str = "",
    record: Record | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    **loading: Any,
) -> Causes:
    """Ask samples with a method, then repeat missed samples under one change after the other until an answer is right.

    `samples` makes the samples for an engine. `loading` are options of `lce.load`. In the mode `shared` of `asking` a
    document is read once for all of its samples that a change is tried on. With `kind`, only samples of this kind are
    asked again. In `record`, a sample is identified by the numbers of the samples asked again and by `setting`, which
    says how samples are made and begins with `task`. Recorded answers are reused; in the mode `shared`, changes 4 and 5
    ask whole documents, as `answers` does, and reuse its records. `progress` is called with the change, the samples
    done, and their total. Raises `UsageError` for the mode `turns`, or if no sample is of `kind`.
    """
    if asking.mode == "turns":
        raise UsageError("mode is turns, where an answer depends on those before; expected single or shared")
    engine = lce.load(model, method, **loading)
    asked, known, about = samples(engine), dict(setting or {"task": "samples"}), {"checkpoint": str(model)}
    first = partial(progress, f"{method.name}, itself:") if progress else None
    how: dict[str, Any] = {"asking": asking, "record": record, "about": about}
    kinds = {sample.kind for sample in asked if sample.kind}
    if kind and kind not in kinds:
        raise UsageError(f"no sample is of the kind {shown(kind)}; {nearest(kind, kinds) if kinds else 'omit kind'}")
    own = answers(engine, asked, setting=known, progress=first, **how)
    numbers, verdicts = {id(sample): i for i, sample in enumerate(asked)}, list[Verdict]()
    for sample, answer in own:
        if kind in ("", sample.kind):
            verdicts.append(Verdict(numbers[id(sample)], sample.depth, sample.answer))
            verdicts[-1].add("answered", "itself", answer)
    window = engine.window
    for rung in rungs(engine.method, window, length, method):
        missed = [verdict for verdict in verdicts if verdict.by is None]
        if not missed:
            break
        try:
            engine = lce.load(model, rung.method, sharing=engine, **loading | {"window": rung.window or window})
        except UsageError:
            if rung.window is None:
                raise
            continue  # the maps of `esa`, for example, were learned for the whole window
        some, changed = asked, how | {"setting": known}
        if not rung.is_whole or asking.mode != "shared":
            again = [verdict.index for verdict in missed]
            some = [asked[i] for i in again]
            changed |= {"setting": known | {"again": again}, "asking": replace(asking, shard=Shard())}
        told = partial(progress, f"{method.name}, {rung.label}:") if progress else None
        given = {id(sample): answer for sample, answer in answers(engine, some, progress=told, **changed)}
        for verdict in missed:
            verdict.add(rung.cause, rung.label, given[id(asked[verdict.index])])
    return Causes(method.name, length, verdicts)


def rungs(method: Method, window: int, length: int, given: Method) -> Iterator[Rung]:
    """Yield the changes of a method whose knobs are set, in the order of trial.

    `length` is the text's, in tokens; `given` is the method with the knobs that were given alone.
    """
    changes: list[tuple[str, str, Method]] = []
    if selects(method):
        changes += [("selection", "", method)]
        changes += [("budget", f"{label}, ", wider) for label, wider in _wider(method, window, length)]
        changes += [("placement", f"placed {placement}, ", moved) for placement, moved in _moved(method, window)]
    judge: Judge = "true" if length <= window else "constant"
    for cause, label, changed in changes:
        yield Rung(cause, f"{label}true mass ({judge})", cheating(changed, judge))
    least = 3 * window // 4
    with suppress(UsageError):  # knobs that are set may be too large for it
        if given.resolve(least) != given.resolve(window):
            yield Rung("window", f"in a window of {least:,}", given, least)
    for name in ("rerope", "dca"):
        yield Rung("both", f"everything ({name})", lce.methods.make(name))


def _changed(method: Method, **knobs: Any) -> Method:
    """Return a method with other knobs; those of the budget of `pages` are named as other methods' own."""
    if not isinstance(method, Pages):
        return replace(method, **knobs)
    knobs["tokens"] = knobs.pop("budget", method.budget.tokens)
    return replace(method, budget=replace(method.budget, **knobs))


def _wider(method: Method, window: int, length: int) -> Iterator[tuple[str, Method]]:
    """Yield labels and methods: without `top_p`, then with 2, 4, ... times the budget, up to the text or the window."""
    if getattr(method.budget if isinstance(method, Pages) else method, "top_p", None) is not None:
        method = _changed(method, top_p=None)
        yield "without top_p", method
    knob, size, beside = budget_of(method)
    if knob is None:
        return
    least, factor = lce.methods.settings(method)[knob], 1
    while least * factor * size < length:
        factor *= 2
        if _placement(method) == "side_by_side" and beside + least * factor * size > window:
            return
        yield f"{factor} times the budget", _changed(method, **{knob: least * factor})


def budget_of(method: Method) -> tuple[str | None, int, int]:
    """Return the knob that sets a method's budget, the tokens per unit of this knob, and those attended beside them."""
    if isinstance(method, Quest | Pages):
        return "budget", 1, 0
    if isinstance(method, SelectiveMethod):
        return "chunks", method.selection.size, 0
    knob = "top_k" if isinstance(method, ESA | InfLLM | ReAttention) else None
    return knob, method.choices[1], method.access.sinks + method.access.local


def _moved(method: Method, window: int) -> Iterator[tuple[str, Method]]:
    """Yield each other placement, and the method with this placement, or `oracle` if the method has no such knob."""
    for placement in PAGES_IN_WINDOW if isinstance(method, Pages) else IN_WINDOW:
        if _placement(method) == placement:
            continue
        if isinstance(method, Pages):
            yield placement, replace(method, placement=cast("Placement", Placement.kinds[placement]()))
        elif "placement" not in {each.name for each in fields(method)}:
            size = max(1, window // 32) if isinstance(method, ESA) else method.choices[1]
            knob, unit, beside = budget_of(method)
            attended = beside + (0 if knob is None else unit * int(lce.methods.settings(method)[knob]))
            knobs = {"chunk_size": size, "budget": min(window, max(3 * size, attended))}
            yield placement, lce.methods.make("oracle", {**knobs, "placement": placement}).resolve(window)
        else:
            yield placement, _changed(method, placement=placement)


def _placement(method: Method) -> str | None:
    return method.selection.placement.name if isinstance(method, ChunkMethod) else None
