"""Rotations, tiles by chunk and KV head, queries as each of their slots sees them, and products for scores."""

import pytest
import torch
from torch import Tensor

from lce.attention import Tiles, Turn, affine, append, products, rotate, token_scores
from lce.attention import tiles as tiles_module
from lce.attention.scores import score_dtype
from lce.attention.tiles import SlotQueries
from tests.attention.truth import random, turned, turns_of
from tests.pretended import Gpus


def test_rotate_turns_pairs_as_complex_numbers_and_back() -> None:
    x, turns = random(3, 7, 16, seed=1), turns_of(7, 1).at(slice(None), 0)
    truth = torch.stack([torch.stack([turned(head[t], turns.cos[t], turns.sin[t]) for t in range(7)]) for head in x])
    torch.testing.assert_close(rotate(x, turns), truth, rtol=0, atol=1e-5)
    torch.testing.assert_close(rotate(rotate(x, turns), Turn(turns.cos, -turns.sin)), x, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_turns_broadcast_over_heads_and_slots(dtype: torch.dtype) -> None:
    x, turns = random(3, 7, 16, seed=1).to(dtype), turns_of(7, 4, dtype)
    every = rotate(x[:, :, None], turns)
    assert every.shape == (3, 7, 4, 16)
    for slot in range(4):
        assert torch.equal(every[:, :, slot], rotate(x, turns.at(slice(None), slot)))


def test_keys_are_appended_where_a_tensor_says() -> None:
    joined, turn = random(5, 3, 16, seed=2), turns_of(3, 1).at(slice(None), 0)
    k, v = joined[:2], joined[2:4]
    for turns in (turn, None):
        into, there = torch.zeros(2, 2, 9, 16), torch.zeros(2, 2, 9, 16)
        append(k, v, into[0], into[1], 4, turns)
        append(k, v, there[0], there[1], torch.tensor([4]), turns)
        torch.testing.assert_close(there, into, rtol=1e-6, atol=1e-6)


def test_on_a_gpu_each_is_one_launch(triton_gpus: Gpus) -> None:
    joined, turn = random(5, 1, 16, seed=2), turns_of(1, 1).at(slice(None), 0)
    into = torch.zeros(2, 2, 9, 16)
    append(joined[:2], joined[2:4], into[0], into[1], 4, turn)
    on_gpu, placed = joined.cuda(), Turn(turn.cos.cuda(), turn.sin.cuda())
    for at in (4, torch.tensor([4], device="cuda")):
        there = torch.zeros(2, 2, 9, 16, device="cuda")
        with triton_gpus.counting() as counts:
            append(on_gpu[:2], on_gpu[2:4], there[0], there[1], at, placed)
            result = rotate(on_gpu[:2], placed)
        assert counts.launched() == ["_append", "_rotate"]
        torch.testing.assert_close(there.cpu(), into, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(result.cpu(), into[0, :, 4:5], rtol=1e-6, atol=1e-6)


def test_the_tile_of_each_choice() -> None:
    index = torch.tensor([[5, -1, 3], [0, 2, -1]])  # two KV heads, three chunks
    tiles = Tiles(random(6, 4, 16, seed=1), random(6, 4, 16, seed=2), index)
    chunk_ids = torch.tensor([[[0, 2]], [[1, -1]], [[0, 1]], [[2, -1]]])  # four query heads, one query, two slots
    assert tiles.chosen(chunk_ids).tolist() == [5, 3, -1, -1, 0, 2, -1, -1]


def test_chunks_of_a_buffer_are_tiles_without_a_copy() -> None:
    k, v = random(2, 3, 4, 16, seed=1), random(2, 3, 4, 16, seed=2)
    tiles = Tiles.of_chunks(k, v)
    assert (tiles.index.tolist(), tiles.k.data_ptr()) == ([[0, 1, 2], [3, 4, 5]], k.data_ptr())
    assert torch.equal(tiles.v[4], v[1, 1])


@pytest.mark.parametrize("per_slot", [True, False])
@pytest.mark.parametrize("transposed", [False, True])
def test_rows_are_rotated_now_or_when_taken(per_slot: bool, transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    q, turns = random(4, 9, 16, seed=1), turns_of(9, 3 if per_slot else 1)
    q = q.transpose(0, 1).contiguous().transpose(0, 1) if transposed else q  # as a projection leaves queries
    every = rotate(q[:, :, None], turns).expand(4, 9, 3, 16).reshape(-1, 16)
    rows = torch.randint(len(every), (50,), generator=torch.Generator().manual_seed(2))
    for at_once in (1 << 20, 0):
        monkeypatch.setattr(tiles_module, "AT_ONCE", at_once)
        assert torch.equal(SlotQueries(q, turns, 3).take(rows), every[rows])


def factors(n: int, n_queries: int, n_keys: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Large ones: their products do not fit in float16. The second is a transposed slice, as keys are."""
    a, b = random(n, n_queries, 64, seed=1, scale=200), random(n, n_keys + 3, 64, seed=2, scale=200)
    return a.to(dtype), b.to(dtype)[:, 3:].mT


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_scores_are_rounded_only_where_the_processor_multiplies_their_dtype_fast(dtype: torch.dtype) -> None:
    a, b = (x.clamp(-3, 3) for x in factors(2, 65, 130, dtype))
    truth, fast = a.double() @ b.double(), score_dtype(a)
    low_keys = b[0].T.contiguous()  # [130, 128]
    eps = torch.finfo(fast).eps
    for got, want, stored in (
        (products(a, b), truth, torch.float32),
        (token_scores(a[0], low_keys), truth[0], torch.float32),
    ):
        assert got.dtype == stored
        torch.testing.assert_close(got.double(), want, rtol=eps, atol=1e-3)
    mapped = affine(low_keys, b[0], a.new_ones(130))
    assert mapped.dtype == dtype
    truth = low_keys.double() @ b[0].double() + 1
    torch.testing.assert_close(mapped.double(), truth, rtol=torch.finfo(dtype).eps, atol=1e-2)


class OnCuda(Tensor):
    is_cuda = True


def test_scores_are_float32_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def bmm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        """PyTorch's, which takes an `out_dtype` on CUDA alone."""
        assert (a.ndim, b.ndim, a.dtype, out_dtype) == (3, 3, b.dtype, torch.float32)
        return a.float() @ b.float()

    a, b = factors(3, 5, 70, torch.float16)
    assert not (a @ b).isfinite().all()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "bmm", bmm)
        got = products(a.as_subclass(OnCuda), b.as_subclass(OnCuda))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.as_subclass(Tensor), a.float() @ b.float())


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(4, 1, 9), (2, 33, 1), (3, 5, 70)], ids=str)
def test_products_on_cuda(dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    a, b = factors(*sizes, dtype)
    got = products(a.cuda(), b.cuda())
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.cpu().double(), a.double() @ b.double(), rtol=1e-4, atol=10.0)
