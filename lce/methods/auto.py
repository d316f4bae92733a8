"""The method `auto`, and all advice on methods: what was measured best for a text's length, on this model or another.

Within the window it is `full`, unless the measured model itself fails at the window's largest distances. Beyond it, it
is what `lce recommend` found on this model in texts about as long, if it was asked; else the choice for the length in
the table of the nearest measured model.
"""

import math
from contextlib import suppress
from dataclasses import replace

from lce.errors import LceError
from lce.methods.base import Method
from lce.methods.choices import CANDIDATES, Choice, table_for
from lce.methods.measured import Measurement, chosen, measurements
from lce.methods.step import ModelFacts
from lce.progress import notice

NEAR = math.log(1.5)  # a measurement recommends for texts at most 1.5 times as long, or as short


def choice_for(length: int | None, model: ModelFacts) -> Choice:
    """Return the choice for texts of `length` tokens (None: any), and a model with the window and scaling in `model`.

    Whatever advises a method asks this function: `auto`, plans, warnings, refusals and `lce recommend`.
    """
    reach, table = _reach(model, length), table_for(model.config, model.named)
    usable = (x for x in table if may_take(x, model))
    usual = next(x for x in usable if x.windows is None or (length is not None and length <= x.windows * reach))
    usual, some = usual.at(model.window), list[Measurement]()
    if length is None or length <= reach or "rope" in model.named or not model.source.has_weights:
        return usual
    with suppress(LceError):
        kept = measurements(lambda: model.source.checkpoint.fingerprint())
        some = [each for each in kept if each.window == model.window]
    nearest = min(some, key=lambda each: abs(math.log(each.length / length)), default=None)
    return usual if nearest is None else _by(nearest, usual, length, model)


def _by(measured: Measurement, usual: Choice, length: int, model: ModelFacts) -> Choice:
    """Return what a measurement recommends instead of `usual`, if its texts were about as long, or `usual` is worse."""
    trials = [x for x in measured.trials if may_take(x.choice, model) and reads_whole(x.choice, length, model)]
    best, is_near = chosen(trials, usual), abs(math.log(measured.length / length)) <= NEAR
    values = {each.choice.spelled: each.values for each in trials}
    if best.spelled not in values or (not is_near and (best == usual or usual.spelled not in values)):
        return usual
    found = f"{sum(values[best.spelled]):.3g} of {len(values[best.spelled])} facts in {measured.length:,} tokens"
    return replace(best, reason=f"measured on this model on {measured.day}, where it found {found}")


def _reach(model: ModelFacts, length: int | None) -> int:
    return model.rope.fitted(model.window, length or 0).reach(model.window)


def candidates(model: ModelFacts) -> list[Choice]:
    """Return what `lce recommend` asks of a model, without choices that change what the user named."""
    return [each.at(model.window) for each in CANDIDATES if may_take(each, model)]


def may_take(choice: Choice, model: ModelFacts) -> bool:
    """Return whether a choice leaves what the user named, and a checkpoint's own RoPE scaling of another kind."""
    changed = {"rope": choice.rope, "window": choice.window or choice.share}
    own = model.config.rope.kind
    return not any(changed[name] for name in model.named) and (choice.rope is None or own in ("none", choice.rope))


def reads_whole(choice: Choice, length: int, model: ModelFacts) -> bool:
    """Return whether a choice reads texts of `length` tokens whole."""
    window = choice.window or model.window
    try:
        made = choice.make().resolve(window)
    except LceError:  # the window is too small for the method
        return False
    limit = made.limit(length if choice.rope else model.rope.reach(window), model.config.sliding_window)
    return limit is None or length <= limit


def automatic(model: ModelFacts, length: int | None) -> tuple[Method, ModelFacts]:
    """Return the method that `auto` stands for, and the model with the window and RoPE scaling that go with it.

    If the model will be run, print the choice on stderr with the reason.
    """
    choice = choice_for(length, model)
    if not model.plan_only:
        notice(choice.line(length, _reach(model, length)))
    rope = model.rope if choice.rope is None else replace(model.rope, kind=choice.rope, factor="auto")
    return choice.make(), replace(model, window=choice.window or model.window, rope=rope)
