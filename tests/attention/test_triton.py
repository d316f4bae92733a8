"""The backend of GPU kernels: on CPU tensors, in Triton's interpreter, as the other backends compute it."""

import pytest
import torch

from lce.attention import Attention, Runs, Tiles, Turn, combine
from lce.kernels.runtime import launching
from tests.attention.truth import assert_same, dense, random, routed, routed_vectors, slots, turns_of, vectors
from tests.pretended import pretended_gpus

pytestmark = pytest.mark.skipif(not launching.usable(torch.zeros(1)), reason="kernels run on the GPU")


@pytest.fixture(name="attention")
def _attention() -> Attention:
    return Attention.choose("triton")


def test_dense(attention: Attention) -> None:
    q, k, v = vectors(4, 2, 6, 20)
    assert_same(attention.dense(q, k, v, causal=True), dense(q, k, v, causal=True))
    assert_same(attention.dense(q, k, v, causal=True, window=4), dense(q, k, v, True, 4))
    turn = turns_of(6, 1).at(slice(None), 0)
    expected = Attention.choose("reference").dense(q, k, v, causal=True, turn=turn)
    assert_same(attention.dense(q, k, v, causal=True, turn=turn), (expected[0].double(), expected[1].double()))


@pytest.mark.parametrize("n_queries", [1, 7])
@pytest.mark.parametrize("per_slot", [False, True], ids=["one turn", "one turn a slot"])
def test_routed(attention: Attention, n_queries: int, per_slot: bool) -> None:
    q, k, v = routed_vectors(4, 2, n_queries, 6, 5)
    turns = turns_of(n_queries, 3 if per_slot else 1)
    chosen = torch.rand(4, n_queries, 6, generator=torch.Generator().manual_seed(4)).argsort(-1)[..., :3]
    chosen[0, :, 1] = -1
    chosen[1, 0] = -1
    part = attention.routed(q, slots(turns), chosen, [Tiles.of_chunks(k, v)])
    assert_same(part, routed(q, turns, chosen, (k, v)))


def test_routed_over_several_rounds_is_the_same_to_the_bit(attention: Attention) -> None:
    q, k, v = (x.bfloat16() for x in routed_vectors(4, 2, 7, 4, 5))
    turns, whole = turns_of(7, 2, torch.bfloat16), Tiles.of_chunks(k, v)
    chosen = torch.rand(4, 7, 4, generator=torch.Generator().manual_seed(4)).argsort(-1)[..., :2].sort(-1)[0]
    rounds = []
    for some in ([1, 0], [3, 2]):
        tiles = whole.index[:, some].flatten()
        index = torch.full_like(whole.index, -1)
        index[:, some] = torch.arange(len(tiles)).view(2, 2)
        rounds.append(Tiles(whole.k[tiles], whole.v[tiles], index))
    out, lse = attention.routed(q, slots(turns), chosen, [whole])
    again, again_lse = attention.routed(q, slots(turns), chosen, rounds)
    assert torch.equal(out, again)
    assert torch.equal(lse, again_lse)


def test_nothing_is_read_back_or_sent_to_the_gpu() -> None:
    q, k, v = (x.bfloat16() for x in routed_vectors(4, 2, 5, 6, 5))
    turns, chosen = turns_of(5, 3, torch.bfloat16), torch.arange(3).expand(4, 5, 3).contiguous()
    attention, expected = Attention.choose("triton"), routed(q, turns, chosen, (k, v))
    with pretended_gpus(triton=True) as gpus:
        turn, tiles = Turn(*(x.cuda() for x in turns)), Tiles.of_chunks(k.cuda(), v.cuda())
        on_gpu = q.cuda(), chosen.cuda()
        with gpus.counting() as counts:
            part = attention.routed(on_gpu[0], slots(turn), on_gpu[1], [tiles])
            out, lse = combine([part, attention.dense(on_gpu[0], tiles.k[:2], tiles.v[:2], causal=False)])
        assert counts.syncs == counts.uploads == 0
        assert_same((part[0].cpu().float(), part[1].cpu()), expected, 6e-2)
        assert not out.isnan().any()
        assert not lse.isnan().any()


def test_decode_reads_runs_by_its_kernel(attention: Attention) -> None:
    from lce.kernels.routed.decoding_triton import attend_runs

    q, k, v = vectors(4, 2, 1, 30)
    first, count, turn = torch.tensor([[[3, 20, 900]]]), torch.tensor([[[9, 5, 0]]]), torch.tensor([2, 0, 1])
    turns = turns_of(1, 3)
    out, lse = attention.decode(q, k, v, Runs(first, count, turn, turns, 10))
    expected = attend_runs(q, k, v, first, count, turn, *turns, 10)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float64, 16), (torch.float32, 320)])
def test_what_the_kernels_do_not_take_goes_to_other_backends(
    attention: Attention, dtype: torch.dtype, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "launch", None)
    q, k, v = (random(2, n, dim, seed=seed).to(dtype) for seed, n in enumerate((3, 9, 9)))
    assert_same(attention.dense(q, k, v, causal=True), dense(q, k, v, causal=True), 1e-4)


def test_cpus_without_interpreter_run_compiled_kernels(attention: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(launching, "launch", None)
    q, k, v = vectors(4, 2, 6, 20)
    compiled = Attention.choose("compiled")
    assert torch.equal(attention.dense(q, k, v, causal=True)[0], compiled.dense(q, k, v, causal=True)[0])


def test_which_keys_it_decodes(attention: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps over others are not recorded: plain operators would copy all keys for every head."""
    sizes = [(torch.bfloat16, 128), (torch.float32, 256), (torch.float64, 64), (torch.float16, 320)]
    assert [attention.decodes(*size) for size in sizes] == [True, True, False, False]
    assert not Attention.choose("torch").decodes(torch.bfloat16, 128)
    monkeypatch.setattr(launching, "installed", lambda: False)
    assert not attention.decodes(torch.bfloat16, 128)
