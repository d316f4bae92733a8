"""Documents asked through the server: with each method, another question finds the text cached, and after a restart."""

from pathlib import Path

import pytest
from starlette.testclient import TestClient

import lce
from lce.engine import kept_files
from lce.methods import registry
from lce_serve.app import application
from lce_serve.service import Service, Settings
from tests.lce_serve.conftest import URL

TEXT = "".join(f"Line {n} of the contract names clause {n * 7919 % 1013}. " for n in range(60))
OPTIONS = {"esa": {"method_options": {"compress": "pca"}}}  # the model has no calibrated maps
EVERYDAY = ("self_extend", "infllm")


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=() if name in EVERYDAY else pytest.mark.slow) for name in registry.available()]
)
def test_a_document_is_read_once(
    chat_model: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_files, "LEAST_IDLE_S", 0.0)
    engine = lce.load(chat_model, threads=1, window=4096, block=64)
    n_shared, questions = len(engine.tokenizer.encode(TEXT)), iter(f"What does clause {n}{n} say?" for n in range(6))
    for served in range(2):
        with engine.batch(cache_dir=tmp_path) as batch:
            client = TestClient(application(Service(Settings("tiny"), batch)), base_url=URL)
            for asked in range(3):
                messages = [{"role": "user", "content": f"{TEXT}\n\n{next(questions)}"}]
                body = {"messages": messages, "max_tokens": 4, "method": method, **OPTIONS.get(method, {})}
                answer = client.post("/v1/chat/completions", json=body).json()
                assert "usage" in answer, answer
                cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert cached >= 0.9 * n_shared or not served + asked
