"""What was measured best by texts' lengths, a table for each measured model, and what `lce recommend` asks."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lce.methods import registry
from lce.methods.base import Method
from lce.methods.knobs import spelled
from lce.methods.registry import AUTO
from lce.models.config import ModelConfig


@dataclass(frozen=True)
class Choice:
    """A method with its knobs, a RoPE scaling and a window, if these are not the user's or the checkpoint's.

    In a table it is for texts of at most `windows` times the model's window (None: any), and `share` is its part of the
    window. The `reason` names the model that was measured.
    """

    method: str
    knobs: Mapping[str, Any] = field(default_factory=dict)
    windows: float | None = field(default=None, compare=False)
    reason: str = field(default="", compare=False)
    rope: str | None = None
    share: float | None = field(default=None, compare=False)
    window: int | None = None

    @property
    def loading(self) -> dict[str, Any]:
        """The options of `lce.load` beside the method and its knobs."""
        return {name: x for name, x in (("rope", self.rope), ("window", self.window)) if x is not None}

    @property
    def spelled(self) -> str:
        """The method, its knobs and options, as a command line has them."""
        knobs = (f"-o {key}={spelled(value)}" for key, value in self.knobs.items())
        return " ".join((self.method, *knobs, *(f"--{name} {value}" for name, value in self.loading.items())))

    @property
    def request(self) -> str:
        """What a client of a server does to have this choice."""
        return f"start the server with --method {self.spelled}" if self.loading else f'give "method": "{self.method}"'

    def make(self) -> Method:
        return registry.make(self.method, self.knobs)

    def at(self, window: int) -> "Choice":
        """Return this choice for a model with a window of so many tokens."""
        return self if self.share is None else replace(self, window=max(2, int(self.share * window)))

    def line(self, length: int | None, window: int) -> str:
        """Return what is printed where `auto` stands for this choice, for texts of `length` tokens."""
        texts = "texts of any length" if length is None else f"up to {length:,} tokens, prompt and answer together,"
        return f"method {AUTO} is {self.spelled} for {texts} with a window of {window:,}: {self.reason}"


@dataclass(frozen=True)
class Table:
    """What was measured best on one model, by length. Choices that change what a user named are passed over.

    Those of `own` come first, for a model with the architecture, the window and the hidden size of the measured one.
    """

    architecture: str
    window: int
    hidden_size: int
    choices: Sequence[Choice]
    own: Sequence[Choice] = ()

    def distance(self, config: ModelConfig) -> float:
        """Return how much another model's window and hidden size differ: the sum of the ratios' logarithms."""
        return abs(math.log(self.window / config.window)) + abs(math.log(self.hidden_size / config.hidden_size))


EXACT = Choice("full", windows=1, reason="within the window it is exact")
ANY = Choice("pages", reason="a token reads no more however long the text is; what it finds there was not measured")
# Facts found in essays: docs/findings.md. `lce recommend` measures the same on another model.
SMOLLM2 = (
    EXACT,
    Choice("rerope", windows=1.5, reason="SmolLM2-135M found most facts in 1.5 windows with it"),
    Choice("self_extend", windows=6, reason="SmolLM2-135M found most facts in two and three windows with it"),
    ANY,
)
LAST_QUARTER = (
    replace(EXACT, windows=3 / 4),
    Choice("rerope", windows=1, reason="rerope avoids the largest distances, at which SmolLM2-135M fails"),
)
QWEN = (
    EXACT,
    Choice("full", rope="yarn", reason="Qwen2.5-Coder-1.5B found all facts in two and four windows with it"),
    Choice("self_extend", windows=6, reason="Qwen2.5-Coder-1.5B found nearly all facts in two and four windows"),
    ANY,
)
TABLES = (
    Table("LlamaForCausalLM", 8192, 576, SMOLLM2, own=LAST_QUARTER),
    Table("Qwen2ForCausalLM", 32768, 1536, QWEN),
)
# What `lce recommend` asks, in this order: those that read a text fastest first, and of these those that find most.
CANDIDATES = (
    *map(Choice, ("rerope", "self_extend")),
    Choice("full", rope="yarn"),
    *map(Choice, ("dca", "pages", "longheads")),
    *(Choice(method, share=3 / 4) for method in ("rerope", "self_extend")),
)


def table_for(config: ModelConfig, named: Collection[str] = ()) -> Sequence[Choice]:
    """Return the table of the nearest measured model: of the same family if one is, else of any; see `distance`.

    The measured model itself has its `own` choices too, if the user named no window or scaling.
    """
    same = [table for table in TABLES if table.architecture == config.architecture]
    table = min(same or TABLES, key=lambda table: table.distance(config))
    is_own = same and not named and not table.distance(config)
    return (*table.own, *table.choices) if is_own else table.choices
