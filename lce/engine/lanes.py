"""One pass through the model for several contexts. A lane is a context's part in the pass: the tokens that it adds.

Each lane attends with its own method and cache. Lanes of generated tokens share matrix products in groups of a few
rows, and the kernel sums each row in the same order as for one row alone. A lane of read tokens shares no product. So
on a CPU the bits of a lane's results do not depend on other lanes; and several tokens that were proposed, not drawn
one by one, have the bits of their own steps.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from lce.cache.kv import KVCache
from lce.errors import ModelError
from lce.methods.run import Block, Driver
from lce.methods.span_lanes import SpanLanes
from lce.models.layers import Attend, Model
from lce.models.products import SHARED_ROWS, Slices, put_tokens, seam, sliced
from lce.models.rope import Rope
from lce.profiling import timed
from lce.progress import notice

T = TypeVar("T")
MOST_LANES = 64  # of a batch; on a CPU, a pass takes them in groups of `SHARED_ROWS`


@dataclass(eq=False)
class Lane:
    """The T tokens that one context adds in a pass. `start` rows of the context's cache precede them.

    After a `forward` that succeeds the cache has the tokens, `logits [vocab]` (float32) follow the last token, `drawn`
    are those after each generated token, `[T, vocab]`, and `hidden [T, hidden]` are the last layer's states. After a
    failure the cache is as before, and `error` says why.

    A step that is recorded as a CUDA graph sets `likeliest`, the likeliest next token, instead of `drawn` and `hidden`.
    With `ahead` the step of the token `likeliest` may be launched early.
    """

    driver: Driver
    cache: KVCache
    rope: Rope
    token_ids: Sequence[int]
    ahead: bool = False
    decoding: bool = False  # whether the tokens, at most `SHARED_ROWS`, were sampled or are proposed: see `Step`
    logits: Tensor | None = None
    drawn: Tensor | None = None
    hidden: Tensor | None = None
    likeliest: int | None = None
    error: Exception | None = None
    start: int = field(init=False)
    stop: int = field(init=False)  # the number of rows of the context's cache after the pass
    indices: tuple[int, int] = field(init=False)  # in the text: of the lane's first token, and behind the last one
    block: Block = field(init=False)

    def __post_init__(self) -> None:
        self.start, first, n = self.cache.length, self.cache.n_tokens, len(self.token_ids)
        self.stop, self.indices = self.start + n, (first, first + n)

    def check(self) -> None:
        """Raise the lane's error, if any, and forget it."""
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # the error's traceback refers to this frame: `del` breaks the cycle

    def begin(self) -> bool:
        """Begin the pass: make space in the cache for the lane's tokens. Return False if the lane has failed."""
        try:
            self.block = self.driver.begin(self.cache, self.rope, len(self.token_ids), decoding=self.decoding)
        except Exception as error:
            self.fail(error)
        return self.error is None

    def attend_block(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return this lane's attention output in a layer; zeros if the lane fails, so that the other lanes go on."""
        if self.error is None:
            try:
                return self.block(layer, q, k, v)
            except Exception as error:
                self.fail(error)
        return torch.zeros_like(q)

    def attempt(self, what: Callable[[Block], T]) -> T | None:
        """Return what a function does with the lane's block; None if the lane fails."""
        try:
            return None if self.error else what(self.block)
        except Exception as error:
            self.fail(error)
            return None

    def finish(self, hidden: Tensor, logits: Tensor) -> None:
        """Commit the lane's tokens to the cache, unless the lane has failed or its logits are not finite.

        `logits [n, vocab]` follow the lane's last n tokens: all of them, if they were generated.
        """
        try:
            if self.error is None:
                check_logits(logits, self.indices[1] - len(logits))
                self.hidden, self.logits, self.drawn = hidden, logits[-1], logits
                self.cache.commit()
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Mark the lane as failed and restore the cache. Only the first error counts."""
        if self.error is None:
            self.cache.settle()
            self.hidden, self.logits, self.drawn, self.error = None, None, None, error


class Recorder:
    """What records steps, for all contexts and threads: passes through the layers on CPUs, whole steps on GPUs.

    A step's Python runs once; later steps run again what it launched. What changes from step to step (tokens, indices,
    lengths, addresses, chosen chunks) is written to memory that a recorded step reads; all else is fixed. A step that
    is not recorded runs kernel by kernel, with the same result. Nobody but `forward` knows that steps are recorded.
    """

    def steps(self, model: Model, lanes: Sequence[Lane]) -> Sequence[Lane]:
        """Append the tokens of lanes whose whole step is recorded; return the other lanes. See `Lane` for errors."""
        return lanes

    def layers(self, model: Model, x: Tensor, attend: Attend) -> Tensor:
        """Return `model(x, attend, generated=True)`: the last hidden states `[T, hidden]` for the first ones."""
        return model(x, attend, generated=True)


PAUSES: set[object] = set()  # one object per active `one_by_one`; unless empty, nothing is recorded or replayed


@contextmanager
def one_by_one() -> Iterator[None]:
    """Record and replay no decode step of this process inside `with`, so that single calls can be observed."""
    pause = object()
    try:
        PAUSES.add(pause)
        yield
    finally:
        PAUSES.discard(pause)


def forward(
    model: Model, lanes: Sequence[Lane], recorder: Recorder | None = None, slices: Slices | None = None
) -> list[Tensor]:
    """Append each lane's tokens to its cache; return the logits after each lane, `[vocab]` float32.

    `recorder`, if any, records and replays the steps of generated tokens. With `slices`, the kernels of a lane of read
    tokens on a CPU run in slices. If a lane fails, its `error` says why, its logits are NaN, and the other lanes go on.
    After an interruption each cache has all tokens of its lane or none.
    """
    with torch.inference_mode():
        left = lanes if recorder is None else recorder.steps(model, lanes)
        for group in groups(left):
            try:
                begun = [lane for lane in group if lane.begin()]
                if begun:
                    device = model.layers[0].device
                    ids = torch.tensor([i for lane in begun for i in lane.token_ids], device=device)
                    indices = torch.cat([torch.arange(*lane.indices, device=device) for lane in begun])
                    generated, sizes = begun[0].decoding, [len(lane.token_ids) for lane in begun]
                    attend: Attend = LanesAttend(begun, sizes) if generated else begun[0].block
                    x, attend = model.embedded(ids), model.attending(attend, indices)
                    if generated and recorder is not None and not PAUSES:
                        hidden = recorder.layers(model, x, attend)
                    else:
                        with sliced(slices):
                            hidden = model(x, attend, generated)
                    last = model.logits(hidden if generated else hidden[-1:], drawn=True)
                    rows = last.split(sizes) if generated else [last]
                    for lane, part, logits in zip(begun, hidden.split(sizes), rows, strict=True):
                        lane.finish(part, logits)
            except Exception as error:  # a shared product failed
                for lane in group:
                    lane.fail(error)
            except BaseException:
                for lane in group:
                    lane.cache.settle()
                raise
        size = model.config.vocab_size
        return [torch.full((), torch.nan).expand(size) if lane.logits is None else lane.logits for lane in lanes]


def groups(lanes: Sequence[Lane]) -> list[Sequence[Lane]]:
    """Split lanes into groups that share products: up to `SHARED_ROWS` generated tokens, or one lane of read ones."""
    shared, n_rows = list[list[Lane]](), SHARED_ROWS
    for lane in lanes:
        if lane.decoding:
            n_rows += len(lane.token_ids)
            if n_rows > SHARED_ROWS:
                shared.append([])
                n_rows = len(lane.token_ids)
            shared[-1].append(lane)
    return [*shared, *([lane] for lane in lanes if not lane.decoding)]


class LanesAttend:
    """The attention of lanes of `sizes` generated tokens, on `q [H, B, D]`, `k v [G, B, D]` for B tokens in all."""

    def __init__(self, lanes: Sequence[Lane], sizes: Sequence[int]) -> None:
        self.lanes, self.sizes = lanes, sizes
        self._spans: SpanLanes | None = None  # set by `memory`, if one call of Python serves all lanes

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._spans is not None:
            try:
                if (out := self._spans(layer, q, k, v)) is not None:
                    return out
            except Exception as error:  # below, a lane that fails fails alone
                _fell_back(error)
            self._spans = None
        if self.sizes == [1]:
            return self.lanes[0].attend_block(layer, q, k, v)
        joined, first = q.new_empty(q.shape[1], len(q), q.shape[2]).transpose(0, 1), 0
        for lane, size in zip(self.lanes, self.sizes, strict=True):
            out = lane.attend_block(layer, *(x[:, first : first + size] for x in (q, k, v)))
            put_tokens(out, joined, first)
            seam()
            first += size
        return joined

    @property
    def blind(self) -> bool:
        """Whether a call only calls kernels, and reads none of their results: its kernels may run later."""
        return self._spans is not None

    def memory(self) -> list[list[tuple[int, int]]] | None:
        """Prepare all layers for the lanes' tokens; return the memory of each layer's keys and values, of all lanes.

        Returns None if the attention of one layer does not tell what that of the others would do: see `Block.memory`.
        """
        found = [memory for lane in self.lanes if (memory := lane.attempt(lambda block: block.memory())) is not None]
        if len(found) < len(self.lanes):
            return None
        try:
            self._spans = SpanLanes.of([lane.block for lane in self.lanes])
        except Exception as error:  # what raises here raises in a lane, too
            _fell_back(error)
        if self._spans is None:
            if max(self.sizes) > 1:
                return None
            for lane in self.lanes:
                lane.attempt(lambda block: block.prepare())
        return [list(chain(*layer)) for layer in zip(*found, strict=True)]


def _fell_back(error: Exception) -> None:
    """Say under `--debug` why lanes that could be attended together are attended one by one."""
    notice(f"lanes attend one by one: {type(error).__name__}: {error}", logging.DEBUG)


@timed("sampling")
def check_logits(logits: Tensor, first: int) -> None:
    """Raise `ModelError` if the logits `[T, vocab]` after the tokens `first..first+T-1` are not finite.

    NumPy adds up a single row. PyTorch would divide the row among threads, and wait for any thread whose core is busy.
    """
    alone = logits.is_cpu and len(logits) == 1
    if not math.isfinite(logits.numpy().sum() if alone else logits.sum().item()):  # cheaper than checking each number
        _check_each(logits, first)


def _check_each(logits: Tensor, first: int) -> None:
    finite = logits.isfinite().all(dim=-1)
    if not finite.all():  # otherwise only the sum overflowed
        token = first + int(finite.int().argmin())
        raise ModelError(
            f"the model's logits are not finite after token {token}: its weights hold NaN or infinite numbers, or "
            "float16 overflowed; check the checkpoint, or give dtype='float32'"
        )
