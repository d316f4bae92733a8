"""Learning low-dim maps for a model from text (Wang et al., 2025, Eq. 5-7), and measuring what they lose.

The text is read in pieces of one window, and the queries and keys of every layer are written to a work folder beside
the map file; then each layer's two maps are learned from them. Both stages leave finished files behind, so that an
interrupted calibration goes on where it was when it is asked for again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from lce.cache.layer import LayerCache
from lce.engine.engine import Engine
from lce.engine.loading import load
from lce.errors import CapacityError, DataError, UsageError
from lce.files import write_whole
from lce.methods.full import Full
from lce.methods.lowdim import (
    LowDimMap,
    LowDimMaps,
    block_scores,
    first_best,
    principal,
    side_by_side,
    spread,
)
from lce.methods.step import Step
from lce.models.rope import rotate

Progress = Callable[[str, int, int], None]  # what is being done, done, of how many
HELD_OUT = 8  # one piece in so many is for measuring, not for learning


@dataclass(frozen=True)
class Calibration:
    """How maps are learned: Adam on the squared error of the scores of `batch` queries and as many keys at a time."""

    low_dim: int = 128
    tokens: int = 50_000
    epochs: int = 10
    batch: int = 128
    lr: float = 5e-4
    seed: int = 0

    def __post_init__(self) -> None:
        for knob in ("low_dim", "tokens", "epochs", "batch"):
            if getattr(self, knob) < 1:
                raise UsageError(f"{knob} is {getattr(self, knob)}; expected 1 or more")
        if not self.lr > 0:
            raise UsageError(f"lr is {self.lr}; expected more than 0")


@dataclass(frozen=True)
class Recall:
    """The share of a layer's truly best tokens that low-dim keys find, by the learned maps and by PCA."""

    layer: int
    top_k: int
    calibrated: float
    pca: float


@dataclass(frozen=True)
class Recorder(Full):
    """Full attention that hands out each layer's unrotated queries and keys of a block, as "q.0" or "k.0"."""

    sink: Callable[[str, Tensor], None] = lambda name, x: None

    def keep(self, k: Tensor, v: Tensor, cache: LayerCache, step: Step) -> None:
        self.sink(f"k.{cache.index}", k)
        super().keep(k, v, cache, step)

    def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        self.sink(f"q.{cache.index}", q)
        return super().attend(q, cache, step)


def calibrate(
    model: str | Path,
    text: str,
    out: str | Path,
    options: Calibration | None = None,
    *,
    progress: Progress = lambda what, done, total: None,
    **loading: Any,
) -> list[Recall]:
    """Learn a model's maps from `text`, write them to `out`, and measure them on the pieces that were held out.

    `loading` goes to `lce.load`. Raises `DataError` for too little text, `CapacityError` for too little disk,
    `UsageError` where `out` was begun with other options.
    """
    out, options = Path(out), options or Calibration()
    if out.is_dir() or not out.parent.is_dir():
        raise DataError(f"cannot write {out}: expected a file in a folder that exists")
    seen: dict[str, list[Tensor]] = defaultdict(list)
    engine = load(model, Recorder(sink=lambda name, x: seen[name].append(side_by_side(x).cpu())), **loading)
    pieces = _pieces(engine, text, options)
    work = _work_folder(out, engine, pieces, options)
    for index, ids in enumerate(pieces):
        file = work / f"piece-{index:05}.safetensors"
        if not file.exists():
            seen.clear()
            engine.prefill(ids)
            write_whole(file, save({name: torch.cat(rows).contiguous() for name, rows in seen.items()}))
        progress("reading", index + 1, len(pieces))
    maps, recalls = [], []
    for layer in range(engine.model.config.n_layers):
        learned, recall = _layer(work, layer, engine, len(pieces), options, progress)
        maps.append(learned)
        recalls.append(recall)
    LowDimMaps(maps).save(out, engine.fingerprint)
    shutil.rmtree(work)
    return recalls


def _pieces(engine: Engine, text: str, options: Calibration) -> list[list[int]]:
    """The first tokens of the text, in runs of one window; those that are left over are not used."""
    ids = engine.tokenizer.encode(text, bos=False)[: options.tokens]
    size = min(engine.window, 4096)
    pieces = [ids[start : start + size] for start in range(0, len(ids) - size + 1, size)]
    if len(pieces) < HELD_OUT:
        raise DataError(f"the text has {len(ids)} tokens; expected {HELD_OUT * size} or more: give a longer one")
    return pieces


def _work_folder(out: Path, engine: Engine, pieces: Sequence[Sequence[int]], options: Calibration) -> Path:
    """The folder of unfinished work, which is this work's or new."""
    work = out.with_name(out.name + ".work")
    plan = {
        **asdict(options),
        "fingerprint": engine.fingerprint,
        "text": hashlib.sha256(json.dumps(pieces).encode()).hexdigest(),
        "dtype": str(engine.dtype),
        "rope": repr(engine.rope),
    }
    told = work / "plan.json"
    config = engine.model.config
    if told.exists() and json.loads(told.read_text()) != plan:
        raise UsageError(f"{work} was begun with other options, text or model; finish it with those, or delete it")
    row = (config.n_heads + config.n_kv_heads) * config.head_dim * engine.dtype.itemsize
    needed = row * config.n_layers * sum(map(len, pieces))
    free = shutil.disk_usage(out.parent).free
    if not told.exists() and needed > free:
        raise CapacityError(
            f"calibrating needs {needed:,} bytes for queries and keys in {work}, {free:,} are free; give fewer --tokens"
        )
    try:
        work.mkdir(exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot write {work}: {error.strerror}") from error
    write_whole(told, json.dumps(plan).encode())
    return work


def _layer(
    work: Path, layer: int, engine: Engine, n_pieces: int, options: Calibration, progress: Progress
) -> tuple[LowDimMap, Recall]:
    """One layer's maps and their recall, learned now or before."""
    file = work / f"layer-{layer:03}.safetensors"
    if not file.exists():
        rows = [_rows(work / f"piece-{index:05}.safetensors", layer) for index in range(n_pieces)]
        held_out = range(HELD_OUT - 1, n_pieces, HELD_OUT)
        learn = [index for index in range(n_pieces) if index not in held_out]
        far = max(1, engine.window // 2)
        q, k = (_joined(rows, learn, what, engine) for what in (0, 1))
        q_test, k_test = (_joined(rows, held_out, what, engine) for what in (0, 1))
        q, q_test = (_turned(x, engine, far) for x in (q, q_test))
        n_kv_heads = engine.model.config.n_kv_heads
        pca = _shared(principal(k.unflatten(1, (n_kv_heads, -1)).transpose(0, 1), options.low_dim), engine)
        maps = _learn(q, k, pca, engine, options, layer, progress)
        top_k = max(1, min(engine.window // 4, len(k_test) // 4))
        calibrated, plain = (_recall(q_test, k_test, made, engine, top_k) for made in (maps, pca))
        told = {"recall": json.dumps(asdict(Recall(layer, top_k, calibrated, plain)))}
        tensors = {"query": maps.query.cpu().contiguous(), "key": maps.key.cpu().contiguous()}
        write_whole(file, save(tensors, told))
    with safe_open(file, framework="pt") as held:
        recall = Recall(**json.loads(held.metadata()["recall"]))
        return LowDimMap(held.get_tensor("query"), held.get_tensor("key")), recall


def _rows(file: Path, layer: int) -> tuple[Tensor, Tensor]:
    try:
        with safe_open(file, framework="pt") as held:
            return held.get_tensor(f"q.{layer}"), held.get_tensor(f"k.{layer}")
    except (OSError, SafetensorError) as error:
        raise DataError(f"cannot read {file}: {error}; delete {file.parent} and calibrate again") from error


def _joined(rows: Sequence[tuple[Tensor, Tensor]], pieces: Sequence[int], what: int, engine: Engine) -> Tensor:
    return torch.cat([rows[index][what] for index in pieces]).to(engine.device, torch.float32)


def _turned(q: Tensor, engine: Engine, far: int) -> Tensor:
    """Queries `[N, H·D]` rotated to the position from which far keys are seen."""
    table = engine.rope_of(0).table(torch.tensor([far], device=q.device), q.dtype)
    heads = q.unflatten(1, (-1, engine.model.config.head_dim))
    return rotate(heads, table).flatten(1)


def _shared(basis: Tensor, engine: Engine) -> LowDimMap:
    """One basis `[G·D, R]` for keys, and for the queries of the heads that share a KV head."""
    config = engine.model.config
    query = basis.unflatten(0, (config.n_kv_heads, -1)).repeat_interleave(config.n_heads // config.n_kv_heads, 0)
    return LowDimMap(query.flatten(0, 1), basis)


def _exact(q: Tensor, engine: Engine) -> Tensor:
    """Queries `[N, H·D]` summed over the heads that share a KV head, `[N, G·D]`: what keys are multiplied by."""
    config = engine.model.config
    summed: Tensor = q.unflatten(1, (config.n_kv_heads, -1, config.head_dim)).sum(dim=2)
    return summed.flatten(1)


def _learn(
    q: Tensor, k: Tensor, start: LowDimMap, engine: Engine, options: Calibration, layer: int,
    progress: Progress,
) -> LowDimMap:  # fmt: skip
    """Maps of least squared error, from those of PCA on: `q [N, H·D]`, `k [N, G·D]`.

    The keys' mean is taken away first: it shifts all scores of a query alike and says nothing of which token is best.
    """
    k = k - k.mean(dim=0)
    shared = _exact(q, engine)
    query, key = start.query.clone().requires_grad_(), start.key.clone().requires_grad_()
    optimizer = torch.optim.Adam([query, key], lr=options.lr)
    random = torch.Generator().manual_seed(options.seed * 1000 + layer)
    steps = max(1, len(q) // options.batch)
    scale = float((shared[:1000] @ k[:1000].T).square().mean())
    with torch.enable_grad():
        for epoch in range(options.epochs):
            orders = [torch.randperm(len(q), generator=random) for _ in range(2)]
            for step in range(steps):
                rows, columns = (order[step * options.batch : (step + 1) * options.batch] for order in orders)
                truth = shared[rows] @ k[columns].T
                loss = ((q[rows] @ query) @ (k[columns] @ key).T - truth).square().mean() / scale
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            progress("learning", layer * options.epochs + epoch + 1, engine.model.config.n_layers * options.epochs)
    return LowDimMap(query.detach(), key.detach())


def _recall(q: Tensor, k: Tensor, maps: LowDimMap, engine: Engine, top_k: int, block: int = 128, eps: int = 1) -> float:
    """The share of the `top_k` best of keys `[N, G·D]` for each block of queries that the maps find too."""
    shared, low_q, low_k = _exact(q, engine), q @ maps.query, (k @ maps.key).T
    shares = []
    for start in range(0, len(q), block):
        here = slice(start, start + block)
        n_queries = len(q[here])

        def best(a: Tensor, b: Tensor, here: slice = here, n_queries: int = n_queries) -> set[int]:
            scores = block_scores(lambda rows: a[here][rows] @ b, n_queries, b.shape[1])
            return set(first_best(spread(scores, eps), top_k).tolist())

        shares.append(len(best(shared, k.T) & best(low_q, low_k)) / top_k)
    return sum(shares) / len(shares)
