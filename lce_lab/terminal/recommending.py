"""The output of `lce recommend`: JSON, or a table and the method to use."""

from __future__ import annotations

from typing import Any

from lce.methods.auto import Choice
from lce.sizes import size_text
from lce.terminal.output import Output, aligned, note
from lce_lab.eval.recommend import Probe, Recommendation, recommend
from lce_lab.eval.report import fails

HEAD = ("method", "tokens", "right", "95% interval", "questions", "s a text", "read a token")


def show_recommendation(model: str, loading: dict[str, Any], output: Output, **how: Any) -> None:
    """Ask the model, and print what each method found, the best first, and how the best is named."""
    with output.noting(None), output.bar("ask", " s") as bar:
        found = recommend(model, progress=bar, **how, **loading)
    if reason := fails(found.ceiling.score):
        note(f"{reason}, at {found.ceiling.length:,} tokens: what methods find says little; try another --task")
    if found.left:
        note(f"there was no time for {', '.join(choice.spelled for choice in found.left)}; give more --seconds")
    more = {"alike": [_named(each.choice) for each in found.alike], "not_asked": [*map(_named, found.left)]}
    probes = {"ceiling": _object(found.ceiling), "probes": [*map(_object, found.probes)]}
    output.object({**probes, **more, "recommended": _named(found.chosen.choice)})
    length = f"{found.probes[0].length:,}"
    left = [(choice.spelled, length, "not asked", *[""] * (len(HEAD) - 3)) for choice in found.left]
    output.text(*(line.rstrip() for line in aligned([HEAD, *map(_row, (found.ceiling, *found.probes)), *left])))
    output.text("", *_advice(found))


def _advice(found: Recommendation) -> list[str]:
    """Return the lines below the table: which method to use, and why."""
    use = f"--method {found.chosen.choice.spelled}"
    if len(found.alike) == 1:
        return [f"{'best of these' if found.probes[1:] else 'only this was asked'}: {use}"]
    names, n = ", ".join(each.choice.spelled for each in found.alike), len(found.chosen.values)
    return [f"{n} question{'s' * (n > 1)} cannot tell these apart: {names}", f"the one that reads least a token: {use}"]


def _named(choice: Choice) -> dict[str, Any]:
    return {"method": choice.method, "knobs": dict(choice.knobs)}


def _object(probe: Probe) -> dict[str, Any]:
    """Return a probe as a JSON object."""
    score = probe.score
    figures = {"questions": score.samples, "mean": score.mean, "low": score.low, "high": score.high}
    about = {**_named(probe.choice), "length": probe.length}
    return {**about, **figures, "seconds": probe.seconds, "read_bytes": score.read_bytes}


def _row(probe: Probe) -> tuple[str, ...]:
    score = probe.score
    right = f"{score.mean:.0%}", f"{score.low:.0%} to {score.high:.0%}", f"{score.samples}"
    read = size_text(round(score.read_bytes or 0))
    return (probe.choice.spelled, f"{probe.length:,}", *right, f"{probe.seconds:.1f}", read)
