"""The lines, tables and JSON objects that commands print."""

from __future__ import annotations

import dataclasses
import json
from typing import Literal

import pytest

from lce.cache.tier import Traffic
from lce.calibrate import Recall
from lce.engine.answer import Stats
from lce.engine.planning import Need, Plan
from lce.terminal import figures

STATS = Stats(2000, generated_tokens=11, prefill_s=2.0, first_token_s=2.25, decode_s=0.5, memory={"device": 3 << 20})


def test_closing_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "peak_memory", lambda: {"process": 5 << 20, "gpu": 7 << 20})
    memory = "cache: device 3.0 MiB | peak memory: process 5.0 MiB, gpu 7.0 MiB"
    assert figures.generation_line(STATS) == (
        f"2,000 prompt tokens | prefill 1,000.0 tok/s | first token 2.25 s | decode 20.0 tok/s | {memory}"
    )
    assert figures.prefill_line(STATS) == f"2,000 prompt tokens | prefill 1,000.0 tok/s | {memory}"
    resumed = dataclasses.replace(STATS, prompt_tokens=4360, read_before=8192, prefill_s=4.36)
    line = f"12,552 prompt tokens (8,192 read before) | prefill 1,000.0 tok/s | {memory}"
    assert figures.prefill_line(resumed) == line
    traffic = Traffic(hits=930, misses=70, early=5, bytes_in=12 << 20, bytes_out=3 << 29)
    stats = Stats(memory={"device": 1 << 20, "host": 0, "disk": 4096}, traffic={"device": traffic})
    assert figures.memory_text(stats, {"process": 9 << 20}) == (
        "cache: device 1.0 MiB, disk 4.0 KiB | peak memory: process 9.0 MiB | "
        "device 93% of 1,000 pages found, 12.0 MiB in, 1.5 GiB out (5 ahead of need)"
    )
    nothing = "cache: device 0 B | peak memory: process 1 B"
    assert figures.memory_text(Stats(memory={"device": 0}), {"process": 1}) == nothing
    assert Stats().prefill_tokens_per_s == Stats(generated_tokens=1).decode_tokens_per_s == 0


def test_recalls_and_their_mean() -> None:
    head, *rows = figures.recall_lines([Recall(0, 32, 0.5, 0.25), Recall(1, 32, 1.0, 0.75)])
    assert head.endswith("recall of the best 32 tokens")
    assert [row.split() for row in rows] == [
        ["0", "50.0%", "25.0%"],
        ["1", "100.0%", "75.0%"],
        ["mean", "75.0%", "50.0%"],
    ]


def test_a_plan_of_unknown_sizes() -> None:
    tiers = {"device": Need(1024, 10, 100, None, None), "disk": Need(2048, budget=4096, available=1024)}
    plan = Plan(9000, "full", "float32", "int8", "cpu", tiers, None, "too long")
    content = json.loads(json.dumps(figures.plan_object(plan)))
    assert (content["fits"], content["longest"]) == (False, None)
    assert content["tiers"]["device"]["needed"] == 1134
    _, _, _, device, disk, _, verdict = figures.plan_lines(plan)
    assert "unknown" in device
    assert "4.0 KiB" in disk
    assert verdict == "It does not fit. Nothing bounds the length."


def test_types_as_a_user_writes_them() -> None:
    for hint, text in (
        (int, "int"), (int | None, "int or none"), (Literal["all"], "all"), (Literal["a", "b", "c"], "a, b or c"),
        (Literal["a", "b"] | None, "a or b or none"),
    ):  # fmt: skip
        assert figures.type_text(hint) == text
