"""Counts the frames from `generate` to a kernel, and how often a block enters the methods in each layer.

    python -m tools.count_frames generate -m demo --method longheads -f examples/haystack.txt -n 4

Prints, for prefill and for decode steps: each kernel with the most frames from `generate`, the command's or the
engine's, to the kernel's call, both included, where the call is the first function of `lce/kernels` on the stack; and
the most entries of `lce/methods` from outside in a pass through a layer. With `--stack`, the deepest stack of each
phase is listed; with `--entered`, every function that a layer enters, with its calls for each pass through a layer.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

from tools.count_path import ROOT, run_command

LCE = f"{ROOT}/lce/"
Name = tuple[str, str]  # a file below `lce`, and a function's qualified name


def name_of(frame: FrameType) -> Name:
    return frame.f_code.co_filename.removeprefix(LCE), frame.f_code.co_qualname


def outward(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of a stack, from the innermost to the outermost."""
    while frame is not None:
        yield frame
        frame = frame.f_back


class Phase:
    """What was counted in all prefill passes, or in all decode steps."""

    def __init__(self) -> None:
        self.stacks: dict[Name, list[Name]] = {}  # for each kernel, its deepest stack from `generate`
        self.entered: Counter[Name] = Counter()  # the functions that layers entered
        self.passes: list[int] = []  # for each pass through a layer, the entries of `methods`
        self.doors: Counter[Name] = Counter()  # the functions of `methods` that were entered from outside
        self.layer: FrameType | None = None

    def of_layers(self, frame: FrameType) -> None:
        """Count a call below a layer."""
        name = name_of(frame)
        if name[1].endswith("Layer.__call__"):
            self.layer = frame
            self.passes.append(0)
        if self.layer is None or self.layer not in outward(frame):
            return
        self.entered[name] += 1
        caller = next((each for each in outward(frame.f_back) if each.f_code.co_filename.startswith(LCE)), None)
        if in_folder(frame, "methods") and caller is not None and not in_folder(caller, "methods"):
            self.passes[-1] += 1
            self.doors[name] += 1

    def of_kernels(self, frame: FrameType) -> None:
        """Keep the stack of a call of a kernel, if the stack is the kernel's deepest one so far."""
        stack = [name_of(each) for each in outward(frame)][::-1]
        first = next((i for i, name in enumerate(stack) if name[1] in ("generate", "Engine.generate")), 0)
        kernel = next(i for i, (file, _) in enumerate(stack) if file.startswith("kernels/"))
        found = stack[first : kernel + 1]
        if len(found) > len(self.stacks.get(found[-1], ())):
            self.stacks[found[-1]] = found


def in_folder(frame: FrameType, folder: str) -> bool:
    return frame.f_code.co_filename.startswith(f"{LCE}{folder}/")


class Frames:
    """A profiler that sorts the calls of one thread into phases."""

    def __init__(self) -> None:
        self.prefill, self.decode = Phase(), Phase()
        self.phase: Phase | None = None

    def __call__(self, frame: FrameType, event: str, _arg: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(LCE):
            return
        name = frame.f_code.co_qualname
        if name == "forward":
            lane = frame.f_locals["lanes"][0]
            self.phase = self.decode if lane.decoding else self.prefill
        if self.phase is None:
            return
        self.phase.of_layers(frame)
        if name == "Kernel.__call__":
            self.phase.of_kernels(frame)


def main() -> None:
    arguments, flags = sys.argv[1:], set()
    while arguments[:1] and arguments[0] in ("--stack", "--entered"):
        flags.add(arguments.pop(0))
    frames = Frames()
    run_command(arguments, frames)
    for title, phase in (("prefill", frames.prefill), ("decode", frames.decode)):
        stacks = sorted(phase.stacks.values(), key=len, reverse=True)
        n_passes = max(1, len(phase.passes))
        print(f"{title}: {len(stacks[0]) if stacks else 0} frames from generate to a kernel;", end=" ")
        print(f"{max(phase.passes, default=0)} entries of methods in a layer, {n_passes} passes of layers")
        for stack in stacks:
            print(f"{len(stack):6} {' '.join(stack[-1])}")
        for name, n in phase.doors.most_common():
            print(f"{n / n_passes:6.2f} entries a layer by {' '.join(name)}")
        for name, n in phase.entered.most_common() if "--entered" in flags else ():
            print(f"{n / n_passes:6.2f} calls a layer of {' '.join(name)}")
        for name in stacks[0] if stacks and "--stack" in flags else ():
            print("       ", *name)


if __name__ == "__main__":
    main()
