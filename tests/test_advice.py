"""One adviser: every place that advises a method says the same for the same model and length."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import lce
from tests.advising import advised
from tests.checkpoints import save_chat, tokens
from tests.command import assert_error, ran, run

TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|turn|>{% endif %}"
)
PROSE = "The old miller took the bread to the village. " * 30
W = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that chats, with a window of 64."""
    return save_chat(tmp_path_factory.mktemp("chat"), TEMPLATE)


def text_of(engine: lce.Engine, n_tokens: int) -> str:
    """Prose of so many tokens."""
    return next(PROSE[:n] for n in range(len(PROSE)) if len(engine.tokenizer.encode(PROSE[:n])) == n_tokens)


def named(text: str, before: str = "--method auto takes ") -> str:
    """The method that a text advises, behind the words `before`."""
    found = re.findall(f"{re.escape(before)}([a-z_]+)", text)
    assert found, text
    return str(found[0])


TWICE = {"rope": "linear", "rope_factor": 2.0}


SLOW = pytest.param(2 * W, TWICE, marks=pytest.mark.slow)


@pytest.mark.parametrize(("length", "scaling"), [(W, {}), (W + 1, {}), (7 * W, {}), SLOW, (2 * W + 1, TWICE)])
def test_all_say_the_same(model: Path, tmp_path: Path, length: int, scaling: dict[str, Any]) -> None:
    expected, flags = advised(length, model, **scaling).method, list[str]()
    for key, value in scaling.items():
        flags += [f"--{key.replace('_', '-')}", str(value)]
    engine, file, out = lce.load(model, **scaling), tmp_path / "text.txt", tmp_path / "text.lce"
    file.write_text(text_of(engine, length - 2))
    of, auto = ("-m", model, *flags), ("--method", "auto")
    said = {
        "load": lce.load(model, "auto", length=length, **scaling).method.name,
        "plan": getattr(lce.plan(model, tokens=length, **scaling).auto, "method", None),
        "plan auto": lce.plan(model, "auto", tokens=length, **scaling).method,
        "lce plan auto": named(ran("plan", *of, *auto, "--tokens", str(length)).stdout, "tokens, read by "),
        "lce plan": named(ran("plan", *of, "--tokens", str(length)).stdout.replace(", which takes", " takes")),
        "lce generate": named(ran("generate", *of, *auto, "-f", file, "-n", "2").stderr, "method auto is "),
    }
    asked = ("prefill", *of, *auto, "--out", out, "-p", "Hello", "--length", str(length))
    said["lce prefill"] = named(ran(*asked).stderr, "method auto is ")
    if length > 2 * W:  # shorter texts hold no fact and question
        measured = ran("recommend", *of, "--task", "code", "--length", str(length), "--seconds", "0", "--json")
        said["lce recommend"] = json.loads(measured.stdout)["recommended"]["method"]
    chat = [{"role": "user", "content": f"{file.read_text()}\n\nWhy?"}]
    n_chat = len(engine.tokenizer.encode_parts(engine.tokenizer.render_chat(chat)))
    talk = ran("chat", *of, *auto, "-n", "1", stdin=f"/file {file}\nWhy?\n")
    by_messages = ran("generate", *of, *auto, "-n", "1", "--messages", "-", stdin=json.dumps(chat))
    in_chat = advised(n_chat + 1, model, **scaling).method
    for each in (talk, by_messages):
        assert named(each.stderr, "method auto is ") == in_chat
        assert f" {n_chat + 1:,} tokens" in each.stderr
    if expected != "full":
        with pytest.warns(lce.WindowWarning) as caught:
            engine.prefill(tokens(length))
        said["warning"] = named(str(caught[0].message).replace(", which takes", " takes"))
        said["refusal"] = refused(engine, length)
    assert said == dict.fromkeys(said, expected)


def refused(engine: lce.Engine, length: int) -> str:
    """The method that the server names where it refuses a text. With this method the text is read."""
    pytest.importorskip("starlette", reason="lce[serve] is not installed")
    from starlette.testclient import TestClient

    from lce_serve.app import application
    from lce_serve.service import Service, Settings

    with engine.batch(max_lanes=1) as batch:
        client = TestClient(application(Service(Settings("tiny"), batch)), base_url="http://127.0.0.1:8000")
        body: dict[str, Any] = {"model": "tiny", "prompt": tokens(length), "max_tokens": 1}
        refusal = client.post("/v1/completions", json=body)
        name = named(refusal.json()["error"]["message"], 'give "method": "')
        answer = client.post("/v1/completions", json={**body, "method": name})
        assert client.post("/contexts", json={"name": "book", "prompt": "Hello there"}).status_code == 200
        continued = client.post("/v1/completions", json={**body, "context": "book"}).json()["error"]["message"]
        assert "make the named context anew, by the " in continued
    assert (refusal.status_code, answer.status_code) == (400, 200), answer.text
    return name


def test_no_line_speaks_of_answers(model: Path) -> None:
    """A text that was read or planned has none."""
    line = lce.load(model).setup.beyond(W + 1)
    assert line is not None
    assert "answer" not in line
    assert 'give --method auto, which takes rerope for this length (in Python: method="auto", length=65)' in line
    assert lce.load(model, "auto", length=65).setup.beyond(W + 1) is None, "the command that the line names mends it"


def test_a_chat_chooses_again_when_a_file_comes(model: Path, tmp_path: Path) -> None:
    """A message within the window, then a file beyond it, which is read with the messages before it."""
    file = tmp_path / "text.txt"
    file.write_text(PROSE[:400])
    talk = ran("chat", "-m", model, "--method", "auto", "-n", "2", stdin=f"Hi\n/file {file}\nWhat?\n/reset\nHi\n")
    assert re.findall("method auto is ([a-z_]+)", talk.stderr) == ["full", "self_extend", "full"]
    engine = lce.load(model)
    conversation = engine.conversation()
    said = [conversation.ask("Hi", max_tokens=2).text]
    conversation.use("self_extend")
    said.append(conversation.ask(f"{PROSE[:400]}\n\nWhat?", max_tokens=2).text)
    said.append(said[0])
    assert talk.stdout == "".join(f"{text}\n" for text in said)
    assert len(conversation.messages) == 4
    assert "can read of this model" not in talk.stderr


def test_a_chat_takes_a_scaling_and_a_larger_one_when_it_outgrows_it(tmp_path: Path) -> None:
    """A factor has a quarter of the window to spare, so that not every message reads all anew."""
    own: dict[str, Any] = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    model, file = save_chat(tmp_path, TEMPLATE, **own), tmp_path / "text.txt"
    file.write_text(PROSE[:400])
    talk = ran(
        "chat",
        "-m",
        model,
        "--method",
        "auto",
        "-n",
        "2",
        stdin=f"Hi\n/file {file}\nWhat?\nOh\n{PROSE[:99]}\n/reset\nHi\n",
    )
    expected = ["full for", "full --rope yarn for", "full --rope yarn for", "full for"]
    assert re.findall("method auto is (full(?: --rope yarn)? for)", talk.stderr) == expected
    lengths = [int(n) for n in re.findall(r"rope yarn: factor [\d.]+, for up to (\d+) tokens", talk.stderr)]
    assert lengths == sorted({*lengths})
    assert len(lengths) == 2
    assert "can read of this model" not in talk.stderr


def test_a_server_is_started_with_a_scaling(tmp_path: Path) -> None:
    """A request names a method, but no scaling."""
    own: dict[str, Any] = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    engine = lce.load(save_chat(tmp_path, TEMPLATE, **own))
    remedy = str(engine.setup.beyond(2 * W, "{0.request}"))
    assert "start the server with --method full --rope yarn; others" in remedy


def test_a_conversation_goes_on_with_another_method(model: Path) -> None:
    engine = lce.load(model)
    whole, switched = lce.load(model, "rerope").conversation("Be brief."), engine.conversation("Be brief.")
    before = switched.ask("Hi", max_tokens=3).text
    switched.use("rerope")
    messages = [*switched.messages[1:], {"role": "user", "content": "Why?"}]
    assert switched.ask("Why?", max_tokens=3).text == whole.ask(messages, max_tokens=3).text
    assert (switched.setup.method.name, switched.messages[2]["content"]) == ("rerope", before)
    with pytest.raises(lce.UsageError, match="unknown method"):
        switched.use("rerop")
    with pytest.raises(lce.UsageError, match="continues a context"):
        engine.conversation(context=engine.prefill("Hello")).use("rerope")


def test_a_context_keeps_its_method_and_says_so(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "text.lce"
    ran("prefill", "-m", model, "-p", "Hello", "--out", out)
    again = run("generate", "-m", model, "-c", out, "--method", "auto", "-p", "Why?", "-n", "1")
    assert "the method of" in again.stderr
    assert "is full: for another, read its text again by `lce prefill`" in again.stderr


@pytest.mark.parametrize(("n_tokens", "reads", "too_long"), [(200, "full", "none"), (1500, "rerope", "full (2,048)")])
def test_a_text_is_counted_and_planned(tmp_path: Path, n_tokens: int, reads: str, too_long: str) -> None:
    """With 1,024 tokens of questions and answers, as `lce prefill` reads it."""
    model, file = save_chat(tmp_path, TEMPLATE, max_position_embeddings=2048), tmp_path / "text.txt"
    file.write_text(text_of(lce.load(model), n_tokens) if n_tokens < 400 else "a" * (n_tokens - 1))
    found = json.loads(ran("info", file, "-m", model, "--json").stdout)
    expected = advised(n_tokens + 1024, model).method
    assert (found["kind"], found["tokens"], found["with_questions"]) == ("text", n_tokens, n_tokens + 1024)
    assert (found["auto"]["method"], reads in found["reads"], "streaming" in found["reads"]) == (
        expected,
        True,
        reads == "full",
    )
    shown = ran("info", "-", "-m", model, stdin=file.read_bytes()).stdout
    assert named(shown, "method auto is ") == expected
    assert too_long in shown.splitlines()[-1]
    planned = ran("plan", "-m", model, "-f", file).stdout
    assert planned.startswith(f"{n_tokens + 1024:,} tokens, read by full")
    assert named(planned.replace(", which takes", " takes")) == expected


def test_what_is_no_text(model: Path, tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(b"a\0b" * 9)
    assert_error(run("info", tmp_path / "data.bin", "-m", model), 3, "data.bin")
    assert_error(run("plan", "-m", model), 2, "give --tokens N or --prompt-file FILE")
    assert_error(run("plan", "-m", model, "--tokens", "9", "-f", "x"), 2, "given twice")
