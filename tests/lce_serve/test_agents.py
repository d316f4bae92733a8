"""Two agents' histories of 30 turns, replayed: none is refused, and each turn reads little but what is new."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lce
from tests.checkpoints import save_chat
from tests.lce_serve.conftest import TEMPLATE
from tests.lce_serve.test_history import PICTURE, PNG, STRICT, Ask, asking

TOOLS = [("read_file", {"path": {"type": "string", "pattern": "^(?!/etc)"}}), ("screenshot", {})]


LENGTHS = pytest.mark.parametrize("n_turns", [6, pytest.param(30, marks=pytest.mark.slow)])


@pytest.fixture(scope="module", params=[TEMPLATE, pytest.param(STRICT, marks=pytest.mark.slow)], ids=["any", "strict"])
def ask(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[tuple[Ask, lce.Engine]]:
    folder: Path = save_chat(tmp_path_factory.mktemp("agents"), request.param, max_position_embeddings=32768)
    with asking(folder) as ask:
        yield ask, lce.load(folder, threads=1)


def messages(turn: int, is_middle: bool) -> list[Any]:
    """A turn of an agent that speaks Anthropic's Messages: a call, its result, and now and then a reminder."""
    name, schema = TOOLS[turn % 2]
    call = {"type": "tool_use", "id": f"t{turn}", "name": name, "input": dict.fromkeys(schema, f"src/{turn}.py")}
    picture = [{"type": "text", "text": "the screen"}, {"type": "image", "source": PNG}]
    result = {"type": "tool_result", "tool_use_id": f"t{turn}", "content": picture if not schema else f"print({turn})"}
    said: list[Any] = [
        {"role": "assistant", "content": [{"type": "text", "text": f"I look at part {turn}."}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": f"and what follows from part {turn}?"}]},
    ]
    if is_middle:
        said.append({"role": "system", "content": "The user opened another file."})
        said.append({"role": "user", "content": "go on"})
    return said


def items(turn: int, is_middle: bool) -> list[Any]:
    """A turn of an agent that speaks OpenAI's Responses: a custom tool, a shell, a picture and an unknown item."""
    picture = {"type": "input_image", "image_url": PICTURE}
    calls = [
        {"type": "custom_tool_call", "call_id": f"c{turn}", "name": "apply_patch", "input": f"*** Update {turn}.py"},
        {"type": "custom_tool_call_output", "call_id": f"c{turn}", "output": "Done!"},
    ]
    shell = [
        {"type": "local_shell_call", "call_id": f"s{turn}", "action": {"type": "exec", "command": ["ls", str(turn)]}},
        {"type": "local_shell_call_output", "call_id": f"s{turn}", "output": f"{turn}.py"},
    ]
    asked = {"role": "user", "content": [{"type": "input_text", "text": f"and then {turn}?"}, picture]}
    middle = [{"role": "developer", "content": "Be brief."}, {"type": "telepathy", "text": "?"}, asked]
    return [*(calls if turn % 2 else shell), *(middle if is_middle else [asked])]


def replay(ask: tuple[Ask, lce.Engine], api: str, turn: Any, n_turns: int, fields: Any) -> None:
    """Send a history that grows by a turn each time. What a prompt shares with the one before has to be cached."""
    send, engine = ask
    history, before = [{"role": "user", "content": "Mend the test that fails, please."}], list[int]()
    for n in range(n_turns):
        answer, prompt = send(api, history, **fields(n))
        assert answer.status_code == 200, answer.text
        usage, ids = answer.json()["usage"], engine.tokenizer.encode(prompt)
        cached = usage.get("cache_read_input_tokens") or usage.get("input_tokens_details", {}).get("cached_tokens", 0)
        shared = next(
            (at for at, (one, other) in enumerate(zip(before, ids, strict=False)) if one != other), len(before)
        )
        assert shared < 64 or cached >= 0.9 * shared  # a strict template has the new system message in front of all
        assert shared >= 0.9 * len(before) or n - 1 == n_turns // 2
        before, history = ids, [*history, *turn(n, n == n_turns // 2)]


@LENGTHS
def test_an_agent_of_anthropics_messages(ask: tuple[Ask, lce.Engine], n_turns: int) -> None:
    tools = [{"name": name, "input_schema": {"type": "object", "properties": has}} for name, has in TOOLS]

    def fields(n: int) -> dict[str, Any]:
        first = f"x-anthropic-billing-header: v=1; h={n * 7919};"
        return {"system": [{"type": "text", "text": text} for text in (first, "You mend.")], "tools": tools}

    replay(ask, "m", messages, n_turns, fields)


@LENGTHS
def test_an_agent_of_openais_responses(ask: tuple[Ask, lce.Engine], n_turns: int) -> None:
    tools = [{"type": "custom", "name": "apply_patch"}, {"type": "local_shell"}]
    replay(ask, "r", items, n_turns, lambda n: {"instructions": "You mend.", "tools": tools})
