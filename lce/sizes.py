"""Sizes in bytes, as people write and read them."""

from __future__ import annotations

import re
from fractions import Fraction

from lce.errors import UsageError

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(B|KiB|MiB|GiB|TiB)?", re.IGNORECASE)


def in_bytes(size: int | str, what: str) -> int:
    """`8 << 30`, "8GiB" or "512 MiB" in bytes. For anything else raises `UsageError`, which calls the size `what`."""
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if match is not None:
        unit = next(i for i, name in enumerate(UNITS) if name.lower() == (match[2] or "B").lower())
        return int(Fraction(match[1]) * 1024**unit)
    if isinstance(size, str | bool) or size < 0:
        raise UsageError(f"{what} is {size!r}; expected a number of bytes, or a size such as 8GiB or 512MiB")
    return size


def size_text(n_bytes: int) -> str:
    """Bytes in the largest unit that they fill: `size_text(1536)` is "1.5 KiB"."""
    power = min(max(0, n_bytes.bit_length() - 1) // 10, len(UNITS) - 1)
    return f"{n_bytes / 1024**power:.1f} {UNITS[power]}" if power else f"{n_bytes} B"
