"""What callers give: every parameter of the public face takes any value, or refuses it in one line.

The table is made from signatures, so a new parameter is tested as soon as it is there.
"""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lce
from lce.engine.arguments import are_many
from lce.engine.options import SizeOptions
from lce.engine.trace import TraceObserver
from lce.methods import LongHeads
from lce_lab.study.explain import explain
from tests.checkpoints import save_chat, tokens

WRONG: list[Any] = [
    *("", "x", "4k", "\0", "a" * 5000, "\ud800", b"x", Path("absent/absent")),
    *(None, True, -1, 0, 1.5, float("nan"), float("inf"), 2**59, 10**30, -(10**30), 3 + 4j),
    *([], {}, (), set(), {"x": 1}, [None], ["x", 3], [b"x"]),
    *(object(), int, LongHeads, lambda *_: 1),
    *(np.float32(2), np.zeros((2, 2)), torch.ones(2), torch.tensor(3)),
]
FOR_ENGINES = {
    "hold",
    "store_logits",
    "mark",
    "go_back",
    "check_undivided",
    "warn",
    "together",
    "sampling_for",
}  # what engines call
Q = torch.ones(2, 3, 4)


class Face:
    """An engine, a context and valid arguments for every public function, by the names of its parameters."""

    def __init__(self, model: Path, folder: Path) -> None:
        method = LongHeads(chunk_size=8, chunks=4)
        self.engine = lce.load(model, method, block=32)
        self.chatty = lce.load(save_chat(folder, "{{ messages[-1].content }}"), method, block=32)
        self.context = self.engine.prefill(tokens(20))
        self.folder, self.model = folder, model
        self.context.save(folder / "c.lce")

    def written(self) -> list[Path]:
        """The folders that `quantize` made."""
        return list((self.folder / "new").glob("*"))

    def functions(self) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
        """Every public function by name, with arguments that it takes."""
        path = self.folder / "written.lce"
        return {
            "load": (lce.load, {"model": self.model}),
            "info": (lce.info, {"path": self.model}),
            "plan": (lce.plan, {"model": self.model, "tokens": 10}),
            "operations": (lce.operations, {"model": self.model, "tokens": 10}),
            "quantize": (lce.quantize, {"model": self.model, "out": self.folder / "new" / str(len(self.written()))}),
            "profiled": (lce.profiled, {"engine": self.engine}),
            "profiled_step": (lce.profiled_step, {"engine": self.engine, "context": self.context.fork()}),
            "Sampling": (lce.Sampling, {}),
            "Engine.generate": (self.engine.generate, {"prompt": [5], "max_tokens": 1}),
            "Engine.stream": (lambda **o: self.engine.stream(**o).finish(), {"prompt": [5], "max_tokens": 1}),
            "Engine.astream": (self.engine.astream, {"prompt": [5], "max_tokens": 1}),
            "Engine.prefill": (self.engine.prefill, {"document": [5]}),
            "Engine.prefill_file": (self.engine.prefill_file, {"document": [5], "path": path}),
            "Engine.evict": (self.engine.evict, {"context": self.context, "keep": 1.0}),
            "Engine.open_context": (self.engine.open_context, {"path": self.folder / "c.lce"}),
            "Engine.conversation": (self.chatty.conversation, {}),
            "Engine.chat": (self.chatty.chat, {"messages": "x", "max_tokens": 1}),
            "Engine.logits": (self.engine.logits, {"token_ids": [5]}),
            "Engine.score": (self.engine.score, {"token_ids": [5, 6]}),
            "Engine.trace": (self.engine.trace, {"token_ids": [5]}),
            "Engine.batch": (lambda **o: self.engine.batch(**o).close(), {}),
            "Setup.using": (self.engine.setup.using, {"method": "full"}),
            "Setup.observed": (self.engine.setup.observed, {"observer": TraceObserver()}),
            "Setup.beyond": (self.engine.setup.beyond, {"n_tokens": 3}),
            "Setup.choice": (self.engine.setup.choice, {"n_tokens": 3}),
            "Setup.limits": (self.engine.setup.limits, {}),
            "Engine.new_context": (self.engine.new_context, {"length": 3}),
            "Setup.rope_of": (self.engine.setup.rope_of, {"length": 3}),
            "Context.save": (self.context.save, {"path": path}),
            "Context.truncate": (self.context.fork().truncate, {"n_tokens": 20}),
            "Context.fork": (self.context.fork, {}),
            "Context.close": (self.context.fork().close, {}),
            "methods.run": (lce.methods.run, {"method": "full", "q": Q, "k": Q, "v": Q, "window": 4}),
            "methods.make": (lce.methods.make, {"name": "full"}),
            "methods.find": (lce.methods.find, {"name": "full"}),
            "methods.available": (lce.methods.available, {}),
            "explain": (explain, {"method": "full", "tokens": 2, "window": 4}),
        }


@pytest.fixture(scope="module")
def face(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Face:
    return Face(tiny_model, tmp_path_factory.mktemp("face"))


def parameters(name: str) -> Iterator[str]:
    """The parameters of a public function, and the options in the `TypedDict` that it unpacks."""
    owner, _, attribute = name.rpartition(".")
    function = explain if name == "explain" else getattr(getattr(lce, owner) if owner else lce, attribute)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            yield from (SizeOptions if name in ("plan", "operations") else lce.GenerationOptions).__annotations__
            yield "no_such_option"
        elif parameter.name != "self":
            yield parameter.name


MEMBERS = [(cls, name) for cls in (lce.Engine, lce.Setup, lce.Context) for name, _ in inspect.getmembers(cls, callable)]
NAMES = [
    *"load info plan operations profiled profiled_step quantize Sampling explain".split(),
    *"methods.run methods.make methods.find methods.available".split(),
    *(f"{cls.__name__}.{name}" for cls, name in MEMBERS if name[0] != "_" and name not in FOR_ENGINES),
]


def test_every_public_function_is_in_the_table(face: Face) -> None:
    assert set(NAMES) == set(face.functions())
    functions = {name for name in lce.__all__ if inspect.isfunction(getattr(lce, name))}
    assert functions <= set(NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_any_value_works_or_is_refused(face: Face, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where some of the values are files' names
    raw = []
    for parameter in parameters(name):
        for value in WRONG:
            function, valid = face.functions()[name]
            try:
                function(**{**valid, parameter: value})
            except lce.LceError as error:
                text = str(error)
                if not text or not text.isprintable() or len(text) > 1500:
                    raw.append(f"{parameter}={value!r:.60} is refused by {text!r}")
            except Exception as error:
                raw.append(f"{parameter}={value!r:.60} raises {error!r:.200}")
    assert raw == []


@pytest.mark.parametrize("name", ["Engine.generate", "Engine.stream", "Engine.astream"])
def test_an_unknown_option_hears_the_nearest(face: Face, name: str) -> None:
    function, valid = face.functions()[name]
    with pytest.raises(lce.UsageError, match="unknown option 'max_token'; did you mean 'max_tokens'"):
        function(**valid, max_token=3)
    with pytest.raises(lce.UsageError, match="give a list of prompts"):
        function(**valid, n=3)
    with pytest.raises(lce.UsageError, match="unknown knob of sampling 'temprature'; did you mean 'temperature'"):
        function(**valid, sampling={"temprature": 3})


def test_sampling_comes_as_an_object_a_mapping_or_keywords(face: Face) -> None:
    text, wanted = tokens(30), lce.Sampling(temperature=1.0, seed=3, top_k=20)

    def ids(**options: Any) -> list[int]:
        return face.engine.generate(text, max_tokens=12, **options).token_ids

    expected = ids(sampling=wanted)
    assert ids(sampling={"temperature": 1.0, "seed": 3, "top_k": 20}) == expected
    assert ids(temperature=1, seed=3, top_k=20) == expected
    assert ids(sampling=lce.Sampling(temperature=1.0, seed=4, top_k=20), seed=3) == expected, "keywords override"
    assert ids(sampling=wanted, seed=4) != expected
    assert ids(sampling=wanted, temperature=np.float32(0)) == ids() != expected


@pytest.mark.parametrize(
    "kind",
    [
        *(tuple, torch.tensor, np.array),
        *(lambda ids: np.array(ids, np.int16), lambda ids: torch.tensor(ids).int(), lambda ids: list(np.array(ids))),
    ],
)
def test_token_ids_come_in_any_sequence(face: Face, kind: Callable[[list[int]], Any]) -> None:
    ids = tokens(40)
    assert torch.equal(face.engine.logits(kind(ids)), face.engine.logits(ids))
    assert face.engine.generate(kind(ids), max_tokens=4).token_ids == face.engine.generate(ids, max_tokens=4).token_ids


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (b"text", r"the prompt is bytes; expected text or token ids: decode it, as prompt\.decode\(\) does"),
        ([True, False], "the prompt has truth values"),
        (torch.tensor([1.0]), r"the prompt is torch\.float32 of shape \[1\]; expected text, or token ids"),
        (torch.tensor([True]), r"the prompt is torch\.bool"),
        (np.array([1.0]), "the prompt is float64"),
        (torch.tensor([[1, 2]]), r"of shape \[1, 2\]; expected text, or token ids: whole numbers of one dimension"),
        ({5: 6}, "the prompt is a dict"),
        ({5, 6}, "the prompt is a set"),
        ([5, 300], "token id 300 is not in the model's vocabulary; expected 0 to 299"),
        ([-1], "token id -1"),
        ([5, 10**30], "token id 1000000"),
        ([5.0], "the prompt is a list; expected text or token ids"),
        ([None], "the prompt is a list"),
        (None, "the prompt is a NoneType"),
        ([], "the prompt is empty; expected some text"),
        ("", "the prompt is empty"),
        (torch.tensor([3, 4]).to("meta"), "expected a dense one"),
        (torch.tensor([3, 0, 4]).to_sparse(), "expected a dense one"),
    ],
)
def test_a_prompt_that_cannot_be_is_refused(face: Face, prompt: Any, message: str) -> None:
    engine = face.engine
    for call in (engine.generate, engine.stream, engine.prefill, engine.logits, engine.trace):
        with pytest.raises(lce.UsageError, match=message):
            call(prompt)
    if "empty" not in message:
        with pytest.raises(lce.UsageError, match=message):
            engine.generate(prompt, context=face.context)
    assert len(face.context) == 20


def test_a_list_of_prompts_is_told_from_a_list_of_ids() -> None:
    many = (["a"], ("a", "b"), [[1, 2], [3]], [(1,)], [torch.tensor([1])], [np.array([1, 2])], [range(3)])
    one = ("a", [1, 2], (), [], [torch.tensor(1)], [np.int64(3)], torch.tensor([[1]]), [None])
    assert all(map(are_many, many))
    assert not any(map(are_many, one))


def test_dtypes_and_devices_may_be_pytorchs_own(tiny_model: Path) -> None:
    engine = lce.load(tiny_model, dtype=torch.bfloat16, device=torch.device("cpu"), block="1k", window="4k")
    assert (engine.setup.dtype, engine.setup.device.type) == (torch.bfloat16, "cpu")
    assert (engine.setup.block, engine.window) == (1024, 4096)
    plain = lce.load(tiny_model, dtype=None, device=None, attention=None)
    assert (plain.setup.dtype, lce.plan(tiny_model, tokens="2k", dtype=torch.float16).tokens) == (torch.float32, 2048)
    with pytest.raises(lce.UsageError, match=r"unknown dtype torch\.int8"):
        lce.load(tiny_model, dtype=torch.int8)
