"""GGUF models on pretended GPUs: matrices stay in their blocks, and compute what the unpacked ones do."""

from pathlib import Path

import pytest
import torch

import lce
from lce.kernels.product.blocks import BlockMatrix
from lce.kernels.runtime import launching
from lce.models.products import linear, rows_of
from lce.weights.packed import Matrix, Stacked
from tests.checkpoints import save_tiny, tokens
from tests.gguf_files import Q4_K_M, write_gguf
from tests.gguf_models import as_saved, save_gguf
from tests.kernels.truth import random
from tests.pretended import Gpus
from tests.weights.test_gguf_packed import opened

pytest.importorskip("triton")


def on_gpu(path: Path, joined: tuple[str, ...]) -> tuple[Matrix, dict[str, torch.Tensor]]:
    """Return matrices of a file joined on a GPU, and the weights of each."""
    types = {"a": "Q4_K", "b": "Q4_K", "c": "Q6_K"}
    file, values = write_gguf(path / "a.gguf", {name: random(32, 256).numpy() / 16 for name in types}, types)
    wanted = {name: (name, (32, 256)) for name in types}
    gpu = torch.device("cuda:0")
    found = opened(file).load(wanted, dtype=torch.float32, device=gpu, joined={"whole": joined})
    return found["whole"], {name: torch.from_numpy(x) for name, x in values.items()}


@pytest.mark.parametrize(("n", "launches"), [(1, ["_product"]), (6, ["_rms_norm", "_silu_mul", "_unpack", "mm"])])
def test_matrices_of_a_type_are_joined(tmp_path: Path, triton_gpus: Gpus, n: int, launches: list[str]) -> None:
    matrix, values = on_gpu(tmp_path, ("a", "b"))
    assert isinstance(matrix, BlockMatrix)
    x, norm, weights = random(n, 256), random(256), torch.cat([values["a"], values["b"]])
    x_on, norm_on = x.cuda(), norm.cuda()
    linear(x_on, matrix)  # the scratch memory is there from now on
    with triton_gpus.counting() as counts:
        out = linear(x_on, matrix, norm=norm_on, eps=1e-5, gate="silu", generated=n == 1)
    assert [name for name in counts.launched() if name != "copy_"] == launches
    torch.testing.assert_close(out.cpu(), linear(x, weights, norm=norm, eps=1e-5, gate="silu"), rtol=1e-4, atol=1e-4)
    assert torch.equal(rows_of(matrix, torch.tensor([40], device="cuda"), torch.float32).cpu(), weights[[40]])


@pytest.mark.parametrize("n", [1, 6])
def test_matrices_of_several_types_are_stacked(tmp_path: Path, triton_gpus: Gpus, n: int) -> None:
    matrix, values = on_gpu(tmp_path, ("a", "b", "c"))
    assert isinstance(matrix, Stacked)
    x, bias, weights = random(n, 256), random(96), torch.cat([*values.values()])
    out = linear(x.cuda(), matrix, bias.cuda(), out_dtype=torch.float32, generated=n == 1)
    torch.testing.assert_close(out.cpu(), linear(x, weights, bias), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_model_takes_the_bytes_of_its_file(
    tmp_path: Path, triton_gpus: Gpus, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = as_saved(save_tiny(tmp_path, hidden_size=256, intermediate_size=256))
    file, ids = save_gguf(tmp_path / "m.gguf", model, Q4_K_M), tokens(3)
    with monkeypatch.context() as patch:
        patch.setattr(launching, "installed", lambda: False)  # matrices are unpacked
        truth = lce.load(file, device="cuda", dtype="float32").logits(ids)
    assert "unpacked" in capsys.readouterr().err
    engine = lce.load(file, device="cuda", dtype="float32")
    torch.testing.assert_close(engine.logits(ids), truth, rtol=1e-3, atol=1e-3)
    stored = sum(info.stop - info.start for info in engine.setup.checkpoint.tensors.values())
    assert sum(engine.setup.weight_bytes.values()) == stored
    assert "unpacked" not in capsys.readouterr().err
