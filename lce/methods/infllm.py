"""InfLLM: a memory of blocks, looked up by a few representative tokens of each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from lce.attention import causal_mask, merge, rotate
from lce.cache.layer import LayerCache
from lce.cache.layout import CacheLayout, Reach
from lce.cache.method_state import MethodState, RecentRows, Staged, Summaries
from lce.kernels.cpu.scores import add_weights, compiled_for
from lce.methods.base import Example, LocalMethod
from lce.methods.costs import Cost, QueryBlock
from lce.methods.lowdim import first_best
from lce.methods.parts import (
    RECENT,
    SCORES_AT_ONCE,
    attend_behind,
    attend_local,
    attend_tokens,
    is_like,
    products,
    spans_of,
)
from lce.methods.registry import register
from lce.methods.selective import dot_products
from lce.methods.step import Step
from lce.methods.top_p import TOP_P_HELP, check_top_p, enough

BLOCKS, VOTES = "memory blocks", "votes"
LOGITS_AT_ONCE = 1 << 22  # that votes are counted by: they stay in the processor's caches


@register("infllm")
@dataclass(frozen=True)
class InfLLM(LocalMethod):
    """InfLLM (Xiao et al., 2024, "Training-Free Long-Context Extrapolation with an Efficient Context Memory").

    A query attends the last `local` tokens at their true distance. At the constant distance `far` it attends the first
    `sinks` tokens, the `top_k` memory blocks that its block of queries finds most relevant, and the tokens that have
    left the local window but do not fill a memory block yet. Tokens from `sinks` on are cut into blocks of
    `block_size`. A block enters the memory when all of it is out of the local window of the first query.

    For each query head, a memory block is represented by its `repr_tokens` tokens with the largest sum of local
    attention weights, over all queries. Its relevance is the sum of `q · k` over heads, representative tokens and the
    queries of the block, with the queries at `far`.

    With `top_p`, no more of the `top_k` blocks are chosen than reach that share of the mass of the memory, the mean of
    those products being taken for the logit of all tokens of a block.

    Cost: a token attends at most `sinks + (top_k + 1) · block_size + local` keys; a block of queries is scored against
    M summaries, O(H · M · D); a memory block's summary is H · D numbers.
    """

    block_size: int = 128
    repr_tokens: int = 4
    top_k: int = 16
    sinks: int = 128
    local: int | None = None
    far: int | None = None
    top_p: float | None = field(default=None, kw_only=True)

    knob_help: ClassVar = {
        "block_size": "tokens of a memory block",
        "repr_tokens": "tokens that represent a memory block",
        "top_k": "memory blocks that a block of queries chooses",
        "sinks": "first tokens, always attended",
        "local": "last tokens, at exact distances; none is half of the window",
        "far": "distance of everything else; none is local",
        "top_p": TOP_P_HELP,
    }
    example: ClassVar = Example({"block_size": 3, "repr_tokens": 1, "top_k": 2, "sinks": 3, "local": 5}, block=3)

    presets: ClassVar = {  # the authors' settings for Llama 3 and Mistral
        "released": {"block_size": 128, "repr_tokens": 4, "top_k": 16, "sinks": 128, "local": 4096}
    }

    def resolve(self, window: int) -> Self:
        local = max(1, window // 2) if self.local is None else self.local
        made = replace(self, local=local, far=local if self.far is None else self.far)
        made.expect(block_size=1, repr_tokens=1, top_k=1, sinks=0, local=1, far=0)
        check_top_p(made)
        return made

    @property
    def block(self) -> int:
        return max(1, min(512, self.n_recent // 4))  # small beside the window: its queries choose together

    @property
    def reach(self) -> Reach:
        return replace(super().reach, chunk_size=self.block_size)

    @property
    def choices(self) -> tuple[int, int]:
        return self.sinks, self.block_size

    def state(self, layout: CacheLayout) -> Mapping[str, MethodState]:
        def votes_bytes(n_tokens: int, block: int) -> int:
            return layout.n_heads * torch.float32.itemsize * min(n_tokens, self.n_recent + self.block_size + block)

        blocks = Summaries(layout.query_bytes, self.block_size)
        return {**super().state(layout), BLOCKS: blocks, VOTES: Staged(votes_bytes)}

    def could_keep(self, layer: int, kept: Mapping[str, Tensor], layout: CacheLayout, n_tokens: int) -> bool:
        blocks, votes = kept.get(BLOCKS), kept.get(VOTES)
        n_blocks = 0 if blocks is None else blocks.shape[1]
        n_votes = n_tokens - self.sinks - n_blocks * self.block_size
        return (
            super().could_keep(layer, kept, layout, n_tokens)
            and (blocks is None or is_like(blocks, (layout.n_heads, n_blocks, layout.head_dim), layout.dtype))
            and (votes is None) == (n_tokens <= self.sinks)
            and (votes is None or is_like(votes, (layout.n_heads, n_votes), torch.float32))
        )

    def memory_end(self, cache: LayerCache, step: Step) -> int:
        """The first token that is in no memory block (and no sink): where the votes of this pass begin."""
        votes = cache.kept(Staged, VOTES)
        if votes.latest is None:
            return self.sinks
        return (cache.length if votes.latest is votes.value else step.stop) - votes.latest.shape[1]

    def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        assert self.far is not None, "resolved before use"
        here = attend_local(q, cache, step, window=self.n_local)
        self.memorise(q, here[1], cache, step)
        if step.stop <= self.n_local:
            return here[0]
        far = rotate(q, step.far_turn(self.far, q))
        end = self.memory_end(cache, step)
        n_blocks = max(0, end - self.sinks) // self.block_size
        if n_blocks <= self.top_k and (self.top_p is None or not n_blocks):  # nothing to choose
            return merge([attend_behind(far, cache, step, gap=self.n_local), here])
        chosen = self.select(self.relevance(q, far, n_blocks, cache, step), q, cache, step)
        tokens = self.sinks + chosen[:, None] * self.block_size + torch.arange(self.block_size, device=q.device)
        parts = [
            attend_behind(far, cache, step, gap=self.n_local, stop=self.sinks),
            attend_tokens(far, cache, step, tokens.flatten()),
            attend_behind(far, cache, step, gap=self.n_local, first=end),
            here,
        ]
        return merge(parts)

    def cost(self, block: QueryBlock) -> Cost:
        local, heads, dim = self.n_local, block.n_heads, block.head_dim
        first = max(0, block.start - local + 1)
        votes = heads * len(block) * (block.stop - first) * dim if block.stop > self.sinks else 0
        here = block.recent(local) + Cost(0, summaries=votes)
        if block.stop <= local:
            return here
        n_blocks = max(0, first - self.sinks) // self.block_size
        if n_blocks <= self.top_k:
            return here + block.behind(local)
        scores = heads * n_blocks * dim  # for the mean of the block's queries
        memory = block.behind(local, stop=self.sinks) + block.tokens(self.top_k * self.block_size)
        rest = block.behind(local, first=self.sinks + n_blocks * self.block_size)
        return here + memory + rest + Cost(0, scores=scores, state_read=scores)

    def spans(self, cache: LayerCache, step: Step) -> Tensor | None:
        index, end = step.positions(cache.buffer.k.device), self.memory_end(cache, step)
        n_blocks = max(0, end - self.sinks) // self.block_size
        if n_blocks <= self.top_k and (self.top_p is None or not n_blocks):
            return spans_of((0, index + 1), like=index)
        return spans_of((0, self.sinks), ((index + 1 - self.n_local).clamp(max=end), index + 1), like=index)

    def distance(self, index: Tensor, token: Tensor, step: Step) -> Tensor | None:
        assert self.far is not None, "resolved before use"
        return torch.where(index - token < self.n_local, index - token, self.far)

    def choice_distance(self, chosen: Tensor, step: Step) -> Tensor | None:
        assert self.far is not None, "resolved before use"
        return torch.full((*chosen.shape, 2), self.far, device=chosen.device)

    def relevance(self, q: Tensor, far: Tensor, n_blocks: int, cache: LayerCache, step: Step) -> Tensor:
        """What the memory blocks are worth to the queries together, `[n_blocks]`. `q far [H, T, D]`, far placed."""
        summary = cache.kept(Summaries, BLOCKS).span(0, n_blocks)
        return dot_products(far.mean(dim=1, keepdim=True), summary).sum(dim=0)[0]

    def log_mass(self, relevance: Tensor, n_heads: int, head_dim: int) -> Tensor:
        """The relevance as logarithms of attention mass, up to a constant."""
        n_products = n_heads * min(self.repr_tokens, self.block_size)
        return relevance.float() / (n_products * math.sqrt(head_dim))

    def select(self, relevance: Tensor, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        """The `top_k` most relevant memory blocks, or fewer with `top_p`, ascending."""
        n = min(self.top_k, len(relevance))
        if self.top_p is not None:
            best = relevance.float().argsort(descending=True, stable=True)[:n]
            n = enough(self.log_mass(relevance, len(q), q.shape[-1]), best, self.top_p)
        chosen = first_best(relevance, n)
        if step.note_scores:
            step.note_scores(cache.index, relevance.float().expand(1, step.n_noted, -1))
        if step.note:
            step.note(cache.index, chosen.expand(*q.shape[:2], -1))
        return chosen

    def memorise(self, q: Tensor, lse: Tensor, cache: LayerCache, step: Step) -> None:
        """Add this block's part of the representative scores; summarise the memory blocks that are complete now.

        `lse [H, T]` is local attention's. The votes `[H, n]` are the scores of the tokens from `memory_end` on.
        """
        done = self.memory_end(cache, step)
        if step.stop <= done:
            return
        first = max(0, step.start - self.n_recent + 1)  # the first key that a query of this block sees as local
        kept = cache.kept(Staged, VOTES)
        votes = q.new_zeros(q.shape[0], 0, dtype=torch.float32) if kept.value is None else kept.value
        votes = pad(votes, (0, step.stop - done - votes.shape[1]))
        new = self.votes(q, lse, first, cache, step)
        votes[:, max(0, first - done) :] += new[:, max(0, done - first) :]
        complete = max(0, step.start - self.n_recent + 1 - done) // self.block_size
        if complete:
            n = complete * self.block_size
            best = votes[:, :n].unflatten(1, (complete, -1)).topk(min(self.repr_tokens, self.block_size)).indices
            keys = cache.span(done, done + n)[0].unflatten(1, (complete, -1))  # [G, m, L, D]
            keys = keys.repeat_interleave(q.shape[0] // keys.shape[0], 0)
            chosen = keys.gather(2, best[..., None].expand(-1, -1, -1, keys.shape[-1]))
            cache.kept(Summaries, BLOCKS).write(chosen.sum(dim=2), (done - self.sinks) // self.block_size)
            votes = votes[:, n:]
        kept.stage(votes)

    def votes(self, q: Tensor, lse: Tensor, first: int, cache: LayerCache, step: Step) -> Tensor:
        """What each token from `first` on has of the local attention of the block's queries: `[H, n]`.

        Probabilities are computed again from the logits and `lse`, for some queries at a time. Time: O(H · T · n · D).
        """
        keys = cache.kept(RecentRows, RECENT).span(first, step.stop)
        if compiled_for(keys):
            return self._votes(rotate(q, step.true_turn(q)), lse, keys)
        unseen = ~causal_mask(q.shape[1], keys.shape[1], self.n_recent, q.device)
        grouped = rotate(q, step.true_turn(q)).unflatten(0, (keys.shape[0], -1))  # [G, R, T, D]
        total = q.new_zeros(q.shape[0], keys.shape[1], dtype=torch.float32)
        rows = max(1, SCORES_AT_ONCE // (q.shape[0] * keys.shape[1]))
        for start in range(0, q.shape[1], rows):
            some = slice(start, start + rows)
            logits = products(grouped[:, :, some].flatten(1, 2), keys.mT).float().view(len(q), -1, keys.shape[1])
            logits /= math.sqrt(q.shape[-1])
            total += (logits - lse[:, some, None]).masked_fill_(unseen[some], -torch.inf).exp_().sum(dim=1)
        return total

    def _votes(self, q: Tensor, lse: Tensor, keys: Tensor) -> Tensor:
        """The same for placed queries `[H, T, D]` and keys `[G, n, D]`, by a product and a pass over its numbers."""
        (n_heads, n_queries, dim), n_keys = q.shape, keys.shape[1]
        total = torch.zeros(n_heads, n_keys, dtype=torch.float32)
        rows = max(1, min(n_queries, LOGITS_AT_ONCE // (n_heads * n_keys)))
        some = (q / math.sqrt(dim)).unflatten(0, (len(keys), -1))  # [G, R, T, D]
        for start in range(0, n_queries, rows):
            part, here = lse[:, start : start + rows].contiguous(), some[:, :, start : start + rows]
            logits = dot_products(here.reshape(len(keys), -1, dim), keys).view(n_heads, -1, n_keys)
            add_weights(logits, part, 1.0, total, n_keys - n_queries + start, self.n_recent)
        return total
