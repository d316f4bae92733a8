"""The method `auto`, and all advice on methods: a table of those that were measured best, by a text's length."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lce.methods import registry
from lce.methods.base import Method
from lce.methods.knobs import spelled
from lce.methods.registry import AUTO
from lce.methods.step import ModelFacts
from lce.progress import notice


@dataclass(frozen=True)
class Choice:
    """A method with its knobs, for texts of at most `windows` times the model's window (None: any), and the reason."""

    method: str
    knobs: Mapping[str, Any] = field(default_factory=dict)
    windows: float | None = field(default=None, compare=False)
    reason: str = field(default="", compare=False)

    @property
    def spelled(self) -> str:
        """The method and its knobs, as a command line has them."""
        return " ".join((self.method, *(f"-o {key}={spelled(value)}" for key, value in self.knobs.items())))

    def make(self) -> Method:
        return registry.make(self.method, self.knobs)

    def line(self, length: int | None, window: int) -> str:
        """Return what is printed where `auto` stands for this choice, for texts of `length` tokens."""
        texts = "texts of any length" if length is None else f"up to {length:,} tokens, prompt and answer together,"
        return f"method {AUTO} is {self.spelled} for {texts} with a window of {window:,}: {self.reason}"


# What SmolLM2-135M found of facts in essays: docs/findings.md. `lce recommend` measures the same on another model.
CHOICES = (
    Choice("full", windows=1, reason="within the window it is exact"),
    Choice("rerope", windows=1.5, reason="SmolLM2-135M found most facts in 1.5 windows with it"),
    Choice("self_extend", windows=6, reason="SmolLM2-135M found most facts in two and three windows with it"),
    Choice("pages", reason="a token reads no more however long the text is; what it finds there was not measured"),
)
# What `lce recommend` asks, in this order: those that read a text fastest first, and of these those that find most.
CANDIDATES = tuple(map(Choice, ("rerope", "self_extend", "dca", "pages", "longheads")))


def choice_for(length: int | None, window: int) -> Choice:
    """Return the choice for texts of `length` tokens (None: any), and a model trusted on `window` positions.

    Whatever advises a method asks this function: `auto`, plans, warnings, refusals and `lce recommend`.
    """
    return next(x for x in CHOICES if x.windows is None or (length is not None and length <= x.windows * window))


def automatic(model: ModelFacts, length: int | None) -> Method:
    """Return the method that `auto` stands for. If the model will be run, print it on stderr with the reason."""
    choice = choice_for(length, window := model.rope.reach(model.window))
    if not model.plan_only:
        notice(choice.line(length, window))
    return choice.make()
