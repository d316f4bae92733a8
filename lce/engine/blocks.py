"""How many tokens a GPU prefills in one step, where nobody names it."""

from dataclasses import replace

import torch

from lce.cache.layout import CacheLayout, all_devices
from lce.cache.limits import Limits
from lce.methods.base import Method
from lce.models.config import ModelConfig

LARGEST = 1 << 14  # tokens: products of more rows run no faster


def activation_bytes(config: ModelConfig, itemsize: int) -> int:
    """Return the bytes of a token's activations: float32 hidden states, sum and norm; q, k, v, output; the gate."""
    heads = (2 * config.n_heads + 2 * config.n_kv_heads) * config.head_dim
    return 12 * config.hidden_size + (heads + 2 * config.intermediate_size) * itemsize


def on_gpus(layout: CacheLayout, method: Method, token_bytes: int, weight_bytes: int) -> CacheLayout:
    """Return a layout whose blocks fill GPUs: a power of two of tokens, at most `LARGEST`; long reads are of two.

    Activations take at most 1/16 of the memory and 1/4 of what the weights leave; keys and values of a block 1/8 of a
    budget. Methods that choose keys keep the block that suits their choices. Free memory does not count, so that a
    model has one block on a GPU, whoever else uses it. Example: of 24 GiB, 16,384 tokens of 60 KiB.
    """
    if not method.promised("plain"):
        return layout
    least = min(torch.cuda.mem_get_info(device)[1] for device in all_devices(layout))
    most = min(least // 16, max(0, least - weight_bytes) // 4) // token_bytes
    if (budget := Limits(layout).budget) is not None:
        most = min(most, budget // (8 * layout.token_bytes))
    block = max(layout.block, min(LARGEST, 1 << most.bit_length() >> 1))
    return replace(layout, block=block, read_size=max(layout.read_size, 2 * block))
