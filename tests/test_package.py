"""The public face, and the methods: one file each, exported, documented, in the README; what scripts import exists."""

import ast
import dataclasses
import importlib
import inspect
import re
from pathlib import Path

import pytest

import lce
from lce_lab.analysis import oracle as analysis
from tests.command import output

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(file for name in "benchmarks docs examples tools".split() for file in (ROOT / name).rglob("*.py"))
SHARED = set(  # files of lce/methods that hold no method that users name
    "__init__ attending auto base budget choices choosing costs decoding hooks joint knobs lowdim "
    "lowdim_pages map_file measured parts placement registry run selection selective selectors span_lanes step "
    "turned_keys wrapped".split()
)

own_methods = [name for name in lce.methods.available() if lce.methods.find(name).__module__.startswith("lce")]


@pytest.mark.parametrize("name", lce.__all__)
def test_all_of_the_face_resolves(name: str) -> None:
    assert getattr(lce, name) is not None
    assert name in dir(lce)


def test_the_face_has_nothing_else() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = lce.nothing
    assert lce.__all__ == sorted(lce.__all__)


def test_one_file_a_method() -> None:
    files = {path.stem for path in (ROOT / "lce" / "methods").glob("[!_]*.py")} - SHARED
    own = [module for name in own_methods if (module := lce.methods.find(name).__module__).startswith("lce.")]
    assert ({module.rpartition(".")[2] for module in own}, len(own)) == (files, len(files))


@pytest.mark.parametrize("name", own_methods)
def test_every_method_is_exported_and_documented_with_its_knobs(name: str) -> None:
    cls = lce.methods.find(name)
    assert getattr(lce.methods if cls.__module__.startswith("lce.") else analysis, cls.__name__) is cls
    assert inspect.getdoc(cls)
    knobs = {field.name for field in dataclasses.fields(cls)}
    assert f"\n| `{name}` |" in section(ROOT / "README.md", "Methods")
    own = section(ROOT / "docs" / "methods.md", f"`{name}`")
    assert set(re.findall(r"^\| `(\w+)` \|", own, re.MULTILINE)) == knobs


READ_BY_ALL = """
import sys, warnings, lce
warnings.simplefilter("ignore")
for name in lce.methods.available():
    options = {"compress": "pca"} if name == "esa" else None
    lce.load(sys.argv[1], lce.methods.make(name, options)).generate(list(range(200)), max_tokens=2)
print(*sys.modules)
"""


@pytest.mark.slow
def test_no_method_imports_a_compiler(tiny_model: Path) -> None:
    """Some functions of PyTorch import torch._dynamo or sympy at their first call, which takes up to 2 s."""
    assert not {"torch._dynamo", "sympy"} & {*output(READ_BY_ALL, tiny_model).split()}


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_what_a_script_imports_of_lce_exists(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and re.match(r"lce(_serve|_lab)?(\.|$)", node.module or ""):
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                assert hasattr(module, alias.name) or importlib.import_module(f"{node.module}.{alias.name}")


def section(page: Path, title: str) -> str:
    return page.read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]
