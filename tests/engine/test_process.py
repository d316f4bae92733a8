"""A forked child of a process that computed with several threads hears so; it does not hang."""

from __future__ import annotations

from pathlib import Path

from tests.command import output

PARENT = """
import os, sys, torch, warnings
import lce
warnings.simplefilter("ignore")
folder = sys.argv[1]

def fork(what, *threads):
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    for n in threads:
        torch.set_num_threads(n)
        for call in (lambda: engine.generate([5], max_tokens=1), lambda: lce.load(folder, dtype="float16")):
            try:
                call()
                print(what, n, "fine", flush=True)
            except lce.UsageError as error:
                print(what, n, error, flush=True)
    os._exit(0)

torch.set_num_threads(1)
engine = lce.load(folder)
engine.generate(list(range(2, 202)), max_tokens=2)
fork("one thread", 1, 2)
torch.set_num_threads(2)
fork("two threads, nothing computed by them", 2)
engine.generate(list(range(2, 202)), max_tokens=2)
fork("two threads", 2, 1)
"""


def test_a_child_of_a_process_with_threads_is_refused_before_it_hangs(tiny_model: Path) -> None:
    said = output(PARENT, tiny_model).splitlines()
    assert len(said) == 10
    refused = [answer for answer in said if not answer.endswith(" fine")]
    assert refused == said[6:8]
    for answer in refused:
        assert answer.startswith(
            "two threads 2 this process was forked from one that had computed with several threads"
        )
        assert "torch.set_num_threads(1)" in answer
