"""Sizes in bytes, as people write and read them."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lce.errors import UsageError
from lce.sizes import UNITS, count, enough_text, in_bytes, size_text

IN_BYTES = "512B 512, 1KiB 1024, 1k 1024, 1.5 kib 1536, 0.3B 0, 0.5TIB 549755813888, 8G 8589934592, 8gb 8589934592"
NO_SIZES = "GiB 8Gi -1 -1GiB +1 1e9 1.GiB .5GiB 1,5GiB 1_000 8GiB8 ٣GiB nan inf 0x10".split()
NO_SIZES += ["", " ", "8 gigabytes", "8 GiB\n1"]


def test_sizes_in_bytes() -> None:
    for size, n_bytes in (0, 0), (8 << 30, 8 << 30), (" 512 MiB ", 512 << 20):
        assert in_bytes(size, "budget") == n_bytes
    for size, _, number in (pair.rpartition(" ") for pair in IN_BYTES.split(", ")):
        assert in_bytes(size, "budget") == int(number)


@pytest.mark.parametrize("size", [*NO_SIZES, -1, True, False, 1.5, None, [8]])
def test_other_values_are_refused(size: object) -> None:
    with pytest.raises(UsageError, match=r"^budget is .*; expected a number of bytes, or a size such as 8GiB.*\Z"):
        in_bytes(size, "budget")


def test_bytes_as_text() -> None:
    sizes = (0, 1023, 1024, 1536, 8 << 30, 5 << 50)
    assert [*map(size_text, sizes)] == ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "8.0 GiB", "5120.0 TiB"]


@given(st.integers(0, 1 << 60))
def test_a_printed_size_reads_back_to_a_tenth_of_its_unit(n_bytes: int) -> None:
    text = size_text(n_bytes)
    unit = 1024 ** UNITS.index(text.split()[1])
    assert abs(in_bytes(text, "budget") - n_bytes) <= unit / 20 + 1
    assert text == f"{n_bytes} B" if n_bytes < 1024 else n_bytes >= unit > n_bytes / 1024 or unit == 1 << 40


@pytest.mark.parametrize(("value", "number"), [(1, 1), ("512", 512), ("4k", 4096), (" 2 K ", 2048), ("1M", 1 << 20)])
def test_counts(value: object, number: int) -> None:
    assert count(value, "tokens") == number


NO_COUNT, LARGE = "expected a whole number, such as 512 or 4k", "expected 1152921504606846976 or less"


@pytest.mark.parametrize(
    ("values", "least", "expected"),
    [
        (["", "k", "1.5k", "4kB", "4KiB", "-1", "1e3", "٣", 1.5, True, None, [4], "1" * 101], 1, NO_COUNT),
        ([0, "0k"], 1, "expected 1 or more"),
        ([-5], 0, "expected 0 or more"),
        ([2**60 + 1, "9" * 19, "9" * 90, "2000000000G"], 1, LARGE),
    ],
)
def test_what_is_no_count_or_out_of_range_is_refused(values: list[object], least: int, expected: str) -> None:
    for value in values:
        with pytest.raises(UsageError, match=rf"^tokens is .*; {expected}\Z"):
            count(value, "tokens", least)


@given(n_bytes=st.integers(0, 1 << 55))
@example(n_bytes=(1 << 40) - 1)
@example(n_bytes=(1 << 20) - 1)
def test_enough_is_enough_and_little_more(n_bytes: int) -> None:
    """Given back as an option it holds the bytes: rounded up, where other texts are rounded to the nearest."""
    text = enough_text(n_bytes)
    assert n_bytes <= in_bytes(text, "it") <= n_bytes * 1.1 + 1
    assert " " not in text
    assert enough_text(in_bytes(text, "it")) == text
