"""Random walks of a context: whatever was done with it, it saves, opens, and goes on like the file."""

import random
from contextlib import nullcontext, suppress
from pathlib import Path
from unittest.mock import Mock

import pytest

import lce
from tests.checkpoints import save_chat, tokens

ESA = "sinks=4 local=16 top_k=8 low_dim=8"
WALKED = [
    *("full", "streaming local=20", "lm_infinite local=20", "rerope local=12", "self_extend local=8"),
    *("self_extend local=8 group=auto", "longheads chunk_size=8 chunks=4", "quest page=4 budget=16 dense_layers=0"),
    *(
        f"esa {ESA} compress=none",
        f"esa {ESA} compress=pca",
        "pages page=4 budget=16 select=lowdim select.compress=pca",
    ),
    *("infllm block_size=4 repr_tokens=2 top_k=3 sinks=4 local=16", "reattention span=4 top_k=3 local=8"),
]
EVERYDAY = ("rerope", "self_extend local=8 group", "longheads", "esa", "infllm")
STEPS = ("read", "read", "read", "cut", "cut", "fork", "cancel", "answer", "interrupt", "evict")


def stepped(engine: lce.Engine, context: lce.Context, step: str, chance: random.Random) -> lce.Context:
    """Take a step with a context; return the context that the walk goes on with."""
    n, more = chance.choice([1, 5, 16, 40]), tokens(40, seed=chance.randrange(99))
    if step == "read":
        engine.prefill(more[:n], context=context)
    elif step == "cut":
        n_tokens, fixed = chance.choice([0, len(context) // 2, max(0, len(context) - n)]), context.cache.fixed
        with (
            nullcontext() if n_tokens >= fixed else pytest.raises(lce.UsageError, match="cannot go back into its first")
        ):
            context.truncate(n_tokens)
    elif step == "fork":
        return context.fork()
    elif step == "cancel":
        stream = engine.stream(more, max_tokens=4, context=context)
        next(stream, None)
        stream.cancel()
    elif step == "interrupt":  # within a prefill, after its first blocks
        before, n_blocks = context.token_ids[:], chance.choice([1, 2])
        stream = engine.stream(more, context=context, progress=lambda done, _: done < n_blocks * 16 or stream.cancel())
        assert (list(stream), stream.result.finish_reason, context.token_ids) == ([], "cancelled", before)
        with pytest.raises(KeyboardInterrupt):
            engine.prefill(more, context=context, progress=Mock(side_effect=[None] * n_blocks + [KeyboardInterrupt]))
        assert context.token_ids == before
    elif step == "evict" and type(engine.setup.method) is lce.methods.Full and not context.cache.fixed:
        return engine.evict(context, chance.choice([0.3, 0.8]))
    elif step == "evict":  # only under `full`, and once
        with pytest.raises(lce.UsageError, match=r"under the method full alone|evicted before"):
            engine.evict(context, 0.5)
        return context if context.cache.fixed == 0 else engine.prefill(tokens(30))
    elif len(context):
        engine.generate(more[:n], max_tokens=3, context=context)
    return context


@pytest.mark.parametrize(("n_steps", "every"), [(24, 3), pytest.param(800, 20, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "spelled", [pytest.param(each, marks=() if each.startswith(EVERYDAY) else pytest.mark.slow) for each in WALKED]
)
def test_a_context_saves_and_goes_on_after_any_walk(
    tiny_model: Path, tmp_path: Path, spelled: str, n_steps: int, every: int
) -> None:
    name, *knobs = spelled.split()
    method = lce.methods.make(name, dict(each.split("=", 1) for each in knobs))
    engine, chance, path = lce.load(tiny_model, method, block=16), random.Random(spelled), tmp_path / "walk.lce"
    context = engine.prefill(tokens(30))
    for i in range(n_steps):
        context = stepped(engine, context, chance.choice(STEPS), chance)
        if len(context) > 200:
            context.truncate(max(90, context.cache.fixed))
        if i % every == every - 1 and len(context):
            context.save(path)
            both = context.fork(), engine.open_context(path)
            here, there = (engine.generate(tokens(7), max_tokens=3, context=each).token_ids for each in both)
            assert here == there
            path.unlink()


TURN = "{{ '<|turn|>' ~ x.role ~ '\n' ~ x.content ~ '<|end|>' }}"
TEMPLATE = f"{{% for x in messages %}}{TURN}{{% endfor %}}{{{{ '<|turn|>assistant\n' }}}}"
WENT_BACK = ("rerope", "self_extend", "infllm")  # methods whose state cannot go back everywhere
SAID = ("What is a llama?", "And an alpaca, is it smaller? " * 3, "The quick brown fox jumps over the lazy dog. " * 6)


@pytest.mark.parametrize(
    "spelled", [WALKED[0], *(pytest.param(x, marks=pytest.mark.slow) for x in WALKED if x.split()[0] in WENT_BACK)]
)
def test_a_conversation_is_saved_after_any_turn(tmp_path: Path, spelled: str) -> None:
    """After Ctrl-C in a prefill or in an answer, too: the file has the messages, and goes on like the conversation."""
    name, *knobs = spelled.split()
    method = lce.methods.make(name, dict(each.split("=", 1) for each in knobs))
    engine = lce.load(save_chat(tmp_path, TEMPLATE), method, block=16)
    conversation, chance, path = engine.conversation(), random.Random(spelled), tmp_path / "chat.lce"
    for _ in range(6):
        allowed, said = chance.choice([1, 2, 99]), chance.choice(SAID)
        ctrl_c = Mock(side_effect=[False] * allowed + [KeyboardInterrupt])
        with suppress(KeyboardInterrupt):
            conversation.ask(said, max_tokens=4, **{chance.choice(["progress", "stop"]): ctrl_c})
        if not conversation.messages:
            with pytest.raises(lce.UsageError, match="the conversation is empty"):
                conversation.save(path)
            continue
        try:
            conversation.save(path)
        except lce.UsageError:  # it is incomplete: earlier turns were to be read anew, and were not yet
            conversation.ask(said, max_tokens=4)
            conversation.save(path)
        both = conversation.context.fork(), engine.open_context(path)
        assert both[0].token_ids == both[1].token_ids
        here, there = (engine.generate(tokens(7), max_tokens=3, context=each).token_ids for each in both)
        assert here == there
