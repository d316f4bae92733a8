"""What the site does with Markdown that also reads well on its own: hooks of MkDocs, named in mkdocs.yml.

- Files outside docs/ become pages: those of `extra.outside`, and whatever a page links to. A file of code becomes a
  page that shows it, any other file is copied. Links are turned to where their targets are in the site.
- A folder in the navigation, `tour/`, stands for its pages in the order of their names.
- `<!-- api: lce.load lce.plan -->` becomes the reference of these names, made from their docstrings. `members=no`
  leaves out what classes have; `name=home` says where a name is that a module has too.
- The site needs no network: the one script that the theme loads from elsewhere is in docs/site, and a page that asks
  for anything else from elsewhere is an error.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
CODE = {
    ".py": "python",
    ".toml": "toml",
    ".sh": "bash",
    ".cfg": "ini",
    ".yaml": "yaml",
    ".conf": "nginx",
    ".js": "js",
    ".css": "css",
}
FENCED = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
INFO = re.compile(
    r"^( *(?:```+|~~~+) *\w+) +[^\n{}=]*$", re.MULTILINE
)  # words behind a block's language, for other tools
ROW = re.compile(r"^\|.*$", re.MULTILINE)  # of a table, where GitHub writes a stroke in code as \|
SPAN = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"(?P<before>\]\()(?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?P<after>\))")
API = re.compile(r"^<!-- api: (.*?) -->$", re.MULTILINE | re.DOTALL)
SHIM = "https://unpkg.com/iframe-worker/shim"  # of Material's plugin `offline`
ELSEWHERE = re.compile(r"<(?:script|img|iframe|source|link)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>")

_uris: dict[str, str] = {}  # a file of the repository outside docs/, and the page or file of the site that it is


def prose(markdown: str) -> Iterator[tuple[str, bool]]:
    """The pieces of a page in order, each with whether it is prose and not code."""
    at = 0
    for match in FENCED.finditer(markdown):
        yield markdown[at : match.start()], True
        yield match.group(), False
        at = match.end()
    yield markdown[at:], True


def targets(markdown: str) -> list[str]:
    """What a page links to in the repository, without anchors."""
    found = [match["target"] for text, is_prose in prose(markdown) if is_prose for match in LINK.finditer(text)]
    return [target for target in found if "://" not in target and not target.startswith(("mailto:", "/"))]


def repository_path(page: str, target: str) -> str:
    """The file that a link `target` of the file `page` means; a folder stands for its README or index."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    for name in ("README.md", "index.md") if (ROOT / path).is_dir() else ():
        if (ROOT / path / name).is_file():
            return posixpath.join(path, name)
    return path


def in_order(name: str) -> tuple[bool, list[int], str]:
    """Pages by their names: the folder's own page first, and numbers as numbers."""
    return name not in ("README.md", "index.md"), [int(number) for number in re.findall(r"^\d+", name)], name


def uri_of(path: str) -> str | None:
    """Where a file of the repository is in the site; None if it is not there."""
    return path.removeprefix("docs/") if path.startswith("docs/") else _uris.get(path)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.nav = _expanded(config.nav)
    return config


def _expanded(nav: Any) -> Any:
    """The navigation with folders replaced by their pages; without those that have none."""
    if isinstance(nav, list):
        return [entry for entry in map(_expanded, nav) if entry]
    if isinstance(nav, dict):
        ((title, inner),) = nav.items()
        found = _expanded(inner)
        return {title: found} if found else None
    if nav.endswith("/"):
        pages = sorted((path.name for path in (ROOT / "docs" / nav).glob("*.md")), key=in_order)
        return [nav + name for name in pages]
    return nav


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside docs/, beginning with those that are named and then those that pages link to."""
    _uris.clear()
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    for uri, path in config.extra["outside"].items():
        _uris[path] = uri
        files.append(File.generated(config, uri, content=(ROOT / path).read_text(encoding="utf-8")))
        waiting.append(path)
    for page in waiting:  # grows
        for target in targets((ROOT / page).read_text(encoding="utf-8")):
            path = repository_path(page, target)
            if path not in _uris and not path.startswith(("docs/", "..")) and (ROOT / path).is_file():
                files.append(_outside(path, config))
                waiting += [path] if path.endswith(".md") else []
    return files


def _outside(path: str, config: MkDocsConfig) -> File:
    """A file outside docs/ as a page, or as it is."""
    kind = CODE.get(posixpath.splitext(path)[1])
    if kind is None:
        _uris[path] = path
        return File.generated(config, path, content=(ROOT / path).read_bytes())
    _uris[path] = f"source/{path}.md"
    text = (ROOT / path).read_text(encoding="utf-8")
    page = f"# {path}\n\n`````` {{.{kind} linenums=1}}\n{text}\n``````\n"
    return File.generated(config, _uris[path], content=page)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    uri = page.file.src_uri
    own = {site: path for path, site in _uris.items()}.get(uri, f"docs/{uri}")
    if uri.startswith("source/"):
        return markdown

    def turned(match: re.Match[str]) -> str:
        target = match["target"]
        if "://" in target or target.startswith(("mailto:", "/")):
            return match.group()
        found = uri_of(repository_path(own, target))
        target = target if found is None else posixpath.relpath(found, posixpath.dirname(uri))
        return f"{match['before']}{target}{match['anchor'] or ''}{match['after']}"

    pieces = (LINK.sub(turned, text) if is_prose else INFO.sub(r"\1", text) for text, is_prose in prose(markdown))
    text = ROW.sub(lambda row: SPAN.sub(lambda span: span.group().replace("\\|", "|"), row.group()), "".join(pieces))
    text = text.replace("<details>", '<details markdown="1">')  # what is folded is Markdown too, as on GitHub
    return API.sub(_reference, text)


def _reference(match: re.Match[str]) -> str:
    words = match[1].split()
    members = "\n      members: false" if "members=no" in words else ""
    entries = []
    for name, _, home in (word.partition("=") for word in words if word != "members=no"):
        heading = f"\n      heading: {name}" if home else ""
        options = f"\n    options:{members}{heading}" if members or heading else ""
        entries.append(f"::: {home or name}{options}")
    return "\n\n".join(entries)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """The page with the theme's script from the site itself. Raises `PluginError` for anything else from elsewhere."""
    output = output.replace(SHIM, posixpath.relpath("site/iframe-worker.js", posixpath.dirname(page.file.src_uri)))
    found = ELSEWHERE.search(output)
    if found:
        raise PluginError(f"{page.file.src_uri} loads from elsewhere: {found.group()}")
    return output
