"""Runs a calibration: reads the text, learns each layer's low-dimensional maps, and measures their recall."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Self

import torch
from torch import Tensor

from lce import Engine, load
from lce.errors import DataError, UsageError
from lce.files import check_new, named, path_of
from lce.methods import ESA, Full, LayerCache, Step, Wrapped, lowdim, rotate
from lce.methods.lowdim import LearnedFor, LowDimMap, LowDimMaps, best_tokens
from lce.methods.map_file import save_maps
from lce_lab.calibrate.work_folder import WorkFolder
from lce_lab.stages import StageProgress, stages

Note = Callable[[str], None]
HELD_OUT = 8  # one piece of the text in 8 is held out: recall is measured on it


@dataclass(frozen=True)
class Calibration:
    """The options of a calibration. Adam minimises the squared error of low-dimensional scores.

    Each step takes the scores of `batch` queries with `batch` keys. The learning rate `lr` falls linearly to 0. As in
    `esa`, queries are rotated to the position `far`, and keys are not rotated. A `far` of None is half of the window.
    The text is read in pieces of `piece` tokens; None stands for the window, or 4,096 if the window is larger. Pieces
    beyond the window are read by `esa` with exact scores, as in the paper.
    """

    low_dim: int = 128
    tokens: int = 50_000
    epochs: int = 10
    batch: int = 128
    lr: float = 5e-4
    seed: int = 0
    far: int | None = None
    piece: int | None = None

    def __post_init__(self) -> None:
        for knob, value in asdict(self).items():
            least = int(knob in ("low_dim", "tokens", "epochs", "batch", "piece"))
            if knob not in ("lr", "seed") and value is not None and value < least:
                raise UsageError(f"{knob} is {value}; expected {least} or more")
        if not 0 < self.lr < math.inf:
            raise UsageError(f"lr is {self.lr}; expected more than 0")


@dataclass(frozen=True)
class Recall:
    """The shares of a layer's `top_k` best keys that low-dimensional scores find, with learned maps and with PCA."""

    layer: int
    top_k: int
    calibrated: float
    pca: float


@dataclass(frozen=True)
class Collecting(Wrapped):
    """A method that passes each layer's unrotated keys and queries rotated to `far` to `sink`, as k.0, q.0 and on."""

    far: int | None = None
    sink: Callable[[str, Tensor], None] = lambda name, x: None

    def resolve(self, window: int) -> Self:
        return replace(super().resolve(window), far=max(1, window // 2) if self.far is None else self.far)

    def keep(self, k: Tensor, v: Tensor, cache: LayerCache, step: Step) -> None:
        self.sink(f"k.{cache.index}", k)
        super().keep(k, v, cache, step)

    def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        assert self.far is not None, "resolved before use"
        self.sink(f"q.{cache.index}", rotate(q, step.far_turn(self.far, q)))
        return super().attend(q, cache, step)


def calibrate(
    model: str | Path,
    text: str,
    out: str | Path,
    options: Calibration | None = None,
    *,
    force: bool = False,
    progress: StageProgress | bool | None = None,
    note: Note = warnings.warn,
    **loading: Any,
) -> list[Recall]:
    """Learn a model's low-dimensional maps from `text`, write them to `out`, and return each layer's held-out recall.

    `loading` are options of `lce.load`. Maps fit only the window and the RoPE scaling that they were learned with.
    `note` is called with a line about each work file that must be computed again. `progress` is True for bars on
    stderr, or a function that takes the stage, the units done and the total. Raises `DataError` for too little
    text, `CapacityError` for too little disk, and `UsageError` if the work folder has another calibration's files, or
    if the file `out` exists, unless `force`.
    """
    out = path_of(out, "out")
    check_new(out, force)
    if not out.parent.is_dir():
        raise DataError(f"cannot write {named(out)}: expected a file in a folder that exists")
    with stages(progress) as told:
        return Calibrator(load(model, **loading), text, out, options or Calibration(), told, note).run()


class Calibrator:
    """One calibration: its engine, its work folder, and `seen`, the queries and keys of the current prefill."""

    def __init__(
        self, engine: Engine, text: str, out: Path, options: Calibration, progress: StageProgress, note: Note
    ) -> None:
        self.out, self.options, self.progress = out, options, progress
        self.seen: dict[str, list[Tensor]] = defaultdict(list)
        size = options.piece or min(engine.window, 4096)
        reading = ESA(compress="none", far=options.far) if size > engine.window else Full()
        method = Collecting(reading, options.far, lambda name, x: self.seen[name].append(lowdim.concat_heads(x).cpu()))
        engine = self.engine = Engine(engine.setup.using(method))
        if engine.setup.rope.follows_length:
            kind, other = engine.setup.rope.kind, "ask with -o compress=pca, without maps"
            fixed = f"give --rope {'ntk' if kind == 'dynamic' else kind} --rope-factor F"
            remedy = other if kind == "longrope" else fixed
            why = f"under {kind} RoPE scaling queries rotate by the length of each text"
            raise UsageError(f"{why}, and maps are learned for one rotation; {remedy}")
        ids = engine.tokenizer.encode(text, bos=False)[: options.tokens]
        pieces = self.pieces = [ids[start : start + size] for start in range(0, len(ids) - size + 1, size)]
        if len(pieces) < HELD_OUT:
            least = HELD_OUT * size
            if options.tokens < least:
                raise UsageError(f"tokens is {options.tokens}; expected {least} or more, {HELD_OUT} pieces of {size}")
            raise DataError(f"the text has {len(ids)} tokens; expected {least} or more: give a longer one")
        assert isinstance(engine.method, Collecting)
        assert engine.method.far is not None, "resolved"
        config = engine.setup.model.config
        self.layers, self.n_heads, self.n_kv_heads = config.acting_layers, config.n_heads, config.n_kv_heads
        widths = (self.n_heads + self.n_kv_heads) * config.head_dim
        self.held_out = range(HELD_OUT - 1, len(pieces), HELD_OUT)
        self.learned_from = [index for index in range(len(pieces)) if index not in self.held_out]
        # The bounds on `low_dim` are those of `principal`.
        self.low_dim = min(options.low_dim, self.n_kv_heads * config.head_dim, size * len(self.learned_from) - 1)
        fingerprint, rope = engine.setup.fingerprint, engine.setup.rope
        self.learned_for = LearnedFor(fingerprint, self.low_dim, engine.method.far, engine.window, rope)
        digest = hashlib.sha256(json.dumps(pieces).encode()).hexdigest()
        plan = {**asdict(options), **asdict(self.learned_for), "dtype": str(engine.setup.dtype), "text": digest}
        a_piece = size * widths * engine.setup.dtype.itemsize
        largest = max(a_piece, 4 * (widths + 2) * self.low_dim)
        self.work = WorkFolder(path_of(f"{out}.work"), plan, largest, note)
        self.work.begin(len(pieces) * a_piece * len(self.layers))

    def run(self) -> list[Recall]:
        """Read all pieces of the text, learn all layers' maps, write the map file, and return each layer's recall."""
        for index in range(len(self.pieces)):
            missing = [layer for layer in self.layers if not self.work.has(_piece(index, layer))]
            if missing:
                self.read_piece(index, missing)
            self.progress("reading", index + 1, len(self.pieces))
        learned = {layer: self.layer(layer) for layer in self.layers}
        maps = {layer: maps for layer, (maps, _) in learned.items()}
        save_maps(LowDimMaps(maps), self.out, self.learned_for)
        self.work.remove()
        return [recall for _, recall in learned.values()]

    def read_piece(self, index: int, layers: Sequence[int]) -> dict[int, dict[str, Tensor]]:
        """Prefill piece `index`. Write the queries and keys of `layers` to the work folder; return them by layer."""
        self.seen.clear()
        self.engine.prefill(self.pieces[index])
        rows = {name: torch.cat(parts).contiguous() for name, parts in self.seen.items()}
        self.seen.clear()
        found = {layer: {name: rows[f"{name}.{layer}"] for name in "qk"} for layer in layers}
        for layer, tensors in found.items():
            self.work.write(_piece(index, layer), tensors)
        return found

    def rows(self, layer: int, pieces: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return a layer's queries `[N, H·D]` and keys `[N, G·D]` for the tokens of some pieces, in float32."""
        found = []
        for index in pieces:
            held = self.work.read(_piece(index, layer))
            found.append(held[0] if held else self.read_piece(index, [layer])[layer])
        device = self.engine.setup.device
        q, k = (torch.cat([tensors[name] for tensors in found]).to(device, torch.float32) for name in "qk")
        _check_finite(f"queries or keys of layer {layer}", "check the model's weights, or give --dtype", q, k)
        return q, k

    def layer(self, layer: int) -> tuple[LowDimMap, Recall]:
        """Return a layer's maps and their recall. Read them from the work folder, or learn and write them."""
        place = f"layer-{layer:03}.safetensors"
        held = self.work.read(place)
        if held is not None:
            return LowDimMap(**held[0]), Recall(**json.loads(held[1]))
        (q, k), (q_test, k_test) = (self.rows(layer, pieces) for pieces in (self.learned_from, self.held_out))
        basis = lowdim.principal(k.unflatten(1, (self.n_kv_heads, -1)).transpose(0, 1), self.low_dim)  # [G·D, R]
        query = basis.unflatten(0, (self.n_kv_heads, -1)).repeat_interleave(self.n_heads // self.n_kv_heads, 0)
        pca = LowDimMap.unbiased(query.flatten(0, 1), basis)  # each query head takes its KV head's basis
        maps = self.learn(q, k, pca, layer)
        remedy = "give a smaller --lr, or check the model's weights"
        _check_finite(f"the maps of layer {layer}", remedy, *maps.tensors().values())
        top_k = max(1, min(self.engine.window // 4, len(k_test) // 4))
        recall = Recall(layer, top_k, *(self.recall(q_test, k_test, made, top_k) for made in (maps, pca)))
        tensors = {name: x.cpu().contiguous() for name, x in maps.tensors().items()}
        self.work.write(place, tensors, json.dumps(asdict(recall)))
        return LowDimMap(**tensors), recall

    def exact(self, q: Tensor) -> Tensor:
        """Sum queries `[N, H·D]` over the heads of each KV head, `[N, G·D]`. Sums times keys are exact scores."""
        grouped: Tensor = q.unflatten(1, (self.n_kv_heads, self.n_heads // self.n_kv_heads, -1))
        return grouped.sum(dim=2).flatten(1)

    def learn(self, q: Tensor, k: Tensor, start: LowDimMap, layer: int) -> LowDimMap:
        """Train maps, which begin as `start`, on queries `q [N, H·D]` and keys `k [N, G·D]`, and return the maps.

        The loss is the squared error of Eq. 7 on keys minus their mean. The mean key adds the same number to all scores
        of a query, which changes no choice. The key bias of the returned maps subtracts the mean.
        """
        options, mean = self.options, k.mean(dim=0)
        k = k - mean
        shared = self.exact(q)
        trained = LowDimMap(**{name: x.clone().requires_grad_() for name, x in start.tensors().items()})
        optimizer = torch.optim.Adam(list(trained.tensors().values()), lr=options.lr)
        random = torch.Generator().manual_seed(options.seed * 1000 + layer)
        steps, n_epochs = max(1, len(q) // options.batch), len(self.layers) * options.epochs
        scale = float((shared[:1000] @ k[:1000].T).square().mean())
        with torch.enable_grad():
            for epoch in range(options.epochs):
                orders = [torch.randperm(len(q), generator=random) for _ in range(2)]
                for step in range(steps):
                    optimizer.param_groups[0]["lr"] = options.lr * (1 - (epoch + step / steps) / options.epochs)
                    rows, columns = (order[step * options.batch : (step + 1) * options.batch] for order in orders)
                    scores = trained.low_queries(q[rows]) @ trained.low_keys(k[columns]).T
                    loss = (scores - shared[rows] @ k[columns].T).square().mean() / scale
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                self.progress("learning", self.layers.index(layer) * options.epochs + epoch + 1, n_epochs)
        query, key, query_bias, key_bias = (x.detach() for x in trained.tensors().values())
        return LowDimMap(query, key, query_bias, key_bias - mean @ key)

    def recall(self, q: Tensor, k: Tensor, maps: LowDimMap, top_k: int, block: int = 128) -> float:
        """Return the mean share of a block's `top_k` best keys that low-dimensional scores find, too."""

        def best(queries: Tensor, keys: Tensor) -> set[int]:
            scores = lowdim.block_scores(lambda rows: queries[rows] @ keys.T, len(queries), len(keys))
            return set(best_tokens(lowdim.spread(scores, ESA.eps), top_k).tolist())

        blocks = zip(self.exact(q).split(block), maps.low_queries(q).split(block), strict=True)
        low_k = maps.low_keys(k)
        return fmean(len(best(exact, k) & best(low, low_k)) / top_k for exact, low in blocks)


def _check_finite(what: str, remedy: str, *tensors: Tensor) -> None:
    if not all(bool(x.isfinite().all()) for x in tensors):
        raise DataError(f"{what} are not finite; {remedy}")


def _piece(index: int, layer: int) -> str:
    return f"piece-{index:05}-{layer:03}.safetensors"
