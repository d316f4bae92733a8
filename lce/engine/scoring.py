"""Computes the logits after each token of a text, and scores the tokens by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lce.engine.arguments import Prompt
from lce.engine.context import Context, appended, new_context, own_context
from lce.engine.lanes import check_logits
from lce.engine.running import append, blocks, prompt_ids, read
from lce.engine.setup import Setup
from lce.errors import UsageError
from lce.progress import Progress, reported
from lce.sizes import count

LOGITS_AT_ONCE = 1 << 24  # the most logits that a `Scorer` holds at a time: 64 MiB in float32


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


@torch.inference_mode()
def logits(setup: Setup, token_ids: Prompt) -> Tensor:
    """Return the logits after each token of a text: see `Engine.logits`."""
    ids = prompt_ids(setup, token_ids)
    setup.warn(len(ids))
    context, found = new_context(setup, len(ids)), []
    for part in blocks(ids, setup.block):
        found.append(setup.model.logits(_hidden(setup, context, part)))
        check_logits(found[-1], context.cache.length - len(part))
    return torch.cat(found)


@torch.inference_mode()
def score(
    setup: Setup,
    token_ids: Prompt,
    context: Context | None = None,
    first: int | None = None,
    progress: Progress | bool | None = None,
) -> TokenScores:
    """Return the log-probability of each token of a text: see `Engine.score`."""
    ids, before = prompt_ids(setup, token_ids, own_context(setup, context)), 0 if context is None else len(context)
    least = 0 if before else 1
    first = least if first is None else count(first, "first", least)
    if first > len(ids):
        raise UsageError(f"first is {first}; expected {len(ids)} or less, the number of tokens")
    scorer = Scorer(ids, first, setup.model.logits, setup.model.config.vocab_size)

    def scores(held: Context) -> TokenScores:
        if before:
            read(setup, held)
        if first == 0 and ids:
            assert held.logits is not None
            scorer.note(held.logits[None], 0)
        held.token_ids.extend(ids)
        with reported(progress, "score") as tell:
            for part in blocks(held.uncached, setup.block, tell):
                start = held.cache.n_tokens - before
                scorer.add(_hidden(setup, held, part), start, before)
        return scorer.scores()

    return appended(setup, context, len(ids), 0, scores)


def _hidden(setup: Setup, context: Context, ids: Sequence[int]) -> Tensor:
    """Append a block of tokens to a context; return their hidden states `[T, hidden]`."""
    hidden = append(setup, context, ids, setup.driver).hidden
    assert hidden is not None, "only recorded steps keep no hidden states"
    return hidden
