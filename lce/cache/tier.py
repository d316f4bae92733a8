"""The interface of tiers: pages are written to a tier and read from it, and another tier is below."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lce.cache.formats import KVFormat, Parts, Plain
from lce.cache.movers import Mover
from lce.cache.pages import Numbers, Pages
from lce.cache.row_file import FULL
from lce.errors import CapacityError


@dataclass
class Traffic:
    """The traffic of a tier: requested pages that were there (`hits`) or not (`misses`), bytes in and out.

    `early` pages were fetched ahead of a request, by the last request.
    """

    hits: int = 0
    misses: int = 0
    early: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


class Tier(ABC):
    """A place for pages, above another tier."""

    name: str
    traffic: Traffic
    below: Tier
    n_bytes: int  # bytes held now
    format: KVFormat  # of the pages here

    @abstractmethod
    def holds(self, pages: Pages) -> NDArray[np.bool_]:
        """Return which pages are in this tier or below."""

    @abstractmethod
    def read(self, pages: Pages) -> Parts:
        """Return copies of pages, as this tier stores them, from here or from below."""

    def order(self, pages: Pages) -> Numbers:
        """Return the order of pages in which `read` is fastest."""
        return np.arange(len(pages.group))

    @abstractmethod
    def read_rows(self, pages: Pages, offsets: Numbers) -> Tensor:
        """Return copies of single tokens of pages, rows `[n, 2, P, D]`, from here or from below."""

    @abstractmethod
    def write(self, pages: Pages, *parts: Tensor) -> None:
        """Write pages, in this tier's format, that no tier below has. Not atomic: call again after an error."""

    @abstractmethod
    def forget(self, pages: Pages) -> None:
        """Remove pages here and below, because new contents are about to be written."""


class Nowhere(Tier):
    """The end of the chain, without pages."""

    name = ""
    n_bytes = 0
    format = Plain(0, 0, 0, torch.float32)

    def holds(self, pages: Pages) -> NDArray[np.bool_]:
        return np.zeros(np.broadcast(*pages).shape, bool)

    def read(self, pages: Pages) -> Parts:
        raise AssertionError("a page that is in no tier")

    def read_rows(self, pages: Pages, offsets: Numbers) -> Tensor:
        raise AssertionError("a page that is in no tier")

    def write(self, pages: Pages, *parts: Tensor) -> None:
        raise CapacityError(FULL)

    def forget(self, pages: Pages) -> None:
        pass


def joined(where: tuple[Numbers, Numbers], parts: tuple[Parts, Parts], mover: Mover) -> Parts:
    """Join two runs of pages, in the memory of the mover's slots.

    `parts[i]` are the entries `where[i]` of the result.
    """
    order = mover.upload(torch.from_numpy(np.argsort(np.concatenate(where))))
    return tuple(torch.cat(both).index_select(0, order) for both in zip(*parts, strict=True))
