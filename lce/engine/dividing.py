"""Divides a model among ranks: finds the ranks, says what each has, and loads that. See `lce.models.ranks`."""

import atexit
import gc
import math
import os
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lce.engine.setup import Setup
from lce.errors import RankError, UsageError, shown
from lce.methods.base import Method
from lce.models.config import ModelConfig
from lce.models.layers import model_class
from lce.models.products import SummedMatrix, VocabularyPart
from lce.models.ranks import LIMIT_S, Division, Facts, Ranks
from lce.weights.checkpoint import Checkpoint
from lce.weights.packed import ROW_BLOCK, Scheme
from lce.weights.slices import Slice, block_size, check_cuts, sliced

LAUNCH = "torchrun --nproc-per-node 2 -m lce ..."


def ranks_of(value: object) -> Ranks:
    """Return the ranks that a user names: "all" of torchrun's, or a process group.

    "all" joins the processes that torchrun started, by gloo on CPUs and NCCL on GPUs, unless there is a group already.
    """
    if not dist.is_available():
        raise UsageError("this PyTorch has no torch.distributed, so ranks cannot be used; leave ranks out")
    if isinstance(value, str) and value == "all":
        if not dist.is_initialized():
            _join()
        value = dist.group.WORLD
    if not isinstance(value, dist.ProcessGroup):
        raise UsageError(f"ranks is {shown(value)}; expected None, 'all' or a group of torch.distributed")
    if dist.get_rank(value) < 0:
        raise UsageError("ranks is a group without this process; load the model in the processes of the group alone")
    own = None if value is dist.group.WORLD else value  # no reference keeps the default group's threads until exit
    return Ranks(dist.get_rank(value), dist.get_world_size(value), own)


def _join() -> None:
    """Join the group of all processes that torchrun started."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise UsageError(f"ranks is 'all', but no torchrun started this process; run {LAUNCH}, or leave ranks out")
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=LIMIT_S))
    except (RuntimeError, ValueError) as error:
        cause = " ".join(str(error).split())[:160]
        raise RankError(f"this rank found no others within {LIMIT_S} s; start all with torchrun ({cause})") from error
    atexit.register(lambda: (gc.collect(), dist.destroy_process_group()))  # gloo's threads may not outlive the group


def facts_of(made: Setup) -> Facts:
    """Return all that can change a token, by names for messages.

    That is what a context file records of model and method, and the block, the attention backend, the device and the
    end tokens. Of the whole model's files only the fingerprint's samples are read, 12 KiB of each tensor.
    """
    facts, found = made.identity.facts, Facts()
    for name, value in sorted(facts.items(), key=lambda fact: fact[0] == "knobs"):  # these follow from the others
        for knob, own in value.items() if name in ("knobs", "rope") else [("", value)]:
            found[f"{name} {knob}".rstrip()] = own.get("digest") if isinstance(own, dict) else own
    attention, ends = made.driver.attention.name, sorted(made.eos_ids)
    return found | {"block": made.block, "attention": attention, "device": made.device.type, "eos_ids": ends}


def division_of(
    config: ModelConfig, ranks: Ranks, method: Method, checkpoint: Checkpoint, schemes: Mapping[str, Scheme]
) -> Division:
    """Return the division of a model whose matrices `schemes` round. Raises `UsageError` if there can be none.

    No division suits a method in which heads of different ranks depend on each other.
    """
    if why := method.couples_heads:
        raise UsageError(f"{method.label} cannot be divided among {ranks.count} ranks: {why}; or load without ranks")
    family = model_class(config)
    table = family.table(config, checkpoint.shapes)
    if any(words in (("query",), ("key",)) and not name.endswith("_bias") for name, (_, words) in table.items()):
        whole = "it normalises the queries and keys of all heads together"
        raise UsageError(f"{family.model_type} cannot be divided among ranks: {whole}; load it without ranks")
    columns = {published: words[1] for published, words in table.values() if len(words) == 2}
    blocks = {name: block_size(checkpoint, name, schemes.get(name)) for name in columns}
    units = [blocks[name] for name, word in columns.items() if word == "inner"]
    division = Division(config, ranks, math.lcm(ROW_BLOCK, *units))
    division.check()
    cuts = {*division.spans["query"][0]} - {config.n_heads * config.head_dim}
    for name, word in columns.items():
        if word == "query":
            check_cuts(checkpoint, name, blocks[name], cuts)
    return division


def weights_of(division: Division, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return what `Model.weights` returns, with the shapes that one of several ranks has."""
    slices, whole = _slices(division, stored), model_class(division.config).weights(division.config, stored)
    return {
        name: (published, slices.get(published, Slice()).shape(shape)) for name, (published, shape) in whole.items()
    }


def part_of(division: Division, checkpoint: Checkpoint, ignore: Sequence[str]) -> Checkpoint:
    """Return a checkpoint with the tensors of one of several ranks."""
    wanted = model_class(division.config).weights(division.config, checkpoint.shapes)
    checkpoint.check(dict(wanted.values()), ignore)
    return sliced(checkpoint, _slices(division, checkpoint.shapes))


def joined(division: Division, loaded: Mapping[str, Any], stored: Collection[str]) -> dict[str, Any]:
    """Return loaded weights. In them, matrices divided by columns or by tokens act like whole matrices."""
    made, ranks = dict(loaded), division.ranks
    for name, (_, words) in model_class(division.config).table(division.config, stored).items():
        if words[0] == "vocab" and words[0] in division.spans:
            first, n_rows = division.spans["vocab"][0][0], division.config.vocab_size
            made[name] = VocabularyPart(loaded[name], first, n_rows, ranks)
        elif len(words) == 2 and words[1] in division.spans:
            made[name] = SummedMatrix(loaded[name], ranks)
    return made


def _slices(division: Division, stored: Collection[str]) -> dict[str, Slice]:
    """Return the slices that this rank has, by the names in published checkpoints."""
    spans, found = division.spans, {}
    for published, words in model_class(division.config).table(division.config, stored).values():
        rows, columns = (spans.get(word) for word in (*words, "")[:2])
        if rows or columns:
            found[published] = Slice(rows, columns[0] if columns else None)
    return found
