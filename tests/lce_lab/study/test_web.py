"""The page of `lce inspect` in headless Chromium: from a file, and live with an engine that is made up."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lce_lab.study.live import Busy
from lce_lab.study.live_server import LiveServer
from lce_lab.study.web_page import json_text, page, write_page
from tests.lce_lab.study.recordings import choices, recording
from tools.chromium import SHIFT, Browser, Page, chromium

pytestmark = pytest.mark.skipif(chromium() is None, reason="Chromium is not installed: apt-get install chromium")

MADE = recording()


def seen(selector: str) -> str:
    """The tokens on screen in the first text that match a selector, ascending, as JavaScript."""
    found = f"[...document.querySelectorAll('.cell:first-child {selector}')].map(e => +e.dataset.token)"
    return f"[...new Set({found})].sort((a, b) => a - b)"


PICKED, COLOURED, ON_SCREEN = seen(".token.picked"), seen(".token:is(.d1, .d2, .d3, .d4)"), seen(".token")
SLIDER = "document.getElementById('slider')"
ROWS = "[...document.querySelectorAll('#why .cell:first-child tbody tr')]"
SWITCH = "document.querySelector('#why button[aria-pressed]')"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(page(json_text(MADE)), encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def shown(browser: Browser, address: str) -> Iterator[Page]:
    """The page of a made-up recording; it must leave nothing on the console and ask no network."""
    found = browser.open(address)
    found.settle()
    yield found
    found.close()
    assert found.complaints == []
    assert all(url.startswith("file:") for url in found.requests)


def choose(on: Page, element: str, value: object, event: str = "change") -> None:
    """Choose an option, or move a slider, as a reader does: the element is changed and says so."""
    change = f"e => {{ e.value = '{value}'; e.dispatchEvent(new Event('{event}')) }}"
    on.value(f"({change})(document.getElementById('{element}'))")
    on.settle()


def text(on: Page, selector: str) -> str:
    return str(on.value(f"document.querySelector({json.dumps(selector)}).textContent"))


def picked_head(on: Page) -> tuple[int, int]:
    layer, head = on.value("['layer', 'head'].map(each => +document.getElementById(each).value)")
    return layer, head


def go(on: Page, query: int) -> None:
    choose(on, "slider", query, "input")


def outlined(query: int, layer: int, head: int, visible: list[int]) -> list[int]:
    """The tokens on screen that stand in the chunks that a head chose."""
    chunks = choices(MADE, query, layer, head)
    return sorted(i for i in visible if i // 8 in chunks and i < query)


def test_a_page_opens_at_the_answer_with_the_choices_of_the_recording(shown: Page) -> None:
    assert "made up" in text(shown, "#about")
    assert "writes 4" in text(shown, "#now")
    assert len(shown.value("[...document.querySelectorAll('#panels canvas')].filter(c => c.width > 1)")) == 6
    layer, head = picked_head(shown)
    assert shown.value(PICKED) == outlined(399, layer, head, shown.value(ON_SCREEN))
    assert shown.value("document.querySelectorAll('.cell:first-child .token.mark').length") == 4


def test_pointing_at_a_token_shows_its_choices_and_leaving_it_goes_back(shown: Page) -> None:
    go(shown, 300)
    before = shown.value(PICKED)
    x, y = shown.middle("document.querySelector('.token[data-token=\"290\"]')")
    shown.point(x, y)
    shown.settle()
    layer, head = picked_head(shown)
    assert "token 290 of 400" in text(shown, "#now")
    assert shown.value(PICKED) == outlined(290, layer, head, shown.value(ON_SCREEN))
    assert shown.value(f"{SLIDER}.value") == "300"
    shown.point(2, 2)
    shown.settle()
    assert shown.value(PICKED) == before
    shown.click(x, y)
    shown.point(2, 2)
    shown.settle()
    assert shown.value(f"{SLIDER}.value") == "290"


def test_keys_and_the_slider_step_through_tokens_blocks_looks_and_the_answer(shown: Page) -> None:
    go(shown, 200)
    right, left = "ArrowRight", "ArrowLeft"
    steps = [(right, 0, "token 201 of 400"), (left, 0, "token 200 of 400"), (left, SHIFT, "prefill block 1 of 4")]
    steps += [(right, SHIFT, "prefill block 2 of 4"), ("a", 0, "writes 4"), (right, SHIFT, "generated token 1 of 4")]
    for key, modifiers, expected in (*steps, (right, 0, "generated token 2 of 4")):
        shown.press(key, modifiers)
        assert expected in text(shown, "#now")
    go(shown, 200)
    shown.press("]")
    assert int(shown.value(f"{SLIDER}.value")) in MADE["runs"][0]["looked"]
    shown.value(f"{SLIDER}.focus()")
    shown.press("Home")
    assert "token 0 of 400" in text(shown, "#now")
    assert "token 0 of 400" in shown.value(f"{SLIDER}.ariaValueText")


def test_a_click_or_the_arrows_in_the_heat_map_pick_a_head(shown: Page) -> None:
    canvas = "document.querySelector('#heads canvas')"
    shown.value(f"{canvas}.scrollIntoView({{block: 'center'}})")
    left, top = shown.value(f"(b => [b.x, b.y])({canvas}.getBoundingClientRect())")
    shown.click(left + 150, top + 3)
    assert picked_head(shown) == (0, 0)
    shown.press("ArrowDown")
    assert picked_head(shown) == (0, 1)
    for _ in range(4):
        shown.press("ArrowDown")
    assert picked_head(shown) == (1, 1)
    assert "Layer 1, head 1." in text(shown, "#why .verdict")


def test_a_miss_says_whether_it_is_of_selection_budget_or_placement(shown: Page) -> None:
    verdicts = ("Nothing that matters", "A miss of selection.", "A miss of budget.", "A miss of placement.")
    for head, words in enumerate(verdicts):
        choose(shown, "head", str(head))
        assert words in text(shown, "#why .verdict")
        assert words in text(shown, "#summary")
    assert "This layer does not choose." in text(shown, "#why .cell:last-child .verdict")


def test_rows_of_the_table_are_the_look_of_the_head(shown: Page) -> None:
    choose(shown, "layer", "1")
    choose(shown, "head", "0")
    chunks = shown.value(f"{ROWS}.map(row => +row.cells[0].textContent)")
    expected = {*choices(MADE, 399, 1, 0), 5, 49}
    assert set(chunks) == expected
    rows = f"{ROWS}.map(row => [...row.cells].map(cell => cell.textContent.trim()))"
    first = choices(MADE, 399, 1, 0)[0]
    assert [row[2:] for row in shown.value(rows) if row[0] == str(first)] == [["50%", "70%", "9.5", "1", "chosen"]]
    assert [row[2:] for row in shown.value(rows) if row[0] == "49"] == [["5.0%", "–", "–", "–", "always"]]
    assert "25%" in text(shown, "#bytes .figure b")


def test_two_runs_are_side_by_side_on_the_same_token_or_one_alone(shown: Page) -> None:
    cells = "[...document.querySelectorAll('.pair')].map(e => e.children.length).join()"
    assert shown.value(cells) == "2,2,2,2,2"
    left, right = shown.value("[...document.querySelectorAll('#heads .cell')].map(e => e.getBoundingClientRect().x)")
    assert right > left + 300
    assert shown.value("document.querySelectorAll('.token.query').length") == 2
    choose(shown, "run-b", "none")
    assert shown.value(cells) == "1,1,1,1,1"
    choose(shown, "run-a", "1")
    assert "everything" in text(shown, "#why .who")
    assert "more than it can read" in text(shown, "#answers .error")


def test_every_control_has_a_name_and_a_reader_of_the_screen_is_told(shown: Page) -> None:
    nodes = [node for node in shown.call("Accessibility.getFullAXTree")["nodes"] if not node["ignored"]]
    roles = {"button", "combobox", "slider", "textbox", "checkbox", "spinbutton", "image", "region", "group"}
    named = [(node["role"]["value"], node["name"]["value"]) for node in nodes if node["role"]["value"] in roles]
    assert {"button", "combobox", "slider", "image"} <= {role for role, _ in named}
    assert [role for role, name in named if not name and role != "group"] == []
    assert shown.value("document.getElementById('summary').ariaLive") == "polite"
    assert "It reads 25% of full attention’s bytes" in text(shown, "#summary")


@pytest.mark.parametrize("large", [False, True])
def test_a_narrow_screen_needs_no_scrolling_to_the_side(shown: Page, large: bool) -> None:
    shown.resize(360, 740)
    if large:
        shown.value("document.getElementById('large').click()")
    shown.settle()
    assert shown.value("document.scrollingElement.scrollWidth") <= 360
    wide = "[...document.querySelectorAll('.over')].filter(e => e.scrollWidth > e.clientWidth).length"
    assert shown.value(wide) == 0, "nothing is cut off in its panel"
    widths = f"{ROWS}.map(row => row.querySelector('.words').clientWidth)"
    assert min(shown.value(widths)) > 200, "the text of a chunk can be read"
    shown.value("localStorage.clear()")


def test_text_of_prompts_is_never_markup(browser: Browser, tmp_path: Path) -> None:
    made = recording(tokens=60)
    made["tokens"][50:54] = ["</script>", "<img src=x onerror=document.title='run'>", "<!--", "\u2028\u202e"]
    made["tokens"][46] = "\u202e"
    made["runs"][0]["label"] = "<u>name</u>"
    (tmp_path / "page.html").write_text(page(json_text(made)), encoding="utf-8")
    found = browser.open((tmp_path / "page.html").as_uri())
    found.settle()
    assert found.value("document.querySelectorAll('img, u, b b').length") == 0
    assert found.value("document.title") == "lce inspect"
    assert "</script>" in text(found, ".sheet")
    assert "\u202e" not in found.value("document.getElementById('panels').innerText"), "no text turns others around"
    assert found.complaints == []
    found.close()


def test_a_recording_behind_a_context_begins_there(browser: Browser, tmp_path: Path) -> None:
    made = recording()
    for run in made["runs"]:
        run["blocks"] = [[max(start, 300), stop] for start, stop in run["blocks"] if stop > 300]
    (tmp_path / "page.html").write_text(page("null"), encoding="utf-8")
    found = browser.open((tmp_path / "page.html").as_uri())
    assert not found.value("document.getElementById('empty').hidden")
    found.value(f"lce.open({json.dumps(made)})")
    found.settle()
    assert found.value("document.getElementById('empty').hidden")
    assert found.value(f"{SLIDER}.min") == "300"
    go(found, 310)
    before = text(found, "#now")
    found.value("document.querySelector('.sheet').parentElement.scrollTop = 0")
    found.settle()
    token = found.value("+document.querySelector('.cell:first-child .token').dataset.token")
    assert token < 300
    x, y = found.middle(f"document.querySelector('.token[data-token=\"{token}\"]')")
    found.click(x, y)
    assert text(found, "#now") == before, "no query of the context was recorded"
    for _ in range(3):
        found.press("ArrowLeft", SHIFT)
    assert "token 300 of 400" in text(found, "#now")
    assert found.complaints == []
    found.close()


def test_data_beside_the_page_is_loaded(browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lce_lab.study.web_page.INLINE", 1000)
    write_page(MADE, tmp_path / "page.html")
    found = browser.open((tmp_path / "page.html").as_uri())
    found.wait("document.querySelector('#why table')")
    loaded = [url for url in found.requests if url.endswith(".js")]
    assert 0 < len(loaded) < len(MADE["runs"][0]["segments"]) + 1
    go(found, 100)
    layer, head = picked_head(found)
    found.wait("document.querySelector('#now').textContent.includes('token 100 of')")
    assert found.value(PICKED) == outlined(100, layer, head, found.value(ON_SCREEN))
    assert found.complaints == []
    for file in tmp_path.rglob("*.js"):
        file.unlink()
    go(found, 200)
    found.wait("!document.getElementById('missing').hidden")
    found.close()


def test_32000_tokens_open_in_2_s_and_a_hover_is_answered_in_50_ms(browser: Browser, tmp_path: Path) -> None:
    # Seconds of the page's own thread, which other work on the machine does not change.
    made = recording(tokens=32_000, k=8, size=16, window=512, looked=200, segment=2000)
    (tmp_path / "page.html").write_text(page(json_text(made)), encoding="utf-8")
    found = browser.open("about:blank")
    found.call("Performance.enable", timeDomain="threadTicks")
    before = busy(found)
    found.go((tmp_path / "page.html").as_uri())
    found.settle()
    assert busy(found) - before < 2
    go(found, 20_000)
    tokens = range(19_960, 20_000, 4)
    before = busy(found)
    for token in tokens:
        found.point(*found.middle(f"document.querySelector('.token[data-token=\"{token}\"]')"))
        found.settle()
        assert f"token {token:,} of" in text(found, "#now")
    assert (busy(found) - before) / len(tokens) < 0.05
    found.close()


def busy(on: Page) -> float:
    """Seconds that the page's thread worked so far."""
    metrics = {each["name"]: each["value"] for each in on.call("Performance.getMetrics")["metrics"]}
    return float(metrics["TaskDuration"])


# Live ---------------------------------------------------------------------------------------------------------------


class MadeUp:
    """What a live page asks of a `Live`. `asked` are the bodies of the runs."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.now: dict[str, Any] = {"state": "idle", "id": 0, "done": 0, "total": 0}
        self.refusal: str | None = None

    def about(self) -> dict[str, Any]:
        knobs = [{"name": "chunk_size", "default": 8, "help": "tokens of a chunk", "choices": None, "words": ["auto"]}]
        methods = [{"name": "choosing", "about": "chooses", "knobs": knobs}, {"name": "full", "about": "", "knobs": []}]
        return {"model": MADE["model"], "methods": methods, "max_tokens": 16}

    def state(self, known: int | None = None) -> dict[str, Any]:
        is_new = self.now["state"] == "done" and known != self.now["id"]
        return self.now if is_new else {key: x for key, x in self.now.items() if key != "recording"}

    def start(self, body: Any) -> int:
        if self.refusal:
            raise Busy(self.refusal)
        self.asked.append(body)
        return self.turn("running", id=self.now["id"] + 1, stage="prefill", done=3, total=9, error=None)

    def cancel(self) -> int:
        return self.turn("cancelled")

    def turn(self, state: str, **facts: Any) -> int:
        self.now = {"state": state, "id": self.now["id"], "done": 0, "total": 0, **facts}
        return int(self.now["id"])

    def close(self) -> None:
        pass


@contextmanager
def served(engine: MadeUp) -> Iterator[str]:
    """The address of a live page."""
    server = LiveServer(engine)  # type: ignore[arg-type]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.address
    finally:
        server.shutdown()
        thread.join(60)
        server.close()


def fill(on: Page, element: str, value: str) -> None:
    on.value(f"document.querySelector({json.dumps(element)}).value = {json.dumps(value)}")


def test_live_runs_a_prompt_shows_progress_and_puts_the_run_before_beside_the_new_one(browser: Browser) -> None:
    engine = MadeUp()
    with served(engine) as address:
        found = browser.open(address)
        found.wait("document.querySelector('[data-knob=chunk_size]')")
        assert found.value("document.getElementById('shown').hidden")
        assert found.value("document.querySelector('[data-knob=chunk_size]').list.options[0].value") == "auto"
        assert found.value("document.querySelector('[data-knob=chunk_size]').placeholder") == "default: 8, or auto"
        values = {"text": "The key is 4829.", "question": "The key is", "mark": "4829", "tokens": "4"}
        for element, value in (
            {f"#ask-{name}": x for name, x in values.items()} | {"[data-knob=chunk_size]": "8"}
        ).items():
            fill(found, element, value)
        found.click(*found.middle("document.getElementById('ask-run')"))
        found.wait("document.getElementById('ask-state').textContent.includes('prefill 3 of 9')")
        method = {"method": "choosing", "knobs": {"chunk_size": "8"}, "max_tokens": 4, "off": [], "marks": ["4829"]}
        assert engine.asked == [{"prompt": "The key is 4829. The key is", **method}]
        assert found.value("document.getElementById('ask-run').disabled")
        engine.turn("done", recording=MADE | {"runs": MADE["runs"][:1]})
        found.wait("!document.getElementById('shown').hidden")
        found.settle()
        choose(found, "layer", "1")
        choose(found, "head", "2")
        found.click(*found.middle(SWITCH))
        assert found.value(f"{SWITCH}.ariaPressed") == "true"
        found.click(*found.middle("document.getElementById('ask-run')"))
        found.wait("document.getElementById('ask-state').textContent.includes('prefill 3 of 9')")
        assert engine.asked[-1]["off"] == [[1, 2]]
        again = MADE["runs"][0] | {"off": [[1, 2]], "label": "again"}
        engine.turn("done", recording=MADE | {"runs": [again]})
        found.wait("document.querySelectorAll('#heads .cell').length === 2")
        found.settle()
        assert "again, 1 head off" in text(found, "#heads .who")
        assert "choosing(chunk_size=8), before" in text(found, "#heads .cell:last-child .who")
        assert "Switched off." in text(found, "#why .verdict")
        assert found.complaints == []
        found.close()


def test_live_cancels_and_says_refusals_and_failures_in_words(browser: Browser) -> None:
    engine = MadeUp()
    with served(engine) as address:
        found = browser.open(address)
        found.wait("document.querySelector('[data-knob=chunk_size]')")
        run, error = "document.getElementById('ask-run')", "document.getElementById('ask-error').textContent"
        found.click(*found.middle(run))
        assert "nothing to read" in found.value(error)
        fill(found, "#ask-text", "A text")
        found.click(*found.middle(run))
        found.wait("!document.getElementById('ask-cancel').disabled")
        found.click(*found.middle("document.getElementById('ask-cancel')"))
        found.wait("document.getElementById('ask-state').textContent === 'cancelled'")
        engine.refusal = "chunk_size is 7; expected a divisor"
        found.click(*found.middle(run))
        found.wait(f"{error}.includes('expected a divisor')")
        engine.refusal = None
        found.click(*found.middle(run))
        found.wait(f"{run}.disabled")
        engine.turn("failed", error="the text is too long")
        found.wait(f"{error}.includes('too long')")
        found.close()
    assert [each for each in found.complaints if "409" not in each] == []
