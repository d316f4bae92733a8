"""Random walks of a context: whatever was done with it, it saves, opens, and goes on like the file."""

import random
from pathlib import Path

import pytest

import lce
from tests.checkpoints import tokens

ESA = "sinks=4 local=16 top_k=8 low_dim=8"
WALKED = [
    *("full", "streaming local=20", "lm_infinite local=20", "rerope local=12", "self_extend local=8"),
    *("self_extend local=8 group=auto", "longheads chunk_size=8 chunks=4", "quest page=4 budget=16 dense_layers=0"),
    *(
        f"esa {ESA} compress=none",
        f"esa {ESA} compress=pca",
        "pages page=4 budget=16 select=lowdim select.compress=pca",
    ),
    "infllm block_size=4 repr_tokens=2 top_k=3 sinks=4 local=16",
    f"delta method=esa:compress=pca:{ESA.replace(' ', ':')} every=8 dense_up_to=0",
]
STEPS = ("read", "read", "cut", "cut", "fork", "cancel", "answer")


def stepped(engine: lce.Engine, context: lce.Context, step: str, chance: random.Random) -> lce.Context:
    """Take a step with a context; return the context that the walk goes on with."""
    n, more = chance.choice([1, 5, 16, 40]), tokens(40, seed=chance.randrange(99))
    if step == "read":
        engine.prefill(more[:n], context=context)
    elif step == "cut":
        context.truncate(chance.choice([0, len(context) // 2, max(0, len(context) - n)]))
    elif step == "fork":
        return context.fork()
    elif step == "cancel":
        stream = engine.stream(more, max_tokens=4, context=context)
        next(stream)
        stream.cancel()
    elif len(context):
        engine.generate(more[:n], max_tokens=3, context=context)
    return context


@pytest.mark.parametrize(("n_steps", "every"), [(24, 3), pytest.param(800, 20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("spelled", WALKED)
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
            context.truncate(90)
        if i % every == every - 1 and len(context):
            context.save(path)
            both = context.fork(), engine.open_context(path)
            here, there = (engine.generate(tokens(7), max_tokens=3, context=each).token_ids for each in both)
            assert here == there
            path.unlink()
