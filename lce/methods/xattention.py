"""XAttention: a block-sparse prefill. A block of queries attends the blocks of keys with most estimated attention."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from lce.attention import Attended, SlotTurns, join, products, rotate
from lce.cache.layer import LayerCache
from lce.cache.layout import AccessPattern
from lce.errors import UsageError
from lce.methods.attending import PlacedPart, unseen
from lce.methods.base import ATTENTION, Example, Method, Promise, filled, knob, resolved
from lce.methods.budget import prune
from lce.methods.costs import Cost, QueryBlock
from lce.methods.full import Full
from lce.methods.parts import CHOSEN, LayerFacts, Part
from lce.methods.registry import register
from lce.methods.step import Step
from lce.methods.turned_keys import pieces

PROMISES: tuple[Promise, ...] = "alike", "counted", "recorded", "noted", "kept", "by_head"
BLOCK = 2048  # the tokens of a pass, in whole blocks
CHOICES_AT_ONCE = 1 << 16  # the largest number of choices of a head's queries at a time: choices take memory


@register("xattention")
@dataclass(frozen=True)
class XAttention(Method, promises=dict.fromkeys(PROMISES, (*ATTENTION, "parts_of", "choose", "shares"))):
    """XAttention (Xu et al., 2025, "XAttention: Block Sparse Attention with Antidiagonal Scoring").

    Queries and keys are cut into blocks of `block_size` tokens, the paper's B, from token 0 on. A block of queries
    attends itself, causally, and whole earlier blocks, at true distances: block 0, and the fewest others that bring the
    estimated attention to the share `top_p`, the paper's tau. Each query head chooses alone.

    The estimate takes tiles of `stride` queries by `stride` keys, the paper's S. A tile's logit is the mean of `q · k /
    sqrt(D)` on its antidiagonal, `Σ_o q[S·r + S - 1 - o] · k[S·c + o] / (S · sqrt(D))` for row r and column c. A row's
    softmax is over its tiles up to c = r; a block's share is the sum over its rows and columns.

    A block chooses where one pass has all of its queries. Queries of a block that a pass cuts attend every key: decode
    steps, and the last tokens of a prompt, at most `block_size - 1`. In passes of whole blocks, whatever their number,
    the result is the same. The authors' code chooses for a cut block, too, by the queries that there are.

    Example: `block_size=4, stride=2`; queries 8 to 11 are rows 4 and 5, each with a softmax over its tiles of blocks 0,
    1 and 2. Blocks 0 and 2 are attended; block 1 is if both have less than `top_p`.

    Cost: the estimate takes O(N / stride · D) per token and head, 1 / (2 · stride) of full attention. How many blocks
    are attended depends on the text. Nothing is kept besides keys and values. Decode costs what `full` does.
    """

    stride: int = knob(8, "queries, and keys, of a tile whose antidiagonal is scored", least=1)
    block_size: int | None = knob(None, "tokens of a block; none is 128, fewer in a window below 4096", least=2)
    top_p: float = knob(0.9, "share of the estimated attention that a block's choice reaches", is_share=True)
    example: ClassVar = Example({"stride": 2, "block_size": 4, "top_p": 0.7}, window=24)

    def resolve(self, window: int) -> Self:
        made = filled(self)
        usual = min(128, window // 32) // made.stride * made.stride
        made = filled(made, block_size=max(2, made.stride, usual))
        if made.size % made.stride:
            raise UsageError(f"{self.label}: block_size is {made.size}; expected a multiple of stride, {made.stride}")
        return made

    @property
    def size(self) -> int:
        """The number of tokens in a block, B."""
        return resolved(self.block_size)

    @property
    def block(self) -> int:
        return max(1, BLOCK // self.size) * self.size

    @property
    def access(self) -> AccessPattern:
        return AccessPattern(self.size, sinks=self.size)

    def limit(self, window: int, sliding_window: int | None = None) -> int | None:
        return window

    def parts_of(self, i: Tensor, layer: LayerFacts) -> Iterable[Part]:
        """Yield a part of each query's own block, or of all keys if the block is cut; and a part of chosen keys."""
        own = i // self.size * self.size
        is_cut = (own < i[0]) | (own + self.size > i[-1] + 1)
        yield Part(keys=(own.masked_fill(is_cut, 0), i + 1), query_at=i)
        yield Part(keys=CHOSEN, query_at=i)

    def slices(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield slices `first..last-1` of the blocks that choose: after block 0, whole in tokens `start..stop-1`."""
        first, last = max(1, -(-start // self.size)), stop // self.size
        at_once = max(1, CHOICES_AT_ONCE // max(1, last * self.size))
        for a in range(first, last, at_once):
            yield a, min(a + at_once, last)

    def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        if step.at is not None:
            return Full().attend(q, cache, replace(step, sliding_window=None))
        return super().attend(q, cache, step)

    def attend_part(self, q: Tensor, placed: PlacedPart, cache: LayerCache, step: Step) -> Attended | None:
        if placed.part.keys != CHOSEN:
            return super().attend_part(q, placed, cache, step)
        size, slices = self.size, list(self.slices(step.start, step.stop))
        if not slices:
            return None
        found, noted = list[Attended](), list[Tensor]()
        begin, end = (edge * size - step.start for edge in (slices[0][0], slices[-1][1]))
        for first, last in slices:
            rows = slice(first * size - step.start, last * size - step.start)
            some, turn = q[:, rows], placed.turn.at(rows)
            chosen = self.choose(rotate(some, turn), first, cache).repeat_interleave(size, dim=1)
            turns = SlotTurns(turn, torch.arange(rows.stop - rows.start, device=q.device)[:, None])
            found.append(step.attention.routed(some, turns, chosen, cache.tiles(chosen)))
            if step.note:
                noted.append(pad(chosen, (0, slices[-1][1] - last), value=-1))
        if step.note:
            step.note(cache.index, pad(torch.cat(noted, dim=1), (0, 0, begin, q.shape[1] - end), value=-1))
        found = [unseen(q, 0, begin), *found, unseen(q, end, q.shape[1])]
        return join([some for some in found if some[0].shape[1]], 1)

    def choose(self, q: Tensor, first: int, cache: LayerCache) -> Tensor:
        """Return the blocks that blocks of queries attend besides their own: `[H, n, K]`, ascending, then -1.

        `q [H, n · B, D]` are the queries of blocks `first..first + n - 1`, rotated to their positions.
        """
        mass = self.shares(q, first, cache)
        number = torch.arange(mass.shape[-1], device=q.device)
        own = number[first:, None]
        candidates = torch.where(number <= own, number, -1).expand_as(mass)
        chosen = prune(candidates, mass, mass.log(), (number == 0) | (number == own), self.top_p)
        return chosen.masked_fill(chosen == own, -1)

    def shares(self, q: Tensor, first: int, cache: LayerCache) -> Tensor:
        """Return the estimated attention of blocks of queries, `q` as in `choose`, to all blocks up to the last's.

        The result is `[H, n, first + n]`, float32; a block's shares add up to its number of rows, B / S.
        """
        (n_heads, n_queries, dim), stride, per_block = q.shape, self.stride, self.size // self.stride
        stop = first * self.size + n_queries
        tiles = (q / (math.sqrt(dim) * stride)).unflatten(1, (-1, stride)).flip(2)  # [H, n · B/S, S, D]
        tiles = tiles.reshape(cache.layout.n_kv_heads, -1, stride * dim)
        found = []
        for piece in pieces(cache, 0, stop, self.size):
            k = cache.span(*piece)[0]
            found.append(products(tiles, k.reshape(len(k), -1, stride * dim).mT))
        logits = torch.cat(found, dim=-1).float().view(n_heads, -1, stop // stride)
        column = torch.arange(stop // stride, device=q.device)
        logits.masked_fill_(column > column[first * per_block :, None], -torch.inf)
        of_rows = logits.softmax(-1).unflatten(-1, (-1, per_block)).sum(-1)  # [H, n · B/S, first + n]
        return torch.unflatten(of_rows, 1, (-1, per_block)).sum(2)

    def choice_cost(self, block: QueryBlock) -> Cost:
        """Return the cost of the estimate and of attending all earlier blocks, an upper bound for any text."""
        slices, size = list(self.slices(block.start, block.stop)), self.size
        if not slices:
            return Cost(0)
        first, last = slices[0][0], slices[-1][1]
        scores = sum((b - a) * b for a, b in slices) * size * size // self.stride
        read = sum(b for _, b in slices) * size
        seen = block.seen(size * size * sum(range(first, last)), (last - 1) * size)
        of_heads, of_kv_heads = (n * block.head_dim for n in (block.n_heads, block.n_kv_heads))
        return seen + Cost(0, of_heads * scores, state_read=of_kv_heads * read)
