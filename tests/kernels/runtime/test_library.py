"""The digest in the folders' names covers what compiled code depends on, and nothing else."""

import ast
from collections.abc import Iterator
from pathlib import Path

from lce.kernels.runtime import library

ROOT = Path(__file__).parents[3]


def imported(file: Path) -> Iterator[Path]:
    """The files of kernels that a file imports."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                found = ROOT.joinpath(*name.split(".")).with_suffix(".py")
                if name.startswith("lce.kernels.") and found.is_file():
                    yield found


def test_the_digest_covers_what_bodies_import() -> None:
    reached = [file for file in library.sources() if file.stem.endswith("_body")]
    for file in reached:  # grows
        reached += [other for other in imported(file) if other not in reached]
    names_of_levels = {ROOT / "lce" / "kernels" / "runtime" / "levels.py"}  # a level has a folder of its own
    assert {*library.sources()} == {*reached} - names_of_levels
