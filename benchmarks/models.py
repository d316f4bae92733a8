"""Makes random checkpoints of named shapes, as Hugging Face folders and as GGUF files of the same weights.

python benchmarks/models.py --shape small --window 16384 --out models
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

SHAPES = {
    # TinyLlama's: 1.1 billion parameters.
    "tinyllama": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
    },
    "small": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "vocab_size": 32000,
    },
    # Four of the layers of a model of seven billion parameters.
    "7b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    },
}
WINDOW = 16384


def make_checkpoint(folder: Path, shape: dict[str, int], dtype: str, window: int = WINDOW) -> None:
    """Make a random checkpoint in the published layout, with the demo model's tokenizer."""
    import torch
    from safetensors.torch import save_file

    from lce.models.layers import model_class, read_config
    from lce.weights.source import DEMO, Source

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **shape,
        "hidden_act": "silu",
        "max_position_embeddings": window,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    model = read_config(Source(folder))
    tensors = {
        name: torch.ones(size, dtype=kind) if len(size) == 1 else torch.empty(size, dtype=kind).normal_(std=0.02)
        for name, size in model_class(model).weights(model).values()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def checkpoint(models: Path, shape: str, dtype: str, window: int = WINDOW) -> Path:
    """Return the folder of a checkpoint below `models`, made once."""
    folder = models / f"{shape}-{dtype}-{window}"
    if not folder.exists():
        models.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=models, prefix=".making-"))
        make_checkpoint(draft, SHAPES[shape], dtype, window)
        os.replace(draft, folder)
    return folder


def token_ids(length: int) -> list[int]:
    """Return a text of token ids below 32,000."""
    return [(i * 7919) % 31000 + 2 for i in range(length)]


# GGUF's names of a layer's weights, by Hugging Face's.
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_MODEL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(folder: Path, path: Path) -> None:
    """Write the weights of a Llama's folder as a GGUF file in bfloat16, norms in float32.

    llama.cpp rotates neighbouring dimensions of a head, Hugging Face rotates halves. So the rows of q and k are
    reordered, as by `convert_hf_to_gguf.py`. The vocabulary has three tokens, and the others are
    unused. Needs the gguf package.
    """
    import gguf
    import torch
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    draft = path.with_suffix(".making")
    writer: Any = gguf.GGUFWriter(draft, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    unused = [f"<{i}>" for i in range(config["vocab_size"] - 3)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab", *unused])
    writer.add_token_types([gguf.TokenType.NORMAL] * 3 + [gguf.TokenType.UNUSED] * len(unused))
    writer.add_token_merges(["a b"])
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  # it is no mapping
            x = file.get_tensor(name)
            if "q_proj" in name or "k_proj" in name:
                x = _interleaved(x, heads if "q_proj" in name else kv_heads)
            if x.ndim == 1:
                writer.add_tensor(_gguf_name(name), x.float().numpy())
            else:
                raw = x.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
                writer.add_tensor(_gguf_name(name), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(draft, path)


def _gguf_name(name: str) -> str:
    base = name.removesuffix(".weight")
    if base in _MODEL:
        return f"{_MODEL[base]}.weight"
    _, _, layer, rest = base.split(".", 3)
    return f"blk.{layer}.{_LAYER[rest]}.weight"


def _interleaved(x: Any, heads: int) -> Any:
    """Reorder rows `[heads · D, hidden]` so that the halves of each head's dimensions alternate."""
    return x.view(heads, 2, -1, x.shape[1]).transpose(1, 2).reshape(x.shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--window", type=int, default=WINDOW)
    parser.add_argument("--out", type=Path, required=True, help="the folder below which the checkpoint goes")
    args = parser.parse_args()
    print(checkpoint(args.out, args.shape, args.dtype, args.window))


if __name__ == "__main__":
    main()
