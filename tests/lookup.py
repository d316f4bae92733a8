"""A hand-made model that looks up one digit: what it attends, it answers. So why it misses is known.

One layer, one head, window 64. `?` attends the digits before it, wherever they are, by one pair of dimensions that
turns by 0.02 a position: at distances beyond 78 the logit changes its sign, and nothing is found. All other weights
are equal. Its answer is the digit that it attends.
"""

import json
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file

from tests.checkpoints import TINY, VOCAB, save_tokenizer

WINDOW, HIDDEN, PAIR = 64, 32, 4
FILLER, DIGITS = "~", "0123456789"
COMMON, ASKING, FLAG, FIRST_DIGIT = 0, 1, 2, 8  # dimensions of an embedding: two of them are 1


def save_lookup(folder: Path) -> Path:
    """The checkpoint of the model, with a tokenizer by which a letter is a token."""
    config = TINY | dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1)
    config |= {"hidden_size": HIDDEN, "intermediate_size": 8, "max_position_embeddings": WINDOW, "rope_theta": 2500.0}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_tokenizer(folder)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    embedding = torch.zeros(VOCAB, HIDDEN)
    embedding[:, COMMON] = embedding[:, 3] = 1
    embedding[library.token_to_id("?")] = _one_at(COMMON, ASKING)
    for digit in DIGITS:
        embedding[library.token_to_id(digit)] = _one_at(FLAG, FIRST_DIGIT + int(digit))
    q, k, v, o = (torch.zeros(16, HIDDEN), torch.zeros(16, HIDDEN), torch.zeros(16, HIDDEN), torch.zeros(HIDDEN, 16))
    q[PAIR, ASKING] = k[PAIR, FLAG] = 2.5  # a logit of 25: norms make 4 of each 1
    for digit in range(10):
        v[digit, FIRST_DIGIT + digit] = o[FIRST_DIGIT + digit, digit] = 1
    head = torch.zeros(VOCAB, HIDDEN)
    for digit in DIGITS:
        head[library.token_to_id(digit), FIRST_DIGIT + int(digit)] = 1
    head[library.token_to_id("#"), COMMON] = 0.1  # what it says where it finds nothing
    zeros = torch.zeros(8, HIDDEN)
    layer = {f"self_attn.{name}_proj": x for name, x in zip("qkvo", (q, k, v, o), strict=True)}
    layer |= {"mlp.gate_proj": zeros, "mlp.up_proj": zeros.clone(), "mlp.down_proj": torch.zeros(HIDDEN, 8)}
    layer |= {f"{name}_layernorm": torch.ones(HIDDEN) for name in ("input", "post_attention")}
    weights = {f"model.layers.0.{name}.weight": x for name, x in layer.items()}
    weights |= {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": torch.ones(HIDDEN)}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def _one_at(*dimensions: int) -> torch.Tensor:
    vector = torch.zeros(HIDDEN)
    vector[list(dimensions)] = 1
    return vector


def text(before: int, digit: str, behind: int) -> str:
    """A document with a digit in it; the question is `?`."""
    return FILLER * before + digit + FILLER * behind
