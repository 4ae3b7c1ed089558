"""Rules on tensor parallelism: requirements and exclusions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checking.rule import (
    ACCELERATE,
    Effect,
    Hit,
    Reproduction,
    Rule,
    Severity,
    declared,
    fails,
    ignored,
)
from zerofit.checking.rules.launch.ranks import uneven_groups
from zerofit.checking.situation import is_read_by_others, known, stage_of, text_of
from zerofit.configs.document import SetValue, say
from zerofit.core.setting import Said
from zerofit.core.strategy import Engine, ZeroStage
from zerofit.scripts.facts import ModelConstructor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.situation import Situation

_PATH = ("tensor_parallel", "autotp_size")
_GATHERS = ("zero_optimization", "stage3_gather_16bit_weights_on_model_save")
_DOCS = "https://www.deepspeed.ai/tutorials/autotp-training/"


@Rule(
    id="tensor-parallel-needs-deepspeed",
    severity=Severity.ERROR,
    summary="tensor parallelism needs DeepSpeed",
    why="PyTorch's data parallelism keeps whole layers on every rank",
    fix="leave out {engine} native, or --tensor-parallel-size",
    see=_DOCS,
    evidence=ignored(("zero_stage", None)),
)
def _without_deepspeed(situation: Situation) -> Iterator[Hit]:
    yield from groups_without_deepspeed(situation, _group(situation))


def groups_without_deepspeed(situation: Situation, group: Said[int] | None) -> Iterator[Hit]:
    """Yield a hit for groups of this size with the native engine."""
    if group is not None:
        engine = known(situation.settings.engine, "the engine")
        if engine.value is Engine.NATIVE:
            yield Hit(found=f"{group.text} with {engine.text}", place=group.place)


def _group(situation: Situation) -> Said[int] | None:
    """Return the tensor-parallel size; None without tensor parallelism."""
    document, topology = situation.deepspeed, situation.topology
    if document is not None:
        value, entry = document.value(*_PATH), document.at(*_PATH)
        if entry is None or not isinstance(value, int) or isinstance(value, bool) or value < 2:
            return None
        return Said(value=value, text=say(document, *_PATH), place=document.place(entry.key_span))
    if topology is None or topology.tensor_parallel_size == 1:
        return None
    size = topology.tensor_parallel_size
    return Said(value=size, text=f"--tensor-parallel-size {size}")


@Rule(
    id="tensor-parallel-groups-not-whole",
    severity=Severity.ERROR,
    summary="the ranks make no whole tensor-parallel groups",
    why="ranks are divided into groups of this size that each have one copy of the model",
    fix="set tensor_parallel.autotp_size to a divisor of the number of ranks, or leave it out",
    see=_DOCS,
    evidence=fails("RuntimeError"),
)
def _parts_of_groups(situation: Situation) -> Iterator[Hit]:
    yield from uneven_groups("tensor")(situation)
    yield from parts_of_groups(situation, _group(situation))


def parts_of_groups(situation: Situation, group: Said[int] | None) -> Iterator[Hit]:
    """Yield a hit for groups whose size does not divide the number of ranks."""
    if group is not None:
        ranks = known(situation.topology, "the number of ranks").world_size
        if ranks % group.value:
            yield Hit(found=f"{group.text} with {ranks} rank{'s' * (ranks > 1)}", place=group.place)


@Rule(
    id="tensor-parallel-without-gathered-saving",
    severity=Severity.ERROR,
    summary="tensor parallelism only saves whole weights with stage3_gather_16bit_weights_on_model_save",
    why="each rank has parts of the weights at every stage, and accelerate only merges them with the key; "
    "Trainer saves shards instead",
    fix="set zero_optimization.stage3_gather_16bit_weights_on_model_save to true",
    see=f"{ACCELERATE}/accelerator.py",
    evidence=fails("Cannot get 16bit model weights"),
)
def _not_gathered(situation: Situation) -> Iterator[Hit]:
    group, document = _group(situation), situation.deepspeed
    if group is None or document is None or document.value(*_GATHERS) in (True, "auto"):
        return
    if is_read_by_others(situation) and stage_of(situation).value is not ZeroStage.PARAMETERS:
        edit = SetValue(document=document.name, path=_GATHERS, value=True)
        yield Hit(found=f"{group.text} with no {_GATHERS[1]}", place=group.place, edits=(edit,))


@Rule(
    id="tensor-parallel-at-zero3-needs-newer-deepspeed",
    severity=Severity.ERROR,
    summary="DeepSpeed before 0.19.4 has no tensor parallelism at ZeRO-3",
    why="its engine asserts that the stage is at most 2",
    fix="set {zero_stage} to 2 or less, or install deepspeed 0.19.4 or newer",
    see="https://github.com/deepspeedai/DeepSpeed/pull/8168",
    evidence=fails(not_reproduced="needs deepspeed before 0.19.4"),
    holds_for=("deepspeed<0.19.4",),
)
def _at_stage_3(situation: Situation) -> Iterator[Hit]:
    group = _group(situation)
    if group is not None and (stage := stage_of(situation)).value is ZeroStage.PARAMETERS:
        yield Hit(found=f"{group.text} with {stage.text}", place=group.place)


@Rule(
    id="tensor-parallel-loading-at-zero3",
    severity=Severity.ERROR,
    summary="transformers can't load a model with ZeRO-3 and tensor parallelism",
    why="it assumes that layers are already sharded, which DeepSpeed does later",
    fix="set {zero_stage} to 2 or less, or run with `zerofit launch`, which makes it load",
    see="https://github.com/huggingface/transformers/blob/main/src/transformers/integrations/deepspeed.py",
    evidence=fails("Weight conversions"),
    holds_for=("transformers>=5.23",),
    is_fixed_by_launch=True,
)
def _loaded_at_stage_3(situation: Situation) -> Iterator[Hit]:
    group, document = _group(situation), situation.deepspeed
    if group is None or document is None or stage_of(situation).value is not ZeroStage.PARAMETERS:
        return
    script = known(situation.script, "how the model is created")
    if any(model.source is ModelConstructor.PRETRAINED for model in script.models):
        yield Hit(
            found=f"{group.text} with {stage_of(situation).text} and from_pretrained()", place=group.place
        )


@Rule(
    id="tensor-parallel-with-adapters",
    severity=Severity.ERROR,
    summary="tensor parallelism can't shard layers with adapters",
    why="DeepSpeed shards the layers around the adapters and then misses their parameters: KeyError",
    fix="leave out --tensor-parallel-size or --lora",
    see="https://github.com/hiyouga/LLaMA-Factory/issues/8206",
    evidence=fails("tensor-parallel-adapters"),
)
def _with_adapters(situation: Situation) -> Iterator[Hit]:
    group = _group(situation)
    if group is not None and situation.strategy is not None and situation.strategy.lora is not None:
        yield Hit(found=f"{group.text} with {text_of(situation, 'lora')}", place=group.place)


@Rule(
    id="resume-needs-same-tensor-parallel-size",
    severity=Severity.ERROR,
    summary="a checkpoint only resumes with the same tensor-parallel size",
    why="each rank saved its parts of the layers, and neither DeepSpeed nor its converter reshards them",
    fix="resume with the same size, or start a new run from the saved weights",
    see=_DOCS,
    evidence=fails(not_reproduced="the harness saves no tensor-parallel checkpoint"),
)
def _other_groups(situation: Situation) -> Iterator[Hit]:
    checkpoint = situation.checkpoint
    if checkpoint is None or checkpoint.num_ranks == 0 or checkpoint.is_universal:
        return
    group = _group(situation)
    size = 1 if group is None else group.value
    if checkpoint.tensor_parallel_size != size:
        saved = f"{checkpoint.folder} has layers sharded over {checkpoint.tensor_parallel_size} ranks"
        yield Hit(found=f"{saved}, and {group.text if group else 'no tensor parallelism'}")


@Rule(
    id="tensor-parallel-over-nodes",
    severity=Severity.ADVICE,
    summary="a tensor-parallel group spans several nodes",
    why="its ranks exchange activations in every layer, and networks between nodes are many times slower "
    "than links inside a node",
    fix="make the ranks per node a multiple of the group size, and use ZeRO between the nodes",
    see="https://arxiv.org/abs/2104.04473",
    evidence=Reproduction(outcome=Effect.COSTS, not_reproduced="needs two nodes"),
)
def _over_nodes(situation: Situation) -> Iterator[Hit]:
    yield from groups_over_nodes(situation, _group(situation))


def groups_over_nodes(situation: Situation, group: Said[int] | None) -> Iterator[Hit]:
    """Yield a hit for groups with ranks on several nodes."""
    if group is not None:
        topology = known(situation.topology, "the number of ranks")
        if topology.num_nodes > 1 and topology.ranks_per_node % group.value:
            each = f"{topology.ranks_per_node} ranks on each of {topology.num_nodes} nodes"
            yield Hit(found=f"{group.text} with {each}", place=group.place)


RULES = declared(vars())
