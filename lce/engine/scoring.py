"""The log-probability that a model gives to each token of a text, without holding the logits of the whole text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lce.engine.sampling import check_logits

LOGITS_AT_ONCE = 1 << 24  # numbers of float32: 64 MiB


@dataclass(frozen=True)
class TokenScores:
    """The scores of the n tokens `first..T-1` of a text; on the CPU.

    `logprobs [n]` float32 are natural log-probabilities, each token's given all tokens before it. `likeliest [n]` bool
    says whether greedy sampling would draw the token.
    """

    first: int
    logprobs: Tensor
    likeliest: Tensor

    def __len__(self) -> int:
        return len(self.logprobs)


class Scorer:
    """Collects the scores of a text, block by block. `head` maps hidden states `[n, hidden]` to logits `[n, vocab]`.

    Bytes: the logits of `LOGITS_AT_ONCE` numbers or of one token, and 5 bytes a token.
    """

    def __init__(self, token_ids: Sequence[int], first: int, head: Callable[[Tensor], Tensor], vocab_size: int) -> None:
        self.token_ids = token_ids
        self.first = first
        self.head = head
        self.at_once = max(1, LOGITS_AT_ONCE // vocab_size)
        self._logprobs = [torch.zeros(0)]
        self._likeliest = [torch.zeros(0, dtype=torch.bool)]

    def add(self, hidden: Tensor, start: int, before: int = 0) -> None:
        """Add hidden states `[n, hidden]` of the tokens from `start` on, which `before` context tokens precede."""
        stop = min(start + len(hidden), len(self.token_ids) - 1)  # nothing follows the last token
        for index in range(max(start, self.first - 1), stop, self.at_once):
            some = hidden[index - start : min(index + self.at_once, stop) - start]
            logits = self.head(some)
            check_logits(logits, before + index)
            self.note(logits, index + 1)

    def note(self, logits: Tensor, index: int) -> None:
        """Record the scores of the tokens from `index` on, under logits `[n, vocab]`."""
        targets = torch.tensor(self.token_ids[index : index + len(logits)], device=logits.device)
        self._logprobs.append((logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)).cpu())
        self._likeliest.append((logits.argmax(-1) == targets).cpu())

    def scores(self) -> TokenScores:
        """Return the scores of all tokens from `first` on."""
        return TokenScores(self.first, torch.cat(self._logprobs), torch.cat(self._likeliest))
