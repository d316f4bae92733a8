"""Train the embedded demo model from scratch, on CPU, with plain causal attention over 512 tokens.

    python -m tools.train_demo --out lce/models/demo

Writes a checkpoint in the published Llama layout: config.json, model.safetensors and the tokenizer's files. The same
seed on the same machine gives the same data in the same order.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from tools.demo_corpus import BOS, EOS, Corpus, train_tokenizer

TOKENS_PER_STEP = 8192
VALUE_LR = 0.1  # the value projections' share of the learning rate: under strong decay large steps would be noise
LENGTHS = ((0.0, 64), (0.08, 128), (0.18, 256), (0.36, 512))  # (share of the training, length from there on)


@dataclass(frozen=True)
class Shape:
    """The model's sizes."""

    vocab: int = 768
    width: int = 256
    n_layers: int = 6
    n_heads: int = 8
    n_kv_heads: int = 4
    head_dim: int = 64
    hidden: int = 512
    window: int = 512
    theta: float = 10000.0
    eps: float = 1e-5


class Layer(nn.Module):
    """One decoder layer; parameters carry the published names, so that saving is a copy."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        q_dim, kv_dim = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
        self.input_layernorm = nn.RMSNorm(shape.width, shape.eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, shape.eps)
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(shape.width, q_dim, bias=False),
                "k_proj": nn.Linear(shape.width, kv_dim, bias=False),
                "v_proj": nn.Linear(shape.width, kv_dim, bias=False),
                "o_proj": nn.Linear(q_dim, shape.width, bias=False),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(shape.width, shape.hidden, bias=False),
                "up_proj": nn.Linear(shape.width, shape.hidden, bias=False),
                "down_proj": nn.Linear(shape.hidden, shape.width, bias=False),
            }
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, bias: Tensor) -> Tensor:
        shape = self.shape
        batch, length, _ = x.shape
        h = self.input_layernorm(x)
        q = rotate(self.self_attn["q_proj"](h).view(batch, length, shape.n_heads, shape.head_dim), cos, sin)
        k = rotate(self.self_attn["k_proj"](h).view(batch, length, shape.n_kv_heads, shape.head_dim), cos, sin)
        v = self.self_attn["v_proj"](h).view(batch, length, shape.n_kv_heads, shape.head_dim)
        out = attention(q, k, v, bias)
        x = x + self.self_attn["o_proj"](out.reshape(batch, length, -1))
        h = self.post_attention_layernorm(x)
        return x + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](h)) * self.mlp["up_proj"](h))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to `[B, T, heads, D]` in the published half-and-half layout."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Compute causal attention, `[B, T, heads, D]`, with queries in slices, which skips about half of the scores.

    `bias [B, T]` is added to every score of a key: 0, or -inf for a dropped key.
    """
    batch, length, n_heads, dim = q.shape
    n_kv = k.shape[2]
    q = q.transpose(1, 2).reshape(batch, n_kv, n_heads // n_kv, length, dim).bfloat16() / math.sqrt(dim)
    k, v = k.transpose(1, 2).bfloat16(), v.transpose(1, 2).bfloat16()  # [B, G, T, D]
    outs = []
    step = min(length, 128)
    mask = torch.full((step, step), -torch.inf).triu(1)
    for start in range(0, length, step):
        stop = start + step
        rows = q[:, :, :, start:stop].flatten(2, 3)  # [B, G, H/G * step, D]
        scores = (rows @ k[:, :, :stop].transpose(-1, -2)).unflatten(2, (-1, step)).float()
        scores = torch.cat((scores[..., :start], scores[..., start:] + mask), dim=-1)
        scores = scores + bias[:, None, None, None, :stop]
        probs = scores.softmax(-1).bfloat16().flatten(2, 3)
        outs.append((probs @ v[:, :, :stop]).unflatten(2, (-1, step)))
    return torch.cat(outs, dim=3).flatten(1, 2).transpose(1, 2)


class Model(nn.Module):
    """Embedding, layers, norm, head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.n_layers))
        self.norm = nn.RMSNorm(shape.width, shape.eps)
        self.lm_head = nn.Linear(shape.width, shape.vocab, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02 if "embed" not in name else 0.5)
        angles = torch.outer(
            torch.arange(shape.window, dtype=torch.float64),
            shape.theta ** (-torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim),
        )
        self.register_buffer("cos", angles.cos().float()[:, None], persistent=False)
        self.register_buffer("sin", angles.sin().float()[:, None], persistent=False)

    def forward(self, ids: Tensor, bias: Tensor) -> Tensor:
        """Return logits `[B, T, vocab]` of `ids [B, T]`; `bias [layers, B, T]` is the layers' key bias."""
        x = self.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer, layer_bias in zip(self.layers, bias, strict=True):
            x = layer(x, cos, sin, layer_bias)
        return self.lm_head(self.norm(x))


def dropped_keys(n_layers: int, rows: int, length: int, share: float) -> Tensor:
    """Return `[layers, B, T]`: -inf for a random `share` of the keys, never the first; 0 for the others.

    A regulariser (Zehui et al., 2019, "DropAttention", by columns) that makes the model spread knowledge over several
    keys.
    """
    dropped = torch.rand(n_layers, rows, length) < share
    dropped[..., 0] = False
    return torch.zeros(n_layers, rows, length).masked_fill_(dropped, -torch.inf)


def loss_of(model: nn.Module, ids: Tensor, weights: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted loss, and the share of heavily weighted tokens (answers) predicted right."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids[:, :-1], bias)
    losses = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    loss = (losses * weights.flatten()).sum() / weights.sum()
    answers = weights > 1.5
    right = (logits.argmax(-1) == ids[:, 1:]) & answers
    return loss, right.sum() / answers.sum()


def schedule(progress: float) -> float:
    """Return the learning rate's factor: a short warm-up, flat, then down to zero over the last 60%."""
    return min(1.0, progress / 0.01 + 0.05, (1 - progress) / 0.6)


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    shape = Shape(n_layers=args.layers, head_dim=args.head_dim)
    model = Model(shape)
    tokenizer = resume(model, Path(args.start)) if args.start else train_tokenizer(Shape.vocab, args.seed)
    corpus = Corpus(tokenizer, args.seed, args.formats)
    values = [p for name, p in model.layers.named_parameters() if "v_proj" in name]
    matrices = [p for name, p in model.layers.named_parameters() if p.ndim == 2 and "v_proj" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim == 1 or not name.startswith("layers.")]
    groups = [
        {"params": matrices, "weight_decay": 0.01, "part": 1.0},
        {"params": values, "weight_decay": args.value_decay, "part": VALUE_LR},
    ]
    optimizers = [
        torch.optim.Muon(groups, lr=0.02, momentum=0.95),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    base = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    step_loss = torch.compile(loss_of, dynamic=False) if args.compile else loss_of
    started, accuracy, mean_loss = time.time(), 0.0, 0.0
    for step in range(args.steps):
        progress = step / args.steps
        length = Shape.window if args.start else [size for share, size in LENGTHS if progress >= share][-1]
        copying = 0.05 if args.start else max(0.05, 0.5 - 0.45 * step / 500)
        ids, weights = corpus.batch(TOKENS_PER_STEP // length, length, copying)
        share = args.drop_keys * (1.0 if args.start else min(1.0, max(0.0, (progress - 0.5) / 0.1)))
        bias = dropped_keys(shape.n_layers, *weights.shape, share)
        loss, right = step_loss(model, torch.from_numpy(ids), torch.from_numpy(weights), bias)
        loss.backward()
        for optimizer, lr in zip(optimizers, base, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = lr * args.peak * schedule(progress) * group.get("part", 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        accuracy, mean_loss = 0.95 * accuracy + 0.05 * right.item(), 0.95 * mean_loss + 0.05 * loss.item()
        if step % 20 == 19:
            seconds = time.time() - started
            print(
                f"step {step + 1} length {length} loss {mean_loss:.3f} answers {accuracy:.3f} {seconds:.0f}s",
                flush=True,
            )
        if step % 500 == 499 or step + 1 == args.steps:
            save(model, tokenizer, shape, out)


def resume(model: Model, folder: Path) -> Tokenizer:
    """Load a checkpoint of `save` into the model; return the tokenizer."""
    tensors = load_file(folder / "model.safetensors")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[published(name)])
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def published(name: str) -> str:
    return name if name.startswith("lm_head") else f"model.{name}"


def save(model: Model, tokenizer: Tokenizer, shape: Shape, out: Path) -> None:
    """Write the checkpoint in the published layout."""
    tensors = {published(name): parameter.detach() for name, parameter in model.named_parameters()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.width,
        "intermediate_size": shape.hidden,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.window,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": tokenizer.token_to_id(EOS),
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer.save(str(out / "tokenizer.json"))
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS, "add_bos_token": True}
    (out / "tokenizer_config.json").write_text(json.dumps(special, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="lce/models/demo")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layers", type=int, default=Shape.n_layers)
    parser.add_argument("--head-dim", type=int, default=Shape.head_dim)
    parser.add_argument("--start", help="continue the training of this checkpoint, at the full window")
    parser.add_argument("--peak", type=float, default=1.0, help="factor on the learning rates")
    parser.add_argument("--formats", type=float, default=0.6, help="share of documents in the formats of the tasks")
    parser.add_argument("--value-decay", type=float, default=4.0, help="weight decay of the value projections")
    parser.add_argument(
        "--drop-keys", type=float, default=0.1,
        help="share of keys that no query sees, drawn again for each batch; without --start, of the second half",
    )  # fmt: skip
    parser.add_argument("--compile", action="store_true", help="fuse the model's arithmetic (needs a C++ compiler)")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
