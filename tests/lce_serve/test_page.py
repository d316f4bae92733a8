"""The page at / and the recordings behind it: their heads, bounds and contents, and the page in headless Chromium."""

import asyncio
import configparser
import http.client
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import lce
from lce_serve import inspecting
from lce_serve.app import application
from lce_serve.service import Service
from tests.command import until, within
from tests.lce_lab.study.recorded import choices_of
from tests.lce_serve.conftest import URL, serving, with_options
from tools.chromium import Browser, Page, chromium

ROOT = Path(__file__).parent.parent.parent
TEXT = "the quick brown fox jumps over the lazy dog, and then over the moon. " * 6
HI: Any = [{"role": "user", "content": TEXT + "what does the fox do?"}]
HEADS = {"method": "longheads", "method_options": {"chunk_size": 8, "chunks": 4, "share": "head"}}


@pytest.mark.parametrize("path", ["/", "/inspect"])
def test_the_page_needs_no_key_has_no_data_and_lets_only_its_own_scripts_run(service: Service, path: str) -> None:
    service.settings = replace(service.settings, key="s3cret", model="a-secret-name")
    client = TestClient(application(service), base_url=URL)
    found, again = client.get(path), client.get(path)
    assert (found.status_code, found.headers["content-type"].partition(";")[0]) == (200, "text/html")
    policy = found.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    assert not re.search("unsafe|http", policy)
    nonce = re.findall(r"'nonce-([\w-]+)'", policy)
    assert nonce[0] == nonce[1] not in again.text
    tags = re.findall(r"<(?:script|style)[^>]*>", found.text)
    assert tags
    assert all(f'nonce="{nonce[0]}"' in tag for tag in tags)
    assert not re.search(r"""<!--lce:|secret|(?:src|href)=["'](?:https?:)?//""", found.text)
    assert client.post("/inspect", json={"prompt": "x"}).status_code == 401
    service.draining = True
    assert client.get(path).status_code == 200
    assert client.post("/inspect", json={"messages": HI}, headers={"x-api-key": "s3cret"}).status_code == 503


def test_the_servers_own_page_may_ask_and_no_other(client: TestClient) -> None:
    body = {"content": "x"}
    for origin in (URL, "http://localhost:8000"):
        host = origin.removeprefix("http://")
        assert client.post("/tokenize", json=body, headers={"Origin": origin, "Host": host}).status_code == 200
    for origin in ("http://127.0.0.1:8001", "http://localhost:8000", "https://127.0.0.1:8000", "http://evil.example"):
        assert client.post("/tokenize", json=body, headers={"Origin": origin}).status_code == 403
    evil = {"Origin": "http://evil.example", "Host": "evil.example"}
    assert client.post("/tokenize", json=body, headers=evil).status_code == 403


def test_the_files_of_the_page_are_in_the_package() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    patterns = config["options.package_data"]["lce_serve"].split()
    packed = {path for pattern in patterns for path in (ROOT / "lce_serve").glob(pattern)}
    assert {*(ROOT / "lce_serve" / "web").iterdir()} <= packed


def recorded(client: TestClient, **fields: Any) -> dict[str, Any]:
    answer = client.post("/inspect", json={"messages": HI, "max_tokens": 6, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def text_of(recording: dict[str, Any]) -> str:
    """The answer of a recording, as an answer has it: without the token that ends it."""
    return "".join(each["text"] for each in recording["runs"][0]["generated"])


def test_a_recording_has_the_choices_of_the_engines_own_trace(client: TestClient, engine: lce.Engine) -> None:
    recording = recorded(client, **HEADS)
    run = recording["runs"][0]
    own = lce.Engine(engine.setup.using(lce.methods.make("longheads", HEADS["method_options"])))
    ids = own.tokenizer.encode_parts(own.tokenizer.render_chat(HI, True))
    answer = own.generate(ids, max_tokens=6).token_ids
    assert "".join(recording["tokens"]) == own.tokenizer.decode(ids, skip_special=False)
    first = run["blocks"][0][0]
    assert (len(run["generated"]), first) == (len(answer), len(ids) - inspecting.LAST)
    assert run["looked"] == list(range(first, len(ids) + len(answer) - 1))
    trace, found = own.trace([*ids, *answer[:-1]]), choices_of(run)
    for place, layer in enumerate(run["choosing"]):
        expected = trace.chosen[layer][:, first:].transpose(0, 1)
        assert (found[:, place, :, : expected.shape[-1]] == expected.numpy()).all()
    plain = client.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 6, **HEADS}).json()
    assert text_of(recording) == plain["choices"][0]["message"]["content"]


def test_what_was_read_for_an_answer_is_not_read_again(client: TestClient, capfd: Any) -> None:
    how = {"temperature": 1.0, "seed": 7, "logit_bias": dict.fromkeys("0 1 300 301".split(), -100)}
    asked = {"messages": HI, "max_tokens": 12, **how}
    answer = client.post("/v1/chat/completions", json=asked).json()
    again = recorded(client, max_tokens=12, **how)
    assert text_of(again) == answer["choices"][0]["message"]["content"]
    *_, line = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    n = answer["usage"]["prompt_tokens"]
    found = [line[name] for name in ("endpoint", "prompt_tokens", "generated_tokens", "cached_tokens")]
    assert found == ["/inspect", n, 12, n - inspecting.LAST]
    cached = client.post("/v1/chat/completions", json=asked).json()["usage"]["prompt_tokens_details"]
    assert cached["cached_tokens"] >= n - 1


def test_a_prompt_and_a_named_context_are_recorded_too(client: TestClient) -> None:
    client.post("/contexts", json={"name": "book", "prompt": TEXT, "method": "streaming"})
    found = recorded(client, messages=None, prompt=" and the dog?", context="book", max_tokens=2)
    assert "".join(found["tokens"]).endswith(TEXT + " and the dog?")
    begun = client.get("/contexts").json()["data"][0]["n_tokens"]
    assert (found["runs"][0]["method"], found["runs"][0]["blocks"][0][0]) == ("streaming", begun)
    assert recorded(client, messages=None, prompt=TEXT, max_tokens=1)["runs"][0]["method"] == "full"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 65}, "max_tokens is 65; expected a whole number from 1 to 64"),
        ({"max_tokens": 0}, "expected a whole number from 1 to 64"),
        ({"prompt": "x"}, "expected either prompt"),
        ({"messages": None}, "expected either prompt"),
        ({"messages": None, "prompt": ""}, "too short"),
        ({"messages": None, "prompt": "word " * 5000}, "more than the"),
        ({"method": "longhead"}, "longheads"),
        ({"method_options": {"maps": "/etc/passwd"}}, "names a file"),
        ({"method": "esa"}, "calibrate"),
        ({"temperature": 3}, "temperature"),
    ],
)
def test_what_cannot_be_recorded(client: TestClient, fields: dict[str, Any], words: str) -> None:
    answer = client.post("/inspect", json={"messages": HI, "max_tokens": 2, **fields})
    said = answer.json()["error"]["message"]
    assert (answer.status_code, words in said, "\n" in said) == (400, True, False), said


def test_a_recording_is_bounded(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"messages": HI, "max_tokens": 2}
    n = len(client.post("/inspect", json=body).content)
    for most, words in ((n // 4, "a recording would have about"), (n - 50, "the recording has")):  # times differ
        monkeypatch.setattr(inspecting, "MOST_BYTES", most)
        answer = client.post("/inspect", json=body)
        assert (answer.status_code, words in answer.text) == (400, True), answer.text


def test_work_beside_the_batch_is_done_one_after_the_other_and_given_up(service: Service) -> None:
    events: list[str] = []

    def work(gone: threading.Event) -> None:
        events.append("begins")
        assert gone.wait(10)
        events.append("ends")
        raise ValueError("nobody sees this")

    async def ask() -> None:
        first, second = (asyncio.create_task(service.beside(work)) for _ in range(2))
        for task, n in ((first, 1), (second, 3)):
            for _ in range(1000):
                await asyncio.sleep(0.01 if len(events) < n else 0)
            task.cancel()
        await asyncio.wait((first, second))

    asyncio.run(asyncio.wait_for(ask(), 20))
    assert events == ["begins", "ends"] * 2


def test_a_client_that_goes_away_ends_its_recording(service: Service, monkeypatch: Any, capfd: Any) -> None:
    begun, ended, record = threading.Event(), threading.Event(), inspecting._recorded

    def held(*given: Any) -> Any:
        begun.set()
        assert given[-1].wait(20)  # the event that nobody waits
        try:
            return record(*given)
        finally:
            ended.set()

    monkeypatch.setattr(inspecting, "_recorded", held)
    with serving(service) as address:
        connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=20)
        body = json.dumps({"messages": HI, "max_tokens": 64})
        connection.request("POST", "/inspect", body, {"Content-Type": "application/json"})
        assert begun.wait(20)
        connection.close()
        assert ended.wait(20)
        until(lambda: not service.active, 20)
    assert '"client gone"' in capfd.readouterr().err


# The page in a browser ----------------------------------------------------------------------------------------------

needs_chromium = pytest.mark.skipif(chromium() is None, reason="Chromium is not installed: apt-get install chromium")
IDLE = "document.getElementById('stop').disabled && !document.getElementById('main').hidden"
TALK = "document.getElementById('talk')"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


@pytest.fixture
def shown(browser: Browser, address: str) -> Iterator[Page]:
    """The page of a server, which must leave nothing on the console, and ask nobody else."""
    found = browser.open(f"{address}/")
    found.prefer(reduced_motion="reduce")
    found.wait(IDLE)
    yield found
    found.close()
    assert found.complaints == []
    assert all(url.startswith((address, "data:")) for url in found.requests)


def click(on: Page, element: str) -> None:
    on.click(*on.middle(f"document.querySelector({element!r})"))


def fill(on: Page, element: str, value: object, event: str = "input") -> None:
    change = f"e => {{ e.value = {json.dumps(value)}; e.dispatchEvent(new Event('{event}')) }}"
    on.value(f"({change})(document.getElementById('{element}'))")


def upload(on: Page, path: Path) -> None:
    found = on.call("Runtime.evaluate", expression="document.getElementById('file')")["result"]["objectId"]
    on.call("DOM.setFileInputFiles", files=[str(path)], objectId=found)


def send(on: Page, question: str, **fields: object) -> None:
    for name, value in fields.items():
        fill(on, name, value)
    fill(on, "question", question)
    click(on, "#send")


def answers(on: Page) -> list[str]:
    return list(on.value(f"[...{TALK}.querySelectorAll('.answer')].map(each => each.textContent)"))


def error(on: Page) -> str:
    return str(on.value("document.getElementById('error').textContent"))


@needs_chromium
def test_a_document_is_asked_over_turns_and_answered_as_by_the_api(
    shown: Page, client: TestClient, service: Service, engine: lce.Engine, tmp_path: Path
) -> None:
    words = [i for i in range(2, 300) if re.fullmatch(r" [a-z]+", engine.tokenizer.decode([i]))]
    # Whole words are the same tokens when they are read again.
    with_options(service, logit_bias=dict.fromkeys(words, 100.0))
    (tmp_path / "fox.txt").write_text(TEXT, encoding="utf-8")
    upload(shown, tmp_path / "fox.txt")
    shown.wait("document.getElementById('document').textContent.includes('fox.txt')")
    asked: list[Any] = []
    for number, question in enumerate(("what does the fox do?", "and the dog?")):
        send(shown, question, tokens=20)
        shown.wait(f"{TALK}.querySelectorAll('.figures').length > {number} && {IDLE}")
        asked.append({"role": "user", "content": question if number else f"{TEXT}\n\n{question}"})
        how = {"messages": asked, "max_tokens": 20, "temperature": 0}
        expected = client.post("/v1/chat/completions", json=how).json()["choices"][0]["message"]["content"]
        assert answers(shown)[number] == expected
        assert len(set(expected.split())) > 1
        asked.append({"role": "assistant", "content": expected})
    assert shown.value("document.getElementById('about').textContent") == "tiny · reads up to 4,096 tokens"
    figures = shown.value(f"[...{TALK}.querySelectorAll('.figures')].map(each => each.textContent)")
    assert "tokens/s" in figures[0]
    cached, n = re.search(r"(\d+) of (\d+) prompt tokens read before", figures[1]).groups()  # type: ignore[union-attr]
    assert 100 < int(cached) < int(n), "the document was not read again"
    assert shown.value("document.getElementById('question').value") == ""
    click(shown, "#new")
    assert answers(shown) == []


@needs_chromium
@pytest.mark.slow
def test_a_long_answer_is_stopped_and_the_conversation_goes_on(shown: Page, service: Service) -> None:
    with_options(service, logit_bias={77: 100})  # it never ends
    busy = f"{TALK}.querySelector('.answer').ariaBusy"
    shown.resize(900, 620)
    send(shown, "go on", tokens=3000)
    shown.wait(f"{TALK}.scrollHeight > {TALK}.clientHeight")  # the conversation has more lines than it shows
    assert shown.value("document.getElementById('ask').getBoundingClientRect().bottom <= innerHeight + 1")
    assert shown.value(busy) == "true"
    click(shown, "#stop")
    shown.wait(IDLE)
    within(lambda: until(lambda: not service.batch.gauges()["running"], 20))
    assert "stopped" in shown.value(f"{TALK}.querySelector('.figures').textContent")
    assert shown.value(busy) == "false"
    said = answers(shown)[0]
    send(shown, "and now?", tokens=3)
    shown.wait(f"{TALK}.querySelectorAll('.answer').length === 2 && {IDLE}")
    assert (answers(shown)[0], error(shown)) == (said, "")


@needs_chromium
def test_what_was_attended_is_watched_in_the_page_of_lce_inspect(shown: Page) -> None:
    fill(shown, "text", TEXT)
    fill(shown, "method", "longheads")
    send(shown, "what does the fox do?", tokens=8)
    shown.wait(f"{TALK}.querySelector('.figures button') && {IDLE}")
    click(shown, ".figures button")
    inner = "document.getElementById('picture').contentDocument"
    shown.wait(f"{inner}?.querySelector('#why table') && {IDLE}")
    told = "".join(shown.value(f"[...{inner}.querySelectorAll('#answers button')].map(each => each.textContent)"))
    assert told.replace("1space", "") != ""
    assert "longheads" in shown.value(f"{inner}.querySelector('#text .who').textContent")
    assert "fox" in shown.value(f"{inner}.querySelector('.sheet').textContent")
    slider = shown.value(f"(e => [+e.min, +e.value, +e.max])({inner}.getElementById('slider'))")
    assert slider[0] < slider[1] < slider[2]
    shown.value(f"{inner}.getElementById('token-on').click()")
    shown.wait(f"{inner}.getElementById('now').textContent.includes('generated token 1 of')")
    assert shown.value(f"{inner}.getElementById('missing').hidden")
    click(shown, "#close")
    assert shown.value("document.getElementById('watch').hidden")


@needs_chromium
def test_a_wrong_key_is_refused_and_the_right_one_is_kept_for_the_tab(browser: Browser, service: Service) -> None:
    service.settings = replace(service.settings, key="s3cret")
    with serving(service) as address:
        found = browser.open(f"{address}/")
        found.wait("!document.getElementById('key').hidden")
        for key in ("wrong", "s3cret"):
            assert found.value("document.getElementById('main').hidden")
            fill(found, "key-text", key)
            click(found, "#key button")
            shown = "'missing or wrong'" if key == "wrong" else "'reads '"
            found.wait(f"document.getElementById('about').textContent.includes({shown})")
        found.go(f"{address}/")
        found.wait(IDLE)
        send(found, "the fox", tokens=3)
        found.wait(f"{TALK}.querySelector('.figures') && {IDLE}")
        assert error(found) == ""
        found.value("sessionStorage.clear()")
        found.close()
    assert [each for each in found.complaints if "401" not in each] == []


@needs_chromium
def test_text_is_never_markup_and_refusals_are_one_line(shown: Page, tmp_path: Path) -> None:
    markup = "<script>document.title = 'run'</script><img src=x onerror=document.title='run'>"
    fill(shown, "text", markup)
    send(shown, f"what is {markup}?", tokens=4)
    shown.wait(f"{TALK}.querySelector('.figures') && {IDLE}")
    assert markup in shown.value(f"{TALK}.querySelector('.question').textContent")
    assert shown.value("document.querySelectorAll('main script, main img').length") == 0
    assert shown.value("document.title") == "tiny · lce"
    (tmp_path / "odd.bin").write_bytes(b"\x00\xff\xfe")
    upload(shown, tmp_path / "odd.bin")
    shown.wait("!document.getElementById('error').hidden")
    assert error(shown) == "odd.bin is not a text file in UTF-8."
    fill(shown, "method", "esa")
    send(shown, "the fox")
    shown.wait(f"!document.getElementById('error').hidden && {IDLE}")
    assert "calibrate" in error(shown)
    assert shown.value("document.getElementById('question').value") == "the fox", "it can be sent again"
    shown.complaints[:] = [each for each in shown.complaints if "400" not in each]


@needs_chromium
def test_progress_is_shown_while_a_document_is_read(shown: Page, service: Service) -> None:
    gate = threading.Event()
    with_options(service, progress=lambda *_: gate.wait(20))
    send(shown, "the fox", tokens=2)
    shown.wait("!document.getElementById('progress').hidden")
    assert re.search(r"\d+ of \d+ tokens are read", shown.value("document.getElementById('state').textContent"))
    gate.set()
    shown.wait(f"{TALK}.querySelector('.figures') && {IDLE}")
    assert shown.value("document.getElementById('progress').hidden")


@needs_chromium
@pytest.mark.parametrize("width", [360, 1280])
def test_every_control_has_a_name_and_a_phone_needs_no_scrolling_to_the_side(shown: Page, width: int) -> None:
    shown.resize(width, 740)
    send(shown, "x" * 200, tokens=4)
    shown.wait(f"{TALK}.querySelector('.figures') && {IDLE}")
    assert shown.value("document.scrollingElement.scrollWidth") <= width
    nodes = [node for node in shown.call("Accessibility.getFullAXTree")["nodes"] if not node["ignored"]]
    roles = {"button", "combobox", "textbox", "checkbox", "spinbutton", "log", "Iframe"}
    named = [(node["role"]["value"], node["name"]["value"]) for node in nodes if node["role"]["value"] in roles]
    assert {"button", "combobox", "textbox", "spinbutton", "log"} <= {role for role, _ in named}
    assert [role for role, name in named if not name] == []


@needs_chromium
def test_enter_sends_and_a_named_context_has_its_own_method(
    browser: Browser, address: str, client: TestClient, service: Service
) -> None:
    client.post("/contexts", json={"name": "book", "prompt": TEXT, "method": "streaming"})
    found = browser.open(f"{address}/")
    found.wait(IDLE)
    fill(found, "context", "book", "change")
    assert found.value("document.getElementById('method').disabled")
    fill(found, "question", "the dog")
    fill(found, "tokens", 5)
    found.value("document.getElementById('question').focus()")
    found.press("Enter")
    found.wait(f"{TALK}.querySelector('.figures') && {IDLE}")
    how = {"messages": [{"role": "user", "content": "the dog"}], "max_tokens": 5, "context": "book"}
    expected = client.post("/v1/chat/completions", json=how).json()["choices"][0]["message"]["content"]
    assert answers(found) == [expected]
    found.close()
    assert found.complaints == []
