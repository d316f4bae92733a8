"""lce as a model of lm-evaluation-harness: on local tasks, the numbers of transformers as its model."""

import configparser
import importlib
import json
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lce
from lce.errors import UsageError
from tests.checkpoints import save_chat
from tests.command import ran, run, spawn

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of the harness and of what it imports
    pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm_eval: pip install 'lce[harness]'"),
]
WORDS = "the quick brown fox jumps over a lazy dog, naïve façades and the morning; 日本語 don't".split()
CHAT = (
    "{% for m in messages %}<|turn|>{{ m.role }}: {{ m.content|trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>bot: {% endif %}"
)
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHAT
TASKS = {
    "choice": "output_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: choices\ndoc_to_target: gold\n",
    "rolling": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n",
    "writing": "output_type: generate_until\ndoc_to_text: '{{q}}'\ndoc_to_target: '{{a}}'\n"
    "generation_kwargs: {until: [e, ' '], max_gen_toks: 12, do_sample: false}\n",
}


def write_tasks(folder: Path, rows: dict[str, list[dict[str, Any]]]) -> Path:
    for task, lines in rows.items():
        data = folder / f"{task}.jsonl"
        data.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        files = f"{{data_files: {{test: {data}}}, cache_dir: {folder / 'cache'}}}"
        head = f"task: {task}\ndataset_path: json\ndataset_kwargs: {files}\ntest_split: test\nnum_fewshot: 0\n"
        (folder / f"{task}.yaml").write_text(head + TASKS[task])
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    random = Random(0)

    def text(n: int) -> str:
        return " ".join(random.choice(WORDS) for _ in range(n))

    document = text(9)
    choices = [{"q": f"{document} {text(3)}", "choices": [text(k + 1) for k in range(3)], "gold": k} for k in range(3)]
    choices += [{"q": text(30), "choices": ["a", "b"], "gold": 1}]  # longer than the window
    rows = {
        "choice": choices,
        "rolling": [{"text": text(n)} for n in (2, 40)],
        "writing": [{"q": text(n), "a": text(1)} for n in (3, 4, 25)],
    }
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("home")
        for name, value in {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}.items():
            patch.setenv(name, value)
        yield write_tasks(tmp_path_factory.mktemp("tasks"), rows)


def evaluated(model: str, folder: Path, tasks: Path) -> dict[str, Any]:
    """What `lm_eval run` makes, without its table of installed packages."""
    from lm_eval.api.registry import get_model
    from lm_eval.evaluator import evaluate
    from lm_eval.tasks import TaskManager

    loaded = TaskManager(include_path=str(tasks), include_defaults=False).load(list(TASKS))
    lm = get_model(model).create_from_arg_string(f"pretrained={folder}", {"device": "cpu", "batch_size": 1})
    found: dict[str, Any] = evaluate(lm=lm, task_dict=loaded, bootstrap_iters=0)
    return found


def test_same_numbers_as_transformers(tiny_model: Path, tasks: Path) -> None:
    importlib.import_module("lce_lab.eval.harness")
    ours, theirs = evaluated("lce", tiny_model, tasks), evaluated("hf", tiny_model, tasks)
    for task in TASKS:
        metrics = {key: value for key, value in theirs["results"][task].items() if isinstance(value, float)}
        assert metrics
        assert {key: ours["results"][task][key] for key in metrics} == pytest.approx(metrics, rel=1e-5)
        for one, other in zip(ours["samples"][task], theirs["samples"][task], strict=True):
            assert one["doc_id"] == other["doc_id"]
            assert flat(one["resps"]) == pytest.approx(flat(other["resps"]), abs=1e-3)


def flat(answers: Any) -> list[Any]:
    """The numbers of nested lists; texts by their characters, so that one `approx` compares all."""
    if isinstance(answers, list | tuple):
        return [x for answer in answers for x in flat(answer)]
    return [float(x) for x in map(ord, answers)] if isinstance(answers, str) else [float(answers)]


def test_the_model_says_what_it_is(tiny_model: Path) -> None:
    from lce_lab.eval.harness import LceLM

    arguments = f"pretrained={tiny_model},method=longheads,chunk_size=4,chunks=8,rope=linear,rope_factor=2"
    lm = LceLM.create_from_arg_string(arguments, {"device": "cuda:0", "max_batch_size": 4})
    method = lce.methods.LongHeads(chunk_size=4, chunks=8).resolve(64)
    assert (lm.engine.method, lm.max_length) == (method, None), "no limit"
    about = lm.get_model_info()
    assert about["model_sha"] == lm.tokenizer_name == lm.engine.setup.fingerprint
    assert about["lce_engine"] == repr(lm.engine)
    assert "linear" in about["lce_rope"]


def test_the_command_hands_its_arguments_on(monkeypatch: pytest.MonkeyPatch) -> None:
    import lm_eval.__main__

    seen = []
    monkeypatch.setattr(lm_eval.__main__, "cli_evaluate", lambda: seen.append(list(sys.argv)))
    before = list(sys.argv)
    for arguments in (["run", "--help"], ["--model", "lce", "--tasks", "a,b"]):
        ran("eval", "harness", *arguments)
        assert seen.pop() == ["lm_eval", *arguments]
    assert sys.argv == before


def test_what_the_harness_refuses_is_one_line() -> None:
    result = run("eval", "harness", "run", "--model", "lce", "--model_args", "{bad", "--tasks", "any")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1].startswith("lce: error: lm-evaluation-harness: Invalid JSON")


@pytest.mark.slow
def test_the_command_runs_a_method(tiny_model: Path, tasks: Path) -> None:
    arguments = f"pretrained={tiny_model},method=longheads,chunk_size=4,chunks=8,block=16"
    command = ["eval", "harness", "run", "--model", "lce", "--model_args", arguments]
    with spawn("", *command, "--tasks", "choice,writing", "--include_path", tasks) as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert "'method': 'longheads', 'chunk_size': 4" in out
    assert "|choice " in out
    with spawn("", *command[:-1], f"{arguments},chunk_siz=1", "--tasks", "choice", "--include_path", tasks) as process:
        out, err = process.communicate()
    assert process.returncode == 2
    assert "lce: error: unknown model argument 'chunk_siz'" in err.splitlines()[-1]


def model_of(*what: Any, **how: Any) -> Any:
    from lce_lab.eval.harness import LceLM

    return LceLM(*what, **how)


@pytest.fixture
def lm(tiny_model: Path) -> Any:
    return model_of(tiny_model)


def request(*arguments: Any) -> Any:
    return SimpleNamespace(args=arguments)


def test_tokens_are_those_of_transformers(lm: Any, tiny_model: Path) -> None:
    from lm_eval.models.huggingface import HFLM

    hf = HFLM(str(tiny_model), device="cpu")
    assert (lm.prefix_token_id, lm.eot_token_id, lm.max_length) == (hf.prefix_token_id, hf.eot_token_id, hf.max_length)
    for text in ("the quick", "<s>the quick", " 日本", ""):
        for special in (None, False, True):
            if not (special and text.startswith("<s>")):  # lce never puts a second BOS
                assert lm.tok_encode(text, special) == hf.tok_encode(text, special)
    assert lm.tok_decode([0, 40, 50, 1]) == hf.tok_decode([0, 40, 50, 1])
    assert lm._encode_pair("the quick ", "fox") == hf._encode_pair("the quick ", "fox")


def test_the_prefix_and_bos_may_be_chosen(tiny_model: Path) -> None:
    engine = lce.load(tiny_model)
    lm = model_of(engine, prefix_token_id=7, add_bos_token=False, max_length=20)
    assert (lm.engine is engine, lm.prefix_token_id, lm.max_length) == (True, 7, 20)
    assert lm.tok_encode("the") == engine.tokenizer.encode("the", bos=False)
    with pytest.raises(UsageError, match="unknown model argument 'method' beside an engine"):
        model_of(engine, method="longheads")
    with pytest.raises(UsageError, match="pretrained=PATH"):
        model_of(method="longheads")


def test_requests_that_are_cut_are_told(lm: Any, caplog: pytest.LogCaptureFixture) -> None:
    short, longer = request("the quick", " fox"), request("the quick " * 40, " fox")
    lm.loglikelihood([short], disable_tqdm=True)
    assert not caplog.messages
    lm.loglikelihood([short, longer, longer], disable_tqdm=True)
    lm.generate_until([request("the", {"max_gen_toks": 63})], disable_tqdm=True)
    assert caplog.messages[0].startswith("2 of 3 requests lose their beginning; the longest has ")
    assert "1 of 1 requests" in caplog.messages[1]


def test_sampling_follows_the_seed_of_torch(lm: Any) -> None:
    asked = [request("the quick", {"do_sample": True, "temperature": 2.0, "max_gen_toks": 20})]
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found += lm.generate_until(asked, disable_tqdm=True)
    assert found[0] == found[1] != found[2]


def test_what_was_answered_is_kept_after_an_interruption(lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    lm.cache_hook = SimpleNamespace(add_partial=lambda kind, asked, answer: kept.append((kind, asked, answer)))
    score, calls = lm.engine.score, []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return score(*args, **kwargs)

    monkeypatch.setattr(lm.engine, "score", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lm.loglikelihood([request(f"the {word}", " lazy dog") for word in WORDS[:5]], disable_tqdm=True)
    assert [(kind, asked[1]) for kind, asked, _ in kept] == [("loglikelihood", " lazy dog")] * 2


@pytest.mark.parametrize("template", [CHAT, CHAT.replace("|trim", "")], ids=["trimmed", "plain"])
def test_chats_are_those_of_transformers(template: str, tmp_path: Path) -> None:
    from lm_eval.models.huggingface import HFLM

    ours, theirs = model_of(save_chat(tmp_path, template)), HFLM(str(tmp_path), device="cpu")
    chat = [{"role": "user", "content": "Hello "}, {"role": "assistant", "content": "I say "}]
    assert ours.chat_template(True) == theirs.chat_template(True) == template
    assert ours.apply_chat_template(chat[:1]) == theirs.apply_chat_template(chat[:1])
    assert ours.apply_chat_template(chat, False) == theirs.apply_chat_template(chat, False)
    text = ours.apply_chat_template(chat[:1])
    assert ours.tok_encode(text) == theirs.tok_encode(text)


def test_a_template_may_refuse_the_system(tmp_path: Path) -> None:
    lm = model_of(save_chat(tmp_path, STRICT))
    user, system = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Be kind"}
    joined = [{"role": "user", "content": "Be kind\n\nHi"}]
    assert lm.apply_chat_template([system, user]) == lm.apply_chat_template(joined)


def test_the_entry_point_names_the_class() -> None:
    from lm_eval.api.registry import Registry, get_model

    from lce_lab.eval.harness import LceLM

    setup = configparser.ConfigParser()
    setup.read(Path(__file__).parents[3] / "setup.cfg")
    name, value = setup["options.entry_points"]["lm_eval.models"].strip().split(" = ")
    registry: Any = Registry("model")
    registry.register(name, target=EntryPoint(name, value, "lm_eval.models"))  # what releases that read them do
    assert registry.get("lce") is get_model("lce") is LceLM
    assert get_model("hf").__name__ == "HFLM"
