"""Writes a recording as a page: an HTML file that needs no network, and scripts beside it for a large recording.

`lce_lab/study/web/page.html` has places to fill: `<!--lce:style NAME-->`, `<!--lce:data-->`, and
`<!--lce:script NAME-->` for each script, in the order in which scripts run. The text of a prompt stays data: JSON is
escaped, so that no text can end its script element. `assembled` also fills pages outside of this folder.
"""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
import shutil
import zlib
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lce.errors import DataError, LceError, UsageError
from lce.files import check_new, check_target, named, path_of, unwritable, write_whole

WEB = Path(__file__).parent / "web"
INLINE = 8 << 20  # The largest recording, in bytes of JSON, that is written into the page itself.
LEVEL = 3  # zlib compresses to a third or two; higher levels take twice the time for a tenth less.
_PLACES = re.compile(r"<!--lce:(style|data|script)(?: ([\w.]+))?-->")
_SCRIPT = re.compile(r"\d+-\d+\.js")
_FOLDER = re.compile(r"[0-9a-f]{32}")

Recording = dict[str, Any]


def json_text(value: Any) -> str:
    """Return a value as ASCII JSON for a script element, with `<`, `>` and `&` escaped."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def page(data: str, *, nonce: str | None = None, live: Any = None) -> str:
    """Return the page's HTML with a recording's JSON, a live page's URL and prompt, and the nonce of a policy."""
    element = '<script type="application/json" id="{}">{}</script>'
    parts = [element.format("lce-recording", data)]
    parts = parts if live is None else [element.format("lce-live", json_text(live)), *parts]
    return assembled(WEB / "page.html", nonce, "\n".join(parts))


def assembled(path: Path, nonce: str | None = None, data: str = "") -> str:
    """Return the HTML of a page with the files that it names: those beside it, or else those of the folder `WEB`."""
    mark = f' nonce="{nonce}"' if nonce else ""

    def put(found: re.Match[str]) -> str:
        kind, name = found.groups()
        if kind == "data":
            return data
        beside = path.with_name(name)
        return f"<{kind}{mark}>\n{_part(beside if beside.is_file() else WEB / name)}</{kind}>"

    return _PLACES.sub(put, _part(path))


@cache
def _part(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        missing = f"lce was installed without {path.name} for pages ({error.strerror})"
        raise LceError(f"{missing}; install it again") from None


def store_of(path: str | Path) -> Path:
    """Return the path of the data folder `NAME.data` beside a page. Raises an error if one cannot be written."""
    path = path_of(path)
    check_target(path)
    store = path_of(path.with_name(f"{path.stem}.data"))
    if store == path:
        raise UsageError(f"{named(path)} is the name of a folder of data; expected a page's, for example page.html")
    if os.path.lexists(store) and not store.is_dir():
        raise DataError(f"{named(store)} is no folder, and a page would keep its data there; name another page")
    return store


def write_page(recording: Recording, path: str | Path, *, force: bool = False) -> int:
    """Write a recording as a page, with large data in the folder `NAME.data` beside the page. Return the bytes written.

    The page appears whole or not at all, after its data. An existing page is replaced only with `force`. At the
    end, data that the page does not use is removed from the folder: data of an older page, or of a failed call.
    """
    path, n_bytes = path_of(path), 0
    store = store_of(path)
    check_new(path, force)
    folder = store / secrets.token_hex(16)
    try:
        choices = sum(len(segment["data"]) for run in recording["runs"] for segment in run["segments"])
        data = "" if choices > INLINE else json_text(recording)
        if not data or len(data) > INLINE:
            folder.mkdir(parents=True)
            for number, run in enumerate(recording["runs"]):
                for at, segment in enumerate(run["segments"]):
                    text = script(number, at, segment)
                    n_bytes += (folder / f"{number}-{at}.js").write_bytes(text.encode("ascii"))
            data = json_text(split(recording, f"{quote(store.name)}/{folder.name}"))
        html = page(data).encode()
        write_whole(path, html)
    except OSError as error:
        raise unwritable(folder, error) from error
    finally:
        _sweep(store, path)
    return n_bytes + len(html)


def split(recording: Recording, folder: str) -> Recording:
    """Return a copy of a recording. Its segments have a script's path `folder/RUN-SEGMENT.js` in place of data."""
    runs = []
    for number, run in enumerate(recording["runs"]):
        bare = [{key: segment[key] for key in ("start", "stop", "rows")} for segment in run["segments"]]
        runs.append({**run, "segments": [x | {"src": f"{folder}/{number}-{at}.js"} for at, x in enumerate(bare)]})
    return {**recording, "runs": runs}


def script(run: int, number: int, segment: dict[str, Any]) -> str:
    """Return the JavaScript that hands segment `number` of run `run` to the page, as JSON compressed by zlib."""
    raw = json.dumps({key: segment[key] for key in ("data", "looks")}, separators=(",", ":"), allow_nan=False)
    return f'lceSegment({run},{number},"{base64.b64encode(zlib.compress(raw.encode(), LEVEL)).decode()}");\n'


def _sweep(store: Path, path: Path) -> None:
    """Remove the data folders in `store` that the page does not use. Leave folders with other names or files alone."""
    with suppress(OSError):
        used = path.read_bytes() if path.exists() else b""
        for folder in store.iterdir():
            ours = _FOLDER.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink()
            ours = ours and all(_SCRIPT.fullmatch(file.name) for file in folder.iterdir())
            if ours and folder.name.encode() not in used:
                shutil.rmtree(folder, ignore_errors=True)
        store.rmdir()  # fails if the folder is not empty; the error is ignored
