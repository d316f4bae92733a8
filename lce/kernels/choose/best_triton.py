"""The n best of many scores on GPUs, by a radix select without a sort.

One program selects among few scores, a bit at a time; many programs select among more, by four counts of 8-bit digits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from lce.kernels.runtime.launching import launch

PIECE = 4096  # scores of a program
_FEW = (1024, 4096, 1 << 14)  # `_select_few` is compiled for each of these maximal numbers of scores


def best_tokens(scores: Tensor, n: int) -> Tensor:
    """Return the ascending indices `[n]` of the n ≤ N largest of `scores [N]`; NaN is inf; of equal scores, the last.

    Grids depend on N alone. Up to 16,384 scores: one launch, which reads them once. More: six launches, which read them
    six times and write 4 KiB for each 4,096 of them.
    """
    assert 0 < n <= len(scores), (scores.shape, n)
    scores, chosen = scores.contiguous(), torch.empty(n, dtype=torch.int64, device=scores.device)
    if len(scores) <= _FEW[-1]:
        block = next(size for size in _FEW if len(scores) <= size)
        launch(_select_few, (1,), scores, chosen, (len(scores), n), BLOCK=block, num_warps=min(16, max(4, block >> 9)))
        return chosen
    n_pieces = triton.cdiv(len(scores), PIECE)
    counts, pieces = chosen.new_empty(4 * 256 + 2, n_pieces, dtype=torch.int32), triton.next_power_of_2(n_pieces)
    for digit in range(6):
        given, constants = (scores, counts, chosen, (len(scores), n, n_pieces)), {"DIGIT": digit, "PIECES": pieces}
        launch(_select, (n_pieces,), *given, **constants, BLOCK=PIECE, num_warps=8)
    return chosen


@triton.jit
def _sort_keys(scores, i, n):
    """Return the sort keys of `scores [n]` at `i`, unsigned and in the order of the scores: at least 1; 0 behind n."""
    score = tl.load(scores + i, mask=i < n, other=0.0).to(tl.float32)
    score = tl.where(score != score, float("inf"), score)
    bits = score.to(tl.uint32, bitcast=True)
    return tl.where(i < n, tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000), 0).to(tl.uint32)


@triton.jit(do_not_specialize=["sizes"])
def _select_few(scores, chosen, sizes, BLOCK: constexpr):
    """Find the n-th largest sort key of up to BLOCK: the largest number that at least n sort keys reach."""
    n_scores, n = sizes
    i = tl.arange(0, BLOCK)
    key = _sort_keys(scores, i, n_scores)
    worst, bit = tl.full((), 0, tl.uint32), tl.full((), 0x80000000, tl.uint32)
    while bit != 0:
        worst = tl.where(tl.sum((key >= (worst | bit)).to(tl.int32), 0) >= n, worst | bit, worst)
        bit = bit >> 1
    over, equal = key > worst, key == worst
    skipped = tl.sum((key >= worst).to(tl.int32), 0) - n  # the first of the equal ones
    taken = over | (equal & (tl.cumsum(equal.to(tl.int32), 0) > skipped))
    tl.store(chosen + tl.cumsum(taken.to(tl.int32), 0) - 1, i.to(tl.int64), mask=taken)


@triton.jit(do_not_specialize=["sizes"])
def _select(scores, counts, chosen, sizes, DIGIT: constexpr, PIECES: constexpr, BLOCK: constexpr):
    """Count digit DIGIT of a piece's sort keys, of those whose higher digits are the n-th largest sort key's.

    After the last digit, count the sort keys above the n-th largest, and those equal to it; then write indices.
    """
    n_scores, n, n_pieces = sizes
    piece, i = tl.program_id(0), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    digit, p = tl.arange(0, 256), tl.arange(0, PIECES)
    worst, left = tl.full((), 0, tl.uint32), n
    for d in tl.static_range(min(DIGIT, 4)):
        at = counts + (d * 256 + digit)[:, None] * n_pieces + p[None, :]
        total = tl.sum(tl.load(at, mask=(p < n_pieces)[None, :], other=0), 1)
        above = tl.sum(total, 0) - tl.cumsum(total, 0)
        mine = (above < left) & (above + total >= left)
        worst = worst * 256 + tl.sum(tl.where(mine, digit, 0), 0).to(tl.uint32)
        left -= tl.sum(tl.where(mine, above, 0), 0)
    key = _sort_keys(scores, i, n_scores)
    if DIGIT < 4:
        mine = (i < n_scores) & ((key >> (24 - 8 * DIGIT) >> 8) == worst)
        own = tl.where(mine, ((key >> (24 - 8 * DIGIT)) & 255).to(tl.int32), 256)
        bins = tl.arange(0, 512)
        tl.store(counts + (DIGIT * 256 + bins) * n_pieces + piece, tl.histogram(own, 512), mask=bins < 256)
    else:
        over, equal = (i < n_scores) & (key > worst), (i < n_scores) & (key == worst)
        at = counts + 4 * 256 * n_pieces
        n_equal = tl.sum(equal.to(tl.int32), 0)
        if DIGIT == 4:
            tl.store(at + piece, tl.sum(over.to(tl.int32), 0))
            tl.store(at + n_pieces + piece, n_equal)
        else:
            all_over = tl.load(at + p, mask=p < n_pieces, other=0)
            all_equal = tl.load(at + n_pieces + p, mask=p < n_pieces, other=0)
            skipped = tl.sum(all_equal, 0) - left  # the first of the equal ones
            before = tl.sum(tl.where(p < piece, all_equal, 0), 0)
            first = tl.sum(tl.where(p < piece, all_over, 0), 0) + tl.maximum(before - skipped, 0)
            taken = over | (equal & (before + tl.cumsum(equal.to(tl.int32), 0) > skipped))
            tl.store(chosen + first + tl.cumsum(taken.to(tl.int32), 0) - 1, i.to(tl.int64), mask=taken)
