"""The scripts of the docs as modules, which lie in no package; and the words of the code."""

import importlib.util
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PACKAGES = [ROOT / name for name in ("lce", "lce_serve", "lce_lab")]
FILES = [file for package in PACKAGES for file in sorted(package.rglob("*.py"))]


def load(path: str | Path) -> ModuleType:
    """Return the module in a file, by default one of docs/."""
    file = DOCS / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@cache
def words() -> set[str]:
    """Return all words of the packages' files."""
    return {word for file in FILES for word in re.findall(r"\w+", file.read_text(encoding="utf-8"))}
