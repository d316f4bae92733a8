"""Samples the next token from logits, and checks that logits are finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lce.engine.sampling_options import Sampling
from lce.errors import ModelError, UsageError
from lce.profiling import timed

LEAST_TEMPERATURE = torch.finfo(torch.float32).tiny  # smaller positive temperatures would be 0 in float32

_RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # fields of generation_config.json


class Constraint(Protocol):
    """What a text must match, such as a grammar: it says which tokens may come next."""

    def apply(self, logits: Tensor) -> Tensor:
        """Return logits `[vocab]` with -inf for tokens that may not come next. May overwrite `logits`."""

    def accept(self, token_id: int) -> None:
        """Take the token that comes next."""


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
        logits = biased(logits, self.sampling)
        if self.sampling.penalises:
            logits = penalised(logits.float().cpu(), self.sampling, self._prompt, answer)
        if self.sampling.temperature == 0:
            return int(logits.numpy().argmax() if logits.is_cpu else logits.argmax())  # see `check_logits`
        probabilities = probabilities_of(logits.float().cpu(), self.sampling)
        return int(torch.multinomial(probabilities, 1, generator=self._random))


def biased(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return logits `[vocab]` with `logit_bias` added. Raises `UsageError` for ids that the logits do not have."""
    if not sampling.logit_bias:
        return logits
    sampling.check(len(logits))
    logits = logits.float().cpu().clone()
    logits[list(sampling.logit_bias)] += torch.tensor(list(sampling.logit_bias.values()))
    return logits


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

    NumPy adds up a single row. PyTorch would divide the row among threads, and wait for any thread whose core is busy.
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
