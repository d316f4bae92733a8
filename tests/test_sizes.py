"""Sizes in bytes, as people write and read them."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lce.errors import UsageError
from lce.sizes import UNITS, count, enough_text, in_bytes, size_text


@pytest.mark.parametrize(
    ("size", "n_bytes"),
    [
        (0, 0),
        (8 << 30, 8 << 30),
        ("512B", 512),
        ("1KiB", 1024),
        ("8GiB", 8 << 30),
        (" 512 MiB ", 512 << 20),
        ("1.5 kib", 1536),
        ("0.5TIB", 1 << 39),
        ("0.3B", 0),
        ("8G", 8 << 30),
        ("8gb", 8 << 30),
        ("1k", 1024),
    ],
)
def test_sizes_in_bytes(size: int | str, n_bytes: int) -> None:
    assert in_bytes(size, "budget") == n_bytes


@pytest.mark.parametrize(
    "size",
    [
        "",
        " ",
        "GiB",
        "8Gi",
        "8 gigabytes",
        "-1",
        "-1GiB",
        "+1",
        "1e9",
        "1.GiB",
        ".5GiB",
        "1,5GiB",
        "1_000",
        "8GiB8",
        "8 GiB\n1",
        "٣GiB",
        "nan",
        "inf",
        "0x10",
        -1,
        True,
        False,
        1.5,
        None,
        [8],
    ],
)
def test_other_values_are_refused(size: object) -> None:
    with pytest.raises(UsageError, match=r"^budget is .*; expected a number of bytes, or a size such as 8GiB.*\Z"):
        in_bytes(size, "budget")


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (8 << 30, "8.0 GiB"), (5 << 50, "5120.0 TiB")],
)
def test_bytes_as_text(n_bytes: int, text: str) -> None:
    assert size_text(n_bytes) == text


@given(st.integers(0, 1 << 60))
def test_a_printed_size_reads_back_to_a_tenth_of_its_unit(n_bytes: int) -> None:
    text = size_text(n_bytes)
    unit = 1024 ** UNITS.index(text.split()[1])
    assert abs(in_bytes(text, "budget") - n_bytes) <= unit / 20 + 1
    assert text == f"{n_bytes} B" if n_bytes < 1024 else n_bytes >= unit > n_bytes / 1024 or unit == 1 << 40


@pytest.mark.parametrize(("value", "number"), [(1, 1), ("512", 512), ("4k", 4096), (" 2 K ", 2048), ("1M", 1 << 20)])
def test_counts(value: object, number: int) -> None:
    assert count(value, "tokens") == number


@pytest.mark.parametrize("value", ["", "k", "1.5k", "4kB", "4KiB", "-1", "1e3", "٣", 1.5, True, None, [4], "1" * 101])
def test_what_is_no_count_is_refused(value: object) -> None:
    with pytest.raises(UsageError, match=r"^tokens is .*; expected a whole number, such as 512 or 4k\Z"):
        count(value, "tokens")


@pytest.mark.parametrize(("value", "least"), [(0, 1), ("0k", 1), (-5, 0), (1, 2)])
def test_too_small_counts_are_refused(value: object, least: int) -> None:
    with pytest.raises(UsageError, match=rf"^tokens is .*; expected {least} or more\Z"):
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


@pytest.mark.parametrize("value", [2**60 + 1, "9" * 19, "9" * 90, "2000000000G"])
def test_too_large_counts_are_refused(value: object) -> None:
    with pytest.raises(UsageError, match="expected 1152921504606846976 or less"):
        count(value, "tokens")
