"""A family against transformers: tiny random checkpoints of the published kinds, and the logits of both."""

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lce
from lce.errors import ModelError
from lce.models.config import LayerKind
from lce.models.layers import read_config
from lce.weights.source import Source
from tests import oracle
from tests.checkpoints import TINY, VOCAB, save_by_transformers
from tests.running import cut

N = 150  # tokens, well beyond the window of 64
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SIZES |= {"bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False}


def rope(kind: str, theta: float = 10000.0, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **values}}


PLAIN = rope("default")


@dataclass(frozen=True)
class Kind:
    """A published kind of model, and an edit of its config.json that must change the logits."""

    config: type[Any]
    values: dict[str, Any]
    matters: dict[str, Any]

    def build(self, **changes: Any) -> Any:
        return self.config(**SIZES | {"rms_norm_eps": 1e-5} | self.values | changes)


@dataclass(frozen=True)
class Saved:
    kind: Kind
    folder: Path
    ids: list[int]
    model: Any

    @property
    def logits(self) -> Tensor:
        return logits_of(self.model, self.ids)


def save_kind(folder: Path, kind: Kind) -> Saved:
    model = save_by_transformers(folder, kind.build())
    ids = torch.randint(2, VOCAB, (N,), generator=torch.Generator().manual_seed(1)).tolist()
    return Saved(kind, folder, ids, model)


def refusal(folder: Path, family: str, change: Mapping[str, Any]) -> str:
    """The error for a tiny config of the family called `family`, with `change`; the config alone is read."""
    names = {"model_type": family, "architectures": None, "hidden_act": None}
    (folder / "config.json").write_text(json.dumps(TINY | names))
    read_config(Source(folder))
    (folder / "config.json").write_text(json.dumps(TINY | names | change))
    with pytest.raises(ModelError) as error:
        read_config(Source(folder))
    return str(error.value)


def edited(folder: Path, to: Path, changes: Mapping[str, Any]) -> Path:
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | changes))
    return to


def logits_of(model: Any, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([ids])).logits[0].float()
    return logits


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def assert_every_weight_matters(folder: Path, kind: Kind, pattern: str, n: int) -> None:
    """Each of the `n` weights whose names match a pattern, changed alone, changes the logits as in transformers."""
    model = save_by_transformers(folder, kind.build())
    ids = list(range(2, 40)) * 4  # beyond the window
    before = lce.load(folder).logits(ids)
    assert difference(before, logits_of(model, ids)) <= 1e-4
    names = [name for name, _ in model.named_parameters() if re.fullmatch(pattern, name)]
    assert len(names) == n
    for name in names:
        weight = model.get_parameter(name)
        with torch.no_grad():
            weight += torch.linspace(-1, 1, len(weight))
        model.save_pretrained(folder)
        after = lce.load(folder).logits(ids)
        assert difference(after, before) > 1e-2, name
        assert difference(after, logits_of(model, ids)) <= 1e-4, name
        before = after


class FamilyTests:
    """The tests of a family: a class that derives from this one names `kinds`, and those whose text is compared.

    Of `weights`, each matters: a kind, a pattern of names, and their number. `refused` has changes and messages.
    `older` has kinds, and changes with which an older config.json says the same.
    """

    kinds: Mapping[str, Kind]
    greedy: Sequence[str]
    weights: Sequence[tuple[Kind, str, int]] = ()
    refused: Sequence[tuple[Mapping[str, Any], str]] = ()
    older: Sequence[tuple[Kind, Mapping[str, Any]]] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        for name, values in {"saved": list(self.kinds), "writer": self.greedy}.items():
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values, indirect=name == "saved")

    @pytest.fixture(scope="class")
    @classmethod
    def saved(cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
        return save_kind(tmp_path_factory.mktemp(request.param), cls.kinds[request.param])

    @pytest.mark.parametrize("blocks", [(None, 7), pytest.param((1, 64), marks=pytest.mark.slow)], ids=str)
    def test_same_logits_as_transformers(self, saved: Saved, blocks: tuple[int | None, int]) -> None:
        """Blocks of one token are tried in every family, by generation, and in every kind where there is time."""
        truth = saved.logits
        for block in blocks:
            logits = lce.load(saved.folder, block=block).logits(saved.ids)
            assert (logits.shape, logits.dtype) == ((N, VOCAB), torch.float32)
            assert difference(logits, truth) <= 1e-4, block

    def test_what_makes_the_kind_makes_a_difference(self, saved: Saved, tmp_path: Path) -> None:
        """Without what makes the kind, the logits are others: equality above proves that it is there."""
        folder = edited(saved.folder, tmp_path / "edited", saved.kind.matters)
        assert difference(lce.load(folder).logits(saved.ids), saved.logits) > 0.05

    def test_bfloat16_stays_as_close_as_transformers(self, saved: Saved, tmp_path: Path) -> None:
        """Logits have a spread of 1.7; bfloat16 puts them 0.03 to 0.05 off on average, in transformers as here.

        A mean is compared, because a single logit may be ten times as far off in either. The bound is 1.25 of theirs.
        """
        model = save_by_transformers(tmp_path, saved.kind.build()).to(torch.bfloat16)
        model.save_pretrained(tmp_path)
        truth = lce.load(tmp_path, dtype="float32").logits(saved.ids)
        ours, theirs = lce.load(tmp_path).logits(saved.ids), logits_of(model, saved.ids)
        assert (ours - truth).abs().mean() <= 1.25 * (theirs - truth).abs().mean()
        assert (ours - truth).abs().mean() <= 0.1
        assert (ours != truth).any(), "bfloat16 was asked for by the checkpoint"

    def test_greedy_tokens_as_transformers_generates(self, writer: str, tmp_path: Path) -> None:
        model = save_by_transformers(tmp_path, self.kinds[writer].build(), seed=3)
        prompt = list(range(5, 85))
        options = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": [1], "pad_token_id": 0}
        ids = torch.tensor([prompt])
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
        ours = lce.load(tmp_path, block=32).generate(prompt, max_tokens=60)
        assert ours.token_ids == [token for token in theirs if token != 1]
        assert len(set(theirs)) > 10

    def test_every_weight_makes_a_difference(self, tmp_path: Path) -> None:
        for number, (kind, pattern, n) in enumerate(self.weights):
            assert_every_weight_matters(tmp_path / f"{number}", kind, pattern, n)

    def test_older_configs_are_the_same_model(self, tmp_path: Path) -> None:
        for number, (kind, changes) in enumerate(self.older):
            saved = save_kind(tmp_path / f"{number}", kind)
            folder = edited(saved.folder, tmp_path / f"{number} older", changes)
            assert difference(lce.load(folder).logits(saved.ids), saved.logits) <= 1e-4

    def test_what_it_cannot_be(self, tmp_path: Path) -> None:
        family = next(iter(self.kinds.values())).config.model_type
        for change, message in self.refused:
            assert re.search(message, refusal(tmp_path, family, change)), message


def oracle_logits(
    engine: lce.Engine, ids: Sequence[int], setting_of: Callable[[LayerKind, int], oracle.Setting], **knobs: object
) -> Tensor:
    """The logits `[N, vocab]` of the engine's model with the oracle's definition of its method behind the hook."""
    model = engine.setup.model

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        setting = setting_of(model.config.kinds[layer], q.shape[-1])
        slides = setting.sliding_window is not None
        define, own = (oracle.full, {}) if slides else (oracle.DEFINITIONS[engine.method.name], knobs)
        return oracle.attention(q, k, v, define(q, k, v, setting, **own), setting).to(q.dtype)

    with torch.inference_mode():
        attending = model.attending(attend, torch.arange(len(ids)))
        return model.logits(model(model.embedded(torch.tensor(ids)), attending))


def assert_equals_the_oracle(engine: lce.Engine, ids: list[int], **knobs: object) -> None:
    """The engine's logits in its blocks, beside the oracle's with the rotations of the engine."""
    scaled, blocks = engine.setup.rope_of(len(ids)), cut(len(ids), engine.setup.block)

    def setting(kind: LayerKind, _: int) -> oracle.Setting:
        rope = scaled.of(kind)
        rotation = {"frequencies": rope.inv_freq, "factor": rope.scale}
        return oracle.Setting(engine.window, blocks, sliding_window=kind.sliding_window, **rotation)

    assert difference(engine.logits(ids), oracle_logits(engine, ids, setting, **knobs)) <= 1e-4
