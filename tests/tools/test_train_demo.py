"""The demo model's training: plain attention, and a checkpoint that is the trained model."""

from pathlib import Path

import torch
from tokenizers import Tokenizer

import lce
from lce.weights.source import DEMO
from tools.train_demo import Model, Shape, attention, dropped_keys, resume, save


def test_the_training_attention_is_plain_causal_attention() -> None:
    q, k, v = torch.randn(2, 256, 4, 8), torch.randn(2, 256, 2, 8), torch.randn(2, 256, 2, 8)
    heads = [x.transpose(1, 2) for x in (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2))]
    truth = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
    assert (attention(q, k, v, torch.zeros(2, 256)) - truth).abs().max() < 0.05  # it computes in bfloat16


def test_the_first_key_is_never_dropped() -> None:
    bias = dropped_keys(3, 4, 200, 0.5)
    assert (bias[..., 0] == 0).all()
    assert 0.4 < (bias == -torch.inf).float().mean() < 0.6
    assert (dropped_keys(1, 2, 50, 0.0) == 0).all()


def test_what_is_saved_is_the_model_that_was_trained(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = Shape(n_layers=2)
    model = Model(shape)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    save(model, Tokenizer.from_file(str(DEMO / "tokenizer.json")), shape, tmp_path)
    ids = [0, *range(5, 132)]  # a whole slice of queries
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        trained = model(torch.tensor([ids]), dropped_keys(2, 1, len(ids), 0.0))[0]
    assert (lce.load(tmp_path).logits(ids) - trained).abs().max() < 0.1 * trained.abs().max()
    again = Model(shape)
    resume(again, tmp_path)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
