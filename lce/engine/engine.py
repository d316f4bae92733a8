"""The engine: a model, a method and the loops, behind one face."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import index
from pathlib import Path

import torch
from torch import Tensor

from lce.cache.kv import CacheShape, KVCache
from lce.engine.attention import Attention
from lce.engine.context import Context
from lce.engine.decode import Generation, Stream, decode
from lce.engine.prefill import Progress, Reader, blocks
from lce.engine.sampling import Sampling
from lce.errors import UsageError, nearest
from lce.methods.base import Method
from lce.methods.registry import make
from lce.models.config import ModelConfig, RopeConfig
from lce.models.llama import IGNORED, Llama, weight_specs
from lce.models.rope import Rope
from lce.weights.checkpoint import Checkpoint
from lce.weights.tokenizer import Tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEMO = Path(__file__).parent.parent / "models" / "demo"


@dataclass(frozen=True)
class Trace:
    """What a method chose: `chosen[layer]` `[H, T, K]`, the chunks of `chunk_size` tokens, ascending, -1 for none.

    A query's own chunk is not listed. Empty for a method that chooses nothing.
    """

    chunk_size: int
    chosen: list[Tensor]


class Engine:
    """Reads and writes text with one model and one method. Never changes: all state is in contexts."""

    def __init__(
        self, model: Llama, tokenizer: Tokenizer, method: Method, attention: Attention, device: torch.device,
        dtype: torch.dtype, block: int, window: int, rope: RopeConfig,
    ) -> None:  # fmt: skip
        self.model = model
        self.tokenizer = tokenizer
        self.method = method
        self.device = device
        self.dtype = dtype
        self.block = block
        self.window = window
        self.rope = rope
        self._reader = Reader(model, method, attention, device, window)
        self._eos_ids = frozenset((*model.config.eos_ids, *tokenizer.eos_ids))

    def __repr__(self) -> str:
        return f"Engine({self.method!r}, window={self.window}, block={self.block}, {self.device}, {self.dtype})"

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 256,
        context: Context | None = None,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> Generation:
        """Read `prompt` (text or token ids), behind what `context` already holds, and write up to `max_tokens` tokens.

        Raises `UsageError` for a prompt or an option that cannot be used.
        """
        stream = self.stream(
            prompt, max_tokens=max_tokens, context=context, sampling=sampling, stop=stop, progress=progress
        )
        for _ in stream:
            pass
        return stream.result

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 256,
        context: Context | None = None,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> Stream:
        """Like `generate`, a piece of text at a time, from the first `next` on; `.result` has the figures."""
        if max_tokens < 1:
            raise UsageError(f"max_tokens is {max_tokens}; expected 1 or more")
        sampling = sampling or Sampling()
        if stop:
            sampling = dataclasses.replace(
                sampling, stop=(*sampling.stop, *([stop] if isinstance(stop, str) else stop))
            )
        ids = self._ids(prompt, context)
        result = Generation()
        return Stream(self._pieces(ids, context, sampling, max_tokens, progress, result), result)

    def _pieces(
        self, ids: list[int], context: Context | None, sampling: Sampling, max_tokens: int, progress: Progress | None,
        result: Generation,
    ) -> Iterator[str]:  # fmt: skip
        if context is None:
            context = self._start(len(ids) + max_tokens)
        with context.in_use():
            started = time.perf_counter()
            result.stats.prompt_tokens = len(ids)
            with context.saying(ids):
                context.cache.reserve(len(context) + max_tokens)
                self._advance(context, progress)
            result.stats.prefill_s = time.perf_counter() - started
            yield from decode(context, self.tokenizer, sampling, max_tokens, self._eos_ids, result, self._advance)
            result.stats.memory = context.cache.bytes_by_tier

    def prefill(
        self,
        document: str | Sequence[int],
        *,
        context: Context | None = None,
        length: int | None = None,
        progress: Progress | None = None,
    ) -> Context:
        """Read a document, to be asked about later. `length` announces how long the context will become in all."""
        ids = self._ids(document, context)
        if context is None:
            context = self._start(max(len(ids), length or 0))
        with context.in_use(), context.saying(ids):
            self._advance(context, progress)
        return context

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Logits after each token: `[T, vocab]`, float32. Raises `UsageError` for ids that the model does not have."""
        ids = self._ids(token_ids, None)
        context = self._start(len(ids))
        return torch.cat([self.model.logits(self._reader.read(context, part)) for part in blocks(ids, self.block)])

    @torch.inference_mode()
    def trace(self, token_ids: Sequence[int]) -> Trace:
        """Which chunks each head of each layer chose for each token."""
        ids = self._ids(token_ids, None)
        context = self._start(len(ids))
        seen: list[list[Tensor]] = [[] for _ in self.model.layers]
        for part in blocks(ids, self.block):
            before = [len(parts) for parts in seen]
            self._reader.read(context, part, lambda layer, chosen: seen[layer].append(chosen))
            for parts, count in zip(seen, before, strict=True):
                if len(parts) == count:  # nothing to choose from yet
                    parts.append(torch.empty(self.model.config.n_heads, len(part), 0, dtype=torch.int64))
        widest = [max(part.shape[-1] for part in parts) for parts in seen]
        return Trace(
            self.method.cache_chunk,
            [
                torch.cat([_widened(part.cpu(), width) for part in parts], dim=1)
                for parts, width in zip(seen, widest, strict=True)
            ],
        )

    def _start(self, length: int) -> Context:
        """An empty context, announced to become `length` tokens long."""
        config = self.model.config
        shape = CacheShape(
            n_layers=config.n_layers,
            n_kv_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            chunk_size=self.method.cache_chunk,
            dtype=self.dtype,
            device=self.device,
        )
        return Context(KVCache(shape, length), Rope(self.rope, config.head_dim, config.window, length))

    @torch.inference_mode()
    def _advance(self, context: Context, progress: Progress | None = None) -> None:
        """Read what the context has not read yet; leaves the logits after its last token."""
        for part in blocks(context.unread, self.block, progress):
            self._reader.read(context, part)

    def _ids(self, prompt: str | Sequence[int], context: Context | None) -> list[int]:
        """A prompt as checked token ids; text that goes on a context gets no beginning token."""
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt, bos=None if context is None else False) if prompt else []
        else:
            ids = self._checked(prompt)
        if not ids and (context is None or not len(context)):
            raise UsageError("the prompt is empty; expected some text")
        return ids

    def _checked(self, token_ids: Sequence[int]) -> list[int]:
        try:
            ids = [index(i) for i in token_ids]
        except TypeError:
            raise UsageError(f"the prompt is a {type(token_ids).__name__}; expected text or token ids") from None
        vocab = self.model.config.vocab_size
        wrong = next((i for i in ids if not 0 <= i < vocab), None)
        if wrong is not None:
            raise UsageError(f"token id {wrong} is not in the model's vocabulary; expected 0 to {vocab - 1}")
        return ids


def load(
    model: str | Path,
    method: str | Method = "full",
    *,
    device: str = "auto",
    dtype: str = "auto",
    block: int = 512,
    window: int | None = None,
    attention: str = "auto",
    rope: str | None = None,
    rope_factor: float | None = None,
) -> Engine:
    """An engine over the model folder `model`, or over the embedded "demo".

    `method` is a name or an instance. `dtype` "auto" is the checkpoint's own. `block` tokens are prefilled in one
    step. `window` overrides the positions that the model is trusted on. `rope` and `rope_factor` override the
    checkpoint's RoPE scaling. Raises `ModelError` for a folder that cannot be trusted, `UsageError` for options.
    """
    folder = DEMO if str(model) == "demo" else Path(model)
    config = ModelConfig.from_folder(folder)
    tokenizer = Tokenizer.from_folder(folder, config.vocab_size)
    if block < 1:
        raise UsageError(f"block is {block}; expected 1 or more tokens")
    if window is not None and window < 2:
        raise UsageError(f"window is {window}; expected 2 or more positions")
    window = window or config.window
    chosen = (make(method) if isinstance(method, str) else method).resolve(window)
    where = _device(device)
    checkpoint = Checkpoint.open(folder)
    kind = _dtype(dtype, checkpoint)
    weights = checkpoint.load(weight_specs(config), dtype=kind, device=where, ignore=_ignored(config))
    return Engine(
        model=Llama(config, weights),
        tokenizer=tokenizer,
        method=chosen,
        attention=Attention.choose(attention),
        device=where,
        dtype=kind,
        block=block,
        window=window,
        rope=_scaled(config.rope, rope, rope_factor),
    )


def _ignored(config: ModelConfig) -> tuple[str, ...]:
    """Published names that may stand in a checkpoint unread: a tied head is the embedding said twice."""
    return (*IGNORED, "lm_head.weight") if config.tied else IGNORED


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"unknown device {name!r}; expected auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise UsageError(f"device {name!r} is not available here; expected auto, cpu{_CUDA}")
    return device


_CUDA = " or cuda" if torch.cuda.is_available() else ""


def _dtype(name: str, checkpoint: Checkpoint) -> torch.dtype:
    if name == "auto":
        return checkpoint.dtype()
    if name not in DTYPES:
        raise UsageError(f"unknown dtype {name!r}; {nearest(name, ['auto', *DTYPES])}")
    return DTYPES[name]


def _scaled(rope: RopeConfig, kind: str | None, factor: float | None) -> RopeConfig:
    """The checkpoint's RoPE scaling with the user's choice on top."""
    kinds = ("none", "linear", "ntk", "dynamic", "yarn", "llama3")
    if kind is not None and kind not in kinds:
        raise UsageError(f"unknown rope {kind!r}; {nearest(kind, kinds)}")
    if factor is not None and not factor >= 1:
        raise UsageError(f"rope_factor is {factor}; expected 1 or more")
    if factor is not None and (kind or rope.kind) == "none":
        raise UsageError(f"rope_factor={factor} has no scaling to belong to; add rope=, for example rope='linear'")
    if kind not in (None, "none", rope.kind) and factor is None:
        raise UsageError(f"rope={kind!r} needs a rope_factor, for example 4")
    return dataclasses.replace(rope, kind=kind or rope.kind, factor=factor if factor is not None else rope.factor)


def _widened(chosen: Tensor, width: int) -> Tensor:
    """Chosen chunks `[H, T, K]` as `[H, T, width]`, -1 behind."""
    return torch.nn.functional.pad(chosen, (0, width - chosen.shape[-1]), value=-1)
