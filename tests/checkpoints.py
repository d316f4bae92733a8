"""Tiny random checkpoints in the published layout. Their weights are so large that attention decides the logits."""

import functools
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

from lce.models.layers import model_class, read_config
from lce.weights.source import Source

VOCAB = 300
TINY: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32"}
TINY |= {"bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False, "vocab_size": VOCAB}
TINY |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 64}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-05, "rope_theta": 1e4}
_PROSE = [
    "The quick brown fox jumps over the lazy dog, and then over the moon and the other dogs.",
    "In the morning the old miller took the bread out of the oven and the children ate it.",
    "Längere Kontexte brauchen kleine Köpfe; naïve façades don't. 日本語の文章と😀の絵文字。",
] * 8


def save_tiny(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A random model with a tokenizer, made without transformers; `changes` override the config `TINY`, a Llama's."""
    config = TINY | changes
    _write(folder, "config.json", config)
    random = torch.Generator().manual_seed(seed)
    read = read_config(Source(folder))
    weights = {name: _random(shape, random) for name, shape in model_class(read).weights(read).values()}
    dtype = getattr(torch, config["torch_dtype"])
    save_file({name: x.to(dtype) for name, x in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    return save_tokenizer(folder)


def save_by_transformers(folder: Path, config: Any, seed: int = 0) -> Any:
    """Saves and returns the model that transformers makes of `config`; all weights are random, biases too."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    randomise(model, seed)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


def randomise(model: Any, seed: int = 0) -> None:
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(_random(weight.shape, random))


def save_chat(folder: Path, template: str, **changes: Any) -> Path:
    """A random model that chats: `<|turn|>` is 300, `<|end|>` 301, the end of a turn; answers are greedy."""
    save_tiny(folder, vocab_size=VOCAB + 4, **changes)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.add_special_tokens(["<|turn|>", "<|end|>"])
    library.save(str(folder / "tokenizer.json"))
    _write(folder, "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template})
    _write(folder, "generation_config.json", {"eos_token_id": [1, VOCAB + 1], "do_sample": False})
    return folder


def save_tokenizer(folder: Path) -> Path:
    """A byte-level BPE of 300 tokens, 0 `<s>` (put before every text) and 1 `</s>`."""
    (folder / "tokenizer.json").write_text(_tokenizer(), encoding="utf-8")
    _write(folder, "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>"})
    return folder


@functools.cache
def _tokenizer() -> str:
    return byte_level(_PROSE, VOCAB, "<s>", "</s>").to_str()


def byte_level(prose: list[str], n_tokens: int, *special: str, added: Sequence[str] = ()) -> tokenizers.Tokenizer:
    """A byte-level BPE; the first of its `special` tokens is put before every text. `added` tokens come beyond."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "special_tokens": [*special]}
    library.train_from_iterator(prose, trainers.BpeTrainer(vocab_size=n_tokens, show_progress=False, **alphabet))
    library.add_tokens([*added])
    single = {"single": f"{special[0]} $A", "special_tokens": [(special[0], 0)]}
    library.post_processor = processors.TemplateProcessing(**single)
    return library


def tokens(n: int, seed: int = 0) -> list[int]:
    """Random token ids of the tiny vocabulary, none of them special."""
    ids: list[int] = torch.randint(2, VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def _random(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    """A matrix that makes vectors of 64 about 1.6 times longer; for one dimension (norm or bias), values near 1."""
    noise = torch.randn(*shape, generator=random) * 0.2
    return noise if len(shape) > 1 else noise + 1.0


def _write(folder: Path, name: str, content: object) -> None:
    (folder / name).write_text(json.dumps(content, indent=2), encoding="utf-8")


def tensor_entry(dtype: object, shape: object, start: object, stop: object) -> dict[str, object]:
    """A tensor's entry in a safetensors header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def raw_safetensors(header: object, data: bytes = b"") -> bytes:
    """The bytes of a safetensors file with this header, as JSON or bytes, and this data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data
