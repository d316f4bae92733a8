"""A copy of pages that lie anywhere a GPU can read, page-locked memory of the host too: no core gathers them."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from lce.kernels.runtime.launching import launch

_PROGRAMS = 32  # programs that keep the host's bus busy, and leave most processors to the model


def gather_pages(pages: Tensor, addresses: Tensor) -> None:
    """Copy n pages, of which `addresses [n]` (int64) has the first bytes, to `pages [n, …]`, of whole 8 bytes each.

    The host does not wait. Bytes: the pages once over the bus.
    """
    words = pages.flatten(1).view(torch.int64)
    assert len(words) == len(addresses), (pages.shape, addresses.shape)
    assert words.numel() < 1 << 31, pages.shape
    launch(_gather_pages, (min(_PROGRAMS, len(words)),), words, addresses, *words.shape, BLOCK=1024)


@triton.jit(do_not_specialize=["n"])
def _gather_pages(words, addresses, n, size, BLOCK: constexpr):
    """Copy the pages `program`, `program + programs`, … of n, of `size` words each."""
    for page in range(tl.program_id(0), n, tl.num_programs(0)):
        source = tl.load(addresses + page).to(tl.pointer_type(tl.int64))
        into = words + page * size
        for first in range(0, size, BLOCK):
            at = first + tl.arange(0, BLOCK)
            tl.store(into + at, tl.load(source + at, mask=at < size), mask=at < size)
