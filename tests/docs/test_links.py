"""Every relative link and anchor in the repository's Markdown leads somewhere, as GitHub reads them."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "benchmarks", "examples", "lce", "lce_serve", "lce_lab")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
CODE = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)|\b(?:src|href)=\"([^\"]+)\"")


def links(text: str) -> list[str]:
    """What a page links to in the repository, pictures included; code is no link."""
    found = [match[1] or match[2] for match in LINK.finditer(CODE.sub("", text))]
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings as GitHub makes them, a number behind a repeated one; and those of its HTML."""
    plain = re.sub(r"^( *)(```+|~~~+).*?^\1\2 *$", "", text, flags=re.MULTILINE | re.DOTALL)
    found: list[str] = []
    for heading in re.findall(r"^#{1,6} +(.*?) *#*$", plain, re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        found.append(slug if slug not in found else f"{slug}-{found.count(slug)}")
    return {*found, *re.findall(r"\b(?:id|name)=\"([^\"]+)\"", plain)}


@cache
def anchors_of(page: Path) -> set[str]:
    return anchors(page.read_text(encoding="utf-8"))


def broken(page: Path, root: Path = ROOT) -> list[str]:
    """The links of a page that lead nowhere, or out of the repository."""
    found = []
    for link in links(page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        missing = not target.exists() or not target.resolve().is_relative_to(root)
        if missing or (anchor and anchor not in anchors_of(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_anchors_are_those_of_github() -> None:
    text = "# `esa`\n\n## Why a method missed\n## 8 bits: keys\n## [A](b.md) link\n## Same\n## Same\n```\n# code\n```\n"
    assert anchors(text) == {"esa", "why-a-method-missed", "8-bits-keys", "a-link", "same", "same-1"}


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page, other = tmp_path / "page.md", tmp_path / "folder" / "other.md"
    other.parent.mkdir()
    other.write_text("# Here\n[back](../page.md#top)")
    page.write_text(
        "# Top\n[a](b.md) `[c](d.md)` ![e](f.png)\n```\n[g](h.md)\n```\n[i](https://x.org) [j](#k) [l](#top)\n"
        "[m](folder) [n](folder/other.md#here) [o](folder/other.md#there) [p](..) <img src='q'> <img src=\"r.svg\">\n"
    )
    assert broken(page, tmp_path) == ["b.md", "f.png", "#k", "folder/other.md#there", "..", "r.svg"]
    assert broken(other, tmp_path) == []
