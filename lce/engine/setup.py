"""What an engine runs with: a method on a model, and all else that `lce.load` decided."""

import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from lce.cache.layout import CacheLayout
from lce.engine.arguments import Sampling
from lce.engine.identity import Identity
from lce.engine.lanes import Recorder
from lce.engine.saving import ContextFiles
from lce.errors import LceError, ModelError, UsageError, WindowWarning, shown
from lce.methods import registry
from lce.methods.attending import skips
from lce.methods.auto import choice_for
from lce.methods.base import Method
from lce.methods.choices import Choice
from lce.methods.run import Driver
from lce.methods.step import ModelFacts
from lce.methods.wrapped import Observed, Observer
from lce.models.config import ModelConfig, RopeConfig
from lce.models.layers import Model
from lce.models.ranks import ALONE, Division, Facts, Ranks
from lce.models.rope import Rope
from lce.sizes import MOST, count
from lce.system import give_back_freed_memory
from lce.tokenizer.tokenizer import Tokenizer
from lce.weights.checkpoint import Checkpoint
from lce.weights.source import Source

if TYPE_CHECKING:
    from lce.engine.grammar import Vocabulary

T = TypeVar("T")
INSIDE = (str(Path(__file__).parent.parent), str(Path(torch.__file__).parent))  # the folders of lce and torch
# The sampling of a conversation with a model that recommends none, by trials with SmolLM2-135M-Instruct. Without a
# penalty the model repeated sentences without end, at temperature 0.7 too. A repetition penalty counts the words of the
# document that is asked about, and hid facts in it. Several answers to one prompt need a temperature to differ.
MILD, MILD_OF_SEVERAL = {"frequency_penalty": 0.5}, {"temperature": 0.7, "frequency_penalty": 0.5}
# What the warning says of `auto`, with the choice for the text, and its tokens.
REMEDY = 'give --method auto, which takes {0.spelled} for this length (in Python: method="auto", length={1})'
# The same where the factor of RoPE scaling is that of the announced length.
REANNOUNCE = "announce so many tokens when the context starts (in Python: length={1}), or give a --rope-factor"


@dataclass(frozen=True, eq=False)
class Planned:
    """The method, cache layout and weight sizes of an engine that need not be loaded.

    `method` has every knob filled in. `config` is of this rank's part of the model; `division` is None if one rank has
    the whole model. `weights` is the quantisation scheme, or None. `weight_bytes` has each weight's, by lce's names.
    `asked` has the window and RoPE scaling that the user asked for; `auto` may have chosen others.
    """

    config: ModelConfig
    window: int
    rope: RopeConfig
    method: Method
    layout: CacheLayout
    weights: str | None
    weight_bytes: Mapping[str, int]
    division: Division | None
    asked: ModelFacts

    @property
    def ranks(self) -> Ranks:
        """The processes that share the model."""
        return self.division.ranks if self.division else ALONE

    def together(self, work: Callable[[], T], facts_of: Callable[[T], Facts] = lambda found: {}) -> T:
        """Return `work()` as `Ranks.together` does; without other ranks nothing is exchanged."""
        return work() if self.division is None else self.division.ranks.together(work, facts_of)

    @property
    def readable(self) -> int | None:
        """The most tokens that the method can read of the model; None: any number."""
        return self._readable(self.rope)

    @property
    def reach(self) -> int:
        """The number of positions that the model can be trusted on: the window, stretched by RoPE scaling."""
        return self.rope.reach(self.window)

    def _readable(self, rope: RopeConfig) -> int | None:
        limit = self.method.limit(rope.reach(self.window), self.config.sliding_window)
        return None if limit is None or limit >= MOST else limit

    def choice(self, n_tokens: int | None) -> Choice:
        """Return what the method `auto` is for a text of `n_tokens` (None: of any length) and this model."""
        return choice_for(None if n_tokens is None else count(n_tokens, "n_tokens", least=0), self.asked)

    def limits(self) -> Mapping[str, int | None]:
        """Return how many tokens each registered method, with default knobs, reads whole of this model; None: any."""
        return _limits(self.config, self.window, self.reach, self.rope)

    def beyond(self, n_tokens: int, remedy: str = REMEDY, rope: Rope | None = None) -> str | None:
        """Return a one-line warning if a text of `n_tokens` is longer than the method can read, else None.

        `remedy` says how the reader of the line takes another method: a format for the `Choice` and `n_tokens`. `rope`
        is that of the text's context, if any: the factor "auto" reaches the length that was announced.
        """
        if rope is not None and not isinstance(rope, Rope):
            raise UsageError(f"rope is {shown(rope)}; expected a context's rope")
        limit = self._readable(self.rope if rope is None else rope.config)
        n_tokens = count(n_tokens, "n_tokens", least=0)
        remedy = REANNOUNCE if self.rope.factor == "auto" else remedy
        if limit is None or n_tokens <= limit:
            return None
        choice, limits = self.choice(n_tokens), self.limits().items()
        others = [name for name, most in limits if name != choice.method and (most is None or most >= n_tokens)]
        return (
            f"{n_tokens:,} tokens are more than the {limit:,} that the method {self.method.label} can read of this "
            f"model (window {self.window:,}), so what it writes behind them is probably wrong; "
            f"{remedy.format(choice, n_tokens)}; others that read it whole: {', '.join(others)}"
        )

    def warn(self, n_tokens: int, rope: Rope | None = None) -> str | None:
        """Issue what `beyond` returns, if anything, as a `WindowWarning` at the user's code that called lce."""
        if (line := self.beyond(n_tokens, rope=rope)) is not None:
            frame, level = sys._getframe(), 1
            while frame.f_back is not None and frame.f_code.co_filename.startswith(INSIDE):
                frame, level = frame.f_back, level + 1
            warnings.warn(line, WindowWarning, stacklevel=level)
        return line


@functools.cache
def _limits(config: ModelConfig, window: int, reach: int, rope: RopeConfig) -> Mapping[str, int | None]:
    found, facts = dict[str, int | None](), ModelFacts(Source(Path()), config, window, rope, plan_only=True)
    for name in registry.available():
        try:
            method = registry.make(name)
            if not method.promised("analysis"):
                method = method.for_model(facts).resolve(window)
                most = window if skips(method, 2 * window) else method.limit(reach, config.sliding_window)
                found[name] = None if most is None or most >= MOST else most
        except LceError:  # a plug-in whose method needs knobs or cannot be imported
            continue
    return found


class _End:
    """An object that returns freed memory to the system when the setup that holds the object is freed."""

    def __init__(self) -> None:
        weakref.finalize(self, give_back_freed_memory).atexit = False  # a `__del__` would fail when Python ends


@dataclass(frozen=True, eq=False, repr=False)
class Setup(Planned):
    """A model with an attention method, and all options of `lce.load` with their values. Immutable.

    `eos_ids` end an answer. `recorder` records decode steps, if any are recorded. `again` loads another method with the
    same options.
    """

    model: Model
    tokenizer: Tokenizer
    checkpoint: Checkpoint
    identity: Identity
    files: ContextFiles
    driver: Driver
    eos_ids: frozenset[int]
    recorder: Recorder | None
    again: "Callable[[str | Method, Setup, int | None], Setup]"
    _end: _End = field(default_factory=_End)  # freed after the model, because it is the last attribute

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
    def fingerprint(self) -> str:
        """The fingerprint of the weights, without the config. Files of learned maps must match this fingerprint."""
        return self.checkpoint.fingerprint()

    @property
    def recommended_sampling(self) -> Sampling | None:
        """The sampling that the model's makers recommend, for `sampling=`; None if they name none.

        It stands in generation_config.json, or under `general.sampling` in a GGUF file.
        If `do_sample` is false the temperature is 0. A missing temperature is 1; other missing knobs are off.
        """
        given, names = self.config.generation, ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        own = {knob: given[knob] for knob in names if given.get(knob) not in (None, -1)}
        if given.get("do_sample") is False:
            own["temperature"] = 0.0
        elif not own and not given.get("do_sample"):
            return None
        try:
            return Sampling(**{"temperature": 1.0, **own})
        except UsageError as error:
            raise ModelError(f"generation_config.json: {error}; correct the file, or give a temperature of 0") from None

    @functools.cached_property
    def vocabulary(self) -> "Vocabulary":
        """The vocabulary for grammars. Raises `UsageError` if llguidance is not installed."""
        try:
            from lce.engine.grammar import Vocabulary
        except ImportError:
            raise UsageError("schema and grammar need llguidance: pip install llguidance") from None
        return Vocabulary(self.tokenizer, self.eos_ids)

    def sampling_for(self, given: Mapping[str, Any], *, several: bool = False) -> dict[str, Any]:
        """Return the options `given` of a generation, and a conversation's sampling for missing knobs.

        That is `recommended_sampling`, else `MILD`, for `several` answers `MILD_OF_SEVERAL`. A `sampling` that is given
        is taken as it is. A `temperature` of 0 is greedy: nothing is added.
        """
        temperature = given.get("temperature")  # of any type: it is checked later
        if given.get("sampling") is not None or (isinstance(temperature, Real) and temperature == 0):
            return dict(given)
        own, greedy = self.recommended_sampling, vars(Sampling())
        if own is None:
            return {**(MILD_OF_SEVERAL if several else MILD), **given}
        return {name: value for name, value in vars(own).items() if value != greedy[name]} | {**given}

    def rope_of(self, length: int, offset: int = 0) -> Rope:
        """Return the RoPE of a context that is announced to have `length` tokens in the end; see `Rope.positions`."""
        rope = self.rope.fitted(self.window, length) if self.rope.factor == "auto" else self.rope
        return Rope(rope, self.config.head_dim, self.config.window, length, offset)

    def using(self, method: str | Method, length: int | None = None) -> "Setup":
        """Return a setup with another method, and this setup's weights and options. `length` is that of `lce.load`.

        A `prefill_method` is not taken over. Raises `UsageError` for a method or a knob that cannot be used.
        """
        return self.again(method, self, length)

    def observed(self, observer: Observer) -> "Setup":
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
            spans = ((part.layers[0], part.layers[-1], part.device) for part in parts)
            where = "; ".join(f"layers {first} to {last} on {device}" for first, last, device in spans)
        return f"{self.method!r}, window={self.window}, block={self.block}, {where}, {self.dtype}"
