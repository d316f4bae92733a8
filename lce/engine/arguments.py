"""What users give: a prompt, and the rule by which the next token is drawn. Each knob is one field with its check.

A check returns a value of one type, or raises `UsageError` with a one-line message. Nothing here imports torch before
a prompt is checked: `lce --help` answers at once.
"""

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, cast

from lce.engine.options import Checked, Counted, Record, number, option
from lce.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from lce.tokenizer.chat import ChatText

TokenIds: TypeAlias = "Sequence[int] | NDArray[np.integer[Any]] | Tensor"
Prompt: TypeAlias = "str | ChatText | TokenIds"
Prompts: TypeAlias = "list[str] | tuple[str, ...] | Sequence[ChatText | TokenIds]"


def _whole(value: Any) -> int | None:
    if isinstance(value, bool):
        raise TypeError
    return None if value is None else operator.index(value)


def _bias(value: Any) -> dict[int, float]:
    found = {operator.index(token_id): number(bias) for token_id, bias in value.items()}
    if any(token_id < 0 or not -100 <= bias <= 100 for token_id, bias in found.items()):
        raise ValueError
    return found


def _ids(value: Any) -> tuple[int, ...]:
    found = tuple(operator.index(token_id) for token_id in value)
    if any(token_id < 0 for token_id in found):
        raise ValueError
    return found


def _stops(value: Any) -> tuple[str, ...] | Callable[[str], object]:
    if callable(value) and not isinstance(value, type):
        return cast("Callable[[str], object]", value)
    if isinstance(value, Mapping):
        raise TypeError
    stops = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError
    return stops


_TO_TWO = Checked("-2 to 2; 0 is off", lambda x: -2 <= x <= 2)


@dataclass(frozen=True)
class Sampling(Record):
    """The rule by which the next token is drawn. By default it is greedy: the likeliest token.

    `logit_bias` maps token ids to numbers that are added to their logits, -100 to 100. Penalties come next, also at
    temperature 0. `repetition_penalty` divides the positive logits and multiplies the negative ones of all tokens in
    context, prompt and answer so far. `presence_penalty` is subtracted from the logits of tokens in the answer so far,
    `frequency_penalty` once for each time the token is there.

    With a `temperature` above 0 the logits are divided by the temperature, and then filtered in this order: `top_k`
    keeps the k likeliest tokens, `top_p` the fewest tokens whose probabilities add up to p, and `min_p` the tokens
    whose probability is at least `min_p` times that of the likeliest. By default no filter drops a token.
    The same `seed` draws the same tokens; None is a new seed for each answer. The text ends before the first of the
    strings `stop`, and before the tokens `stop_token_ids`. The string of a special token stands for the token as well.
    A function `stop` is called with the text so far after each token; True ends the text.
    """

    temperature: float = option(
        0.0, "0 takes the likeliest token.", parse=Checked("a number, 0 or more", lambda x: 0 <= x < math.inf)
    )
    top_k: int = option(
        0,
        "Keep this many likeliest tokens; 0 is off.",
        "N",
        parse=Checked("a whole number, 0 (off) or more", lambda x: x >= 0, _whole, Counted(0)),
    )
    top_p: float = option(
        1.0,
        "Keep the likeliest tokens of this probability in all; 1 is off.",
        parse=Checked("more than 0 and at most 1", lambda x: 0 < x <= 1),
    )
    min_p: float = option(
        0.0,
        "Keep tokens this likely relative to the likeliest; 0 is off.",
        parse=Checked("0 (off) to 1", lambda x: 0 <= x <= 1),
    )
    seed: int | None = option(
        None,
        "The same seed draws the same tokens.",
        parse=Checked("a whole number from 0 to 2**63 - 1", lambda x: x is None or 0 <= x < 2**63, _whole, int),
    )
    stop: str | Sequence[str] | Callable[[str], object] | None = option(
        (),
        "End the text before this; repeatable.",
        "TEXT",
        parse=Checked("strings, none of them empty, or a function of the text", lambda x: True, _stops, None),
        multiple=True,
    )
    repetition_penalty: float = option(
        1.0,
        "Above 1: tokens of the whole text so far get unlikelier; 1 is off.",
        parse=Checked("0.01 to 100; 1 is off", lambda x: 0.01 <= x <= 100),
    )
    presence_penalty: float = option(
        0.0, "Above 0: tokens of the answer so far get unlikelier; 0 is off.", parse=_TO_TWO
    )
    frequency_penalty: float = option(0.0, "The same, once for each time the token is there; 0 is off.", parse=_TO_TWO)
    logit_bias: Mapping[int, float] = option(
        factory=dict, parse=Checked("token ids with numbers from -100 to 100", lambda x: True, _bias)
    )
    stop_token_ids: Sequence[int] = option((), parse=Checked("a list of token ids", lambda x: True, _ids))

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, none if `stop` is a function."""
        return self.stop if isinstance(self.stop, tuple) else ()

    @property
    def penalises(self) -> bool:
        """Whether the next token depends on the tokens before it by more than the model's logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def greedy(self) -> bool:
        """Whether each token is the likeliest by the model's logits: at temperature 0 without penalties or biases."""
        return self.temperature == 0 and not self.penalises and not self.logit_bias

    def check(self, vocab_size: int) -> None:
        """Raise `UsageError` if `logit_bias` or `stop_token_ids` have ids beyond a vocabulary."""
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            if (wrong := max(ids, default=0)) >= vocab_size:
                raise UsageError(f"{name} has token {wrong}; expected ids below {vocab_size}, the model's vocabulary")


def are_many(prompt: object) -> TypeGuard[Prompts]:
    """Return whether `prompt` is a list of prompts: texts, rendered chats, or lists of token ids."""
    from lce.tokenizer.chat import ChatText

    if not isinstance(prompt, list | tuple) or not prompt:
        return False
    return isinstance(prompt[0], str | ChatText | list | tuple | range) or getattr(prompt[0], "ndim", 0) == 1


def ids_of(prompt: object, vocab_size: int) -> list[int]:
    """Convert a sequence, an array or a tensor of token ids to a list. Refuses ids that are not in the vocabulary."""
    from lce.tokenizer.tokenizer import checked_ids

    ids = prompt if isinstance(prompt, list) else _listed(prompt)
    if any(isinstance(token_id, bool) for token_id in ids):
        raise UsageError("the prompt has truth values; expected text or token ids")
    return checked_ids(ids, vocab_size)


def _listed(prompt: object) -> list[Any]:
    import numpy as np
    from torch import Tensor

    if isinstance(prompt, bytes | bytearray | memoryview):
        raise UsageError("the prompt is bytes; expected text or token ids: decode it, as prompt.decode() does")
    if isinstance(prompt, Tensor | np.ndarray):
        if prompt.ndim != 1 or "int" not in str(prompt.dtype):
            kind = f"{prompt.dtype} of shape {list(prompt.shape)}"
            raise UsageError(f"the prompt is {kind}; expected text, or token ids: whole numbers of one dimension")
        try:
            return list(prompt.tolist())
        except (RuntimeError, NotImplementedError):  # a meta tensor or a sparse tensor
            raise UsageError("the prompt is a tensor that has no list of numbers; expected a dense one") from None
    if isinstance(prompt, Mapping | Set) or not isinstance(prompt, Iterable):
        raise UsageError(f"the prompt is a {type(prompt).__name__}; expected text or token ids")
    return list(prompt)
