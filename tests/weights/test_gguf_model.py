"""What a GGUF file says of its model: the config and tensors of the checkpoint that it was made of, and refusals."""

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Olmo3Config, SmolLM3Config

from lce.errors import ModelError
from lce.models.config import Fields
from lce.models.layers import family_of, read_config
from lce.weights.gguf_file import GgufFile, read_gguf
from lce.weights.gguf_model import model_in
from lce.weights.gguf_types import BY_NAME
from lce.weights.safetensors_file import TensorInfo
from lce.weights.source import Source
from tests.checkpoints import save_by_transformers
from tests.gguf_files import write_gguf
from tests.gguf_models import divisors, save_gguf
from tests.models import test_llama, test_ministral3, test_mistral, test_olmo2, test_qwen2, test_qwen3
from tests.mutated_gguf import as_others_read
from tests.parity import SIZES, rope, save_kind

KINDS = {
    name: module.KINDS[name]
    for module, names in (
        (test_llama, ("llama-2", "llama-3.1", "llama-3.2", "attention-bias", "mlp-bias", "linear", "yarn")),
        (test_mistral, ("mistral-0.3", "nemo")),
        (test_ministral3, ("multi-head", "ministral-3-3b", "strong", "yarn-scale")),
        (test_qwen2, ("qwen2.5", "qwen2.5-0.5b", "narrow-heads")),
        (test_qwen3, ("qwen3", "qwen3-0.6b")),
    )
    for name in names
}
KINDS |= {name: test_olmo2.KINDS[name] for name in ("olmo2", "olmo2-32b")}
KINDS["qwen3-bias"] = test_qwen3.KINDS["attention-bias"]


def config_of(file: GgufFile) -> dict[str, Any]:
    return model_in(file).config()


def tensors_of(file: GgufFile) -> tuple[dict[str, TensorInfo], dict[str, np.ndarray]]:
    return model_in(file).tensors()


def stored(info: TensorInfo) -> np.ndarray:
    assert info.dtype == "F32"
    return np.frombuffer(info.file.read_bytes()[info.start : info.stop], "<f4").reshape(info.shape)


@pytest.mark.parametrize("name", [*KINDS, "small-3"])
def test_config_and_tensors_of_the_published_checkpoint(name: str, tmp_path: Path) -> None:
    saved = save_kind(tmp_path, KINDS["nemo" if name == "small-3" else name])
    arch = "mistral3" if name == "small-3" else ""
    file = read_gguf(save_gguf(tmp_path / "model.gguf", saved.model, arch=arch))
    fields = Fields("model.gguf", config_of(file))
    read, truth = family_of(fields).read(fields, Fields("none", {})), read_config(Source(tmp_path))
    if file.metadata["general.architecture"] == "llama":  # Mistral's name is not in the file
        truth = replace(truth, architecture="LlamaForCausalLM")
    assert read == truth
    tensors, orders = tensors_of(file)
    published = load_file(tmp_path / "model.safetensors")
    assert tensors.keys() == published.keys()
    for key, info in tensors.items():
        rows = stored(info)
        assert (rows[orders.get(key, slice(None))] == published[key].numpy()).all(), key


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    """A Llama 3.1, with divisors of frequencies."""
    folder = tmp_path_factory.mktemp("llama")
    return read_gguf(save_gguf(folder / "m.gguf", save_kind(folder, KINDS["llama-3.1"]).model))


def but(file: GgufFile, changes: Mapping[str, Any]) -> GgufFile:
    """The file with other metadata; without a key whose value is None."""
    metadata = {key: x for key, x in {**file.metadata, **changes}.items() if x is not None}
    return replace(file, metadata=metadata)


def test_wrong_metadata_is_refused_by_the_keys_name(file: GgufFile) -> None:
    whole, number = "a whole number from 1 to 2147483647", "a number from 0 to 1e+30"
    for key, value, message in (
        ("general.architecture", "gemma2", "one that lce reads from GGUF: gemma3, llama, mistral3, olmo2, qwen2, q"),
        ("general.architecture", None, "general.architecture is missing; expected one that lce reads"),
        ("general.architecture", ["llama"], "general.architecture is ['llama']; expected one that lce reads"),
        ("llama.block_count", 3, "llama.block_count is 3; expected 2, the number of blocks"),
        ("llama.block_count", 2**40, whole),
        ("llama.embedding_length", "64", f"llama.embedding_length is '64'; expected {whole}"),
        ("llama.attention.head_count", 0, whole),
        ("llama.attention.head_count", True, whole),
        ("llama.attention.head_count", [4, 4], f"llama.attention.head_count is [4, 4]; expected {whole}"),
        ("llama.feed_forward_length", None, f"llama.feed_forward_length is missing; expected {whole}"),
        ("llama.context_length", 64.0, whole),
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), number),
        ("llama.attention.layer_norm_rms_epsilon", None, number),
        ("llama.rope.freq_base", float("inf"), "a number from 2 to 1e+30"),
        ("llama.rope.dimension_count", 8, "expected 16, the size of a head's queries and keys; use another file"),
        ("llama.attention.value_length", 8, "expected 16, the size of a head's queries and keys; use another file"),
        ("llama.rope.scaling.type", "longrope", "expected one of none, linear, yarn; use another file"),
        ("llama.rope.scaling.type", "linear", "expected none, because the file has rope_freqs.weight"),
        ("llama.rope.scaling.factor", 2.0, "expected none, because the file has rope_freqs.weight"),
        ("llama.expert_count", 8, "llama.expert_count is 8; expected no such key, because lce does not implement"),
        ("llama.attention.clamp_kqv", 8.0, "expected no such key"),
        ("llama.final_logit_softcapping", float("nan"), "expected no such key"),
        ("llama.attention.causal", False, "expected true"),
        ("llama.rope.scaling.attn_factor", 1.2, "expected 1; use another file"),
        ("tokenizer.ggml.eos_token_id", -1, "tokenizer.ggml.eos_token_id is -1; expected a whole number from 0"),
        ("tokenizer.ggml.bos_token_id", "1", "tokenizer.ggml.bos_token_id is '1'; expected a whole number from 0"),
    ):
        with pytest.raises(ModelError) as raised:
            config_of(but(file, {key: value}))
        text = str(raised.value)
        assert text.startswith(f"{file.path}: {key if 'rope_freqs' not in message else 'llama.rope'}"), text
        assert message in text, text
        assert "\n" not in text


def test_metadata_that_changes_nothing_is_let_by(file: GgufFile) -> None:
    plain = config_of(file)
    for changes in (
        {"llama.expert_count": 0, "llama.logit_scale": 0.0, "llama.rope.scaling.finetuned": True},
        {"llama.attention.causal": True, "llama.tensor_data_layout": "Meta AI original pth", "llama.vocab_size": 7},
        {"llama.attention.key_length": None, "llama.attention.value_length": None, "llama.rope.dimension_count": None},
        {"llama.rope.scaling.attn_factor": 1.0, "quantize.imatrix.file": "x", "qwen2.expert_count": 8},
    ):
        assert config_of(but(file, changes)) == plain
    yarn = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    unscaled = replace(file, tensors={name: x for name, x in file.tensors.items() if name != "rope_freqs.weight"})
    rope = {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 4.0}
    for factor in (1.0, -1.0):
        changed = but(unscaled, yarn | {"llama.rope.scaling.yarn_ext_factor": factor})
        assert config_of(changed)["rope_parameters"] == rope
    with pytest.raises(ModelError, match=r"yarn_ext_factor is 0.5; expected 1; use another file"):
        config_of(but(unscaled, yarn | {"llama.rope.scaling.yarn_ext_factor": 0.5}))
    fewer = config_of(but(file, {"llama.attention.head_count_kv": None, "tokenizer.ggml.eos_token_id": None}))
    assert fewer == plain | {"num_key_value_heads": 4, "eos_token_id": None}
    assert plain["rms_norm_eps"] == 1e-5 != file.metadata["llama.attention.layer_norm_rms_epsilon"]


def test_tensors_that_are_not_the_architectures_are_refused(file: GgufFile) -> None:
    tensors = dict(file.tensors)
    one = tensors["blk.0.ffn_up.weight"]
    for name, message in (
        ("blk.0.ffn_gate_inp.weight", r"1 tensors that lce does not know in llama \('blk.0.ffn_gate_inp.weight'\)"),
        ("blk.0.attn_q_norm.weight", "1 tensors that lce does not know"),
        ("blk.00.attn_q.weight", "1 tensors that lce does not know"),
        ("v.patch_embd.weight", "1 tensors that lce does not know"),
    ):
        with pytest.raises(ModelError, match=message):
            tensors_of(replace(file, tensors={**tensors, name: one}))
    for name, shape, heads in (("attn_q.weight", (30, 64), 64), ("attn_k.weight", (), 32), ("attn_q.bias", (63,), 64)):
        wrong_rows = {f"blk.0.{name}": replace(one, shape=shape)}
        with pytest.raises(ModelError, match=rf"blk.0.{name} is .*; expected {heads} rows, "):
            tensors_of(replace(file, tensors=tensors | wrong_rows))
    sizes = dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), 2**31 - 1)
    with pytest.raises(ModelError, match="expected 8589934588 rows, 4 heads of an even number of channels"):
        tensors_of(but(file, {f"llama.{key}": value for key, value in sizes.items()}))
    gap = {name.replace("blk.1", "blk.999999"): info for name, info in tensors.items()}
    for more, count in (({**tensors, "blk.999999.ffn_up.weight": one}, 3), (gap, 2)):
        with pytest.raises(ModelError, match=f"block_count is 2; expected {count}, the number of blocks"):
            config_of(replace(file, tensors=more))
    halves = {"rope_freqs.weight": replace(tensors["rope_freqs.weight"], dtype="F16")}
    with pytest.raises(ModelError, match=r"rope_freqs.weight is F16 \[8\]; expected 8 numbers in F32"):
        config_of(replace(file, tensors=tensors | halves))
    for wrong in ({}, {"token_embd.weight": replace(one, shape=())}, {"token_embd.weight": replace(one, shape=(300,))}):
        rest = {name: info for name, info in tensors.items() if name != "token_embd.weight"}
        with pytest.raises(ModelError, match=r"has no matrix token_embd.weight; expected the file of a whole model"):
            config_of(replace(file, tensors=rest | wrong))


def rope_of(path: Path, values: np.ndarray, dim: int, **changes: Any) -> dict[str, Any]:
    """What is read of a Llama with these divisors of frequencies."""
    keys = {"embedding_length": dim, "feed_forward_length": 8, "context_length": 64, "block_count": 1}
    keys |= {"attention.head_count": 1, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 500000.0}
    tensors = {"token_embd.weight": np.ones((2, dim)), "blk.0.attn_norm.weight": np.ones(dim)}
    metadata = {f"llama.{key}": value for key, value in keys.items()}
    made, _ = write_gguf(path, {**tensors, "rope_freqs.weight": values}, "F16", metadata | changes)
    rope: dict[str, Any] = config_of(read_gguf(made))["rope_parameters"]
    return rope


def test_divisors_of_frequencies_are_those_of_a_llama3_scaling_or_refused(tmp_path: Path) -> None:
    """Llama 3.1's and 3.2's own, those of other windows, and wrong ones."""
    path, low_high = tmp_path / "m.gguf", {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for factor, dim, window in ((8.0, 128, 8192), (32.0, 64, 8192), (4.0, 128, 4096), (16.0, 128, 16384)):
        published = rope("llama3", 500000.0, factor=factor, original_max_position_embeddings=window, **low_high)
        published = published["rope_parameters"]
        right = divisors(published, dim)
        assert rope_of(path, right, dim) == published
        assert rope_of(path, right * (1 + 1e-7), dim)["factor"] == pytest.approx(factor)
        for wrong in (
            np.concatenate([right[:20], right[20:] * 1.01]),
            right[::-1],
            divisors(published | {"low_freq_factor": 2.0}, dim),
            divisors(published | {"original_max_position_embeddings": window - 300}, dim),
        ):
            with pytest.raises(ModelError, match=r"rope_freqs.weight is no llama3 scaling of frequencies by"):
                rope_of(path, wrong, dim)
        for damaged in (right[1:], right * 0, np.where(right == 1, np.nan, right), right.reshape(1, -1), -right):
            with pytest.raises(ModelError, match=f"rope_freqs.weight is F.*; expected {dim // 2} numbers in F32"):
                rope_of(path, damaged, dim)
    assert rope_of(path, np.ones(32), 64)["factor"] == 1


def test_a_file_that_changes_before_its_divisors_are_read_is_refused(file: GgufFile) -> None:
    stale = {path: (stamp[0] + 1, *stamp[1:]) for path, stamp in file.stamps.items()}
    with pytest.raises(ModelError, match="changed while it was loaded; load it again"):
        config_of(replace(file, stamps=stale))


def test_what_files_of_layers_of_several_kinds_do_not_say(tmp_path: Path) -> None:
    """Is in the config as in that of transformers, which the files were made of."""
    sizes = {**SIZES, "num_hidden_layers": 8, "rms_norm_eps": 1e-5, "pad_token_id": 0}
    yarn = rope("yarn", 5e5, factor=8.0, original_max_position_embeddings=32, beta_fast=32.0, beta_slow=1.0)
    scaled = {"rope_parameters": {"full_attention": rope("linear", 1e6, factor=8.0)["rope_parameters"]}}
    for config in (
        Gemma3TextConfig(**sizes, head_dim=24, sliding_window=24, query_pre_attn_scalar=24),
        Gemma3TextConfig(**sizes, head_dim=24, sliding_window=24, query_pre_attn_scalar=24, **scaled),
        Gemma3TextConfig(**sizes | {"num_hidden_layers": 62, "hidden_size": 8}, head_dim=4, query_pre_attn_scalar=2),
        SmolLM3Config(**sizes),
        Olmo3Config(**sizes, sliding_window=24, rope_scaling=yarn["rope_parameters"], rope_theta=5e5),
    ):
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        file = read_gguf(save_gguf(folder / "m.gguf", save_by_transformers(folder, config)))
        found, truth = config_of(file), config.to_dict()
        if config.model_type == "gemma3_text":
            assert found.pop("norms_plus_one")
        name = type(config).__name__.removesuffix("Config").removesuffix("Text")
        assert found.pop("architectures") == [f"{name}ForCausalLM"]
        truth = {"head_dim": 16, **truth, "dtype": "float32"}
        assert {key: truth.get(key, "none") for key in found} == found
        assert tensors_of(file)[0].keys() == load_file(folder / "model.safetensors").keys()
        if "sliding_window" in found:
            prefix = file.metadata["general.architecture"]
            for wrong in ([True] * 9, [1] * 8, 0, "x", [True] * 7):
                with pytest.raises(ModelError, match=r"attention.sliding_window_pattern is .*expected a whole number"):
                    config_of(but(file, {f"{prefix}.attention.sliding_window_pattern": wrong}))


def test_files_of_others_than_llamas_kind_have_no_divisors(tmp_path: Path) -> None:
    saved = save_kind(tmp_path, KINDS["qwen2.5"])
    file = read_gguf(save_gguf(tmp_path / "m.gguf", saved.model))
    info = file.tensors["blk.0.attn_q.bias"]
    with pytest.raises(ModelError, match=r"1 tensors that lce does not know in qwen2 \('rope_freqs.weight'\)"):
        tensors_of(replace(file, tensors={**file.tensors, "rope_freqs.weight": info}))


def test_queries_of_ministral_grow_with_the_window_before_scaling(tmp_path: Path) -> None:
    """A file may say so again; another length is refused."""
    saved = save_kind(tmp_path, KINDS["strong"])
    file = read_gguf(save_gguf(tmp_path / "m.gguf", saved.model))
    length = "mistral3.attention.temperature_length"
    assert config_of(but(file, {length: 40})) == config_of(file)
    with pytest.raises(ModelError, match="temperature_length is 16; expected 40, the window before scaling"):
        config_of(but(file, {length: 16}))


def test_a_file_with_a_pattern_of_layers_of_its_own(tmp_path: Path) -> None:
    config = Gemma3TextConfig(**{**SIZES, "num_hidden_layers": 8}, head_dim=24, sliding_window=24)
    file = read_gguf(save_gguf(tmp_path / "m.gguf", save_by_transformers(tmp_path, config)))
    own = "gemma3.attention.sliding_window_pattern"
    for changes, sliding in (
        ({own: 3, "gemma3.rope.freq_base_swa": 500.0}, [1, 1, 0, 1, 1, 0, 1, 1]),
        ({own: 1}, [0] * 8),
        ({own: [True, False] * 4}, [1, 0] * 4),
        ({"gemma3.attention.sliding_window": None}, [0] * 8),
    ):
        found = config_of(but(file, changes))
        assert [kind == "sliding_attention" for kind in found["layer_types"]] == [bool(x) for x in sliding]
        assert found["sliding_window"] == (24 if any(sliding) or own in changes else None)
        theta = changes.get("gemma3.rope.freq_base_swa", 10000.0)
        assert found["rope_parameters"]["sliding_attention"] == {"rope_type": "default", "rope_theta": theta}


@pytest.mark.slow
def test_smollm2_as_transformers_reads_it(smollm2: Path) -> None:
    """Every value of every tensor, and the config, but that transformers keeps float32's digits of the epsilon."""
    file = read_gguf(smollm2)
    as_others_read(file)
    model = AutoModelForCausalLM.from_pretrained(file.path.parent, gguf_file=file.path.name)
    found, truth = config_of(file), model.config.to_dict()
    assert found.pop("rms_norm_eps") == 1e-5 == pytest.approx(truth["rms_norm_eps"])
    found |= {"dtype": "float32", "architectures": None}  # as transformers has dequantised the weights
    assert {key: truth[key] for key in found} == found
    weights, (tensors, orders) = model.state_dict(), tensors_of(file)
    assert tensors.keys() | {"lm_head.weight"} == weights.keys()
    for name, info in tensors.items():
        raw = np.fromfile(info.file, np.uint8, info.stop - info.start, offset=info.start)
        kind = BY_NAME[info.dtype]
        values = raw.view("<f4") if info.dtype == "F32" else kind.dequantise(raw.reshape(-1, kind.n_bytes))
        rows = values.reshape(info.shape)[orders.get(name, slice(None))]
        assert (rows == weights[name].numpy()).all(), name
