"""`python -m lce.kernels [LEVEL ...]` does what `lce warm` does, and needs Numba alone: installing lce runs it."""

from __future__ import annotations

import sys

from lce.errors import LceError
from lce.kernels.runtime import levels
from lce.kernels.runtime.building import build

if __name__ == "__main__":
    try:
        for level in [levels.find(name) for name in sys.argv[1:]] or [levels.asked()]:
            print(build(level).line, file=sys.stderr)
    except LceError as error:
        sys.exit(f"lce: error: {error}")
