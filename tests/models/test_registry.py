"""Families: found by name and never guessed, one file each, and every method runs on all of them."""

import json
import shutil
import tokenize
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import lce
from lce.errors import ModelError
from lce.models.layers import families, read_config
from lce.weights.source import Source
from tests.checkpoints import TINY, save_tiny
from tests.command import output
from tests.depth import pairs
from tests.parity import assert_equals_the_oracle, difference

ROOT = Path(__file__).parents[2]
SHARED = {"__init__", "config", "layers", "products", "ranks", "rope"}  # files of lce/models that hold no family
NESTED = {"gemma3", "mistral3"}  # each wraps the text model of another family

UNKNOWN = [
    *("mixtral", "qwen3_moe", "qwen2_moe", "qwen2_vl", "gemma2", "phi", "llama4", "ministral", "mistral4", "qwen"),
    *("Mistral", "llama ", "lama", ""),
]


def tiny(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(TINY | changes))
    return folder


def refused(config: Path) -> str:
    with pytest.raises(ModelError) as error:
        read_config(Source(config))
    assert "did you mean" not in str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_family_gets_the_supported_ones_and_no_guess(name: str, tmp_path: Path) -> None:
    for changes in ({"architectures": None}, {"architectures": ["MixtralForCausalLM"]}, {}):
        message = refused(tiny(tmp_path, model_type=name, **changes))
        assert f"model_type is {name!r}; expected a supported one: {', '.join(families())}; use a " in message


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "Qwen3MoeForCausalLM", "Qwen2ForSequenceClassification"])
def test_an_unknown_architecture_gets_no_guess_either(name: str, tmp_path: Path) -> None:
    listed = ", ".join(cls.architecture for cls in families().values())
    for model_type in ("llama", "qwen2", None):
        message = refused(tiny(tmp_path, architectures=[name], model_type=model_type))
        assert f"architectures is [{name!r}]; expected a supported one: {listed}; use a checkpoint of" in message


@pytest.mark.parametrize("name", families())
def test_either_name_finds_the_family_and_both_must_agree(name: str, tmp_path: Path) -> None:
    family = families()[name]
    inner = {"text_config": TINY} if name in NESTED else {}
    expected = "LlamaForCausalLM" if name in NESTED else family.architecture
    for names in (
        {"architectures": None, "model_type": name},
        {"architectures": [family.architecture], "model_type": None},
        {"architectures": [family.architecture], "model_type": name},
    ):
        assert read_config(Source(tiny(tmp_path, **names, **inner, rope_scaling=None))).architecture == expected
    other = "qwen3" if name != "qwen3" else "llama"
    with pytest.raises(ModelError, match=f"model_type is '{other}'; expected '{name}', as architectures says"):
        read_config(Source(tiny(tmp_path, architectures=[family.architecture], model_type=other)))


def test_a_family_is_a_file_with_a_test_and_a_row_in_the_docs() -> None:
    assert {path.stem for path in (ROOT / "lce" / "models").glob("*.py")} - SHARED == set(families())
    rows = (ROOT / "docs" / "usage.md").read_text(encoding="utf-8").splitlines()
    for name, family in families().items():
        assert family.__module__ == f"lce.models.{name}"
        assert family.__doc__
        assert sum(row.startswith(f"| `{name}` |") for row in rows) == 1
        assert (ROOT / "tests" / "models" / f"test_{name}.py").is_file()


def test_no_other_module_names_a_family() -> None:
    """Only readers of GGUF do: these files name their architectures and tokenizers alike."""
    names = {family.__name__.lower() for family in families().values()} | set(families())
    for path in sorted((ROOT / "lce").rglob("*.py")):
        if path.parent.name == "models" or path.stem.startswith("gguf"):
            continue
        with path.open("rb") as file:
            code = {token.string.strip("'\"").lower() for token in tokenize.tokenize(file.readline)}
        assert not code & names, path


NEW_FAMILY = '''
from dataclasses import replace
from lce.models.llama import Llama
from lce.models.layers import family
from lce.weights.source import Source

@family("parrot", "ParrotForCausalLM")
class Parrot(Llama):
    """Llama whose window is in `perch`."""

    @classmethod
    def configure(cls, config, fields):
        return replace(config, window=fields.integer("perch", within=(1, 100)))
'''


def test_a_new_family_is_one_file(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "parrot.py").write_text(NEW_FAMILY)
    config = TINY | {"architectures": ["ParrotForCausalLM"], "model_type": "parrot", "perch": 48}
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "config.json").write_text(json.dumps(config))
    code = (
        "import sys, lce, lce.models; lce.models.__path__.append(sys.argv[1]); engine = lce.load(sys.argv[2]);"
        "print(type(engine.setup.model).__name__, engine.window, engine.logits([3, 4]).shape)"
    )
    assert output(code, tmp_path, model, cwd=ROOT) == "Parrot 48 torch.Size([2, 300])\n"


YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e6}
YARN["llama_4_scaling_beta"] = 0.1
KINDS: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20}
OWN: dict[str, dict[str, Any]] = {
    "ministral3": {"rope_parameters": YARN},
    "mistral": {"sliding_window": None},
    "smollm3": {"no_rope_layer_interval": 2},
    "olmo3": KINDS,
    "gemma3_text": KINDS,
}

FAMILIES = sorted(set(families()) - NESTED)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each family that has layers of its own."""
    names = {"model_type": request.param, "architectures": [families()[request.param].architecture]}
    return save_tiny(tmp_path_factory.mktemp(request.param), **names, **OWN.get(request.param, {}))


def test_the_plan_counts_the_weights_as_stored(folder: Path) -> None:
    stored = sum(weight.nbytes for weight in load_file(folder / "model.safetensors").values())
    assert lce.plan(folder, tokens=10).tiers["device"].weights == stored


@pytest.mark.parametrize(
    ("folder", "method", "block"),
    pairs(FAMILIES, ["full", "longheads", "dca", "lm_infinite", "rerope"], [7, 40]),
    indirect=["folder"],
    ids=str,
)
@pytest.mark.covering("folder", "method")
def test_methods_equal_the_oracle_on_every_family(folder: Path, method: str, block: int) -> None:
    ids = [(7 * i) % 290 + 5 for i in range(150)]
    assert_equals_the_oracle(lce.load(folder, method=method, block=block), ids)


@pytest.mark.parametrize("method", lce.methods.available())
@pytest.mark.covering("folder", "method")
def test_every_method_writes_on_every_family(folder: Path, method: str) -> None:
    knobs = {"compress": "none"} if method == "esa" else {}  # it needs a calibrated checkpoint otherwise
    engine = lce.load(folder, method=lce.methods.make(method, knobs))
    context = engine.prefill([(7 * i) % 290 + 5 for i in range(150)])
    first = engine.generate([9, 10], max_tokens=5, context=context.fork()).token_ids
    assert first == engine.generate([9, 10], max_tokens=5, context=context).token_ids


def test_a_saved_context_goes_on_as_if_never_saved(folder: Path, tmp_path: Path) -> None:
    engine = lce.load(folder, method="longheads", block=16)
    ids = [(7 * i) % 290 + 5 for i in range(150)]
    context = engine.prefill(ids[:100])
    context.save(tmp_path / "half.lce")
    opened = engine.open_context(tmp_path / "half.lce")
    engine.prefill(ids[100:], context=opened)
    assert difference(opened.logits, engine.logits(ids)[-1]) <= 1e-4


def test_a_tied_model_with_a_head_of_its_own_uses_it(tmp_path: Path) -> None:
    """As transformers 5 does; a head that repeats the embedding changes nothing."""
    save_tiny(tmp_path, tie_word_embeddings=True)
    ids = list(range(5, 60))
    tied = lce.load(tmp_path).logits(ids)
    weights = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in weights
    embed = weights["model.embed_tokens.weight"]
    save_file(weights | {"lm_head.weight": embed.clone()}, tmp_path / "model.safetensors")
    assert torch.equal(lce.load(tmp_path).logits(ids), tied)
    save_file(weights | {"lm_head.weight": embed.flip(0)}, tmp_path / "model.safetensors")
    logits = lce.load(tmp_path).logits(ids)
    assert difference(logits, tied) > 1
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path)(torch.tensor([ids])).logits[0]
    assert difference(logits, theirs) <= 1e-4
