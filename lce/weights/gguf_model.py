"""What a GGUF file says of its model: the config, as config.json has it, and the tensors by their published names.

A class describes the files of one `general.architecture`. In files of Llama's kind the rows of each head of q and k lie
in another order than in published checkpoints: row `2·j + c` is the published row `c·D/2 + j`, so that the two channels
which RoPE rotates together are neighbours.
"""

import re
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lce.errors import ModelError
from lce.files import named
from lce.weights.checkpoint import Checkpoint
from lce.weights.gguf_file import GgufFile
from lce.weights.gguf_keys import AGAIN, DIVISORS, OTHER, Keys, rope_parameters
from lce.weights.safetensors_file import TensorInfo, few

_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(\w+)\.(weight|bias)")
_OWN = "name the file of the model itself"
# Files that are no model, by `general.type` or by `general.architecture`: what they are, and what to do.
_NO_MODELS = {
    "adapter": ("a LoRA adapter", "merge it into its model, for example with llama.cpp's llama-export-lora"),
    **dict.fromkeys(("mmproj", "clip"), ("the part of a model that reads images", f"{_OWN}, which reads text")),
    "imatrix": ("an importance matrix, by which models are quantised", _OWN),
    "vocabulary": ("a vocabulary without weights", _OWN),
}
# Keys of an architecture that change nothing in what lce computes.
_HARMLESS = frozenset(("vocab_size", "rope.scaling.finetuned", "tensor_data_layout", "pooling_type"))
_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def model_in(file: GgufFile) -> "Llama":
    """Return the model in a file. Raises ModelError for a file that is no model, and for an unknown architecture."""
    general = Keys(file, "general.")
    name = general.get("architecture")
    kind = next((kind for kind in (general.get("type"), name) if isinstance(kind, str) and kind in _NO_MODELS), None)
    if kind is not None or not file.tensors:
        what, remedy = _NO_MODELS[kind or "vocabulary"]
        raise ModelError(f"{named(file.path)} is {what}, not a model; {remedy}")
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise general.refusal("architecture", f"one that lce reads from GGUF: {known}", "use a file of one of these")
    return _ARCHITECTURES[name](file, Keys(file, f"{name}."))


class Llama:
    """The model in a file of the architecture `llama`; other architectures derive from this class.

    `family` has the class and the type in config.json. `names` maps the name of a layer's tensor to the published name.
    `permuted` are the tensors of which the rows of each head lie in another order.
    """

    family: ClassVar[tuple[str, str]] = "LlamaForCausalLM", "llama"
    names: ClassVar[dict[str, str]] = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    permuted: ClassVar[tuple[str, ...]] = ("attn_q", "attn_k")

    def __init__(self, file: GgufFile, keys: Keys) -> None:
        self.file, self.keys = file, keys
        self.hidden_size = keys.integer("embedding_length")
        self.n_heads = keys.integer("attention.head_count")
        self.n_kv_heads = keys.integer("attention.head_count_kv", self.n_heads)
        self.head_dim = keys.integer("attention.key_length", self.hidden_size // self.n_heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if keys.integer(key, self.head_dim) != self.head_dim:
                raise keys.refusal(key, f"{self.head_dim}, the size of a head's queries and keys", OTHER)
        self.n_layers = keys.integer("block_count")
        blocks = {int(found[1]) for name in file.tensors if (found := _BLOCK.fullmatch(name))}
        if blocks != set(range(len(blocks))) or len(blocks) != self.n_layers:
            raise keys.refusal("block_count", f"{len(blocks)}, the number of blocks that the names of tensors have")

    def config(self) -> dict[str, Any]:
        """Return the model's config.json. Raises ModelError for a key that lce does not read and that may matter."""
        embedding, keys = self.file.tensors.get("token_embd.weight"), self.keys
        if embedding is None or len(embedding.shape) != 2:
            fault = "has no matrix token_embd.weight; expected the file of a whole model"
            raise ModelError(f"{named(self.file.path)} {fault}; {OTHER}")
        if keys.get("attention.causal", True) is not True:
            raise keys.refusal("attention.causal", "true: lce runs models that write text", OTHER)
        tokens = Keys(self.file, "tokenizer.ggml.")
        ids = {f"{name}_token_id": tokens.get(f"{name}_token_id") for name in ("bos", "eos")}
        rope = rope_parameters(keys, self.head_dim)
        found = {
            "architectures": [self.family[0]],
            "model_type": self.family[1],
            "dtype": str(Checkpoint(self.file.path, self.file.tensors).dtype()).removeprefix("torch."),
            "vocab_size": embedding.shape[0],  # may be more than there are tokens
            "hidden_size": self.hidden_size,
            "intermediate_size": keys.integer("feed_forward_length"),
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": keys.integer("context_length"),
            "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
            "rope_parameters": rope,
            "tie_word_embeddings": "output.weight" not in self.file.tensors,
            **{key: None if value is None else tokens.integer(key, least=0) for key, value in ids.items()},
        }
        found |= self.own(rope)
        keys.refuse_unread(_HARMLESS)
        return found

    def own(self, rope: dict[str, Any]) -> dict[str, Any]:
        """Return the entries of config.json that not all architectures have. `rope` are the RoPE parameters."""
        return {"attention_bias": self.has_bias("attn_q"), "mlp_bias": self.has_bias("ffn_up")}

    def has_bias(self, name: str) -> bool:
        return f"blk.0.{name}.bias" in self.file.tensors

    def tensors(self) -> tuple[dict[str, TensorInfo], dict[str, NDArray[np.int64]]]:
        """Return the tensors by published name, and for tensors whose rows are exchanged the stored row of each row."""
        found, orders, unknown = {}, {}, []
        for stored, info in self.file.tensors.items():
            block = _BLOCK.fullmatch(stored)
            if stored in _WHOLE:
                found[_WHOLE[stored]] = info
            elif block and block[2] in self.names:
                name = f"model.layers.{block[1]}.{self.names[block[2]]}.{block[3]}"
                found[name] = info
                if block[2] in self.permuted:
                    orders[name] = self._order(stored, self.n_heads if block[2] == "attn_q" else self.n_kv_heads)
            elif stored != DIVISORS or not self.permuted:
                unknown.append(stored)
        if unknown:
            fault = f"{len(unknown)} tensors that lce does not know in {self.keys.prefix[:-1]} ({few(unknown)})"
            raise ModelError(f"{named(self.file.path)}: {fault}; expected those of a dense model of text; {OTHER}")
        return found, orders

    def windows(self, rope: dict[str, Any], period: int, local: float) -> dict[str, Any]:
        """Return entries of sliding windows: by default in all but each last of `period` layers, with theta `local`."""
        keys, pattern = self.keys, "attention.sliding_window_pattern"
        window = keys.integer("attention.sliding_window", 0, least=0)
        sliding = keys.get(pattern)
        if not isinstance(sliding, list):
            period = keys.integer(pattern, period)
            sliding = [(i + 1) % period != 0 for i in range(self.n_layers)]
        if len(sliding) != self.n_layers or not all(isinstance(kind, bool) for kind in sliding):
            raise keys.refusal(pattern, f"a whole number, or true or false for each of the {self.n_layers} layers")
        own = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", local, least=2.0)}
        return {
            "sliding_window": window or None,
            "layer_types": ["sliding_attention" if window and kind else "full_attention" for kind in sliding],
            "rope_parameters": {"full_attention": rope, "sliding_attention": own},
        }

    def _order(self, stored: str, n_heads: int) -> NDArray[np.int64]:
        shape, n_rows = self.file.tensors[stored].shape, n_heads * self.head_dim
        if shape[:1] != (n_rows,) or self.head_dim % 2:
            expected = f"{n_rows} rows, {n_heads} heads of an even number of channels"
            raise ModelError(f"{named(self.file.path)}: {stored} is {list(shape)}; expected {expected}; {AGAIN}")
        return np.arange(n_rows, dtype=np.int64).reshape(n_heads, self.head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


class Mistral3(Llama):
    """Ministral 3, whose queries grow with their index, and Mistral Small 3, whose queries do not."""

    def own(self, rope: dict[str, Any]) -> dict[str, Any]:
        if not (beta := self.keys.number("attention.temperature_scale", 0.0)):
            return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
        length = rope.get("original_max_position_embeddings")
        if self.keys.get("attention.temperature_length", length) != length:
            raise self.keys.refusal("attention.temperature_length", f"{length}, the window before scaling", OTHER)
        rope |= {"llama_4_scaling_beta": beta}
        return {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3", "sliding_window": None}


class SmolLM3(Llama):
    """SmolLM3: Llama without RoPE in every fourth layer, which the file does not say."""

    family = "SmolLM3ForCausalLM", "smollm3"

    def own(self, rope: dict[str, Any]) -> dict[str, Any]:
        rotated = [int((i + 1) % 4 != 0) for i in range(self.n_layers)]
        return super().own(rope) | {"no_rope_layers": rotated, "no_rope_layer_interval": 4}


class Qwen2(Llama):
    """Qwen2 and Qwen2.5: biases on queries, keys and values."""

    family = "Qwen2ForCausalLM", "qwen2"
    permuted = ()

    def own(self, rope: dict[str, Any]) -> dict[str, Any]:
        return {"use_sliding_window": False}


class Qwen3(Qwen2):
    """Qwen3: norms of queries and keys."""

    family = "Qwen3ForCausalLM", "qwen3"
    names = Llama.names | {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}

    def own(self, rope: dict[str, Any]) -> dict[str, Any]:
        return super().own(rope) | {"attention_bias": self.has_bias("attn_q")}


class Gemma3(Qwen3):
    """Gemma 3: two kinds of layers, four norms a layer. Norms' weights are stored with 1 added, published without.

    Files of the first years lack the pattern of layers, the base of RoPE in layers with a sliding window, and the scale
    of scores, which is another one in the model of 62 layers alone.
    """

    family = "Gemma3ForCausalLM", "gemma3_text"
    names = Qwen3.names | {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }

    def own(self, rope: dict[str, Any]) -> dict[str, Any]:
        return {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": self.hidden_size // self.n_heads if self.n_layers == 62 else self.head_dim,
            "norms_plus_one": True,
            **self.windows(rope, 6, 10000.0),
        }


class Olmo2(Qwen3):
    """OLMo 2, and OLMo 3, which has a sliding window in most layers: norms behind attention and MLP, none before."""

    family = "Olmo2ForCausalLM", "olmo2"
    names: ClassVar[dict[str, str]] = {k: x for k, x in Gemma3.names.items() if k not in ("attn_norm", "ffn_norm")}

    def own(self, rope: dict[str, Any]) -> dict[str, Any]:
        found = self.windows(rope, 4, rope["rope_theta"])
        newer = {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", **found}
        return newer if found["sliding_window"] else {}


_ARCHITECTURES = {kind.__name__.lower(): kind for kind in (Llama, Mistral3, SmolLM3, Qwen2, Qwen3, Gemma3, Olmo2)}
