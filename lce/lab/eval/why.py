"""Finds why a method missed an answer: its selection, its budget, its placement, or the model.

A missed sample is asked again with one thing changed at a time, by selections that cheat (`lce.methods.cheating`). The
first change that answers right names the cause:

1. `selection`: chooses what has most true attention; budget, placement and always attended tokens stay.
2. `budget`: as 1, without `top_p`, then with 2, 4, 8, ... times the budget; side by side, while the window has room.
3. `placement`: as 1, with chosen chunks placed otherwise within the window.
4. `both`: attends everything, at distances that the model knows (`rerope`, `dca`). Budget and placement together were
   at fault; no selection could help.
5. `model`: no change answers. The model fails this sample even if it sees everything.

A cheating selection is judged by full attention at distances up to half of the window, and then by full attention at
true distances. If either answers, a better selection would answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, NamedTuple

import lce
from lce.errors import UsageError
from lce.lab.eval.record import Answer, Record
from lce.lab.eval.running import answers
from lce.lab.eval.selection import Samples
from lce.methods import ESA, InfLLM, Method, Quest, SelectiveMethod, cheating, make, selects
from lce.methods.mass import JUDGES

CAUSES = ("answered", "selection", "budget", "placement", "both", "model")
RIGHT = 0.5  # the score from which an answer counts as right
IN_WINDOW = ("side_by_side", "constant")  # placements with no distance beyond the window


class Rung(NamedTuple):
    """One change of a method, and the cause that a right answer shows."""

    cause: str
    label: str
    method: Method


@dataclass
class Verdict:
    """Why a method missed a sample, or that it answered. `by` is the change that answered; `answers` has all."""

    index: int
    depth: float | None
    expected: str
    cause: str = "model"
    by: str | None = None
    answers: dict[str, str] = field(default_factory=dict)

    def add(self, cause: str, label: str, answer: Answer) -> None:
        """Add an answer; the first right one gives the verdict."""
        self.answers[label] = answer.answer or ""
        if self.by is None and answer.value >= RIGHT:
            self.cause, self.by = cause, label


@dataclass(frozen=True)
class Causes:
    """The verdicts on the samples of one length."""

    method: str
    length: int
    verdicts: list[Verdict]

    @property
    def counts(self) -> dict[str, int]:
        """The number of samples by cause."""
        return {cause: sum(verdict.cause == cause for verdict in self.verdicts) for cause in CAUSES}


def explain(
    model: str, method: Method, samples: Samples, *, length: int, setting: Mapping[str, Any] | None = None,
    record: Record | None = None, progress: Callable[[str, int, int], None] | None = None, **loading: Any,
) -> Causes:  # fmt: skip
    """Answer samples with a method; repeat missed samples with each change until one answers.

    `samples` is called with the engine; `loading` are options of `lce.load`. `setting` and a sample's number identify
    the sample in `record`; `setting` has what the samples are made from, first `task`. The method's own answers are
    those of `lce.lab.eval.running.answers`; recorded ones are reused. `progress` is called with the change tried, the
    number of samples done, and their total. Raises `UsageError` for a method that selects nothing.
    """
    check_selects(method)
    engine = lce.load(model, method, **loading)
    asked, known, about = samples(engine), dict(setting or {"task": "samples"}), {"checkpoint": str(model)}
    first = partial(progress, f"{method.name}, itself:") if progress else None
    own = answers(engine, asked, setting=known, record=record, about=about, progress=first)
    verdicts = [Verdict(i, sample.depth, sample.answer) for i, sample in enumerate(asked)]
    for verdict, (_, answer) in zip(verdicts, own, strict=True):
        verdict.add("answered", "itself", answer)
    for rung in rungs(engine.method, engine.window, length):
        missed = [verdict for verdict in verdicts if verdict.by is None]
        if not missed:
            break
        engine = lce.load(model, rung.method, **loading)
        for done, verdict in enumerate(missed, 1):
            key, sample = known | {"number": verdict.index}, asked[verdict.index]
            ((_, answer),) = answers(engine, [sample], setting=key, record=record, about=about)
            verdict.add(rung.cause, rung.label, answer)
            if progress:
                progress(f"{method.name}, {rung.label}:", done, len(missed))
    return Causes(method.name, length, verdicts)


def check_selects(method: Method) -> None:
    """Raise `UsageError` for a method that selects nothing."""
    if not selects(method):
        raise UsageError(f"{method.label} selects nothing, so its selection cannot be at fault; expected one that does")


def rungs(method: Method, window: int, length: int) -> Iterator[Rung]:
    """Yield the changes of a resolved method in the order of trial, for a text of `length` tokens."""
    changes = [("selection", "", method)]
    changes += [("budget", f"{label}, ", wider) for label, wider in _wider(method, window, length)]
    changes += [("placement", f"placed {placement}, ", moved) for placement, moved in _moved(method, window)]
    for cause, label, changed in changes:
        for judge in JUDGES[::-1]:
            yield Rung(cause, f"{label}true mass ({judge})", cheating(changed, judge))
    for name in ("rerope", "dca"):
        yield Rung("both", f"everything ({name})", make(name))


def _changed(method: Method, knob: str, value: Any) -> Method:
    knobs: dict[str, Any] = {knob: value}
    return replace(method, **knobs)


def _wider(method: Method, window: int, length: int) -> Iterator[tuple[str, Method]]:
    """Yield the method without `top_p`, then with 2, 4, ... times its budget, up to the text or the window."""
    if getattr(method, "top_p", None) is not None:
        method = _changed(method, "top_p", None)
        yield "without top_p", method
    knob, size = _budget(method)
    if knob is None:
        return
    least, factor = getattr(method, knob), 1
    while least * factor * size < length:
        factor *= 2
        if getattr(method, "placement", None) == "side_by_side" and least * factor * size > window:
            return
        yield f"{factor} times the budget", _changed(method, knob, least * factor)


def _budget(method: Method) -> tuple[str | None, int]:
    """Return the knob of a method's budget, and the tokens that a unit of this knob stands for."""
    if isinstance(method, Quest):
        return "budget", 1
    if isinstance(method, ESA | InfLLM):
        return "top_k", method.choices[1]
    if isinstance(method, SelectiveMethod):
        return "chunks", method.size
    return None, 1


def _moved(method: Method, window: int) -> Iterator[tuple[str, Method]]:
    """Yield the method with other placements within the window; methods without placements become `oracle`."""
    is_knob = "placement" in {each.name for each in fields(method)}
    for placement in IN_WINDOW:
        if not is_knob:
            size = max(1, window // 32) if isinstance(method, ESA) else method.choices[1]
            knobs = {"chunk_size": size, "budget": min(window, max(3 * size, _attended(method)))}
            yield placement, make("oracle", {**knobs, "placement": placement}).resolve(window)
        elif vars(method)["placement"] != placement:
            yield placement, _changed(method, "placement", placement)


def _attended(method: Method) -> int:
    """Return the most tokens that a query of a resolved method attends."""
    if isinstance(method, Quest):
        assert method.budget is not None, "resolved"
        return method.budget
    knob, size = _budget(method)
    return method.access.sinks + method.access.local + (0 if knob is None else size * int(getattr(method, knob)))
