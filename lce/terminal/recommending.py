"""The output of `lce recommend`: JSON, or a table and the method to use."""

from __future__ import annotations

from typing import Any

from lce.lab.eval.recommend import Probe, recommend
from lce.lab.eval.report import fails
from lce.sizes import size_text
from lce.terminal.output import Output, aligned, note

HEAD = ("method", "tokens", "right", "95% interval", "questions", "s a text", "read a token")


def show_recommendation(model: str, loading: dict[str, Any], output: Output, **how: Any) -> None:
    """Ask the model, and print what each method found, the best first, and how the best is named."""
    with output.noting(None), output.bar("ask", " s") as bar:
        found = recommend(model, progress=bar, **how, **loading)
    if reason := fails(found.ceiling.score):
        note(f"{reason}, at {found.ceiling.length:,} tokens: what methods find says little; try another --task")
    if found.left:
        note(f"there was no time for {', '.join(choice.spelled for choice in found.left)}; give more --seconds")
    output.object({"ceiling": _object(found.ceiling), "probes": [*map(_object, found.probes)]})
    output.text(*aligned([HEAD, *map(_row, (found.ceiling, *found.probes))]))
    output.text("", f"best of these: --method {found.probes[0].choice.spelled}")


def _object(probe: Probe) -> dict[str, Any]:
    """Return a probe as a JSON object."""
    choice, score = probe.choice, probe.score
    figures = {"questions": score.samples, "mean": score.mean, "low": score.low, "high": score.high}
    about = {"method": choice.method, "knobs": dict(choice.knobs), "length": probe.length}
    return {**about, **figures, "seconds": probe.seconds, "read_bytes": score.read_bytes}


def _row(probe: Probe) -> tuple[str, ...]:
    score = probe.score
    right = f"{score.mean:.0%}", f"{score.low:.0%} to {score.high:.0%}", f"{score.samples}"
    read = size_text(round(score.read_bytes or 0))
    return (probe.choice.spelled, f"{probe.length:,}", *right, f"{probe.seconds:.1f}", read)
