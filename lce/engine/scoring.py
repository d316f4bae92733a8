"""Computes the logits after each token of a text, and scores the tokens by them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lce.cache.kv import off_grid
from lce.engine.arguments import Prompt
from lce.engine.context import Context, appended, new_context
from lce.engine.lanes import check_logits
from lce.engine.running import agreed_ids, append, blocks, unread
from lce.engine.setup import Setup
from lce.errors import UsageError
from lce.progress import Progress, reported
from lce.sizes import count

LOGITS_AT_ONCE = 1 << 24  # the most logits that `score` holds at a time: 64 MiB in float32


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


@torch.inference_mode()
def logits(setup: Setup, token_ids: Prompt) -> Tensor:
    """Return the logits after each token of a text: see `Engine.logits`."""
    ids = agreed_ids(setup, token_ids)
    setup.warn(len(ids))
    context, found = new_context(setup, len(ids)), []
    for part in blocks(ids, setup.block):
        found.append(setup.model.logits(_hidden(setup, context, part)))
        check_logits(found[-1], context.cache.length - len(part))
    return torch.cat(found)


@torch.inference_mode()
def score(
    setup: Setup, token_ids: Prompt, context: Context | None, first: int | None, progress: Progress | bool | None
) -> TokenScores:
    """Return the log-probability of each token of a text: see `Engine.score`."""
    ids, before = agreed_ids(setup, token_ids, context, progress, first=first), 0 if context is None else len(context)
    least = 0 if before else 1
    first = least if first is None else count(first, "first", least)
    if first > len(ids):
        raise UsageError(f"first is {first}; expected {len(ids)} or less, the number of tokens")
    n_at_once = max(1, LOGITS_AT_ONCE // setup.model.config.vocab_size)
    logprobs, likeliest = [torch.zeros(0)], [torch.zeros(0, dtype=torch.bool)]

    def note(logits: Tensor, index: int) -> None:
        """Add the scores of tokens from `index` on, given the logits `[n, vocab]` that predict them."""
        targets = torch.tensor(ids[index : index + len(logits)], device=logits.device)
        logprobs.append((logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)).cpu())
        likeliest.append((logits.argmax(-1) == targets).cpu())

    def scores(held: Context) -> TokenScores:
        if before:
            append(setup, held, unread(setup, held))
        if first == 0 and ids:
            assert held.logits is not None
            note(held.logits[None], 0)
        held.token_ids.extend(ids)
        with reported(progress, "score") as tell:
            for part in blocks(held.uncached, setup.block, tell, offset=off_grid(held.cache)):
                start = held.cache.n_tokens - before
                hidden, stop = _hidden(setup, held, part), min(start + len(part), len(ids) - 1)  # the last has no next
                for index in range(max(start, first - 1), stop, n_at_once):
                    logits = setup.model.logits(hidden[index - start : min(index + n_at_once, stop) - start])
                    check_logits(logits, before + index)
                    note(logits, index + 1)
        return TokenScores(first, torch.cat(logprobs), torch.cat(likeliest))

    return appended(setup, context, len(ids), 0, scores)


def _hidden(setup: Setup, context: Context, ids: Sequence[int]) -> Tensor:
    """Append a block of tokens to a context; return their hidden states `[T, hidden]`."""
    lane = append(setup, context, [ids], setup.driver)
    assert lane is not None
    assert lane.hidden is not None, "only recorded steps keep no hidden states"
    return lane.hidden
