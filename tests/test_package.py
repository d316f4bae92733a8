"""The public face, and the methods: one file each, exported, documented, in the README."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import lce

ROOT = Path(__file__).parent.parent
SHARED = set(  # files of lce/methods that hold no method that users name
    "__init__ attending base best_tokens costs decoding distances hooks joint lowdim lowdim_pages map_file mass parts "
    "placement registry run selective selectors step top_p observed own_window".split()
)

own_methods = [name for name in lce.methods.available() if lce.methods.find(name).__module__.startswith("lce.")]


@pytest.mark.parametrize("name", lce.__all__)
def test_all_of_the_face_resolves(name: str) -> None:
    assert getattr(lce, name) is not None
    assert name in dir(lce)


def test_the_face_has_nothing_else() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = lce.nothing
    assert lce.__all__ == sorted(lce.__all__, key=lambda name: (name.islower(), name))


def test_one_file_a_method() -> None:
    files = {path.stem for path in (ROOT / "lce" / "methods").glob("[!_]*.py")} - SHARED
    assert {lce.methods.find(name).__module__.rpartition(".")[2] for name in own_methods} == files
    assert len(own_methods) == len(files)


@pytest.mark.parametrize("name", own_methods)
def test_every_method_is_exported_and_documented_with_its_knobs(name: str) -> None:
    cls = lce.methods.find(name)
    assert getattr(lce.methods, cls.__name__) is cls
    assert inspect.getdoc(cls)
    knobs = {field.name for field in dataclasses.fields(cls)}
    assert f"\n| `{name}` |" in section(ROOT / "README.md", "Methods")
    own = section(ROOT / "docs" / "methods.md", f"`{name}`")
    assert set(re.findall(r"^\| `(\w+)` \|", own, re.MULTILINE)) == knobs


def section(page: Path, title: str) -> str:
    """The text below a heading of a page, up to the next one."""
    return page.read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]
