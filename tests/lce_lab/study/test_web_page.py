"""Pages: what is put where, that no text can leave its place, and files that appear whole."""

import base64
import json
import re
import shutil
import subprocess
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lce import files
from lce.errors import CapacityError, DataError, UsageError
from lce_lab.study import web_page as pages
from lce_lab.study.web_page import json_text, page, write_page
from tests.lce_lab.study import recordings

HOSTILE = "</script><script>alert(1)</script><!-- --> ]]> \u2028\u2029 & ' \" \\ \x00 <!--lce:data--> \ud800"


def recording(text: str = "text", data: str = "AAAA", runs: int = 1) -> dict[str, Any]:
    segments = [{"start": 0, "stop": 2, "rows": 2, "data": data, "looks": {"0": {"why": text}}}]
    segments.append({**segments[0], "start": 2, "stop": 3})
    return {"tokens": [text, "b"], "runs": [{"label": text, "segments": segments}] * runs}


class Scripts(HTMLParser):
    """The scripts of a page as a browser sees them, with their attributes and contents."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.inside = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "script":
            self.inside = True
            self.scripts.append((dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag != "script"


def test_a_page_has_everything_in_order() -> None:
    names = re.findall(r"<!--lce:script (\S+)-->", (pages.WEB / "page.html").read_text())
    found = Scripts(page(json_text(recording()))).scripts
    assert [attrs.get("id") for attrs, _ in found] == ["lce-recording", *[None] * len(names)]
    assert json.loads(found[0][1]) == recording()
    assert [text.strip() for _, text in found[1:]] == [(pages.WEB / name).read_text().strip() for name in names]
    live = Scripts(page("null", nonce="xyz", live={"base": "/t/"})).scripts
    assert [attrs.get("id") for attrs, _ in live[:2]] == ["lce-live", "lce-recording"]
    assert ({attrs.get("nonce") for attrs, _ in live[2:]}, json.loads(live[0][1])) == ({"xyz"}, {"base": "/t/"})
    assert '<style nonce="xyz">' in page("null", nonce="xyz")


def test_no_text_leaves_its_place() -> None:
    html = page(json_text(recording(HOSTILE)), live={"prompt": HOSTILE})
    found = Scripts(html).scripts
    assert len(found) == len(Scripts(page("null", live={})).scripts)
    assert (json.loads(found[0][1]), json.loads(found[1][1])) == ({"prompt": HOSTILE}, recording(HOSTILE))
    assert not re.search("[\u2028\u2029\x00]", html)
    script = pages.script(0, 0, recording(HOSTILE)["runs"][0]["segments"][0])
    (packed,) = re.findall(r'^lceSegment\(0,0,"([\w+/=]+)"\);\n$', script)
    assert json.loads(zlib.decompress(base64.b64decode(packed))) == {"data": "AAAA", "looks": {"0": {"why": HOSTILE}}}


def test_large_ones_are_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "INLINE", 100)
    path = tmp_path / "a page #1.html"
    written = write_page(recording(data="A" * 200, runs=2), path)
    (first,) = (tmp_path / "a page #1.data").iterdir()
    files = sorted(file.name for file in first.iterdir())
    assert files == ["0-0.js", "0-1.js", "1-0.js", "1-1.js"]
    assert written == path.stat().st_size + sum(file.stat().st_size for file in first.iterdir())
    inside = json.loads(Scripts(path.read_text()).scripts[0][1])
    sources = [segment["src"] for run in inside["runs"] for segment in run["segments"]]
    assert sources == [f"a%20page%20%231.data/{first.name}/{name}" for name in files]
    assert "data" not in inside["runs"][0]["segments"][0]
    assert (first / "1-1.js").read_text() == pages.script(1, 1, recording(data="A" * 200)["runs"][0]["segments"][1])
    (first.parent / "mine.txt").write_text("not a page's")
    write_page(recording(data="B" * 200), path, force=True)
    (second,) = (each for each in first.parent.iterdir() if each.is_dir())
    assert second != first, "what the older page had is gone"
    assert (first.parent / "mine.txt").exists()
    (first.parent / "mine.txt").unlink()
    monkeypatch.setattr(pages, "INLINE", 1 << 20)
    write_page(recording(), path, force=True)
    assert not first.parent.exists()


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "INLINE", 100)
    path = tmp_path / "page.html"
    write_page(recording(data="A" * 200), path)
    before = path.read_text()
    with pytest.raises(UsageError, match=r"page\.html exists; name another file, or give --force"):
        write_page(recording(), path)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "replace", full)
        with pytest.raises(CapacityError, match="No space left"):
            write_page(recording(data="B" * 200), path, force=True)
    assert path.read_text() == before
    assert len(list((tmp_path / "page.data").iterdir())) == 1
    with monkeypatch.context() as patch:
        patch.setattr(pages, "write_whole", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_page(recording(data="B" * 200), path, force=True)
        with pytest.raises(KeyboardInterrupt):
            write_page(recording(data="B" * 200), tmp_path / "new.html")
    assert len(list((tmp_path / "page.data").iterdir())) == 1
    assert not (tmp_path / "new.data").exists(), "nothing that no page uses stays"
    with monkeypatch.context() as patch:
        patch.setattr(files, "sync_folder", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_page(recording(data="C" * 200), path, force=True)
    assert all((tmp_path / src).exists() for src in re.findall(r"page\.data/\w+/\d-\d\.js", path.read_text()))


def test_a_page_without_a_place(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="is a folder"):
        write_page(recording(), tmp_path / "folder")
    (tmp_path / "page.data").write_text("mine")
    with pytest.raises(DataError, match=r"page\.data is no folder"):
        write_page(recording(), tmp_path / "page.html")
    with pytest.raises(UsageError, match="expected a page's, for example"):
        write_page(recording(), tmp_path / "page.data")
    assert (tmp_path / "page.data").read_text() == "mine"


# Reads a split recording from stdin. Elements are objects; a script in the document's head runs when it is put there.
NODE = """
const [fs, vm] = [require("fs"), require("vm")], run = (file) => vm.runInThisContext(fs.readFileSync(file, "utf8"));
const createElement = () => ({
  setAttribute(name, value) { this[name] = value; }, addEventListener(name, then) { this[`on${name}`] = then; },
  append() {},
});
const append = (script) => { document.currentScript = script; run(script.src); };
Object.assign(globalThis, { window: globalThis, document: { createElement, head: { append } } });
for (const name of ["dom", "recording", "words"]) run(`${process.argv[1]}/${name}.js`);
const raw = JSON.parse(fs.readFileSync(0)), [first] = new lce.Recording(raw).runs;
const say = () => console.log(JSON.stringify({
  chosen: first.chosen(200, 1, 2), failed: first.segmentOf(200).failed ?? false, about: lce.about(raw),
  chips: [" ", "   ", " Paris", "\\n", "a"].map(lce.chip),
}));
first.isReady(200, say);
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed (Debian: apt-get install nodejs)")
def test_the_page_reads_what_is_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read() -> dict[str, Any]:
        text = json.dumps(json.loads(Scripts((tmp_path / "page.html").read_text()).scripts[0][1]))
        line = ["node", "-e", NODE, str(pages.WEB)]
        done = subprocess.run(line, input=text, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    monkeypatch.setattr(pages, "INLINE", 100)
    made = recordings.recording()
    made["model"]["window"] = 2048
    write_page(made, tmp_path / "page.html")
    found = read()
    assert (found["chosen"], found["failed"]) == (recordings.choices(made, 200, 1, 2), False)
    assert found["about"] == "made up · 2 layers × 4 heads · window of 64 (the model’s is 2,048) · 400 tokens"
    assert found["chips"] == ["1 space", "3 spaces", "Paris", "↵", "a"]
    (script,) = tmp_path.glob("page.data/*/0-1.js")
    script.write_text(script.read_text().replace('"eF', '"AA'))
    assert read()["failed"], "a damaged file is a missing one"


def test_on_a_phone_the_line_of_the_query_is_not_cut() -> None:
    phone = (pages.WEB / "page.css").read_text().partition("@media (max-width: 40rem)")[2]
    assert re.search(r"\.now \{[^}]*white-space: normal;", phone)
