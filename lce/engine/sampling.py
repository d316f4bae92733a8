"""Samples the next token from logits, scores the tokens of a text, and checks that logits are finite."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from lce.errors import ModelError, UsageError, shown
from lce.profiling import timed

LOGITS_AT_ONCE = 1 << 24  # the most logits that a `Scorer` holds at a time: 64 MiB in float32
LEAST_TEMPERATURE = torch.finfo(torch.float32).tiny  # smaller positive temperatures would be 0 in float32

_RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # fields of generation_config.json


@dataclass(frozen=True)
class Sampling:
    """The rule by which the next token is drawn. By default it is greedy: the likeliest token.

    `logit_bias` maps token ids to numbers that are added to their logits, -100 to 100. Penalties come next, also at
    temperature 0. `repetition_penalty` divides the positive logits and multiplies the
    negative ones of all tokens in context, prompt and answer so far; 1 is off. `presence_penalty` is subtracted from
    the logits of tokens in the answer so far, `frequency_penalty` once for each time the token is there; 0 is off.

    With a `temperature` above 0 the logits are divided by the temperature, and then filtered in this order: `top_k`
    keeps the k likeliest tokens, `top_p` the fewest tokens whose probabilities add up to p, and `min_p` the tokens
    whose probability is at least `min_p` times that of the likeliest. `top_k` 0, `top_p` 1 and `min_p` 0 drop nothing.
    The same `seed` draws the same tokens; None is a new seed for each answer. The text ends before the first of the
    strings `stop`. A function `stop` is called with the text so far after each token; True ends the text.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | Callable[[str], object] | None = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks = (
            ("temperature", "a number, 0 or more", _number, lambda x: 0 <= x < math.inf),
            ("top_k", "a whole number, 0 (off) or more", _whole, lambda x: x >= 0),  # `None >= 0` is a TypeError
            ("top_p", "more than 0 and at most 1", _number, lambda x: 0 < x <= 1),
            ("min_p", "0 (off) to 1", _number, lambda x: 0 <= x <= 1),
            ("seed", "a whole number from 0 to 2**63 - 1", _whole, lambda x: x is None or 0 <= x < 2**63),
            ("stop", "strings, none of them empty, or a function of the text", _stops, lambda x: True),
            ("repetition_penalty", "0.01 to 100; 1 is off", _number, lambda x: 0.01 <= x <= 100),
            ("presence_penalty", "-2 to 2; 0 is off", _number, lambda x: -2 <= x <= 2),
            ("frequency_penalty", "-2 to 2; 0 is off", _number, lambda x: -2 <= x <= 2),
            ("logit_bias", "token ids with numbers from -100 to 100", _bias, lambda x: True),
        )
        for knob, expected, kind, holds in checks:
            value = getattr(self, knob)
            try:
                plain = kind(value)
                if not holds(plain):
                    raise ValueError
            except (TypeError, ValueError, OverflowError, AttributeError):
                raise UsageError(f"{knob} is {shown(value)}; expected {expected}") from None
            object.__setattr__(self, knob, plain)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, none if `stop` is a function."""
        return self.stop if isinstance(self.stop, tuple) else ()

    @property
    def penalises(self) -> bool:
        """Whether the next token depends on the tokens before it by more than the model's logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def check(self, vocab_size: int) -> None:
        """Raise `UsageError` if `logit_bias` has ids beyond a vocabulary."""
        if (wrong := max(self.logit_bias, default=0)) >= vocab_size:
            raise UsageError(f"logit_bias has token {wrong}; expected ids below {vocab_size}, the model's vocabulary")

    def biased(self, logits: Tensor) -> Tensor:
        """Return logits `[vocab]` with `logit_bias` added. Raises `UsageError` for ids that the logits do not have."""
        if not self.logit_bias:
            return logits
        self.check(len(logits))
        logits = logits.float().cpu().clone()
        logits[list(self.logit_bias)] += torch.tensor(list(self.logit_bias.values()))
        return logits

    @property
    def greedy(self) -> bool:
        """Whether each token is the likeliest by the model's logits: at temperature 0 without penalties or biases."""
        return self.temperature == 0 and not self.penalises and not self.logit_bias


class Constraint(Protocol):
    """What a text must match, such as a grammar: it says which tokens may come next."""

    def apply(self, logits: Tensor) -> Tensor:
        """Return logits `[vocab]` with -inf for tokens that may not come next. May overwrite `logits`."""

    def accept(self, token_id: int) -> None:
        """Take the token that comes next."""


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError
    return float(value)


def _whole(value: Any) -> int | None:
    if isinstance(value, bool):
        raise TypeError
    return None if value is None else operator.index(value)


def _bias(value: Any) -> dict[int, float]:
    found = {operator.index(token_id): _number(bias) for token_id, bias in value.items()}
    if any(token_id < 0 or not -100 <= bias <= 100 for token_id, bias in found.items()):
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


def recommended(generation: Mapping[str, Any]) -> Sampling | None:
    """Return the sampling that the fields of a generation_config.json recommend; None if no field is about sampling.

    If `do_sample` is false the temperature is 0. A missing temperature is 1; other missing knobs are off.
    """
    own = {knob: generation[knob] for knob in _RECOMMENDED if generation.get(knob) is not None}
    if generation.get("do_sample") is False:
        own["temperature"] = 0.0
    elif not own and not generation.get("do_sample"):
        return None
    try:
        return Sampling(**{"temperature": 1.0, **own})
    except UsageError as error:
        raise ModelError(f"generation_config.json: {error}; correct the file, or give a temperature of 0") from None


class Sampler:
    """A sampler of the tokens of one answer to the tokens `prompt`, with a random generator of its own."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int] = ()) -> None:
        self.sampling = sampling
        self._prompt = torch.tensor(prompt if sampling.repetition_penalty != 1 else (), dtype=torch.int64).unique()
        self._random = torch.Generator()
        if sampling.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(sampling.seed)

    @timed("sampling")
    def pick(self, logits: Tensor, answer: Sequence[int] = ()) -> int:
        """Draw the token after the tokens `answer` from logits `[vocab]`.

        Time: O(vocab), or O(vocab log vocab) if `top_p` keeps thousands; with penalties also O(n log n) for n tokens.
        """
        logits = self.sampling.biased(logits)
        if self.sampling.penalises:
            logits = penalised(logits.float().cpu(), self.sampling, self._prompt, answer)
        if self.sampling.temperature == 0:
            return int(logits.numpy().argmax() if logits.is_cpu else logits.argmax())  # see `check_logits`
        probabilities = probabilities_of(logits.float().cpu(), self.sampling)
        return int(torch.multinomial(probabilities, 1, generator=self._random))


def penalised(logits: Tensor, sampling: Sampling, prompt: Tensor, answer: Sequence[int]) -> Tensor:
    """Return logits `[vocab]` with the penalties of the ids in `prompt` and of the tokens `answer`."""
    said, times = torch.tensor(answer, dtype=torch.int64).unique(return_counts=True)
    seen, logits = torch.cat((prompt, said)), logits.clone()
    found = logits[seen]
    logits[seen] = torch.where(found < 0, found * sampling.repetition_penalty, found / sampling.repetition_penalty)
    logits[said] -= sampling.presence_penalty + sampling.frequency_penalty * times
    return logits


def probabilities_of(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the distribution `[vocab]` from which a token is drawn, after all filters."""
    scaled = (logits - logits.max()) / max(sampling.temperature, LEAST_TEMPERATURE)
    if 0 < sampling.top_k < len(scaled):
        scaled = scaled.masked_fill(scaled < scaled.topk(sampling.top_k).values[-1], -torch.inf)
    probabilities = scaled.softmax(-1)
    if sampling.top_p < 1:
        _cut_nucleus(probabilities, sampling.top_p)
    if sampling.min_p > 0:
        probabilities[probabilities < sampling.min_p * probabilities.max()] = 0
    return probabilities / probabilities.sum()


def _cut_nucleus(probabilities: Tensor, top_p: float) -> None:
    """Set the `probabilities [vocab]` of the tokens that `top_p` drops to 0, in place.

    `top_p` drops a token if the likelier tokens add up to `top_p`. Of equally likely tokens, lower ids count as
    likelier. Time: O(vocab) if hundreds of tokens are kept. The cumulative sums equal those of a full sort bit by bit.
    """
    n_ranked = min(len(probabilities), 256)
    while True:
        ranked = probabilities.topk(n_ranked).values
        beyond = ranked.cumsum(0) - ranked >= top_p
        if beyond[-1] or n_ranked == len(probabilities):
            break
        n_ranked = min(len(probabilities), 8 * n_ranked)
    n_kept = n_ranked - int(beyond.sum())
    least = ranked[n_kept - 1]
    equal = (probabilities == least).nonzero().squeeze(1)
    n_equal = n_kept - int((ranked > least).sum())
    probabilities[probabilities < least] = 0
    probabilities[equal[n_equal:]] = 0


@timed("sampling")
def check_logits(logits: Tensor, first: int) -> None:
    """Raise `ModelError` if the logits `[T, vocab]` after the tokens `first..first+T-1` are not finite.

    NumPy adds up a single row. PyTorch would share it among threads, and wait for one whose core has other work.
    """
    alone = logits.is_cpu and len(logits) == 1
    if math.isfinite(logits.numpy().sum() if alone else logits.sum().item()):  # cheaper than checking each number
        return
    finite = logits.isfinite().all(dim=-1)
    if not finite.all():  # otherwise only the sum overflowed
        token = first + int(finite.int().argmin())
        raise ModelError(
            f"the model's logits are not finite after token {token}: its weights hold NaN or infinite numbers, or "
            "float16 overflowed; check the checkpoint, or give dtype='float32'"
        )


@dataclass(frozen=True)
class TokenScores:
    """The scores of the n tokens of a text from `first` on, in tensors on the CPU.

    `logprobs [n]` float32 has each token's natural log-probability given all tokens before it. `likeliest [n]` bool
    says whether greedy sampling would draw the token.
    """

    first: int
    logprobs: Tensor
    likeliest: Tensor

    def __len__(self) -> int:
        return len(self.logprobs)


class Scorer:
    """A collector of a text's scores, block by block. `head` maps hidden states `[n, hidden]` to logits `[n, vocab]`.

    Holds at most `LOGITS_AT_ONCE` logits, or those of one token, and 5 bytes for each token.
    """

    def __init__(self, token_ids: Sequence[int], first: int, head: Callable[[Tensor], Tensor], vocab_size: int) -> None:
        self.token_ids = token_ids
        self.first = first
        self.head = head
        self.at_once = max(1, LOGITS_AT_ONCE // vocab_size)
        self._logprobs = [torch.zeros(0)]
        self._likeliest = [torch.zeros(0, dtype=torch.bool)]

    def add(self, hidden: Tensor, start: int, before: int = 0) -> None:
        """Add the hidden states `[n, hidden]` of the text's tokens from `start` on.

        `before` tokens of a context precede the text; token numbers in error messages include them.
        """
        stop = min(start + len(hidden), len(self.token_ids) - 1)  # the last token has no next token to score
        for index in range(max(start, self.first - 1), stop, self.at_once):
            some = hidden[index - start : min(index + self.at_once, stop) - start]
            logits = self.head(some)
            check_logits(logits, before + index)
            self.note(logits, index + 1)

    def note(self, logits: Tensor, index: int) -> None:
        """Record the scores of n tokens from `index` on, given the logits `[n, vocab]` that predict them."""
        targets = torch.tensor(self.token_ids[index : index + len(logits)], device=logits.device)
        self._logprobs.append((logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)).cpu())
        self._likeliest.append((logits.argmax(-1) == targets).cpu())

    def scores(self) -> TokenScores:
        """Return the collected scores."""
        return TokenScores(self.first, torch.cat(self._logprobs), torch.cat(self._likeliest))
