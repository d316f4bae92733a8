"""What a stretch of code launched."""

from __future__ import annotations

from tests.pretended.device import Counts


def launched(counts: Counts) -> list[str]:
    """The operators and kernels, sorted, each as often as it was launched; memory without a value is none.

    The code must not have waited for the device, nor copied to it.
    """
    assert (counts.syncs, counts.uploads) == (0, 0), counts
    names = {name.removeprefix("launches: "): n for name, n in counts.at.items() if not name.endswith("empty")}
    return sorted(name for name, n in names.items() for _ in range(n))
