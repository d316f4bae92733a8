"""LongHeads in one file: a Llama answers questions of a text that is many times longer than its window.

    python examples/minimal.py lce/models/demo --prompt-file examples/haystack.txt --tokens 6

A model is trained on texts of at most W tokens, its window. Beyond W full attention fails, because the model has never
seen such distances between a query and a key. LongHeads (Lu et al., 2024, "Multi-Head Attention is Secretly a Long
Context Processor", arXiv:2402.10685) runs the same weights, and changes only which tokens a query attends and at which
positions it sees them. The text is cut into chunks of L tokens, and each head of each query works in four steps:

    summarise   keep one vector c of each complete chunk                        `summarise`   Eq. 1 and 2
    choose      score the chunks by q · c, take the first, the last, the best   `choose`      Eq. 3
    place       put the chosen chunks side by side, from position 0             `place`
    attend      take one softmax over the tokens of these chunks                `attend`

A query attends at most W tokens, and no distance reaches W. Heads choose for themselves, so together they see far more
than a window. While the text is no longer than W, all chunks are chosen, and the result is full attention.

Read the file from top to bottom: config, RoPE, cache, LongHeads, Llama, generation. The engine lce computes the same
tokens, faster. Shapes: H query heads, G key/value heads, T queries, D head dimension, M chunks, L tokens of a chunk.
`q k v` have no positions, `q_rot k_rot` are rotated. `i` is the index of a query in the text, `j` that of a key.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

# ---------------------------------------------------------------------------------------------------------------------
# The model's sizes
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """The sizes of a Llama, as its config.json has them, and the two sizes of LongHeads."""

    n_layers: int
    n_heads: int  # H
    n_kv_heads: int  # G: H / G query heads share the keys and values of one KV head
    head_dim: int  # D
    norm_eps: float
    rope_theta: float
    eos_ids: tuple[int, ...]  # the tokens that end a text
    window: int  # W: the number of positions on which the model was trained
    chunk_size: int  # L
    chunks: int  # the most chunks that a query attends, its own chunk included: `chunks` · L is at most W

    @classmethod
    def read(cls, folder: Path, window: int | None = None) -> Config:
        """Read config.json. `window` replaces the model's window."""
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        rope = found.get("rope_parameters") or {"rope_theta": found.get("rope_theta", 10000.0)}
        if found["model_type"] != "llama" or found.get("rope_scaling") or rope.get("rope_type", "default") != "default":
            sys.exit(f"{folder}: expected a Llama without RoPE scaling; the engine lce reads more models")
        window = window or found["max_position_embeddings"]
        chunk_size = min(32, window // 32)
        eos = found["eos_token_id"]
        return cls(
            n_layers=found["num_hidden_layers"],
            n_heads=found["num_attention_heads"],
            n_kv_heads=found.get("num_key_value_heads") or found["num_attention_heads"],
            head_dim=found.get("head_dim") or found["hidden_size"] // found["num_attention_heads"],
            norm_eps=found["rms_norm_eps"],
            rope_theta=rope["rope_theta"],
            eos_ids=tuple(eos) if isinstance(eos, list) else (eos,),
            window=window,
            chunk_size=chunk_size,
            chunks=window // chunk_size,
        )


# ---------------------------------------------------------------------------------------------------------------------
# Positions
# ---------------------------------------------------------------------------------------------------------------------


class Rope:
    """Rotary position embedding (Su et al., 2021). A vector at position p has each of its D/2 pairs turned by p · θ_f.

    The product of a query at p and a key at p' then depends on the distance p - p' alone:

        rotate(q, p) · rotate(k, p')  =  rotate(q, p - p') · k

    Llama pairs number f with number f + D/2, and θ_f = theta^(-2f/D). Angles are float64: a float32 angle is too coarse.
    """

    def __init__(self, config: Config) -> None:
        exponents = -torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        angles = torch.arange(config.window)[:, None] * config.rope_theta**exponents
        self.cos, self.sin = angles.cos().float(), angles.sin().float()  # [W, D/2]: no position reaches W

    def rotate(self, x: Tensor, position: Tensor) -> Tensor:
        """Rotate vectors `x [..., D]` to positions `[...]`. Leading dimensions are broadcast."""
        cos, sin = self.cos[position], self.sin[position]
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


# ---------------------------------------------------------------------------------------------------------------------
# The cache: keys and values, and what is kept of each chunk
# ---------------------------------------------------------------------------------------------------------------------


class LayerCache:
    """The tokens that one layer has read, as chunks of L tokens, and a summary of each complete chunk.

    Keys have no positions here: each query of each head sees them elsewhere. Queries are needed until their chunk is
    complete and has its summary.
    """

    def __init__(self, config: Config, length: int) -> None:
        n_chunks = math.ceil(length / config.chunk_size)
        self.n_tokens = 0
        self.k = torch.zeros(config.n_kv_heads, n_chunks, config.chunk_size, config.head_dim)  # [G, M, L, D]
        self.v = torch.zeros_like(self.k)
        self.summary = torch.zeros(config.n_heads, n_chunks, config.head_dim)  # [H, M, D]
        self.open_q = torch.zeros(config.n_heads, 0, config.head_dim)  # queries of the incomplete chunk

    def append(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[range, Tensor]:
        """Add tokens `q [H, T, D]`, `k v [G, T, D]`. Return the chunks that are now complete, and their queries."""
        size, start = self.k.shape[2], self.n_tokens
        self.n_tokens += q.shape[1]
        self.k.flatten(1, 2)[:, start : self.n_tokens] = k
        self.v.flatten(1, 2)[:, start : self.n_tokens] = v
        complete = range(start // size, self.n_tokens // size)
        q = torch.cat((self.open_q, q), dim=1)
        self.open_q = q[:, len(complete) * size :]
        return complete, q[:, : len(complete) * size].unflatten(1, (-1, size))  # [H, m, L, D]


# ---------------------------------------------------------------------------------------------------------------------
# LongHeads
# ---------------------------------------------------------------------------------------------------------------------


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return `softmax(q kᵀ / √D) v` for `q [..., T, D]` and `k v [..., N, D]`, without a causal mask."""
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


class LongHeads:
    """The attention of one model: which tokens each query of each head attends, and at which positions."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.rope = Rope(config)
        self.offsets = torch.arange(config.chunk_size)  # positions in a chunk, 0..L-1

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache) -> Tensor:
        """Add a block of tokens `q [H, T, D]`, `k v [G, T, D]` to the cache. Return their attention, `[H, T, D]`.

        The queries of one chunk choose among the same chunks, so they are taken together.
        """
        start, size = cache.n_tokens, self.config.chunk_size
        complete, queries = cache.append(q, k, v)
        for n, chunk_id in enumerate(complete):
            cache.summary[:, chunk_id] = self.summarise(queries[:, n], cache.k[:, chunk_id], cache.v[:, chunk_id])
        i = torch.arange(start, cache.n_tokens)
        n_queries = (i // size).unique_consecutive(return_counts=True)[1].tolist()
        pieces = zip(q.split(n_queries, dim=1), i.split(n_queries), strict=True)
        return torch.cat([self.attend(q, i, cache) for q, i in pieces], dim=1)

    def summarise(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the summaries c `[H, D]` of one complete chunk, `q [H, L, D]` and `k v [G, L, D]`.

        Queries and keys are rotated to their offsets in the chunk, 0..L-1. A chunk has no causal mask here:

            O = softmax(Q Kᵀ / √D) V,   q^c = mean(O)        (Eq. 2)
            c = softmax(q^c Kᵀ / √D) K                       (Eq. 1)
        """
        shared = self.config.n_heads // self.config.n_kv_heads
        q_rot = self.rope.rotate(q, self.offsets)
        k_rot = self.rope.rotate(k, self.offsets).repeat_interleave(shared, dim=0)  # [H, L, D]
        out = attention(q_rot, k_rot, v.repeat_interleave(shared, dim=0))
        return attention(out.mean(dim=1, keepdim=True), k_rot, k_rot).squeeze(1)

    def choose(self, q: Tensor, summary: Tensor) -> Tensor:
        """Return which chunks the queries `q [H, T, D]` of chunk m attend, `[H, T, m + 1]` bool: Eq. 3.

        `summary [H, m, D]` has the chunks before the queries' own chunk m. A query attends chunk 0, the best of
        1..m-2 by the score q · c, the last complete chunk m-1, and its own chunk: `chunks` in all.
        """
        n_heads, n_queries, _ = q.shape
        own, chunks = summary.shape[1], self.config.chunks
        chosen = torch.ones(n_heads, n_queries, own + 1, dtype=torch.bool)
        if own + 1 > chunks:
            scores = q @ summary.mT  # [H, T, m]
            best = scores[..., 1 : own - 1].topk(chunks - 3).indices + 1
            chosen[..., 1 : own - 1] = False
            chosen.scatter_(-1, best, True)
        return chosen

    def place(self, chosen: Tensor, i: Tensor) -> Tensor:
        """Return the position from which the queries `i [T]` see each chunk, `[H, T, M]`, if a chunk begins at 0.

        Chosen chunks stand side by side in their order: the n-th begins at n · L, and the own chunk is the last. So key
        j stands at n · L + j mod L, and a query, whose own chunk is the N-th, at N · L + i mod L. As only distances
        matter, each chunk stays at 0..L-1 and the query moves: it sees the n-th chunk from (N - n) · L + i mod L.
        """
        slot = chosen.cumsum(-1) - 1  # n
        return (slot[..., -1:] - slot) * self.config.chunk_size + (i % self.config.chunk_size)[:, None]

    def attend(self, q: Tensor, i: Tensor, cache: LayerCache) -> Tensor:
        """Return the attention `[H, T, D]` of the queries `q [H, T, D]`, `i [T]`, which are all in one chunk."""
        own, shared = int(i[0]) // self.config.chunk_size, self.config.n_heads // self.config.n_kv_heads
        chosen = self.choose(q, cache.summary[:, :own])
        position = self.place(chosen, i)
        return torch.cat(
            [
                self.attend_chunks(*of_head, i, cache.k[g], cache.v[g])
                for g, of_head in enumerate(zip(*(x.split(shared) for x in (q, chosen, position)), strict=True))
            ]
        )

    def attend_chunks(self, q: Tensor, chosen: Tensor, position: Tensor, i: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return `softmax(q_rot k_rotᵀ / √D) v` over the chosen chunks of one KV head, `k v [M, L, D]`.

        The query heads `q [R, T, D]` share this KV head. Chunks that no query chose are left out: U chunks remain.
        """
        chunk_ids = chosen.flatten(0, 1).any(dim=0).nonzero().squeeze(1)  # [U]
        j = chunk_ids[:, None] * self.config.chunk_size + self.offsets  # [U, L]
        attended = chosen[..., chunk_ids, None] & (j <= i[:, None, None])  # [R, T, U, L]; in the own chunk: causal
        q_rot = self.rope.rotate(q[:, :, None], position[..., chunk_ids])  # [R, T, U, D]
        k_rot = self.rope.rotate(k[chunk_ids], self.offsets)  # [U, L, D]
        logits = torch.einsum("rtud,uld->rtul", q_rot, k_rot) / math.sqrt(self.config.head_dim)
        weights = logits.masked_fill(~attended, -math.inf).flatten(2).softmax(-1)  # [R, T, U * L]
        return weights @ v[chunk_ids].flatten(0, 1)


# ---------------------------------------------------------------------------------------------------------------------
# Llama
# ---------------------------------------------------------------------------------------------------------------------


class Llama:
    """Llama (Touvron et al., 2023): its weights by their published names, and its equations.

    Hidden states are `x [T, hidden]`. Only `attention` knows that tokens have an order.
    """

    def __init__(self, folder: Path, window: int | None = None) -> None:
        self.config = Config.read(folder, window)
        self.attend = LongHeads(self.config)
        self.weights: dict[str, Tensor] = {}
        for file in sorted(folder.glob("model*.safetensors")):
            self.weights |= {name: weight.float() for name, weight in load_file(file).items()}
        self.weights.setdefault("lm_head.weight", self.weights["model.embed_tokens.weight"])  # tied embeddings

    def __call__(self, ids: Tensor, cache: list[LayerCache]) -> Tensor:
        """Read a block of token ids `[T]` behind what the cache has. Return the logits of the next token, `[vocab]`."""
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
        return (
            x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.norm_eps) * self.weights[name + ".weight"]
        )

    def mlp(self, name: str, x: Tensor) -> Tensor:
        """Return SwiGLU: `(silu(x W_gateᵀ) ∘ x W_upᵀ) W_downᵀ`."""
        gate = torch.nn.functional.silu(self.linear(x, name + "gate_proj"))
        return self.linear(gate * self.linear(x, name + "up_proj"), name + "down_proj")

    def attention(self, name: str, x: Tensor, cache: LayerCache) -> Tensor:
        """Return grouped-query attention: H heads of queries, G of keys and values, joined again by W_o."""
        q, k, v = (
            self.linear(x, name + kind).unflatten(-1, (-1, self.config.head_dim)).transpose(0, 1)  # [H or G, T, D]
            for kind in ("q_proj", "k_proj", "v_proj")
        )
        out = self.attend(q, k, v, cache)
        return self.linear(out.transpose(0, 1).flatten(1), name + "o_proj")


# ---------------------------------------------------------------------------------------------------------------------
# Generation
# ---------------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def generate(model: Llama, ids: list[int], n_tokens: int, block: int = 512) -> Iterator[int]:
    """Yield up to n tokens that follow the prompt `ids`: each is the likeliest one. An end token ends the text.

    The prompt is prefilled in blocks. A decode step is a block of one token. The result does not depend on `block`.
    """
    cache = [LayerCache(model.config, len(ids) + n_tokens) for _ in range(model.config.n_layers)]
    for some in torch.tensor(ids).split(block):
        logits = model(some, cache)
    for _ in range(n_tokens):
        token_id = int(logits.argmax())
        if token_id in model.config.eos_ids:
            return
        yield token_id
        logits = model(torch.tensor([token_id]), cache)


def main() -> None:
    """Run the command line. The text goes to stdout, figures go to stderr."""
    parser = argparse.ArgumentParser(description="LongHeads in one file: read a long text, and continue it.")
    parser.add_argument("model", type=Path, help="a folder with config.json, model*.safetensors and tokenizer.json")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="the text to continue")
    prompt.add_argument("--prompt-file", type=Path, help="a file with the text to continue")
    parser.add_argument("--tokens", type=int, default=16, help="the most tokens to generate (default: 16)")
    parser.add_argument("--window", type=int, help="the number of positions to trust (default: the model's)")
    parser.add_argument("--block", type=int, default=512, help="tokens prefilled in one step (default: 512)")
    options = parser.parse_args()

    text = options.prompt or options.prompt_file.read_text(encoding="utf-8")
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    model = Llama(options.model, options.window)
    ids, began = tokenizer.encode(text).ids, time.perf_counter()
    print(tokenizer.decode(list(generate(model, ids, options.tokens, options.block))))
    config, seconds = model.config, time.perf_counter() - began
    n_chunks = len(ids) // config.chunk_size
    seen = f"each head of each query attended at most {config.chunks} of {n_chunks} chunks of {config.chunk_size}"
    print(f"{len(ids)} tokens, window {config.window}; {seen}; {seconds:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
