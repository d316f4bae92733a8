"""What a layer's cache holds for each token besides its key and value: stores that grow, or slide, with the text.

A store is written by token index and is told nothing of commits: what a discarded pass wrote lies at indices that the
next pass writes again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor


class Store(ABC):
    """Something kept of tokens `0..n-1`, or of the last of them."""

    @abstractmethod
    def copy(self, n_tokens: int) -> Self:
        """A store of its own with what this one has of the first `n_tokens`."""

    @abstractmethod
    def tensors(self, n_tokens: int) -> dict[str, Tensor]:
        """What `restore` needs to make a store of the first `n_tokens` again."""

    @classmethod
    @abstractmethod
    def restore(cls, tensors: Mapping[str, Tensor]) -> Self:
        """The store that `tensors` were taken of."""

    @property
    @abstractmethod
    def n_bytes(self) -> int:
        """Bytes held."""


class RecentKeys(Store):
    """The last `keep` keys `[G, n, D]`, and those of the block at work, rotated at their absolute positions.

    For a method whose cache holds keys otherwise: near keys are seen at their true distance without being rotated
    again for every query. Time: O(1) a token, amortised. Bytes: at most `2 · keep` keys, and a block's.
    """

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self._held: tuple[Tensor | None, int] = (None, 0)  # the buffer, and which token its first column is

    def write(self, k_rot: Tensor, start: int) -> None:
        """Put the keys `[G, T, D]` of tokens `start..start+T-1` behind those of the tokens before them."""
        buffer, first = self._held
        stop = start + k_rot.shape[1]
        if buffer is None or stop - first > buffer.shape[1]:
            kept = min(start - first, self.keep)
            grown = k_rot.new_empty(k_rot.shape[0], kept + max(k_rot.shape[1], self.keep), k_rot.shape[2])
            if buffer is not None:
                grown[:, :kept] = buffer[:, start - first - kept : start - first]
            buffer, first = grown, start - kept
        buffer[:, start - first : stop - first] = k_rot
        self._held = (buffer, first)

    def since(self, index: int, stop: int) -> Tensor:
        """The keys of tokens `index..stop-1`, a view; `index` is at most `keep` behind the block at work."""
        buffer, first = self._held
        assert buffer is not None
        assert first <= index, "asked for a key that is no longer kept"
        return buffer[:, index - first : stop - first]

    def copy(self, n_tokens: int) -> RecentKeys:
        other = RecentKeys(self.keep)
        buffer, first = self._held
        if buffer is not None:
            kept = min(n_tokens - first, self.keep)
            other._held = (buffer[:, n_tokens - first - kept : n_tokens - first].clone(), n_tokens - kept)
        return other

    def tensors(self, n_tokens: int) -> dict[str, Tensor]:
        buffer, first = self.copy(n_tokens)._held
        known = {"keep": torch.tensor(self.keep), "first": torch.tensor(first)}
        return known if buffer is None else {**known, "keys": buffer}

    @classmethod
    def restore(cls, tensors: Mapping[str, Tensor]) -> Self:
        store = cls(int(tensors["keep"]))
        store._held = (tensors.get("keys"), int(tensors["first"]))
        return store

    @property
    def n_bytes(self) -> int:
        buffer = self._held[0]
        return 0 if buffer is None else buffer.numel() * buffer.element_size()


class TokenRows(Store):
    """A row of numbers `[R]` a token; the buffer grows by half, never a token at a time."""

    def __init__(self) -> None:
        self._rows: Tensor | None = None

    def write(self, rows: Tensor, start: int) -> None:
        """Put the rows `[T, R]` of tokens `start..start+T-1`. Time and bytes: O(T · R), amortised."""
        stop = start + rows.shape[0]
        old = self._rows
        if old is None or stop > old.shape[0]:
            grown = rows.new_empty(max(stop, 0 if old is None else old.shape[0] * 3 // 2, 64), rows.shape[1])
            if old is not None:
                grown[:start] = old[:start]
            self._rows = grown
        assert self._rows is not None
        self._rows[start:stop] = rows

    def span(self, start: int, stop: int) -> Tensor:
        """The rows `[stop - start, R]` of some tokens, a view."""
        assert self._rows is not None
        return self._rows[start:stop]

    def copy(self, n_tokens: int) -> Self:
        other = type(self)()
        if self._rows is not None:
            other._rows = self._rows[:n_tokens].clone()
        return other

    def tensors(self, n_tokens: int) -> dict[str, Tensor]:
        return {} if self._rows is None else {"rows": self._rows[:n_tokens]}

    @classmethod
    def restore(cls, tensors: Mapping[str, Tensor]) -> Self:
        store = cls()
        store._rows = tensors.get("rows")
        return store

    @property
    def n_bytes(self) -> int:
        return 0 if self._rows is None else self._rows.numel() * self._rows.element_size()
