"""Formats what `lce calibrate` and `lce explain` print."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from lce.methods import knob_values

if TYPE_CHECKING:
    from lce_lab.calibrate import Recall
    from lce_lab.study.explain import Explanation


def recall_lines(recalls: Sequence[Recall]) -> list[str]:
    """Return the top-k recall of low-dimensional keys as text: a line for each layer, then the mean."""
    rows = [(str(recall.layer), recall.calibrated, recall.pca) for recall in recalls]
    rows.append(("mean", fmean(recall.calibrated for recall in recalls), fmean(recall.pca for recall in recalls)))
    head = f"{'layer':<8}{'calibrated':>12}{'pca':>10}  recall of the best {recalls[0].top_k} tokens"
    return [head, *(f"{layer:<8}{calibrated:>12.1%}{pca:>10.1%}" for layer, calibrated, pca in rows)]


def explanation_object(explanation: Explanation) -> dict[str, Any]:
    """Return an explanation as JSON. The distance of a key that is not attended is null."""
    setting = {name: getattr(explanation, name) for name in ("window", "tokens", "block", "head", "seed")}
    method = {"method": explanation.method.name, "knobs": knob_values(explanation.method)}
    return {**method, **setting, "distances": explanation.rows()}


def explanation_lines(explanation: Explanation) -> list[str]:
    """Return an explanation as text: rows are queries, columns keys, and a dot is a key that is not attended."""
    rows = [["." if d is None else str(d) for d in row] for row in explanation.rows()]
    heads = [str(index) for index in range(explanation.tokens)]
    width = max(len(cell) for row in [heads, *rows] for cell in row)
    label = max(len(heads[-1]), len("i\\j"))
    lines = [
        f"{name:>{label}} |" + "".join(f" {cell:>{width}}" for cell in row)
        for name, row in zip(["i\\j", *heads], [heads, *rows], strict=True)
    ]
    caption = f"{explanation.setting}; the distance at which query i sees key j:"
    rule = "".join("+" if sign == "|" else "-" for sign in lines[0])
    return [explanation.title, caption, "", lines[0], rule, *lines[1:]]
