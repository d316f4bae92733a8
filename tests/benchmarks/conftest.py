"""The scripts in benchmarks/ import each other by their plain names, and so do their tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
