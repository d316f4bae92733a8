"""Scripts outside the package import names that lce has."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("lce", "lce_serve", "lce_lab")
FOLDERS = ("benchmarks", "docs", "examples", "tools")
SCRIPTS = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_what_a_script_imports_of_lce_exists(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PACKAGES:
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                assert hasattr(module, alias.name) or importlib.import_module(f"{node.module}.{alias.name}")
