"""Learns a model's low-dim maps from text (Wang et al., 2025, Eq. 5-7), and measures their top-k recall.

The text is prefilled in pieces of one window, and the queries and keys of every layer are written to a work folder
beside the map file. Then the two maps of each layer are learned from them. Finished pieces and layers stay in the work
folder, so that an interrupted calibration resumes when it is called again.
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

from lce import Engine, load
from lce.errors import CapacityError, DataError, UsageError
from lce.files import write_whole
from lce.methods import Full, LayerCache, Step, rotate
from lce.methods.lowdim import LowDimMap, LowDimMaps, block_scores, concat_heads, first_best, principal, spread

Progress = Callable[[str, int, int], None]  # the stage, units done, units in all
HELD_OUT = 8  # one piece in 8 measures recall and is not learned from


@dataclass(frozen=True)
class Calibration:
    """How maps are learned: by Adam, on the squared error of the scores of `batch` queries and `batch` keys a step."""

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
    """The share of a layer's `top_k` best tokens that low-dim keys find, by the learned maps and by PCA."""

    layer: int
    top_k: int
    calibrated: float
    pca: float


@dataclass(frozen=True)
class Recorder(Full):
    """Full attention that passes each layer's unrotated queries and keys to `sink`, as "q.0" or "k.0"."""

    sink: Callable[[str, Tensor], None] = lambda name, x: None

    def keep(self, k: Tensor, v: Tensor, cache: LayerCache, step: Step) -> None:
        self.sink(f"k.{cache.index}", k)
        super().keep(k, v, cache, step)

    def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        self.sink(f"q.{cache.index}", q)
        return super().attend(q, cache, step)


def calibrate(
    model: str | Path, text: str, out: str | Path, options: Calibration | None = None, *,
    progress: Progress = lambda what, done, total: None, **loading: Any,
) -> list[Recall]:  # fmt: skip
    """Learn a model's maps from `text`, write them to `out`, and return each layer's recall on held-out pieces.

    `loading` are options of `lce.load`. Raises `DataError` for too little text, `CapacityError` for too little disk,
    `UsageError` where `out` was begun with other options.
    """
    out, options = Path(out), options or Calibration()
    if out.is_dir() or not out.parent.is_dir():
        raise DataError(f"cannot write {out}: expected a file in a folder that exists")
    seen: dict[str, list[Tensor]] = defaultdict(list)
    engine = load(model, Recorder(sink=lambda name, x: seen[name].append(concat_heads(x).cpu())), **loading)
    pieces = _pieces(engine, text, options)
    work = _work_folder(out, engine, pieces, options)
    for index, ids in enumerate(pieces):
        file = work / f"piece-{index:05}.safetensors"
        if not file.exists():
            seen.clear()
            engine.prefill(ids)
            write_whole(file, save({name: torch.cat(rows).contiguous() for name, rows in seen.items()}))
        progress("reading", index + 1, len(pieces))
    n_layers = engine.model.config.n_layers
    learned = [_layer(work, layer, engine, len(pieces), options, progress) for layer in range(n_layers)]
    LowDimMaps([maps for maps, _ in learned]).save(out, engine.fingerprint)
    shutil.rmtree(work)
    return [recall for _, recall in learned]


def _pieces(engine: Engine, text: str, options: Calibration) -> list[list[int]]:
    """The first `options.tokens` tokens of the text in pieces of one window; an incomplete last piece is dropped."""
    ids = engine.tokenizer.encode(text, bos=False)[: options.tokens]
    size = min(engine.window, 4096)
    pieces = [ids[start : start + size] for start in range(0, len(ids) - size + 1, size)]
    if len(pieces) < HELD_OUT:
        raise DataError(f"the text has {len(ids)} tokens; expected {HELD_OUT * size} or more: give a longer one")
    return pieces


def _work_folder(out: Path, engine: Engine, pieces: Sequence[Sequence[int]], options: Calibration) -> Path:
    """The work folder, new or of an earlier call with the same plan. Raises `UsageError` for another plan."""
    work = out.with_name(out.name + ".work")
    plan = {
        **asdict(options),
        "fingerprint": engine.fingerprint,
        "text": hashlib.sha256(json.dumps(pieces).encode()).hexdigest(),
        "dtype": str(engine.dtype),
        "rope": repr(engine.rope),
    }
    plan_file = work / "plan.json"
    config = engine.model.config
    if plan_file.exists() and json.loads(plan_file.read_text()) != plan:
        raise UsageError(f"{work} was begun with other options, text or model; finish it with those, or delete it")
    row = (config.n_heads + config.n_kv_heads) * config.head_dim * engine.dtype.itemsize
    needed = row * config.n_layers * sum(map(len, pieces))
    free = shutil.disk_usage(out.parent).free
    if not plan_file.exists() and needed > free:
        raise CapacityError(
            f"calibrating needs {needed:,} bytes for queries and keys in {work}, {free:,} are free; give fewer --tokens"
        )
    try:
        work.mkdir(exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot write {work}: {error.strerror}") from error
    write_whole(plan_file, json.dumps(plan).encode())
    return work


def _layer(
    work: Path, layer: int, engine: Engine, n_pieces: int, options: Calibration, progress: Progress
) -> tuple[LowDimMap, Recall]:
    """One layer's maps and their recall, from the work folder if they are there, else learned and written to it."""
    file = work / f"layer-{layer:03}.safetensors"
    if not file.exists():
        held_out = range(HELD_OUT - 1, n_pieces, HELD_OUT)
        learn = [index for index in range(n_pieces) if index not in held_out]
        q, q_test = (_turned(_rows(work, f"q.{layer}", pieces, engine), engine) for pieces in (learn, held_out))
        k, k_test = (_rows(work, f"k.{layer}", pieces, engine) for pieces in (learn, held_out))
        n_kv_heads = engine.model.config.n_kv_heads
        pca = _shared(principal(k.unflatten(1, (n_kv_heads, -1)).transpose(0, 1), options.low_dim), engine)
        maps = _learn(q, k, pca, engine, options, layer, progress)
        top_k = max(1, min(engine.window // 4, len(k_test) // 4))
        calibrated, plain = (_recall(q_test, k_test, made, engine, top_k) for made in (maps, pca))
        metadata = {"recall": json.dumps(asdict(Recall(layer, top_k, calibrated, plain)))}
        tensors = {"query": maps.query.cpu().contiguous(), "key": maps.key.cpu().contiguous()}
        write_whole(file, save(tensors, metadata))
    with safe_open(file, framework="pt") as held:
        recall = Recall(**json.loads(held.metadata()["recall"]))
        return LowDimMap(held.get_tensor("query"), held.get_tensor("key")), recall


def _rows(work: Path, name: str, pieces: Sequence[int], engine: Engine) -> Tensor:
    """The queries or keys (`name` is "q.0" or "k.0") of some pieces, one behind the other."""
    rows = []
    for file in (work / f"piece-{index:05}.safetensors" for index in pieces):
        try:
            with safe_open(file, framework="pt") as held:
                rows.append(held.get_tensor(name))
        except (OSError, SafetensorError) as error:
            raise DataError(f"cannot read {file}: {error}; delete {work} and calibrate again") from error
    return torch.cat(rows).to(engine.device, torch.float32)


def _turned(q: Tensor, engine: Engine) -> Tensor:
    """Queries `[N, H·D]` rotated to `far`, half of the window."""
    far = torch.tensor([max(1, engine.window // 2)], device=q.device)
    turn = engine.rope_of(0).turn(far, q.dtype)
    heads = q.unflatten(1, (-1, engine.model.config.head_dim))
    return rotate(heads, turn).flatten(1)


def _shared(basis: Tensor, engine: Engine) -> LowDimMap:
    """The maps of a basis `[G·D, R]` of the keys; query heads take the basis of their KV head."""
    config = engine.model.config
    query = basis.unflatten(0, (config.n_kv_heads, -1)).repeat_interleave(config.n_heads // config.n_kv_heads, 0)
    return LowDimMap(query.flatten(0, 1), basis)


def _exact(q: Tensor, engine: Engine) -> Tensor:
    """Queries `[N, H·D]` summed over the heads of each KV head, `[N, G·D]`; exact scores are these times the keys."""
    config = engine.model.config
    summed: Tensor = q.unflatten(1, (config.n_kv_heads, -1, config.head_dim)).sum(dim=2)
    return summed.flatten(1)


def _learn(
    q: Tensor, k: Tensor, start: LowDimMap, engine: Engine, options: Calibration, layer: int,
    progress: Progress,
) -> LowDimMap:  # fmt: skip
    """Maps of least squared error for `q [N, H·D]`, `k [N, G·D]`, trained from `start`.

    The keys' mean is subtracted first: it adds the same to all scores of a query and changes no ranking.
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
    """The share of the `top_k` best keys `[N, G·D]` of each block of queries that low-dim scores find too."""

    def best(queries: Tensor, keys: Tensor) -> set[int]:
        scores = block_scores(lambda rows: queries[rows] @ keys.T, len(queries), len(keys))
        return set(first_best(spread(scores, eps), top_k).tolist())

    blocks = zip(_exact(q, engine).split(block), (q @ maps.query).split(block), strict=True)
    low_k = k @ maps.key
    shares = [len(best(exact, k) & best(low, low_k)) / top_k for exact, low in blocks]
    return sum(shares) / len(shares)
