"""Checks of rows: in memory and in a file they are what was put there, and a damaged row has another one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lce.cache import checks as module
from lce.cache.checks import Checks, FiledChecks, fingerprints, runs
from lce.errors import DataError

START, N = 10, 50  # bytes before the checks of a file, and how many there are


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECK_BLOCK", 8)


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    """Of a file whose check of row i is 1000 + i."""
    numbers = np.arange(1000, 1000 + N, dtype=np.int32)
    (tmp_path / "file").write_bytes(bytes(START) + numbers.tobytes())
    opened = os.open(tmp_path / "file", os.O_RDWR)
    yield opened
    os.close(opened)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_table_is_what_was_put_there(data: st.DataObject) -> None:
    checks, truth = Checks(), dict[int, int]()
    for step in range(data.draw(st.integers(1, 8))):
        rows = data.draw(st.lists(st.integers(0, 99), unique=True, max_size=9))
        numbers = [(step * 31 + row * 7) ^ -step for row in rows]
        checks.put(np.array(rows, np.int64), torch.tensor(numbers, dtype=torch.int32))
        truth.update(zip(rows, numbers, strict=True))
    known = sorted(truth)
    assert checks.of(np.array(known, np.int64)).tolist() == [truth[row] for row in known]
    assert checks.n_bytes == 4 * 8 * len({row // 8 for row in truth})


@given(asked=st.lists(st.lists(st.integers(0, N - 1), min_size=1), max_size=5))
@settings(max_examples=40, deadline=None)
def test_a_file_is_read_a_block_at_a_time(asked: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("checks") / "file"
    path.write_bytes(bytes(START) + np.arange(N, dtype=np.int32).tobytes())
    with path.open("rb") as file:
        checks = FiledChecks(file.fileno(), "it", START, N)
        assert checks.n_bytes == 0
        for rows in asked:
            assert checks.of(np.array(rows)).tolist() == rows
        read = {row // 8 for rows in asked for row in rows}
        assert checks.n_bytes == 4 * sum(min(8, N - 8 * block) for block in read)


def test_what_is_put_goes_to_the_file(descriptor: int) -> None:
    """Whether its block was read before or not; and another reader finds it there."""
    checks = FiledChecks(descriptor, "it", START, N)
    assert checks.of(np.array([3, 40])).tolist() == [1003, 1040]
    rows = np.array([2, 3, 4, 20, 48, 49])
    checks.put(rows, torch.arange(6, dtype=torch.int32))
    for each in (checks, FiledChecks(descriptor, "it", START, N)):
        assert each.of(rows).tolist() == [0, 1, 2, 3, 4, 5]
        assert each.of(np.array([1, 5, 19, 21, 47])).tolist() == [1001, 1005, 1019, 1021, 1047]


def test_a_file_that_is_cut_short_is_an_error_and_what_is_known_stays(descriptor: int) -> None:
    checks = FiledChecks(descriptor, "it", START, N)
    checks.of(np.array([0]))
    os.ftruncate(descriptor, START + 4 * 20)
    assert checks.of(np.array([7])).tolist() == [1007]
    with pytest.raises(DataError, match=r"^it was cut short since it was opened; prefill the text again\Z"):
        checks.of(np.array([22]))


@given(data=st.data(), width=st.sampled_from([8, 16, 64]))
@settings(max_examples=80, deadline=None)
def test_a_fingerprint_is_of_every_byte_and_of_the_place(data: st.DataObject, width: int) -> None:
    rows = torch.randint(0, 256, (6, width), generator=torch.Generator().manual_seed(width)).to(torch.uint8)
    first = data.draw(st.integers(0, 1 << 40))
    truth = fingerprints(rows, first)
    assert torch.equal(truth, fingerprints(rows, first + torch.arange(6)))
    row, byte, change = (data.draw(st.integers(*span)) for span in ((0, 5), (0, width - 1), (1, 255)))
    rows[row, byte] ^= change
    assert (fingerprints(rows, first) != truth).tolist() == [at == row for at in range(6)]
    assert not (fingerprints(rows, first + 1) == truth).any(), "rows that changed places"


@given(first=st.lists(st.integers(0, 30), max_size=20), size=st.integers(1, 4))
def test_runs_are_adjacent_pages(first: list[int], size: int) -> None:
    found = runs(np.array(first, np.int64), size)
    assert [at for a, b in found for at in range(a, b)] == list(range(len(first)))
    assert all(first[i + 1] - first[i] == size for a, b in found for i in range(a, b - 1))
    assert all(first[b] - first[b - 1] != size for _, b in found if b < len(first))


@pytest.mark.parametrize("bit", range(64))
def test_two_flips_of_the_same_bit_are_seen(bit: int) -> None:
    """Of a word's highest bits a product modulo 2^64 keeps little."""
    words = torch.randint(-(2**62), 2**62, (1, 16), generator=torch.Generator().manual_seed(bit))
    truth, flip = fingerprints(words, 5), torch.tensor(1).bitwise_left_shift(bit)
    pairs = torch.combinations(torch.arange(16))
    damaged = words.repeat(len(pairs), 1)
    damaged.scatter_(1, pairs, damaged.gather(1, pairs) ^ flip)
    assert (fingerprints(damaged, torch.full((len(pairs),), 5)) != truth).all()
