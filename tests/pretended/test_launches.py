"""How many kernels a decode step of a token launches on a GPU, when it is recorded."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

import lce
from lce.engine.graph import CudaTape, DecodeGraph, Work
from lce.kernels.cuda import launching
from lce.methods import DualChunk, Full, LongHeads, Method, Quest
from tests.checkpoints import tokens
from tests.pretended import Gpus
from tests.pretended.launches import launched

pytest.importorskip("triton")
ATTENTION = ["_append", "_merge_row", "_rows_together"]
CHOICE = ["_append", "_choose", "_merge_row", "_one_row", "_score"]
PRODUCTS = ["_product"] * 4
CASES: dict[str, tuple[Method, list[str]]] = {  # what a layer launches
    "full": (Full(), ATTENTION + PRODUCTS),
    "dca": (DualChunk(chunk_size=16), ATTENTION + PRODUCTS),
    "longheads": (LongHeads(chunk_size=8, chunks=4), CHOICE + PRODUCTS + ["index_copy_"]),
    "quest": (Quest(page=8, budget=32, dense_layers=0), CHOICE + PRODUCTS + ["_rotate"]),
}
AROUND = 40  # what all layers share, the embedding and the head


@pytest.mark.parametrize("name", CASES)
def test_launches_of_a_recorded_step(
    name: str, triton_gpus: Gpus, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, expected = CASES[name]
    engine = lce.load(tiny_model, method, device="cuda", dtype="bfloat16")
    with monkeypatch.context() as patch:
        patch.setattr(launching, "installed", lambda: False)  # fast
        context = engine.prefill(tokens(50), length=64)
    bound = engine.method.bound(51)
    assert bound is not None
    counted = []
    for n_layers in (2, 1):
        monkeypatch.setattr(engine.model, "layers", engine.model.layers[:n_layers])
        tape = CudaTape(engine.device)
        work = (
            DecodeGraph(engine.model, engine.alone.driver, engine.device, tape)
            ._prepared(context.cache, context.rope, bound)
            .work
        )

        def count(work: Work = work) -> None:
            with triton_gpus.counting() as counts:
                work()
            counted.append(Counter(launched(counts)))

        with torch.inference_mode():
            tape.record(count)  # nothing is run
    layer = counted[0] - counted[1]
    assert layer == Counter(expected)
    around = counted[1] - layer
    assert around.total() <= AROUND, around
