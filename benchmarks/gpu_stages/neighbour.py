"""Stage 7: transformers with the same weights, in turns with lce's full attention."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lce
from gpu_stages.drawn import engine_of, published, random_ids, write_config
from gpu_stages.setup import Setup
from gpu_stages.speed import free, measure, warm_up

LENGTHS, NEW_TOKENS = (4096, 16384, 32768), 32


def run(setup: Setup) -> None:
    lengths = (100,) if setup.tiny else LENGTHS
    new_tokens = 4 if setup.tiny else NEW_TOKENS
    shape = "tiny" if setup.tiny else "llama-2-7b"
    engine = engine_of(shape, "full", setup.device)
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), shape)
        model = transformers_model(Path(folder), engine)
    with setup.record.attempt("logits") as cell:
        cell.update(same_logits(engine, model))
    with setup.record.attempt("warm up"):
        warm_up(engine, setup)
        forward(setup, model, random_ids(engine, 64), 3)
    for length in lengths:
        with setup.record.attempt(f"lce at {length}") as cell:
            measure(setup, engine, length, new_tokens, setup.left() / 2, cell)
        with setup.record.attempt(f"transformers at {length}") as cell:
            free(setup)
            cell.update(forward(setup, model, random_ids(engine, length), new_tokens))
        free(setup)


def transformers_model(folder: Path, engine: lce.Engine) -> nn.Module:
    """Return transformers' model over the engine's own weights; only rotary frequencies are new."""
    import transformers
    from transformers.models.llama import modeling_llama

    config = transformers.LlamaConfig.from_pretrained(folder)
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(published(engine), assign=True)
    model.model.rotary_emb = modeling_llama.LlamaRotaryEmbedding(config).to(engine.setup.device)
    return model.requires_grad_(False).eval()


def same_logits(engine: lce.Engine, model: nn.Module) -> dict[str, Any]:
    """Return the largest difference of logits over a short text, as a share of the largest logit."""
    ids = random_ids(engine, min(256, engine.window))
    with torch.inference_mode():
        theirs = model(torch.tensor([ids], device=engine.setup.device)).logits[0].float()
    ours = engine.logits(ids)
    difference = float((ours - theirs).abs().max() / theirs.abs().max())
    return {"difference": difference, "ok": difference <= 0.05}


@torch.inference_mode()
def forward(setup: Setup, model: nn.Module, ids: list[int], new_tokens: int) -> dict[str, Any]:
    """Time the model's forward with its own cache and only the last token's logits, without `generate`'s overhead."""
    x = torch.tensor([ids], device=setup.device)
    setup.synchronize()
    started = time.perf_counter()
    out = model(x, use_cache=True, logits_to_keep=1)
    token = out.logits[:, -1:].argmax(-1)
    token.item()
    prefill = time.perf_counter() - started
    found: dict[str, Any] = {"prefill s": prefill, "prefill tok/s": len(ids) / prefill}
    for counted in (3, new_tokens):  # the first 3 steps do not count
        setup.synchronize()
        started = time.perf_counter()
        for _ in range(counted):
            out = model(token, past_key_values=out.past_key_values, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
            token.item()
        found["decode ms"] = (time.perf_counter() - started) / counted * 1e3
    if setup.cuda:
        found["peak memory bytes"] = torch.cuda.max_memory_allocated()
    return found
