"""Rules on sequence parallelism: requirements and exclusions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checking.rule import (
    ACCELERATE,
    DEEPSPEED,
    DIFFERS,
    Effect,
    Hit,
    Reproduction,
    Rule,
    Severity,
    declared,
    fails,
    ignored,
)
from zerofit.checking.rules.deepspeed.tensor_parallel import (
    groups_over_nodes,
    groups_without_deepspeed,
    parts_of_groups,
)
from zerofit.checking.rules.launch.ranks import uneven_groups
from zerofit.checking.situation import known, text_of
from zerofit.configs.document import say
from zerofit.core.command import Route
from zerofit.core.setting import Said
from zerofit.core.strategy import Engine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.situation import Situation
    from zerofit.configs.document import Document

_SECTION = "parallelism_config"
_KEYS = ("sequence_parallel_size", "data_parallel_size")
_PARALLELISM = f"{ACCELERATE}/parallelism_config.py"
_ULYSSES = f"{DEEPSPEED}/runtime/sequence_parallel/ulysses_sp.py"
_MASKED = ("eager", "flex_attention")
"""Attention implementations whose masks cover only one rank's tokens
(training/setup/deepspeed/sequence_shards.py)."""


def _key(name: str) -> tuple[str, str]:
    return (_SECTION, f"{_SECTION}_{name}")


def _size(document: Document | None, *path: str) -> Said[int] | None:
    """Return the group size in a file; None if it makes no groups."""
    said = document.said(*path) if document is not None else None
    is_size = said is not None and isinstance(said.value, int) and not isinstance(said.value, bool)
    return said if said is not None and is_size and said.value > 1 else None


def _in_file(situation: Situation) -> Said[int] | None:
    return _size(situation.accelerate, *_key("sp_size"))


def _group(situation: Situation) -> Said[int] | None:
    """Return the sequence-parallel size; None without sequence parallelism."""
    topology = situation.topology
    if (said := _in_file(situation)) is not None or topology is None:
        return said
    size = topology.sequence_parallel_size
    return Said(value=size, text=f"--sequence-parallel-size {size}") if size > 1 else None


@Rule(
    id="sequence-parallel-needs-deepspeed",
    severity=Severity.ERROR,
    summary="sequence parallelism needs DeepSpeed",
    why="PyTorch's data parallelism gives each rank different, whole samples",
    fix="leave out {engine} native, or --sequence-parallel-size",
    see=_PARALLELISM,
    evidence=ignored(("zero_stage", None)),
)
def _without_deepspeed(situation: Situation) -> Iterator[Hit]:
    yield from groups_without_deepspeed(situation, _group(situation))


@Rule(
    id="sequence-parallel-groups-not-whole",
    severity=Severity.ERROR,
    summary="the ranks make no whole sequence-parallel groups",
    why="ranks are divided into groups of this size that share samples",
    fix="set parallelism_config_sp_size to a divisor of the number of ranks, or leave it out",
    see=_PARALLELISM,
    evidence=fails("less than sequence_parallel_size"),
)
def _parts_of_groups(situation: Situation) -> Iterator[Hit]:
    yield from uneven_groups("sequence")(situation)
    yield from parts_of_groups(situation, _group(situation))


@Rule(
    id="parallelism-flags-beside-deepspeed",
    severity=Severity.ERROR,
    summary="accelerate launch refuses --use_parallelism_config with DeepSpeed",
    why="it checks for FSDP 2 before it reads that DeepSpeed implements the dimension",
    fix="set it in the section parallelism_config of accelerate's file, or use `zerofit launch "
    "--sequence-parallel-size N`",
    see=f"{ACCELERATE}/commands/launch.py",
    evidence=fails("You cannot use `--use_parallelism_config`"),
    is_fixed_by_launch=True,
)
def _by_flags(situation: Situation) -> Iterator[Hit]:
    command = situation.command
    flag = command.find("use_parallelism_config") if command is not None else None
    if command is not None and flag is not None and command.find("use_fsdp") is None:
        engine = known(situation.settings.engine, "the engine")
        if engine.value is Engine.DEEPSPEED:
            yield Hit(found=f"{flag.text} with {engine.text}")


@Rule(
    id="sequence-parallel-micro-batch",
    severity=Severity.ERROR,
    summary="with accelerate's sequence parallelism Trainer supports one sample at a time",
    why="it slices labels along the tokens without making them contiguous, and transformers' loss calls "
    "view() on them",
    fix="set per_device_train_batch_size to 1, or use `zerofit launch --sequence-parallel-size N`",
    see=_ULYSSES,
    evidence=fails("view size is not compatible"),
    is_fixed_by_launch=True,
)
def _micro_batch(situation: Situation) -> Iterator[Hit]:
    group = _in_file(situation)
    if group is None or situation.route is not Route.TRAINER:
        return
    trainer = known(situation.trainer, "TrainingArguments")
    size = known(trainer.find_or_default("per_device_train_batch_size"), "per_device_train_batch_size")
    if size.value > 1:
        yield Hit(found=f"{group.text} with {size.text}", place=group.place, confidence=size.confidence)


@Rule(
    id="sequence-parallel-attention-unknown",
    severity=Severity.ERROR,
    summary="eager and flex attention don't support sequence parallelism",
    why="their masks only cover the tokens of one rank",
    fix="use sdpa or flash attention",
    see=_ULYSSES,
    evidence=fails("sequence-parallel-attention"),
)
def _masks_of_one_rank(situation: Situation) -> Iterator[Hit]:
    group, strategy = _group(situation), situation.strategy
    if group is not None and strategy is not None and strategy.attention in _MASKED:
        yield Hit(found=f"{group.text} with {text_of(situation, 'attention')}")


@Rule(
    id="sequence-parallel-with-context-parallel",
    severity=Severity.ERROR,
    summary="sequence and context parallelism exclude each other",
    why="both split samples along their tokens, and context parallelism belongs to FSDP",
    fix="leave out parallelism_config_cp_size",
    see=_PARALLELISM,
    evidence=fails("mutually exclusive"),
)
def _with_context_parallel(situation: Situation) -> Iterator[Hit]:
    group, other = _in_file(situation), _size(situation.accelerate, *_key("cp_size"))
    if group is not None and other is not None:
        yield Hit(found=f"{group.text} with {other.text}", place=group.place)


@Rule(
    id="sequence-parallel-with-tensor-parallel",
    severity=Severity.ERROR,
    summary="sequence and tensor parallelism exclude each other",
    why="DeepSpeed's tensor-parallel groups replace the sequence-parallel ones in its engine",
    fix="leave out one of the two",
    see=f"{DEEPSPEED}/runtime/engine.py",
    evidence=fails(not_reproduced="needs four ranks"),
)
def _with_tensor_parallel(situation: Situation) -> Iterator[Hit]:
    group, topology = _group(situation), situation.topology
    tensor = _size(situation.deepspeed, "tensor_parallel", "autotp_size")
    if tensor is None and topology is not None and topology.tensor_parallel_size > 1:
        size = topology.tensor_parallel_size
        tensor = Said(value=size, text=f"--tensor-parallel-size {size}")
    if group is not None and tensor is not None:
        yield Hit(found=f"{group.text} with {tensor.text}", place=group.place)


@Rule(
    id="deepspeed-sequence-groups-not-summed",
    severity=Severity.ERROR,
    summary="DeepSpeed does not reduce gradients over groups from its configuration",
    why="sequence_parallel_size with data_parallel_size makes the engine reduce gradients only over "
    "data-parallel ranks, and the ranks of a group diverge",
    fix="remove both keys; `zerofit launch --sequence-parallel-size N` creates working groups",
    see=f"{DEEPSPEED}/utils/groups.py",
    evidence=DIFFERS,
)
def _groups_not_summed(situation: Situation) -> Iterator[Hit]:
    document = situation.deepspeed
    group = _size(document, _KEYS[0])
    if document is not None and group is not None and document.at(_KEYS[1]) is not None:
        yield Hit(found=f"{group.text} with {say(document, _KEYS[1])}", place=group.place)


@Rule(
    id="deepspeed-sequence-parallel-size-ignored",
    severity=Severity.WARNING,
    summary="sequence_parallel_size in a DeepSpeed file creates no groups",
    why="DeepSpeed divides the batch size by it, although no samples are shared",
    fix="remove it, and pass --sequence-parallel-size to `zerofit launch`",
    see=f"{DEEPSPEED}/runtime/config.py",
    evidence=ignored(("train_batch_size", 2)),
)
def _size_ignored(situation: Situation) -> Iterator[Hit]:
    group = _size(situation.deepspeed, _KEYS[0])
    document = situation.deepspeed
    if group is None or document is None or document.at(_KEYS[1]) is not None:
        return
    passes = document.value("compile", "passes")
    is_compiled = isinstance(passes, list) and "autosp" in passes  # a pass that creates the groups
    if _group(situation) is None and not is_compiled:
        yield Hit(found=group.text, place=group.place)


@Rule(
    id="sequence-parallel-over-nodes",
    severity=Severity.ADVICE,
    summary="a sequence-parallel group spans several nodes",
    why="its ranks exchange queries, keys, values and outputs in every layer, and networks between nodes "
    "are many times slower than links inside a node",
    fix="make the ranks per node a multiple of the group size",
    see="https://arxiv.org/abs/2309.14509",
    evidence=Reproduction(outcome=Effect.COSTS, not_reproduced="needs two nodes"),
)
def _over_nodes(situation: Situation) -> Iterator[Hit]:
    yield from groups_over_nodes(situation, _group(situation))


RULES = declared(vars())
