"""LongHeads in one file: a language model answers a question about a text many times longer than its window.

    python examples/minimal.py lce/models/demo --prompt-file examples/haystack.txt --tokens 16

A model is trained on texts of at most W tokens, its window. Beyond W, full attention fails, because the model has never
seen such distances between a query and a key. LongHeads (Lu et al., 2024, "Multi-Head Attention is Secretly a Long
Context Processor", arXiv:2402.10685) runs the same weights. The method changes only which tokens a query attends, and
at which positions the query sees them. The text is cut into chunks of L tokens. There are four steps:

    summarise   make one vector c of each complete chunk, for each query head              Eq. 1 and 2
    choose      score each chunk by q · c; take the first chunk, the best, and the last    Eq. 3
    place       put the chosen chunks side by side, from position 0                        "position remapping"
    attend      take one softmax over the tokens of the chosen chunks

A query attends at most W tokens, and no distance reaches W. Each head of each query chooses for itself, so that all
heads together see far more than W tokens. A text of at most W tokens has full attention: all its chunks are chosen.

Read this file from top to bottom. The engine lce computes the same tokens, faster. All numbers are float32.

Shapes: H query heads, G key/value heads, T queries, D head dimension, M chunks, L tokens of a chunk. `q k v` are
unrotated, `q_rot k_rot` are rotated. The indices of queries in the text are `i`, those of keys are `j`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

# ---- 1. Sizes ----


@dataclass(frozen=True)
class Config:
    """The sizes of a Llama, from config.json, and the two sizes of LongHeads."""

    n_layers: int
    n_heads: int  # H
    n_kv_heads: int  # G; H / G query heads share the keys and values of one KV head
    head_dim: int  # D
    norm_eps: float
    rope_theta: float
    eos_ids: tuple[int, ...]  # the tokens that end a text
    window: int  # W, the number of positions on which the model was trained
    chunk_size: int  # L; the paper's is 256, but with more and smaller chunks a model finds more facts
    chunks: int  # the largest number of chunks that a query attends, its own chunk included: W / L

    @classmethod
    def read(cls, folder: Path, window: int | None = None) -> Config:
        """Read config.json. `window` replaces the model's window."""
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        rope = found | (found.get("rope_scaling") or {}) | (found.get("rope_parameters") or {})
        scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
        biases = found.get("attention_bias") or found.get("mlp_bias")
        if found["model_type"] not in ("llama", "mistral") or scaled or biases:
            sys.exit(f"{folder}: expected a Llama or Mistral without RoPE scaling and biases; lce reads more models")
        window = window or found["max_position_embeddings"]
        n_heads, eos = found["num_attention_heads"], found["eos_token_id"]
        chunk_size = max(1, min(32, window // 32))
        return cls(
            n_layers=found["num_hidden_layers"],
            n_heads=n_heads,
            n_kv_heads=found.get("num_key_value_heads") or n_heads,
            head_dim=found.get("head_dim") or found["hidden_size"] // n_heads,
            norm_eps=found["rms_norm_eps"],
            rope_theta=rope.get("rope_theta", 10000.0),
            eos_ids=tuple(eos) if isinstance(eos, list) else (eos,),
            window=window,
            chunk_size=chunk_size,
            chunks=window // chunk_size,
        )


# ---- 2. Positions ----


class Rope:
    """Rotary position embedding (Su et al., 2021).

    At position p, the pair of the numbers f and f + D/2 of a vector is turned by the angle p · θ_f, with the frequency
    θ_f = theta^(-2f/D). The product of a query and a key then depends on the distance between them alone:

        rotate(q, p) · rotate(k, p')  =  rotate(q, p - p') · k

    Angles are computed in float64.
    """

    def __init__(self, config: Config) -> None:
        exponents = -torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        angles = torch.arange(config.window)[:, None] * config.rope_theta**exponents
        self.cos, self.sin = angles.cos().float(), angles.sin().float()  # [W, D/2]: no position reaches W

    def rotate(self, x: Tensor, position: Tensor) -> Tensor:
        """Rotate vectors `x [..., D]` to `position [...]`, whose dimensions are broadcast with those of `x`."""
        cos, sin = self.cos[position], self.sin[position]
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


# ---- 3. Cache ----


class LayerCache:
    """One layer's keys and values, in chunks of L tokens, and the summary of each complete chunk for each query head.

    Keys are rotated to their offsets in their chunks, 0..L-1, because their chunks have no fixed position: each query
    of each head sees a chunk at another one. Queries of the incomplete chunk are kept for the summary of this chunk.
    """

    def __init__(self, config: Config, length: int) -> None:
        n_chunks = math.ceil(length / config.chunk_size)
        self.n_tokens = 0
        self.k_rot = torch.zeros(config.n_kv_heads, n_chunks, config.chunk_size, config.head_dim)  # [G, M, L, D]
        self.v = torch.zeros_like(self.k_rot)
        self.summary = torch.zeros(config.n_heads, n_chunks, config.head_dim)  # [H, M, D]
        self.open_q_rot = torch.zeros(config.n_heads, 0, config.head_dim)  # [H, less than L, D]

    def append(self, q_rot: Tensor, k_rot: Tensor, v: Tensor) -> Iterable[tuple[int, Tensor]]:
        """Add T tokens, `q_rot [H, T, D]` and `k_rot v [G, T, D]`.

        Return the numbers of the chunks that are complete now, each with its queries `[H, L, D]`.
        """
        size, start, stop = self.k_rot.shape[2], self.n_tokens, self.n_tokens + q_rot.shape[1]
        self.k_rot.flatten(1, 2)[:, start:stop] = k_rot
        self.v.flatten(1, 2)[:, start:stop] = v
        complete = range(start // size, stop // size)
        q_rot = torch.cat((self.open_q_rot, q_rot), dim=1)
        *queries, self.open_q_rot = q_rot.split([size] * len(complete) + [stop % size], dim=1)
        self.n_tokens = stop
        return zip(complete, queries, strict=True)


# ---- 4. LongHeads ----


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return `softmax(q kᵀ / √D) v` for `q [..., T, D]` and `k v [..., N, D]`, without a causal mask."""
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


class LongHeads:
    """The attention of LongHeads: which tokens each query of each head attends, and at which positions."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.rope = Rope(config)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache) -> Tensor:
        """Add a block of T tokens, `q [H, T, D]` and `k v [G, T, D]`, to the cache. Return their attention `[H, T, D]`.

        The queries of one chunk choose among the same chunks. So they choose and attend together.
        """
        size = self.config.chunk_size
        i, out = torch.arange(cache.n_tokens, cache.n_tokens + q.shape[1]), torch.empty_like(q)
        for chunk_id, q_rot in cache.append(self.rope.rotate(q, i % size), self.rope.rotate(k, i % size), v):
            cache.summary[:, chunk_id] = self.summarise(q_rot, cache.k_rot[:, chunk_id], cache.v[:, chunk_id])
        for m in range(int(i[0]) // size, int(i[-1]) // size + 1):
            here = i // size == m
            out[:, here] = self.attend(q[:, here], i[here], cache)
        return out

    def summarise(self, q_rot: Tensor, k_rot: Tensor, v: Tensor) -> Tensor:
        """Return the summaries c `[H, D]` of one complete chunk, `q_rot [H, L, D]` and `k_rot v [G, L, D]`.

        Queries and keys are rotated to their offsets in the chunk, and there is no causal mask:

            O = softmax(Q Kᵀ / √D) V,   q^c = mean(O)       (Eq. 2)
            c = softmax(q^c Kᵀ / √D) K                      (Eq. 1)
        """
        k_rot, v = (x.repeat_interleave(len(q_rot) // len(x), dim=0) for x in (k_rot, v))  # [H, L, D]
        out = attention(q_rot, k_rot, v)
        return attention(out.mean(dim=1, keepdim=True), k_rot, k_rot).squeeze(1)

    def choose(self, q: Tensor, summary: Tensor) -> Tensor:
        """Return which of the chunks 0..m the queries `q [H, T, D]` of chunk m attend, `[H, T, m + 1]` bool.

        `summary [H, m, D]` are the summaries c of the chunks before chunk m. Each query attends `chunks` chunks in all,
        or all chunks if there are fewer:

            P = {chunk 0} ∪ {the chunks with the best scores q · c} ∪ {chunk m-1} ∪ {chunk m}      (Eq. 3)
        """
        m, chunks = summary.shape[1], self.config.chunks
        chosen = torch.ones(*q.shape[:2], m + 1, dtype=torch.bool)
        if m + 1 > chunks:
            scores = q @ summary.mT  # [H, T, m]
            reversed_scores = scores[..., 1 : m - 1].flip(-1)  # so that of equal scores the later one comes first
            best = m - 2 - reversed_scores.argsort(dim=-1, descending=True, stable=True)[..., : chunks - 3]
            chosen[..., 1 : m - 1] = False
            chosen.scatter_(-1, best, True)
        return chosen

    def place(self, chosen: Tensor, i: Tensor) -> Tensor:
        """Return the positions from which queries at indices `i [T]` see chunks 0..m, `[H, T, m + 1]`.

        Chosen chunks are placed side by side in their order, in the slots 0..S. The own chunk is in slot S. So key j of
        the chunk in slot s is at s · L + j mod L, and query i is at S · L + i mod L.

        Only the distance counts. So key j may stay at j mod L in the cache, for all queries of all heads, if the query
        moves back by s · L. The query then sees the chunk in slot s from (S - s) · L + i mod L, which is returned.
        """
        slot = chosen.cumsum(-1) - 1
        return (slot[..., -1:] - slot) * self.config.chunk_size + (i % self.config.chunk_size)[:, None]

    def attend(self, q: Tensor, i: Tensor, cache: LayerCache) -> Tensor:
        """Return the attention `[H, T, D]` of queries `q [H, T, D]` at indices `i [T]`, which are in one chunk.

        A query's attention is `softmax(q_rot k_rotᵀ / √D) v` over the tokens of its chosen chunks, up to the query. The
        queries of a head are computed together, over the U chunks that any of them chose, with a mask.
        """
        size, shared = self.config.chunk_size, self.config.n_heads // self.config.n_kv_heads
        chosen = self.choose(q, cache.summary[:, : int(i[0]) // size])
        position, out = self.place(chosen, i), torch.empty_like(q)
        later = torch.arange(size) > (i % size)[:, None]  # [T, L], the keys after each query in its own chunk
        for h in range(self.config.n_heads):
            chunk_ids = chosen[h].any(dim=0).nonzero().squeeze(1)  # [U]
            k_rot, v = cache.k_rot[h // shared, chunk_ids], cache.v[h // shared, chunk_ids]  # [U, L, D]
            q_rot = self.rope.rotate(q[h, :, None], position[h][:, chunk_ids])  # [T, U, D]
            logits = torch.einsum("tud,uld->tul", q_rot, k_rot) / math.sqrt(self.config.head_dim)
            logits.masked_fill_(~chosen[h][:, chunk_ids, None], -math.inf)  # [T, U, L]
            logits[:, -1].masked_fill_(later, -math.inf)  # the own chunk is the last
            out[h] = logits.flatten(1).softmax(-1) @ v.flatten(0, 1)
        return out


# ---- 5. Llama ----


class Llama:
    """Llama (Touvron et al., 2023) with LongHeads as its attention. Hidden states are `x [T, hidden]`."""

    def __init__(self, folder: Path, window: int | None = None) -> None:
        self.config = Config.read(folder, window)
        self.attend = LongHeads(self.config)
        self.weights: dict[str, Tensor] = {}
        for file in sorted(folder.glob("model*.safetensors")):
            self.weights |= {name: weight.float() for name, weight in load_file(file).items()}
        self.weights.setdefault("lm_head.weight", self.weights["model.embed_tokens.weight"])  # tied embeddings

    def new_cache(self, length: int) -> list[LayerCache]:
        """Return an empty cache for a text of at most `length` tokens."""
        return [LayerCache(self.config, length) for _ in range(self.config.n_layers)]

    def __call__(self, ids: Tensor, cache: list[LayerCache]) -> Tensor:
        """Add a block of token ids `[T]` to the cache. Return the logits of the next token, `[vocab]`."""
        x = self.weights["model.embed_tokens.weight"][ids]
        for n in range(self.config.n_layers):
            layer = f"model.layers.{n}."
            x = x + self.attention(layer + "self_attn.", self.norm(x, layer + "input_layernorm"), cache[n])
            x = x + self.mlp(layer + "mlp.", self.norm(x, layer + "post_attention_layernorm"))
        return self.linear(self.norm(x[-1], "model.norm"), "lm_head")

    def linear(self, x: Tensor, name: str) -> Tensor:
        """Return `x Wᵀ`."""
        return x @ self.weights[name + ".weight"].T

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Return RMSNorm: `x / sqrt(mean(x²) + eps)`, times a weight for each number."""
        mean = x.square().mean(-1, keepdim=True)
        return x / torch.sqrt(mean + self.config.norm_eps) * self.weights[name + ".weight"]

    def mlp(self, name: str, x: Tensor) -> Tensor:
        """Return SwiGLU: `(silu(x W_gateᵀ) ∘ x W_upᵀ) W_downᵀ`."""
        gate = torch.nn.functional.silu(self.linear(x, name + "gate_proj"))
        return self.linear(gate * self.linear(x, name + "up_proj"), name + "down_proj")

    def attention(self, name: str, x: Tensor, cache: LayerCache) -> Tensor:
        """Return grouped-query attention: H heads of queries, and G of keys and values, each for H / G query heads."""
        q, k, v = (
            self.linear(x, name + kind).unflatten(-1, (-1, self.config.head_dim)).transpose(0, 1)  # [H or G, T, D]
            for kind in ("q_proj", "k_proj", "v_proj")
        )
        out = self.attend(q, k, v, cache)
        return self.linear(out.transpose(0, 1).flatten(1), name + "o_proj")


# ---- 6. Generation ----


@torch.inference_mode()
def prefill(model: Llama, ids: list[int], cache: list[LayerCache], block: int = 512) -> Tensor:
    """Add the prompt to the cache, block by block (chunked prefill). Return the logits of the next token, `[vocab]`.

    Hidden states are in memory for one block at a time. The logits do not depend on `block`.
    """
    for some in torch.tensor(ids).split(block):
        logits = model(some, cache)
        print(f"\r{cache[0].n_tokens} of {len(ids)} tokens read", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return logits


@torch.inference_mode()
def decode(model: Llama, logits: Tensor, cache: list[LayerCache], n_tokens: int) -> list[int]:
    """Return the ids of the next `n_tokens` tokens, each the likeliest one, or fewer if an end token comes."""
    ids: list[int] = []
    while len(ids) < n_tokens and (token_id := int(logits.argmax())) not in model.config.eos_ids:
        ids.append(token_id)
        logits = model(torch.tensor([token_id]), cache)  # a block of one token
    return ids


def main() -> None:
    """Run the command line. The generated text goes to stdout; progress and figures go to stderr."""
    parser = argparse.ArgumentParser(description="LongHeads in one file: read a long text, and continue it.")
    parser.add_argument("model", type=Path, help="a folder with config.json, model*.safetensors and tokenizer.json")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="the text to continue")
    prompt.add_argument("--prompt-file", type=Path, help="a file with the text to continue")
    parser.add_argument("--tokens", type=int, default=16, help="the most tokens to generate (default: 16)")
    parser.add_argument("--window", type=int, help="the positions on which the model can be trusted (default: its own)")
    parser.add_argument("--block", type=int, default=512, help="the tokens read in one step (default: 512)")
    options = parser.parse_args()

    start, text = time.perf_counter(), options.prompt
    if options.prompt_file:
        text = options.prompt_file.read_text(encoding="utf-8")
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    ids, model = tokenizer.encode(text).ids, Llama(options.model, options.window)
    cache = model.new_cache(len(ids) + options.tokens)
    logits = prefill(model, ids, cache, options.block)
    print(tokenizer.decode(decode(model, logits, cache, options.tokens)))
    size, chunks = model.config.chunk_size, model.config.chunks
    seen = f"each head of each query attended at most {chunks} of {len(ids) // size} chunks of {size} tokens"
    print(f"{time.perf_counter() - start:.0f} s; {seen}", file=sys.stderr)


if __name__ == "__main__":
    main()
