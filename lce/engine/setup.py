"""What an engine runs with: a model, a method, and all that `lce.load` decided."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from lce.attention import Attention
from lce.cache.layout import CacheLayout
from lce.engine.arguments import Sampling, recommended
from lce.engine.identity import Identity
from lce.engine.saving import ContextFiles
from lce.engine.window import beyond, readable
from lce.errors import UsageError, shown
from lce.methods.base import Method
from lce.methods.observed import Observed, Observer
from lce.methods.run import Driver
from lce.models.config import RopeConfig
from lce.models.layers import Model
from lce.models.ranks import Division, Ranks
from lce.models.rope import Rope
from lce.sizes import count
from lce.system import give_back_freed_memory
from lce.tokenizer.tokenizer import Tokenizer
from lce.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from lce.engine.graph import CudaTape


class _End:
    """An object that returns freed memory to the system when the setup that holds the object is freed."""

    def __init__(self) -> None:
        weakref.finalize(self, give_back_freed_memory).atexit = False  # a `__del__` would fail when Python ends


@dataclass(frozen=True, eq=False)
class Setup:
    """A model with an attention method, and all options of `lce.load` with their values. Immutable.

    `method` has every knob filled in. `weights` is the quantisation scheme, or None. `eos_ids` end an answer. `tape`
    makes a recorder of CUDA graphs; if it is None, no decode step is recorded. `again` loads another
    method with the same options.
    """

    model: Model
    tokenizer: Tokenizer
    method: Method
    layout: CacheLayout
    window: int
    rope: RopeConfig
    weights: str | None
    division: Division
    checkpoint: Checkpoint
    identity: Identity
    files: ContextFiles
    driver: Driver
    eos_ids: frozenset[int]
    tape: Callable[[torch.device], CudaTape] | None
    again: Callable[[str | Method, Setup], Setup]
    _end: _End = field(default_factory=_End)  # freed after the model, because it is the last attribute

    @classmethod
    def of(
        cls,
        model: Model,
        tokenizer: Tokenizer,
        checkpoint: Checkpoint,
        layout: CacheLayout,
        method: Method,
        attention: Attention,
        window: int,
        rope: RopeConfig,
        weights: str | None,
        again: Callable[[str | Method, Setup], Setup],
        division: Division,
    ) -> Setup:
        """Return the setup of a loaded model."""
        config, whole, divided = model.config, division.config, division.ranks.count > 1
        sizes = layout.dtype, config.vocab_size, layout.kv_dtype
        identity = Identity(lambda: whole.identity(checkpoint.fingerprint()), method, window, rope, *sizes, weights)
        files, tape = ContextFiles(layout, identity), None
        if divided:
            from lce.engine.divided_files import DividedFiles

            files = DividedFiles.of(layout, identity, division)
        elif (
            layout.device.type == "cuda"
            and method.promised("recorded")
            and attention.decodes(layout.dtype, config.head_dim)
        ):
            from lce.engine.graph import CudaTape

            tape = CudaTape
        driver = Driver(method, attention, window, config.n_kv_heads, config.sliding_window, config.kinds)
        eos_ids = frozenset((*config.eos_ids, *tokenizer.eos_ids))
        facts = method, layout, window, rope, weights, division, checkpoint, identity, files, driver, eos_ids
        return cls(model, tokenizer, *facts, tape, again)

    @property
    def device(self) -> torch.device:
        """The first layer's device."""
        return self.layout.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and of keys and values."""
        return self.layout.dtype

    @property
    def block(self) -> int:
        """The number of tokens that are prefilled in one step."""
        return self.layout.block

    @property
    def ranks(self) -> Ranks:
        """The processes that share the model."""
        return self.division.ranks

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the weights, without the config. Files of learned maps must match this fingerprint."""
        return self.checkpoint.fingerprint()

    @property
    def recommended_sampling(self) -> Sampling | None:
        """The sampling that the model's generation_config.json recommends, for `sampling=`; None if it names none."""
        return recommended(self.model.config.generation)

    @property
    def readable(self) -> int | None:
        """The most tokens that the method can read of the model; None: any number."""
        return readable(self.method, self.model.config, self.window, self.rope)

    def beyond(self, n_tokens: int) -> str | None:
        """Return a one-line warning if a text of `n_tokens` is longer than the method can read, else None."""
        return beyond(self.method, self.model.config, self.window, self.rope, count(n_tokens, "n_tokens", least=0))

    def rope_of(self, length: int, offset: int = 0) -> Rope:
        """Return the RoPE of a context that is announced to have `length` tokens in the end; see `Rope.positions`."""
        return Rope(self.rope, self.model.config.head_dim, self.model.config.window, length, offset)

    def using(self, method: str | Method) -> Setup:
        """Return a setup with another method, and this setup's weights and options.

        A method that reads prompts alone (`prefill_method`) is not taken over. Raises `UsageError` for a method or a
        knob that cannot be used.
        """
        return self.again(method, self)

    def observed(self, observer: Observer) -> Setup:
        """Return a setup like this one with an observer, which sees what the method chooses in every layer.

        Engines of the two setups may use each other's contexts. `observer` has the methods of `lce.methods.Observer`.
        """
        if not (hasattr(observer, "rows") and hasattr(observer, "observe")):
            raise UsageError(f"observer is {shown(observer)}; expected an object with `rows` and `observe`")
        return replace(self.using(Observed(self.method, observer)), identity=self.identity, files=self.files)

    def check_undivided(self, what: str, remedy: str) -> None:
        """Raise `UsageError` if ranks share the model: `what` is then impossible."""
        if self.ranks.count > 1:
            raise UsageError(f"{what} is for a model on one rank, and {self.ranks.count} share this one; {remedy}")

    def __repr__(self) -> str:
        where, parts = str(self.device), self.layout.by_device
        if len(parts) > 1:
            spans = ((part.first_layer, part.first_layer + part.n_layers - 1, part.device) for part in parts)
            where = "; ".join(f"layers {first} to {last} on {device}" for first, last, device in spans)
        return f"{self.method!r}, window={self.window}, block={self.block}, {where}, {self.dtype}"
