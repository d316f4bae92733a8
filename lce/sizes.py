"""Sizes in bytes and counts of tokens, as people write and read them. A k is 1024 everywhere, an M is 1024 k."""

import operator
import re
from fractions import Fraction

from lce.errors import UsageError, shown

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:B|([KMGT])(?:i?B)?)?", re.IGNORECASE)
_COUNT = re.compile(r"([0-9]{1,100})\s*([KMG]?)", re.IGNORECASE)
MOST = 1 << 60  # larger counts are refused as mistakes


def in_bytes(size: object, what: str) -> int:
    """Parse a size in bytes: `8 << 30`, "8GiB", "8GB" and "8G" are equal. Raises `UsageError` about `what`."""
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if match is not None:
        return int(Fraction(match[1]) * _factor(match[2]))
    number = _whole(size)
    if number is None or number < 0:
        raise UsageError(f"{what} is {shown(size)}; expected a number of bytes, or a size such as 8GiB, 8G or 512MiB")
    return number


def count(value: object, what: str, least: int = 1, most: int = MOST) -> int:
    """Parse a number from `least` to `most`: 4096, "4096" and "4k" are equal. Raises `UsageError` about `what`."""
    match = _COUNT.fullmatch(value.strip()) if isinstance(value, str) else None
    number = int(match[1]) * _factor(match[2]) if match is not None else _whole(value)
    if number is None:
        raise UsageError(f"{what} is {shown(value)}; expected a whole number, such as 512 or 4k")
    if number > most:
        raise UsageError(f"{what} is {shown(value)}; expected {most} or less")
    if number < least:
        raise UsageError(f"{what} is {shown(value)}; expected {least} or more")
    return number


def _factor(letter: str | None) -> int:
    """Return 1024 for k, 1024 k for M, and so on; 1 for no letter."""
    return 1 << 10 * "BKMGT".index((letter or "B").upper())


def _whole(value: object) -> int | None:
    """Convert a whole number of any type, such as NumPy's, to an int. Return None for a bool or any other value."""
    if isinstance(value, bool | str):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def size_text(n_bytes: int) -> str:
    """Return a number of bytes as text for people: `size_text(1536)` is "1.5 KiB"."""
    power = _power(n_bytes)
    return f"{n_bytes / 1024**power:.1f} {UNITS[power]}" if power else f"{n_bytes} B"


def enough_text(n_bytes: int) -> str:
    """Return a size as users type it in options, rounded up to a tenth of its unit: `enough_text(1537)` is "1.6KiB"."""
    power = _power(n_bytes)
    tenths = -(-10 * n_bytes // 1024**power)
    if tenths == 10 * 1024 and power + 1 < len(UNITS):
        power, tenths = power + 1, 10
    return f"{tenths // 10}.{tenths % 10}{UNITS[power]}" if power and tenths % 10 else f"{tenths // 10}{UNITS[power]}"


def _power(n_bytes: int) -> int:
    """Return the index in `UNITS` of the largest unit that is at most `n_bytes`. Example: 1 (KiB) for 1024 bytes."""
    return min(max(0, n_bytes.bit_length() - 1) // 10, len(UNITS) - 1)
