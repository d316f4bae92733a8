"""`lce trace`: the choices of each head of each layer for some tokens of a text, as lines, JSON, or a picture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lce
from lce.terminal.output import Output


def show_trace(
    model: str, method: lce.Method, prompt: str, plot: str | None, loading: dict[str, Any], output: Output, **what: Any
) -> None:
    """Trace a text and print the choices of its last tokens, a line a layer and head."""
    from lce.lab.study.pictures import draw_choices, drawable
    from lce.lab.study.recording import Recorder, RecordingRequest

    if plot is not None:
        drawable(plot)
    request = RecordingRequest(prompt, max_tokens=0, spread=0, **what)
    with output.noting(), output.bars() as bars:
        recording = Recorder(model, **loading).record(request, [method], progress=bars)
    run = recording["runs"][0]
    if plot is not None:
        draw_choices(recording, plot)
    found = list(rows(recording))
    output.object({
        "chunk_size": run["chunk_size"], "first": run["first"], "marks": recording["marks"], "rows": found,
        "hits": hits(recording, found),
    })  # fmt: skip
    output.text(f"choice c: tokens {run['first']} + {run['chunk_size']} c and on; choice (rank, score)")
    output.text(*map(_row, found), *(_hit_line(recording["marks"], hit) for hit in hits(recording, found)))


def rows(recording: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the choices of each head, layer and looked-at query. Ranks begin at 0; -1 is unknown."""
    run, n_heads = recording["runs"][0], recording["model"]["heads"]
    looks = {int(query): look for segment in run["segments"] for query, look in segment["looks"].items()}
    for query in run["looked"]:
        for layer, found in enumerate(looks[query]["layers"]):
            for head, each in enumerate(found["heads"]):
                own = head * len(found["chosen"]) // n_heads
                lists = [found[name][own] if found["chosen"] else [] for name in ("chosen", "ranks", "scores")]
                distances = [] if each["distances"] is None else looks[query]["distances"][each["distances"]]
                yield {
                    "token": query, "layer": layer, "head": head,
                    **dict(zip(("choices", "ranks", "scores"), lists, strict=True)), "distances": distances,
                    **{name: each[name] for name in ("mass", "best", "marked", "recall", "reachable", "why")},
                }  # fmt: skip


def hits(recording: dict[str, Any], found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each mark and layer, how often heads attended the mark for the traced tokens, and its ranks.

    `attended` is the share of heads that attend a token of the mark. `hit1` and `hit5` are the shares of heads for
    which one of its choices has the best, or one of the five best, scores; None for layers that choose nothing. `mass`
    is the mean true attention.
    """
    lines = []
    for number, mark in enumerate(recording["marks"]):
        for layer in range(recording["model"]["layers"]):
            some = [each for row in found if row["layer"] == layer for each in row["marked"] if each[0] == number]
            ranks = [rank for _, _, rank, _ in some if rank >= 0]
            if some:
                lines.append({
                    "mark": number, "label": mark["label"], "layer": layer, "queries_and_heads": len(some),
                    "attended": sum(share > 0 for *_, share in some) / len(some),
                    "hit1": sum(rank < 1 for rank in ranks) / len(ranks) if ranks else None,
                    "hit5": sum(rank < 5 for rank in ranks) / len(ranks) if ranks else None,
                    "mass": sum(mass for _, mass, _, _ in some) / len(some),
                })  # fmt: skip
    return lines


def _row(row: dict[str, Any]) -> str:
    known = [
        f"{choice} ({rank + 1}, {score:.3g})" if rank is not None and rank >= 0 else str(choice)
        for choice, rank, score in zip(row["choices"], row["ranks"], row["scores"], strict=True)
    ]
    return f"token {row['token']:,}, layer {row['layer']}, head {row['head']}: {', '.join(known) or 'no choice'}"


def _hit_line(marks: list[dict[str, Any]], hit: dict[str, Any]) -> str:
    mark = marks[hit["mark"]]
    rates = "".join(f", {name} {hit[name]:.0%}" for name in ("hit1", "hit5") if hit[name] is not None)
    where = f"{hit['label']!r} at tokens {mark['start']:,} to {mark['stop'] - 1:,}, layer {hit['layer']}"
    return f"{where}: attended by {hit['attended']:.0%} of heads, true attention {hit['mass']:.4f}{rates}"
