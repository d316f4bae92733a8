"""InfLLM: queries choose blocks of earlier tokens by a few representative tokens of each block."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from lce.attention import Attended, attention_sums, best_first, dot_products, rotate, sum_heads
from lce.cache.layer import LayerCache
from lce.cache.layout import AccessPattern, CacheLayout, query_bytes
from lce.cache.method_state import FileTensor, MethodState, RecentRows, Staged, Summaries
from lce.methods.attending import PlacedPart
from lce.methods.base import Example, is_like, knob, resolved
from lce.methods.budget import TOP_P
from lce.methods.costs import Cost, QueryBlock
from lce.methods.joint import HOOKS, PROMISES, JointSelection
from lce.methods.parts import CHOSEN, RECENT, LayerFacts, Part
from lce.methods.registry import register
from lce.methods.step import Step

BLOCKS, VOTES = "memory blocks", "votes"


@register("infllm")
@dataclass(frozen=True)
class InfLLM(JointSelection, promises=dict.fromkeys(PROMISES[:-1], HOOKS)):  # not `kept`: attention gives votes
    """InfLLM (Xiao et al., 2024, "Training-Free Long-Context Extrapolation with an Efficient Context Memory").

    A query attends the last `local` tokens at their true distance. At the constant distance `far` the query attends the
    first `sinks` tokens, the `top_k` memory blocks that are most relevant to the query's block, and the tokens that
    have left the local window but do not fill a memory block yet. Tokens from `sinks` on are cut into memory blocks of
    `block_size` tokens. A memory block can be chosen when none of its tokens is in the local window of the first query.

    For each query head, a memory block is represented by its `repr_tokens` tokens with the largest sum of local
    attention weights, over all queries. A memory block's relevance is the sum of `q · k` over heads, representative
    tokens and the queries of the block, with the queries at `far`.

    The paper's blocks have 128 tokens, and 4 tokens represent a block poorly. The default is 128 blocks of 16 tokens,
    the same number of tokens; they find more with both models tried.

    With `top_p`, the best of the `top_k` blocks are chosen until their estimated attention reaches that share of the
    attention to all memory blocks. The estimate takes the mean of a block's products `q · k` as each token's logit.

    Cost: a token attends at most `sinks + (top_k + 1) · block_size + local` keys. Scoring M memory blocks for a block
    of queries takes O(H · M · D). A memory block's summary is H · D numbers.
    """

    block_size: int = knob(16, "tokens of a memory block", least=1)
    repr_tokens: int = knob(4, "tokens that represent a memory block", least=1)
    top_k: int = knob(128, "memory blocks that a block of queries chooses", least=1)
    sinks: int = knob(128, "first tokens, always attended", least=0)
    local: int | None = knob(None, "last tokens, at exact distances; none is half of the window", least=1)
    far: int | None = knob(None, "distance of everything else; none is local", least=0)
    top_p: float | None = knob(None, TOP_P, is_share=True, kw_only=True)
    example: ClassVar = Example({"block_size": 3, "repr_tokens": 1, "top_k": 2, "sinks": 3, "local": 5}, block=3)

    presets: ClassVar = {  # the paper's blocks; and all that the authors set for Llama 3 and Mistral
        "paper": {"block_size": 128, "top_k": 16},
        "released": {"block_size": 128, "repr_tokens": 4, "top_k": 16, "sinks": 128, "local": 4096},
    }

    @property
    def block(self) -> int:
        return max(1, min(512, self.n_recent // 4))  # small, because the queries of a block choose together

    @property
    def access(self) -> AccessPattern:
        return replace(super().access, chunk_size=self.block_size)

    @property
    def choices(self) -> tuple[int, int]:
        return self.sinks, self.block_size

    def state(self, layout: CacheLayout) -> Mapping[str, MethodState]:
        def votes_bytes(n_tokens: int, block: int) -> int:
            return layout.n_heads * torch.float32.itemsize * min(n_tokens, self.n_recent + self.block_size + block)

        votes = Staged(votes_bytes, layout.block, layout.key_bytes // 4)  # an eighth of the bytes of keys and values
        blocks = Summaries(query_bytes(layout), self.block_size)
        return {**super().state(layout), BLOCKS: blocks, VOTES: votes}

    def could_keep(self, layer: int, kept: Mapping[str, FileTensor], layout: CacheLayout, n_tokens: int) -> bool:
        blocks, votes = kept.get(BLOCKS), kept.get(VOTES)
        n_blocks = 0 if blocks is None else blocks.shape[1]
        n_votes = 0 if votes is None else votes.shape[-1]
        n_left = n_tokens - self.sinks - n_votes - n_blocks * self.block_size  # below 0 if the text went back
        return (
            super().could_keep(layer, kept, layout, n_tokens)
            and (blocks is None or is_like(blocks, (layout.n_heads, n_blocks, layout.head_dim), layout.dtype))
            and (votes is None) == (n_tokens <= self.sinks)
            and (votes is None or is_like(votes, (layout.n_heads, n_votes), torch.float32))
            and (votes is None or (n_left <= 0 and n_left % self.block_size == 0 and n_votes <= n_tokens - self.sinks))
        )

    def n_candidates(self, start: int) -> int:
        return max(0, start + 1 - self.n_local - self.sinks) // self.block_size

    def parts_of(self, i: Tensor, layer: LayerFacts) -> Iterator[Part]:
        first, far, n_blocks = i + 1 - self.n_local, resolved(self.far), self.n_candidates(int(i[0]))
        yield Part(keys=(first, i + 1), query_at=i, exact=True)
        if n_blocks > (self.top_k if self.top_p is None else 0):
            yield Part(keys=(0, first.clamp(max=self.sinks)), query_at=far)
            yield Part(keys=CHOSEN, query_at=far)
            yield Part(keys=(self.sinks + n_blocks * self.block_size, first), query_at=far)
        else:
            yield Part(keys=(0, first), query_at=far)

    def attend_part(self, q: Tensor, placed: PlacedPart, cache: LayerCache, step: Step) -> Attended | None:
        """Return the attention to a part; for the local span, call `memorise` too, before blocks are chosen."""
        found = super().attend_part(q, placed, cache, step)
        if found is not None and placed.part.exact:
            self.memorise(q, found[1], cache, step)
        return found

    def choice_cost(self, block: QueryBlock) -> Cost:
        heads, dim, first = block.n_heads, block.head_dim, max(0, block.start - self.n_local + 1)
        votes = heads * len(block) * (block.stop - first) * dim if block.stop > self.sinks else 0
        n_blocks = self.n_candidates(block.start)
        if n_blocks <= self.top_k:
            return Cost(0, summaries=votes)
        scores = heads * n_blocks * dim  # the mean query, times one summary per head and memory block
        return block.tokens(self.top_k * self.block_size) + Cost(0, scores, votes, state_read=scores)

    def relevance(self, q: Tensor, far: Tensor, cache: LayerCache, step: Step) -> Tensor:
        summary = cache.kept(Summaries, BLOCKS).span(0, self.n_candidates(step.start))
        return sum_heads(dot_products(far.mean(dim=1, keepdim=True), summary), len(q))[0, 0]

    def log_mass(self, relevance: Tensor, n_heads: int, head_dim: int) -> Tensor:
        n_products = n_heads * min(self.repr_tokens, self.block_size)
        return relevance.float() / (n_products * math.sqrt(head_dim))

    def memorise(self, q: Tensor, lse: Tensor, cache: LayerCache, step: Step) -> None:
        """Add this block's local attention weights to the votes, and summarise memory blocks that are now complete.

        `lse [H, T]` is the log-sum-exp of local attention. The votes `[H, n]` are sums of local attention weights so
        far, one for each of the n tokens that are in no memory block yet.
        """
        kept = cache.kept(Staged, VOTES)
        # Tokens before `done` are sinks or in memory blocks.
        before = kept.latest
        done = self.sinks if before is None else step.start - before.shape[1]
        if step.stop <= done:
            return
        first = max(0, step.start - self.n_recent + 1)  # the first key that a query of this block sees as local
        votes = q.new_zeros(q.shape[0], 0, dtype=torch.float32) if before is None else before
        votes = pad(votes, (0, step.stop - done - votes.shape[1]))
        new = self.votes(q, lse, first, cache, step)
        votes[:, max(0, first - done) :] += new[:, max(0, done - first) :]
        complete = self.n_candidates(step.start) - max(0, done - self.sinks) // self.block_size
        if complete:
            n = complete * self.block_size
            of_blocks = votes[:, :n].unflatten(1, (complete, -1))
            best = best_first(of_blocks, min(self.repr_tokens, self.block_size))
            keys = cache.span(done, done + n)[0].unflatten(1, (complete, -1))  # [G, m, L, D]
            keys = keys.repeat_interleave(q.shape[0] // keys.shape[0], 0)
            chosen = keys.gather(2, best[..., None].expand(-1, -1, -1, keys.shape[-1]))
            cache.kept(Summaries, BLOCKS).write(chosen.sum(dim=2), (done - self.sinks) // self.block_size)
            votes = votes[:, n:]
        kept.stage(votes)

    def votes(self, q: Tensor, lse: Tensor, first: int, cache: LayerCache, step: Step) -> Tensor:
        """Return the local attention weights of tokens from `first` on, summed over the block's queries: `[H, n]`."""
        keys = cache.kept(RecentRows, RECENT).span(first, step.stop)
        return attention_sums(rotate(q, step.true_turn(q)), keys, lse, self.n_recent)
