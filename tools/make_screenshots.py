"""Makes the pictures of `lce inspect`, and of the page of `lce serve`, in docs/pictures/inspect, in headless Chromium.

python -m tools.make_screenshots                     records the demo on a part of examples/haystack.txt, minutes
python -m tools.make_screenshots --page page.html    draws an existing page, best with two runs and a mark
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tools.chromium import Browser, Page

ROOT = Path(__file__).parent.parent
MOST_BYTES = 300_000
AROUND = (3500, 5000)  # letters of the haystack before and after the key


def part_of_haystack() -> tuple[str, str]:
    """Return paragraphs with the pass key and the question, about seven windows of the demo, and the key."""
    text = (ROOT / "examples" / "haystack.txt").read_text(encoding="utf-8")
    found = re.search(r"pass key is (\d+)", text)
    assert found, "the haystack has no pass key"
    before, after = AROUND
    part = text[max(0, found.start() - before) : found.end() + after]
    question = text[text.rindex(" What is the pass key") :]
    return part[part.index(". ") + 2 : part.rindex(". ") + 1] + question, found[1]


def record(folder: Path, methods: str) -> Path:
    """Record the demo under two methods by `lce inspect`; return the page."""
    text, key = part_of_haystack()
    page, prompt = folder / "page.html", folder / "prompt.txt"
    prompt.write_text(text, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "lce",
        "inspect",
        "-m",
        "demo",
        "--method",
        methods,
        "-f",
        str(prompt),
        "--mark",
        key,
    ]
    subprocess.run([*command, "-n", "8", "--out", str(page)], check=True, cwd=ROOT)
    return page


def choose(page: Page, element: str, value: str) -> None:
    """Choose an option, as a reader does."""
    page.value(
        f"(e => {{ e.value = {value!r}; e.dispatchEvent(new Event('change')) }})(document.getElementById({element!r}))"
    )
    page.settle()


def pictures(page: Page) -> dict[str, bytes]:
    """Return the pictures by name."""
    made: dict[str, bytes] = {}

    def take(name: str, *steps: Callable[[], object], clip: str | None = None) -> None:
        for step in steps:
            step()
        page.settle()
        made[name] = page.picture(clip=clip)

    page.wait("!document.getElementById('shown').hidden && document.querySelector('#why table')")
    take("inspect", lambda: choose(page, "theme", "light"))
    take("inspect-heads", clip="document.getElementById('panel-heads')")
    take("inspect-why", clip="document.getElementById('panel-why')")
    take("inspect-distances", clip="document.getElementById('panel-distances')")
    take("inspect-bytes", clip="document.getElementById('panel-bytes')")
    click, top = (
        "document.querySelector('#marks button')?.click()",
        "document.getElementById('panel-text').offsetTop - 8",
    )
    take(
        "inspect-dark",
        lambda: choose(page, "run-b", "none"),
        lambda: choose(page, "theme", "dark"),
        lambda: page.value(click),
    )
    take(
        "inspect-phone",
        lambda: page.resize(360, 740, 2),
        page.settle,
        lambda: page.value(f"scrollTo(0, {top}); {click}"),
    )
    page.resize(1600, 900)
    choose(page, "theme", "light")
    page.value("scrollTo(0, 0); document.getElementById('large').click()")
    take("inspect-projector", page.settle, lambda: page.value(click))
    return made


def live_picture(browser: Browser) -> bytes:
    """Draw the live page: the demo before and after switching off the layer that attends most to the answer."""
    text, key = part_of_haystack()
    start = text.index(key)
    prompt = text[start - 1000 : start + 1000] + text[text.rindex(" What is the pass key") :]
    command = [sys.executable, "-m", "lce", "inspect", "-m", "demo", "--live"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as engine:
        try:
            assert engine.stdout is not None
            page = browser.open(engine.stdout.readline().strip(), width=1280, height=900)
            page.wait("document.querySelector('[data-knob]')", 60)
            for field, value in (("ask-text", prompt), ("ask-mark", key), ("ask-tokens", "6")):
                page.value(f"document.getElementById({field!r}).value = {value!r}")
            page.click(*page.middle("document.getElementById('ask-run')"))
            page.wait("document.querySelector('#why table')", 120)
            page.click(*page.middle("[...document.querySelectorAll('#why button[aria-pressed]')].at(-1)"))
            page.click(*page.middle("document.getElementById('ask-run')"))
            page.wait("document.querySelectorAll('#heads .cell').length === 2", 120)
            page.wait("document.querySelector('#now').textContent.includes('writes')")
            page.value("scrollTo(0, 0)")
            page.settle()
            if page.complaints:
                sys.exit(f"the live page complains: {page.complaints}")
            return page.picture()
        finally:
            engine.send_signal(signal.SIGINT)


def serve_picture(browser: Browser) -> bytes:
    """Draw the page of `lce serve`: the demo answers about a text, and what it attended is watched."""
    text, _ = part_of_haystack()
    at = text.rindex(" What is the pass key")
    command = [sys.executable, "-m", "lce", "serve", "-m", "demo", "--method", "longheads", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            address = server.stderr.readline().split()[-1]
            server.stderr.readline()  # the model is loaded
            page = browser.open(address, width=960, height=1180)
            page.prefer(reduced_motion="reduce")
            page.wait("!document.getElementById('main').hidden", 60)
            for field, value in (("text", text[:at]), ("question", text[at:].strip()), ("tokens", "6")):
                change = f"e => {{ e.value = {value!r}; e.dispatchEvent(new Event('input')) }}"
                page.value(f"({change})(document.getElementById({field!r}))")
            page.click(*page.middle("document.getElementById('send')"))
            page.wait("document.querySelector('.figures button')", 60)
            page.click(*page.middle("document.querySelector('.figures button')"))
            page.wait("document.getElementById('picture').contentDocument?.querySelector('#why table')", 60)
            page.value("scrollTo(0, 0)")
            page.settle()
            if page.complaints:
                sys.exit(f"the server's page complains: {page.complaints}")
            return page.picture()
        finally:
            server.send_signal(signal.SIGINT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, help="a page that lce inspect made")
    parser.add_argument("--methods", default="longheads,dca")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures" / "inspect")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Browser(timeout_s=60) as browser:
        source = given.page or record(Path(folder), given.methods)
        page = browser.open(source.absolute().as_uri(), width=1280, height=900)
        made = pictures(page)
        if page.complaints:
            sys.exit(f"the page complains: {page.complaints}")
        made["inspect-live"] = live_picture(browser)
        made["serve"] = serve_picture(browser)
    given.out.mkdir(parents=True, exist_ok=True)
    for name, data in made.items():
        if len(data) > MOST_BYTES:
            sys.exit(f"{name}.png has {len(data):,} bytes; expected {MOST_BYTES:,} or fewer")
        (given.out / f"{name}.png").write_bytes(data)
        print(given.out / f"{name}.png", f"{len(data):,} bytes")


if __name__ == "__main__":
    main()
