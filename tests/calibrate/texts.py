"""What the tests of calibration learn from, and how."""

from __future__ import annotations

from pathlib import Path

from lce.calibrate import Calibration
from lce.methods.map_file import read_sealed

TEXT = "the quick brown fox jumps over the lazy dog, and then over the moon. " * 120
SMALL = Calibration(low_dim=8, tokens=1024, epochs=2, batch=64, far=8)
TINY = Calibration(low_dim=4, tokens=512, epochs=1, batch=64)


def bytes_of(out: Path) -> dict[str, bytes]:
    """The numbers of a map file, to the bit."""
    tensors, metadata = read_sealed(out, 1 << 20)
    return {name: x.numpy().tobytes() for name, x in tensors.items()} | {"for": metadata["learned_for"].encode()}
