"""`lce chat` and the chat of `lce generate`: what goes where, the commands, Ctrl-C, and what is refused."""

import fcntl
import json
import os
import pty
import re
import readline
import select
import shutil
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import lce
from lce.terminal.output import Output
from tests.checkpoints import save_chat
from tests.command import LIMIT, assert_error, run, spawn, within

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|turn|>' ~ message.role ~ '\n' ~ message.content ~ '<|end|>\n' }}"
    "{% endfor %}{{ '<|turn|>assistant\n' }}"
)
GREEDY = ("--temperature", "0")


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat(tmp_path_factory.mktemp("chat"), TEMPLATE)


@pytest.fixture(scope="module")
def engine(chatty: Path) -> lce.Engine:
    return lce.load(chatty)


def test_a_line_is_a_turn_and_answers_alone_go_to_stdout(chatty: Path, engine: lce.Engine) -> None:
    result = run("chat", "--model", chatty, *GREEDY, "--max-tokens", "5", "--system", "Be brief.", stdin="Hi\n\nWhy?\n")
    conversation = engine.conversation("Be brief.")
    texts = [conversation.ask(text, max_tokens=5).text for text in ("Hi", "Why?")]
    assert (result.exit_code, result.stdout) == (0, "".join(f"{text}\n" for text in texts))
    notes = [line for line in result.stderr.splitlines() if line.startswith("lce: note:")]
    first, second = (line for line in result.stderr.splitlines() if line not in notes)
    assert len(notes) == 1, "the second turn is beyond the window"
    assert re.match("[0-9]+ prompt tokens [|]", first)
    whole, before = (int(text) for text in re.findall("([0-9]+) (?:prompt tokens|read before)", second))
    assert whole - before == conversation.tokens_read


def test_a_first_message_and_messages_of_several_lines(chatty: Path, engine: lce.Engine) -> None:
    args = ("chat", "--model", chatty, *GREEDY, "--max-tokens", "5")
    for words, stdin, messages in (
        (("Hi", "you"), "Why?\n", ["Hi you", "Why?"]),
        (("/help",), "", ["/help"]),
        ((), '"""\nWhy?\n\n /x\n"""\n"""Hi"""\n', ["Why?\n\n /x", "Hi"]),
    ):
        conversation = engine.conversation()
        expected = "".join(f"{conversation.ask(text, max_tokens=5).text}\n" for text in messages)
        assert run(*args, *words, stdin=stdin).stdout == expected
    assert_error(run(*args, stdin='"""Why?\n'), 3, 'stdin ended within a message; end the message with """')
    assert_error(run(*args, " "), 2, "the first message is empty")


def test_sampling_is_what_the_model_recommends_and_is_said(chatty: Path, tmp_path: Path) -> None:
    plain, tmp_path = tmp_path / "plain", tmp_path / "own"
    for folder in (plain, tmp_path):
        shutil.copytree(chatty, folder)
    (plain / "generation_config.json").unlink()
    own = {"do_sample": True, "temperature": 0.9, "top_k": 20, "repetition_penalty": 1.2}
    (tmp_path / "generation_config.json").write_text(json.dumps(own))
    args, how = ("chat", "--max-tokens", "9", "--seed", "1", "--model"), {"max_tokens": 9, "seed": 1}
    for folder, more, sampling, said in (
        (tmp_path, (), own, "temperature 0.9, top_k 20, repetition_penalty 1.2 (its makers recommend)"),
        (tmp_path, ("--top-k", "3"), own | {"top_k": 3}, "top_k 3"),
        (plain, (), {"frequency_penalty": 0.5}, "the likeliest token, frequency_penalty 0.5 (of lce, since"),
    ):
        result, knobs = run(*args, folder, *more, "Hi"), {k: x for k, x in sampling.items() if k != "do_sample"}
        assert result.stdout == lce.load(folder).chat("Hi", **how, sampling=knobs).text + "\n"
        assert lce.load(folder).chat("Hi", **how, **({"top_k": 3} if more else {})).text + "\n" == result.stdout
        asked = run("generate", "--chat", *args[1:], folder, *more, "Hi")
        assert (asked.stdout, asked.stderr.count(said)) == (result.stdout, 1)
        assert result.stderr.count("lce: sampling: ") == result.stderr.count(said) == 1
    greedy = run(*args, tmp_path, *GREEDY, "Hi")
    assert greedy.stdout == lce.load(tmp_path).chat("Hi", max_tokens=9, temperature=0).text + "\n"
    assert "lce: sampling" not in greedy.stderr
    assert_error(run(*args, tmp_path / "none", "--top-p", "7"), 2, "top_p is 7.0")


def test_what_a_stopped_message_read_stays_read(chatty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    @contextmanager
    def bar(output: Output, label: str, unit: str) -> Iterator[Callable[[int, int], None]]:
        def interrupt(done: int, total: int) -> None:
            calls.append(done)
            if len(calls) == 2:
                raise KeyboardInterrupt

        yield interrupt

    monkeypatch.setattr(Output, "bar", bar)
    (tmp_path / "a.txt").write_text("The llama is larger. " * 20)
    lines = f"/file {tmp_path / 'a.txt'}\nHi\nWhy?\n/file {tmp_path / 'a.txt'}\n/file\n"
    result = run("chat", "--model", chatty, *GREEDY, "--max-tokens", "5", "--block", "32", stdin=lines)
    tokenizer, said = lce.load(chatty).tokenizer, [{"role": "user", "content": "The llama is larger. " * 20}]
    total = len(tokenizer.encode_parts(tokenizer.render_chat(said)))
    assert f"forgotten; 64 of its {total + 4} tokens were read" in result.stderr
    assert "files that go before the next message: 1" in result.stderr
    assert "(64 read before)" in result.stderr
    assert result.stderr.endswith("no file goes before the next message\n")


def test_the_commands(chatty: Path, engine: lce.Engine, tmp_path: Path) -> None:
    document, saved = tmp_path / "a document.txt", tmp_path / "chat.lce"
    document.write_text("The llama is larger.\n")
    lines = f"Hi\n/reset\n/file {document}\n/file {document}\nWhich?\n/save {saved}\n//x\n/help\n/exit\nnever\n"
    result = run("chat", "--model", chatty, *GREEDY, "--max-tokens", "5", stdin=lines)
    assert result.exit_code == 0
    conversation = engine.conversation()
    texts = [engine.chat("Hi", max_tokens=5).text]
    for said in ("The llama is larger.\n\nThe llama is larger.\n\nWhich?", "/x"):
        texts.append(conversation.ask(said, max_tokens=5).text)
    assert result.stdout == "".join(f"{text}\n" for text in texts)
    for words in ("20 characters go before the next message", f"saved {saved}", "begins again", "/file PATH"):
        assert words in result.stderr
    assert saved.exists()


def test_a_saved_chat_goes_on(chatty: Path, engine: lce.Engine, tmp_path: Path) -> None:
    saved = tmp_path / "chat.lce"
    args = ("chat", "--model", chatty, *GREEDY, "--max-tokens", "5")
    first = run(*args, stdin=f"Hi\n/save {saved}\nWhy?\n")
    again = run(*args, "--context", saved, stdin=f"Why?\n/save {saved}\n/save {saved}\nAnd?\n")
    assert again.exit_code == 0
    assert again.stdout.startswith(first.stdout.split("\n", 1)[1])
    expected = engine.conversation()
    texts = [expected.ask(text, max_tokens=5).text for text in ("Hi", "Why?", "And?")]
    assert again.stdout == "".join(f"{text}\n" for text in texts[1:])
    assert len(engine.open_context(saved)) < len(expected.context or [])
    assert run(*args, stdin=f"Hi\n/save {saved} --force\n").exit_code == 0
    assert len(engine.open_context(saved)) < len(expected.context or []) / 2


def test_a_bad_line_of_a_pipe_ends_it(chatty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken").write_text("text")
    for line, code, words in (
        ("/nothing", 2, "/nothing is no command"),
        ("/fil a.txt", 2, "did you mean '/file'?"),
        ("/file no such file", 3, "no such file"),
        ("/save", 2, "/save takes a path"),
        ("/save chat.lce", 2, "the conversation is empty"),
        (b"\xff\n", 3, "not UTF-8"),
    ):
        assert_error(run("chat", "--model", chatty, *GREEDY, stdin=line), code, words)
    taken = run("chat", "--model", chatty, "--max-tokens", "5", *GREEDY, stdin="Hi\n/save taken\nnever\n")
    assert (taken.exit_code, "taken exists; name another file, or give --force" in taken.stderr) == (2, True)
    assert Path("taken").read_text() == "text"


@pytest.mark.parametrize("empty", [False, True])
def test_a_model_without_a_template(tiny_model: Path, tmp_path: Path, empty: bool) -> None:
    if empty:
        tiny_model = save_chat(tmp_path, "", max_position_embeddings=64)
    for args in (["chat"], ["generate", "--chat", "--prompt", "Hi"], ["generate", "--prompt", "Hi", "--system", "Be"]):
        result = run(*args, "--model", tiny_model, stdin="Hi\n")
        assert_error(result, 3, "has no chat template: it continues text; use generate with a prompt alone")


def test_generate_chats(chatty: Path, engine: lce.Engine, tmp_path: Path) -> None:
    history = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    (tmp_path / "history.json").write_text(json.dumps(history))
    user, system = {"role": "user", "content": "Why?"}, {"role": "system", "content": "Be brief."}
    args = ("generate", "--model", chatty, "--max-tokens", "5")
    for options, stdin, messages in (
        (("--chat", "--prompt", "Why?"), None, [user]),
        (("--chat",), "Why?\n", [user]),
        (("--system", "Be brief.", "--prompt", "Why?"), None, [system, user]),
        (("--messages", tmp_path / "history.json", "--prompt", "Why?"), None, [*history, user]),
        (("--messages", tmp_path / "history.json", "--chat"), None, history),
        (("--messages", "-", "--system", "Be brief."), json.dumps([*history, user]), [system, *history, user]),
    ):
        result = run(*args, *options, stdin=stdin)
        assert (result.exit_code, result.stdout) == (0, engine.chat(messages, max_tokens=5).text + "\n")
    plain, template = (
        run(*args, "--prompt", "Why?"),
        "lce: the prompt is continued as it stands; --chat asks this model to answer it\n",
    )
    assert plain.stdout == engine.generate("Why?", max_tokens=5).text + "\n"
    assert plain.stderr.startswith(template)
    for more in (("--chat",), ("--quiet",)):
        assert template not in run(*args, "--prompt", "Why?", *more).stderr
    assert template not in run(*args, "--prompt", "<|turn|>user").stderr, "it is in the format already"
    nothing = run(*args, "--prompt", "Why?", "--stop", plain.stdout[0])
    assert template in nothing.stderr
    assert "lce: the answer is empty\n" in nothing.stderr
    assert "decode" not in run(*args, "--max-tokens", "1", "--prompt", "Why?").stderr


def test_messages_that_are_none(chatty: Path) -> None:
    for content in ("[]", '[{"role": "user"}]', '["a"]'):
        assert_error(run("generate", "--model", chatty, "--messages", "-", stdin=content), 3, "expected a list of")


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(chatty: Path) -> None:
    process = spawn("", "chat", "--model", chatty, *GREEDY, "--max-tokens", "100000", stdin=subprocess.PIPE)
    assert process.stdin
    assert process.stdout
    process.stdin.write("Hi\n")
    process.stdin.flush()
    assert within(partial(process.stdout.read, 3))  # it answers
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    out, err = process.communicate("/help\n")
    assert process.returncode == 0
    assert out.endswith("\n")
    assert "stopped; the answer so far is kept\n/file PATH" in err
    assert "Traceback" not in err


class Terminal:
    """A chat at a terminal of its own, 60 columns wide, where keys make signals."""

    def __init__(self, *args: str | Path, **options: Any) -> None:
        self.keys, ours = pty.openpty()
        fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
        own = "import fcntl, termios\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)"
        pipes = {"stdin": ours, "stdout": ours, "stderr": ours, "start_new_session": True} | options
        self.process = spawn(own, "chat", *GREEDY, *args, **pipes)
        os.close(ours)
        self.seen = ""

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *error: Any) -> None:
        os.close(self.keys)
        self.process.__exit__(*error)

    def type(self, text: str) -> None:
        os.write(self.keys, text.encode())

    def expect(self, pattern: str, again: Callable[[], None] = lambda: None) -> str:
        deadline = time.monotonic() + LIMIT
        while not (found := re.search(pattern, self.seen)):
            assert time.monotonic() < deadline, self.seen
            if select.select([self.keys], [], [], 1.0)[0]:
                self.seen += os.read(self.keys, 4096).decode(errors="replace")
            else:
                again()
        before, self.seen = self.seen[: found.start()], self.seen[found.end() :]
        return before

    def leave(self) -> str:
        """Type Ctrl-D, and return what the chat wrote to a pipe as its stdout."""
        self.type("\x04")
        out, _ = self.process.communicate()
        assert self.process.returncode == 0
        return out


def test_at_a_terminal(chatty: Path, engine: lce.Engine, tmp_path: Path) -> None:
    """What is loading, the last turns, the mark, a note for a mistake, Ctrl-C at the mark, wrapping, and Ctrl-D."""
    before = engine.conversation()
    for text in ("First?", "Is it?", "And then,\nwhy?", "Hi"):
        before.ask(text, max_tokens=4)
    before.save(tmp_path / "chat.lce")
    args = ("--model", chatty, "--max-tokens", "4", "--context", tmp_path / "chat.lce")
    with Terminal(*args, stdout=subprocess.PIPE) as chat:
        assert chat.expect("lce: loading ") == "", "before anything else"
        chat.expect(f"so far: {len(before.context)} tokens, turns: 4\r\n> Is it[?]\r\n  .*\r\n> And then, why[?]\r\n")
        chat.expect("> Hi\r\n  .*\r\nType a message, or /help. Ctrl-D ends.\r\n> ")
        chat.type("/nothing\n")
        assert max(map(len, chat.expect("message\r\n> ").split("\r\n"))) <= 60
        chat.type("\x03")  # once more if nothing happens: a signal just before a read begins does not end it
        chat.expect("Ctrl-D ends the chat.", again=lambda: chat.type("\x03"))
        chat.expect("> ")
        chat.type("Why?\n")
        lines = chat.expect("peak memory: [^>]*> ").split("\r\n")
        assert max(len(line) for line in lines if "prefill:" not in line) <= 60
        goes_on = engine.conversation(context=engine.open_context(tmp_path / "chat.lce"))
        assert chat.leave() == goes_on.ask("Why?", max_tokens=4).text + "\n"


@pytest.mark.slow
@pytest.mark.skipif("libedit" in (readline.__doc__ or ""), reason="pastes of several lines need GNU readline")
def test_a_paste_is_one_message_and_what_is_typed_ahead_stays(chatty: Path, engine: lce.Engine, tmp_path: Path) -> None:
    with Terminal("--model", chatty, "--max-tokens", "100000", "--quiet") as chat:
        chat.expect("\x1b\\[[?]2004h> ")
        chat.type("\x1b[200~/one\rand two\r\x1b[201~")
        chat.expect("and two")
        chat.type("\r")
        chat.expect("\x1b\\[[?]2004l[\r\n]*[^\r\n]")  # it answers
        chat.type(f"/save {tmp_path / 'chat.lce'}\n\x03")
        chat.expect("the answer so far is kept")
        chat.expect("saved[^>]*> ")
        chat.leave()
    asked = engine.tokenizer.encode_parts(engine.tokenizer.render_chat([{"role": "user", "content": "/one\nand two"}]))
    assert engine.open_context(tmp_path / "chat.lce").token_ids[: len(asked)] == asked
