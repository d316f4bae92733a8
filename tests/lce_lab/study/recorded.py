"""A method watched on plain tensors, as `lce_lab.study` watches it in a model, and recordings taken apart."""

import base64
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from lce.methods import Observed, make
from lce_lab.analysis.mass import Judge
from lce_lab.study.looks import looks_of
from lce_lab.study.run_observer import RunObserver
from tests.running import run, vectors

WINDOW, N, HEADS, KV_HEADS, DIM = 32, 120, 4, 2, 8
BLOCKS = [80, 39, 1]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("longheads", {"chunk_size": 4, "chunks": 5}),
    ("longheads", {"chunk_size": 4, "chunks": 6, "share": "group", "top_p": 0.6}),
    ("longheads", {"chunk_size": 4, "chunks": 5, "placement": "constant"}),
    ("quest", {"dense_layers": 0, "page": 4, "budget": 20}),
    ("infllm", {"block_size": 4, "sinks": 4, "top_k": 3}),
    ("esa", {"compress": "none", "sinks": 4, "top_k": 8}),
]
PLAIN: list[tuple[str, dict[str, Any]]] = [("full", {}), ("streaming", {}), ("dca", {})]


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    """`q k v` of the watched runs."""
    return vectors(3, HEADS, KV_HEADS, N, DIM)


def watched(name: str, knobs: dict[str, Any], looked: Iterable[int] = ()) -> tuple[RunObserver, Tensor]:
    """What was kept of a run, and the run's output `[H, N, D]`."""
    watch = RunObserver(N, looked)
    return watch, run(Observed(make(name, knobs), watch), *tensors(), BLOCKS, window=WINDOW)


def looks_at(
    name: str, knobs: dict[str, Any], looked: Iterable[int], judge: Judge = "constant", marks: Sequence[Any] = ()
) -> dict[int, dict[str, Any]]:
    """The looks at some queries of a watched run."""
    return looks_of(watched(name, knobs, looked)[0], make(name, knobs).resolve(WINDOW).choices, marks, judge)


def choices_of(run: dict[str, Any]) -> np.ndarray[Any, Any]:
    """What every query of a recorded run chose, `[queries, layers, choosers, K]`, -1 for none."""
    kind, parts = np.dtype("<u2" if run["bits"] == 16 else "<u4"), []
    for segment in run["segments"]:
        flat = np.frombuffer(base64.b64decode(segment["data"]), dtype=kind)
        x = flat.reshape(segment["rows"], len(run["choosing"]), run["choosers"], run["k"]).astype(np.int64)
        parts.append(np.broadcast_to(x, (segment["stop"] - segment["start"], *x.shape[1:])))
    joined = np.concatenate(parts)
    return np.where(joined == np.iinfo(kind).max, -1, joined)


def always_of(run: dict[str, Any], layer: int, query: int) -> list[list[int]]:
    """The spans that a query of a recorded run attends in a layer whatever is chosen."""
    entry = next(entry for entry in run["always"] if layer in entry["layers"])
    q0, _, spans = next(each for each in entry["runs"] if each[0] <= query < each[1])
    return [[a + da * (query - q0), b + db * (query - q0)] for a, da, b, db in spans]
