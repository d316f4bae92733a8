"""The commands: what they print, what they refuse, and that `--help` imports nothing heavy."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

import lce
from lce.system import PASSIVE
from lce.terminal.figures import COUNTED, count_text
from tests.checkpoints import TINY
from tests.command import PROMPT, assert_error, output, run, spawn


@pytest.mark.parametrize("args", ["--help", "--version", "generate --help", "eval passkey --help", "warm --help"])
def test_help_imports_nothing_heavy(args: str) -> None:
    heavy = {"torch", "numba", "matplotlib", "huggingface_hub"}
    check = f"import atexit; atexit.register(lambda: {heavy} & {{*sys.modules}} and os._exit(99))"
    process = spawn(check, *args.split())
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert out.startswith(("Usage: lce", f"lce {lce.__version__}"))


@pytest.mark.parametrize("group", [[], ["eval"], ["leaderboard"]])
def test_help_names_each_command_once_and_cuts_nothing(group: list[str]) -> None:
    text = run(*group, "--help").stdout
    listed = re.findall(r"^  (\w+)  ", text.partition("Options:")[2].partition("\n\n")[2], re.MULTILINE)
    assert len({*listed}) == len(listed) > 1
    assert "..." not in text.partition("Options:")[2]
    titles = ["Run a model:", "Keep what was read:", "Serve:", "Models:", "Study methods:"]
    assert re.findall(r"^\S.*:$", text, re.MULTILINE) == ["Options:", *(["Commands:"] if group else titles)]


def test_python_dash_m() -> None:
    code = "import runpy, sys; sys.argv[1:] = ['--version']; runpy.run_module('lce', run_name='__main__')"
    assert output(code) == f"lce {lce.__version__}\n"


def test_the_text_alone_goes_to_stdout(tiny_model: Path) -> None:
    result = run("generate", "--model", tiny_model, "--prompt", PROMPT, "--max-tokens", "7")
    expected = lce.load(tiny_model).generate(PROMPT, max_tokens=7)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (0, expected.text + "\n", 1)
    for figure in (f"{expected.stats.prompt_tokens} prompt tokens", "prefill", "first token", "decode", "peak memory"):
        assert figure in result.stderr


def test_json_is_one_object(tiny_model: Path) -> None:
    knobs = ("--method", "longheads", "-o", "chunk_size=8", "-o", "chunks=4", "--block", "1K", "--quiet")
    result = run("generate", "--model", tiny_model, "--prompt", PROMPT, "--max-tokens", "5", "--json", *knobs)
    assert (result.exit_code, result.stderr) == (0, "")
    got = json.loads(result.stdout)
    assert set(got) == {
        "text",
        "token_ids",
        "finish_reason",
        "logprobs",
        "warning",
        "seed",
        "stop",
        "method",
        "stats",
        "context",
    }
    method, stats = got["method"], got["stats"]
    assert got["finish_reason"] in ("stop", "length")
    assert (method["name"], method["knobs"]["chunks"]) == ("longheads", 4)
    assert method["repr"].startswith("LongHeads(chunk_size=8, chunks=4")
    assert stats["generated_tokens"] == len(got["token_ids"])
    assert min(stats["prefill_tokens_per_s"], stats["decode_tokens_per_s"]) > 0
    assert stats["peak_memory"]["process"] > stats["memory"]["device"] > 0


def test_options_that_cannot_be_used(tiny_model: Path) -> None:
    generate = ("generate", "--model", tiny_model, "--prompt", PROMPT)
    assert_error(run(*generate, "--method", "longhead"), 2, "did you mean 'longheads'?")
    assert_error(run("run", tiny_model), 2, "lce says it as lce chat -m MODEL")
    longheads = (*generate, "--method", "longheads", "-o")
    assert_error(run(*longheads, "chunk=3"), 2, "'chunk'", "chunk_size=none", "share=group")
    assert_error(run(*longheads, "chunks=few"), 2, "chunks=few", "whole number")
    assert_error(run(*longheads, "chunks"), 2, "key=value")
    assert_error(run(*generate, "--top-p", "2"), 2, "top_p is 2.0")
    assert_error(run(*generate, "-n", "1k0"), 2, "--max-tokens is '1k0'; expected a whole number, such as 512 or 4k")
    assert_error(run(*generate, "another prompt"), 2, "as an argument and with --prompt")
    assert_error(run(*generate, "--dtype", "float"), 2, "float32")
    assert_error(run(*generate, "--max-token"), 2, "--max-tokens", "lce generate --help")
    assert_error(run("generate", "--prompt", PROMPT), 2, "--model")
    assert_error(run(*generate, "-n", "900", "--kv-host-budget", "128KiB"), 4, "128.0 KiB", "256 tokens", "--spill-dir")
    assert_error(run("generat"), 2, "generat", "lce --help")
    assert_error(run("generate", "--model", tiny_model / "none", "--prompt", PROMPT), 3, "none does not exist")


def test_plan_as_a_table_and_as_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    budget = ("--kv-host-budget", "1MiB", "--spill-dir", tmp_path / "later", "--block", "64")
    args = ("plan", "--model", tmp_path, "--method", "longheads", "-o", "chunk_size=16", "--tokens", "32k", *budget)
    result = run(*args)
    assert (result.exit_code, result.stderr) == (0, "")
    head, _, names, device, disk, _, verdict, advice = result.stdout.splitlines()
    assert head == "32,768 tokens, read by longheads on cpu, keys and values in float32"
    columns = "tier, needed, available, keys and values, budget, kept besides, weights, activations"
    assert re.split(" {2,}", names) == columns.split(", ")
    assert re.fullmatch(r"device +2.8 MiB +.* +1.0 MiB +1.0 MiB +1.3 MiB +391.2 KiB +144.0 KiB", device)
    assert re.fullmatch(r"disk +16.0 MiB +.* +16.0 MiB +none +0 B +0 B +0 B", disk)
    assert re.fullmatch(r"It fits. The longest is [0-9,]+ tokens.", verdict)
    assert advice.startswith("For this length --method auto takes pages: ")
    plan = json.loads(run(*args, "--json").stdout)
    assert (plan["fits"], plan["auto"]["method"]) == (True, "pages")
    assert (plan["tokens"], plan["method"], plan["refusal"]) == (32768, "longheads", None)
    assert plan["tiers"]["device"]["keys_and_values"] == plan["tiers"]["device"]["budget"] == 1 << 20
    assert plan["tiers"]["device"]["needed"] > plan["tiers"]["device"]["keys_and_values"]
    assert not (tmp_path / "later").exists()


def test_plan_says_what_does_not_fit() -> None:
    args = ("plan", "--model", "demo", "--tokens", "4k", "--kv-host-budget", "1MiB")
    result = run(*args)
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (4, "It does not fit. The longest is 0 tokens.")
    assert re.match(r"lce: error: 4,096 tokens need \d+\.\d MiB of memory", result.stderr)
    assert result.stderr.count("\n") == 1
    refused = run(*args, "--json")
    assert (refused.exit_code, refused.stderr) == (4, result.stderr)
    assert json.loads(refused.stdout)["refusal"] in result.stderr
    assert_error(run("plan", "--model", "demo", "--tokens", "2k,4k"), 2, "'2k,4k'")
    assert_error(run("plan", "--model", "demo"), 2, "--tokens")


def test_counts_as_people_read_them() -> None:
    for n, text in ((0, "0"), (999, "999"), (1234, "1.23 k"), (999_600, "1 M"), (13_000_000_000, "13 G")):
        assert count_text(n) == text


def test_plan_prints_what_it_counted(tiny_model: Path) -> None:
    args = ("plan", "--model", tiny_model, "--method", "longheads", "-o", "chunk_size=8", "--tokens", "300")
    lines = run(*args, "--operations").stdout.splitlines()
    start = lines.index("Counted for 300 tokens: the prefill in blocks of 512, and the decode of the last 8.")
    table = [line for line in lines[start + 2 :] if not line.startswith("In the paper")]
    assert [line[:20].rstrip() for line in table[1:8]] == [text[:20].rstrip() for text in COUNTED.values()]
    assert any(line.endswith("|P| · heads · layers: 32") for line in lines)
    assert "Counted" not in run(*args).stdout


def test_plan_as_json_has_the_counts(tiny_model: Path) -> None:
    args = ("plan", "--model", tiny_model, "--method", "esa", "--tokens", "300", "--operations", "--json")
    found = json.loads(run(*args).stdout)["operations"]
    assert found["prefill"]["flops"] == 2 * found["prefill"]["operations"]
    assert found["decode"]["operations"] == sum(found["decode"][name] for name in COUNTED)
    assert [round(figure["value"], 4) for figure in found["paper_figures"]] == [1.0, 2.0]  # 128 numbers of 64 and 32
    assert found["decode"]["bytes_read"] == sum(found["decode"][f"{name}_bytes"] for name in ("weight", "key", "state"))


def test_methods_lists_knobs_and_defaults() -> None:
    listed = {method["name"]: method for method in json.loads(run("methods", "--json").stdout)}
    assert list(listed) == lce.methods.available()
    options = {option["name"]: option for option in listed["longheads"]["options"]}
    assert options["share"] | {"name": "share", "type": "head, group or layer", "default": "group"} == options["share"]
    assert options["chunk_size"] | {"type": "int or none", "default": None} == options["chunk_size"]
    assert json.loads(run("methods", "dca", "--json").stdout) == listed["dca"]
    text = run("methods").stdout
    for method in listed.values():
        assert all(option["meaning"] and len(option["meaning"]) <= 90 for option in method["options"])
        assert method["summary"].endswith("."), "a whole sentence"
        assert f"{method['name']}\n  {method['summary']}\n" in text
    assert re.search(r"^  keep_first=true +bool\b", text, re.MULTILINE)
    assert re.search(r"^  chunk_size=none +int or none\b", text, re.MULTILINE)
    assert "  preset=released  block_size=128 repr_tokens=4 top_k=16 sinks=128 local=4096\n" in text
    assert "full\n" in text
    assert "\n  (no options)\n" in text


def test_a_broken_method_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lce.methods, "available", lambda: ["broken", "full"])
    result = run("methods", "--json")
    assert (result.exit_code, [method["name"] for method in json.loads(result.stdout)]) == (0, ["full"])
    assert result.stderr.startswith("lce: warning: unknown method 'broken'")


def test_an_interrupted_prefill_says_how_to_resume(tiny_model: Path, tmp_path: Path) -> None:
    """Ctrl-C in the middle, then the same command again."""
    command = ("prefill", "--model", tiny_model, "--prompt", PROMPT * 40, "--out", tmp_path / "text.lce")
    command = (*command, "--block", "16", "--checkpoint-every", "32", "--method", "rerope")
    slow = (
        "from lce.methods import Driver\nimport time\n"
        "begin = Driver.begin\n"
        "def slowly(self, cache, *block, **how):\n"
        "    if cache.length == 128:\n"
        "        print('there', file=sys.stderr, flush=True)\n"
        "        for _ in range(600):\n"  # a signal just before a single long sleep would not end the sleep
        "            time.sleep(0.1)\n"
        "    return begin(self, cache, *block, **how)\n"
        "Driver.begin = slowly\n"
    )
    process = spawn(slow, *command)
    assert any(process.line("stderr") == "there\n" for _ in range(20))  # lines of progress may come first
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out) == (130, "")
    assert re.search("interrupted.*the same command goes on from 128 tokens", err)
    done = run(*command, "--json")
    n_tokens = len(lce.load(tiny_model).tokenizer.encode(PROMPT * 40))
    assert json.loads(done.stdout)["stats"]["prompt_tokens"] == n_tokens - 128


def test_threads_wait_passively_from_the_beginning(tiny_model: Path) -> None:
    """The settings are there when torch is loaded, unless the user has made one of them."""
    script = (
        "class Hook:\n    def find_spec(self, name, *_):\n        if name == 'torch':\n"
        "            print(*map(os.environ.get, ('OMP_WAIT_POLICY', 'GOMP_SPINCOUNT')), file=sys.stderr, flush=True)\n"
        "            os._exit(0)\nsys.meta_path.insert(0, Hook())\n"
    )
    command = ("generate", "-m", tiny_model, PROMPT, "-n", "1", "--quiet")
    plain = {name: value for name, value in os.environ.items() if name not in PASSIVE}
    for environment, said in ((plain, "PASSIVE 10000\n"), ({**plain, "OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE None\n")):
        _, err = spawn(script, *command, env=environment).communicate()
        assert err.splitlines(keepends=True)[0] == said


def test_full_beyond_the_window_is_said_in_one_line(tiny_model: Path, tmp_path: Path) -> None:
    for command in (("generate", "-n", "2"), ("prefill", "--out", tmp_path / "a.lce")):
        args = (command[0], "-m", tiny_model, PROMPT * 9, *command[1:])
        result = run(*args, "--quiet", "--json")
        assert re.fullmatch(r"lce: note: [0-9,]+ tokens are more than the 64 .*longheads.*\n", result.stderr)
        assert json.loads(result.stdout)["warning"] == result.stderr.removeprefix("lce: note: ").strip()
        within = run(*args, "--method", "longheads", "--json", "--quiet", *(["--force"] if "--out" in args else []))
        assert json.loads(within.stdout)["warning"] is None
        assert "tokens are more" not in within.stderr


def test_methods_shows_one() -> None:
    shown = run("methods", "dca").stdout
    assert shown.startswith("dca\n")
    assert "longheads" not in shown
    assert_error(run("methods", "dcaa"), 2, "did you mean 'dca'?")
