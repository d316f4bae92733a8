"""The site: its navigation and its reference of the public face are complete, and its hooks turn links and names."""

import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import lce
from tests.docs.scripts import DOCS, ROOT, load

CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
SECTION = CONFIG.partition("\nnav:")[2].partition("\nextra:")[0]
NAV = re.findall(r"^ +- (?:.*: )?([\w./]+(?:\.md|/))$", SECTION, re.MULTILINE)
OUTSIDE = dict(re.findall(r"^    ([\w./]+\.md): (\S+)$", CONFIG, re.MULTILINE))


def test_every_page_is_in_the_navigation() -> None:
    folders = [entry for entry in NAV if entry.endswith("/")]
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert {page for page in pages if not page.startswith(tuple(folders))} | set(OUTSIDE) == set(NAV) - set(folders)
    assert len(NAV) == len(set(NAV))
    assert all((ROOT / path).is_file() for path in OUTSIDE.values())


def referenced() -> dict[str, Path]:
    """The names whose reference the pages ask for, and the page of each."""
    found: dict[str, Path] = {}
    for page in sorted((DOCS / "api").glob("*.md")):
        for names in re.findall(r"<!-- api: (.*?) -->", page.read_text(encoding="utf-8"), re.DOTALL):
            asked = [name.partition("=")[0] for name in names.split() if name != "members=no"]
            assert not set(asked) & set(found)
            found |= dict.fromkeys(asked, page)
    return found


def test_the_whole_face_is_in_the_reference() -> None:
    face = {f"lce.{name}" for name in lce.__all__} - {"lce.methods", "lce.__version__"}
    exported = re.findall(r" as (\w+)$", (ROOT / "lce/methods/__init__.py").read_text(encoding="utf-8"), re.MULTILINE)
    face |= {f"lce.methods.{name}" for name in exported} - {"lce.methods.Method", "lce.methods.SelectiveMethod"}
    names = referenced()
    assert face <= set(names)
    for name, page in names.items():
        assert f"`{name}`" in page.read_text(encoding="utf-8") or name.startswith("lce.methods."), name


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    pytest.importorskip("mkdocs", reason="the site's packages are not installed: make docs installs them")
    return load("site/hooks.py")


def turned(hooks: ModuleType, uri: str, markdown: str) -> str:
    page = SimpleNamespace(file=SimpleNamespace(src_uri=uri))
    result: str = hooks.on_page_markdown(markdown, page=page, config=None, files=None)
    return result


def test_links_are_turned_to_where_pages_are(hooks: ModuleType) -> None:
    hooks._uris.clear()
    hooks._uris |= {"README.md": "index.md", "examples/custom_method/README.md": "examples/custom_method/README.md"}
    for page, before, after in (
        ("index.md", "[a](docs/cache.md#b) `[a](docs/cache.md)`", "[a](cache.md#b) `[a](docs/cache.md)`"),
        ("methods.md", "[a](../examples/custom_method)", "[a](examples/custom_method/README.md)"),
        ("api/errors.md", "[a](../../README.md) [b](../python.md)", "[a](../index.md) [b](../python.md)"),
        ("methods.md", "[a](https://x.org) [b](#c) [d](none.txt)", "[a](https://x.org) [b](#c) [d](none.txt)"),
    ):
        assert turned(hooks, page, before) == after


def test_names_become_their_reference(hooks: ModuleType) -> None:
    hooks._uris.clear()
    assert turned(hooks, "api/x.md", "<!-- api: lce.load\nlce.plan -->") == "::: lce.load\n\n::: lce.plan"
    made = turned(hooks, "api/x.md", "<!-- api: members=no a.run=a.run.run -->")
    assert made == "::: a.run.run\n    options:\n      members: false\n      heading: a.run"


def test_a_page_that_loads_from_elsewhere_is_refused(hooks: ModuleType) -> None:
    from mkdocs.exceptions import PluginError

    page = SimpleNamespace(file=SimpleNamespace(src_uri="api/x.md"))
    made = hooks.on_post_page('<script src="https://unpkg.com/iframe-worker/shim"></script>', page=page, config=None)
    assert made == '<script src="../site/iframe-worker.js"></script>'
    assert hooks.on_post_page('<a href="https://x.org">x</a>', page=page, config=None)
    style = '<link rel="stylesheet" href="//x.org/a.css">'
    for html in ('<script src="https://x.org/a.js">', style, "<img src=http://x.org>"):
        with pytest.raises(PluginError, match="loads from elsewhere"):
            hooks.on_post_page(html, page=page, config=None)
