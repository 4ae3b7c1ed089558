"""Rules on ZeRO and offload: which stage can offload what, and which checkpoints can resume."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checking.rule import (
    DEEPSPEED,
    DEEPSPEED_DOCS,
    Hit,
    Rule,
    Severity,
    declared,
    fails,
    ignored,
)
from zerofit.checking.situation import known, stage_of
from zerofit.core.facts import Checkpoint
from zerofit.core.strategy import Engine, OffloadDevice, ZeroStage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerofit.checking.situation import Situation
    from zerofit.core.setting import Said


_OFFLOADED = (OffloadDevice.CPU, OffloadDevice.NVME)
_BELOW_3 = (ZeroStage.OPTIMIZER_STATES, ZeroStage.GRADIENTS)


def _offload_at(
    which: str, stages: tuple[ZeroStage, ...], devices: tuple[OffloadDevice, ...] = _OFFLOADED
) -> Callable[[Situation], Iterator[Hit]]:
    """Return a predicate that finds an offload to one of these devices at one of these stages."""
    fact = "the optimizer offload" if which == "optimizer_offload" else "the parameter offload"

    def find(situation: Situation) -> Iterator[Hit]:
        engine = situation.settings.engine
        if engine is not None and engine.value is Engine.FSDP2:
            return
        offload: Said[OffloadDevice] = known(getattr(situation.settings, which), fact)
        if offload.value in devices and (stage := stage_of(situation)).value in stages:
            yield Hit(found=f"{offload.text} with {stage.text}", place=offload.place)

    return find


@Rule(
    id="zero-needs-deepspeed",
    severity=Severity.ERROR,
    summary="ZeRO and offload need DeepSpeed",
    why="PyTorch's data parallelism keeps whole parameters, gradients and states on every GPU",
    fix="leave out {engine} native, or set {zero_stage} to 0 without offload",
    see=f"{DEEPSPEED_DOCS}#zero-optimizations-for-fp16-training",
    evidence=ignored(("zero_stage", None)),
)
def _zero_without_deepspeed(situation: Situation) -> Iterator[Hit]:
    settings = situation.settings
    engine = known(settings.engine, "the engine")
    if engine.value is not Engine.NATIVE:
        return
    stage = stage_of(situation)
    optimizer = known(settings.optimizer_offload, "the optimizer offload")
    param = known(settings.param_offload, "the parameter offload")
    needing = [said.text for said in (stage, optimizer, param) if said.value not in (0, OffloadDevice.NONE)]
    if needing:
        yield Hit(found=f"{engine.text} with {' and '.join(needing)}", place=engine.place)


_OPTIMIZER_OFFLOAD_NEEDS_ZERO = Rule(
    id="optimizer-offload-needs-zero",
    severity=Severity.ERROR,
    summary="optimizer offload needs ZeRO-1 or higher",
    why="at stage 0 DeepSpeed runs its CPU optimizer on every rank, without partitioning",
    fix="set {zero_stage} to 1, 2 or 3, or leave out {optimizer_offload}",
    see=f"{DEEPSPEED_DOCS}#optimizer-offloading",
    find=_offload_at("optimizer_offload", (ZeroStage.NOTHING,)),
    evidence=ignored(("partitions_optimizer_states", False)),
)


_PARAM_OFFLOAD_NEEDS_ZERO3 = Rule(
    id="param-offload-needs-zero3",
    severity=Severity.ERROR,
    summary="parameter offload needs ZeRO-3",
    why="only stage 3 partitions parameters, so lower stages ignore the setting",
    fix="set {zero_stage} to 3, or leave out {param_offload}",
    see=f"{DEEPSPEED_DOCS}#parameter-offloading",
    find=_offload_at("param_offload", (ZeroStage.NOTHING, *_BELOW_3)),
    evidence=ignored(("offloads_parameters", False)),
)


_NVME_OFFLOAD_NEEDS_ZERO3 = Rule(
    id="nvme-offload-needs-zero3",
    severity=Severity.ERROR,
    summary="NVMe offload needs ZeRO-3",
    why="at stages 1 and 2 DeepSpeed treats nvme as cpu, and fills host memory instead of the disk",
    fix="set {zero_stage} to 3, or offload to cpu",
    see=f"{DEEPSPEED_DOCS}#optimizer-offloading",
    find=_offload_at("optimizer_offload", _BELOW_3, (OffloadDevice.NVME,)),
    evidence=ignored(("optimizer_states_on", "cpu")),
)


@Rule(
    id="nvme-needs-path",
    severity=Severity.ERROR,
    summary="NVMe offload needs a folder on that disk",
    why="DeepSpeed has no default folder, and fails later with an unrelated error",
    fix="name a writable folder on that disk with {nvme_path}",
    see=f"{DEEPSPEED_DOCS}#optimizer-offloading",
    evidence=fails("TypeError"),
)
def _nvme_without_path(situation: Situation) -> Iterator[Hit]:
    settings = situation.settings
    sections = (
        (settings.optimizer_offload, settings.optimizer_nvme_path),
        (settings.param_offload, settings.param_nvme_path),
    )
    for device, path in sections:
        offload = known(device, "the offload settings")
        if offload.value is OffloadDevice.NVME:
            folder = known(path, "the folder for NVMe offload")
            if folder.value is None:
                yield Hit(found=f"{offload.text} with {folder.text}", place=offload.place)


@Rule(
    id="nvme-path-unused",
    severity=Severity.ERROR,
    summary="nothing is offloaded to NVMe",
    why="the folder would have no effect",
    fix="add --offload-optimizer nvme or --offload-param nvme, or leave out {nvme_path}",
    see=f"{DEEPSPEED_DOCS}#optimizer-offloading",
    evidence=ignored(("optimizer_states_on", "gpu")),
)
def _nvme_path_unused(situation: Situation) -> Iterator[Hit]:
    if not situation.is_from_flags:
        return  # in a file the folder is often prepared beside an offload to cpu
    settings = situation.settings
    path = known(settings.optimizer_nvme_path, "the folder for NVMe offload")
    if path.value is None:
        return
    offloads = (settings.optimizer_offload, settings.param_offload)
    if not any(known(device, "the offload settings").value is OffloadDevice.NVME for device in offloads):
        yield Hit(found=f"{path.text} without an offload to nvme", place=path.place)


@Rule(
    id="resume-needs-same-ranks",
    severity=Severity.ERROR,
    summary="a DeepSpeed checkpoint only resumes on the same number of ranks",
    why="each rank saved its own shard of the optimizer states, and DeepSpeed does not reshard them",
    fix="run on the same number of ranks, or with `zerofit launch`, which converts a copy of the checkpoint",
    see=f"{DEEPSPEED}/runtime/engine.py",
    evidence=fails("Automatic adjustment of ZeRO's optimizer state partitioning"),
)
def _other_number_of_ranks(situation: Situation) -> Iterator[Hit]:
    checkpoint = _sharded_checkpoint(situation)
    if checkpoint is None:
        return
    world_size = known(situation.topology, "the number of ranks").world_size
    if world_size != checkpoint.num_ranks:
        shards = f"the shards of {checkpoint.num_ranks} ranks"
        yield Hit(found=f"{checkpoint.folder} has {shards}, but {world_size} ranks are to resume")


def _sharded_checkpoint(situation: Situation) -> Checkpoint | None:
    """Return the checkpoint to resume from, if it has shards and DeepSpeed will read it."""
    checkpoint = situation.checkpoint
    if checkpoint is None or checkpoint.num_ranks == 0 or checkpoint.is_universal:
        return None
    engine = known(situation.settings.engine, "whether DeepSpeed runs")
    return checkpoint if engine.value is Engine.DEEPSPEED else None


@Rule(
    id="resume-needs-same-layout",
    severity=Severity.ERROR,
    summary="checkpoints don't resume between ZeRO-3 and lower stages",
    why="stage 3 saves shards of the parameters, the others whole parameters; DeepSpeed fails with an "
    "AssertionError without a message",
    fix="set {zero_stage} to the checkpoint's stage, or run with `zerofit launch`, which converts a copy "
    "of the checkpoint",
    see=f"{DEEPSPEED}/runtime/engine.py",
    evidence=fails("AssertionError"),
)
def _other_layout(situation: Situation) -> Iterator[Hit]:
    checkpoint = _sharded_checkpoint(situation)
    if checkpoint is None:
        return
    stage = stage_of(situation)
    partitions = stage.value is ZeroStage.PARAMETERS
    if stage.value is not ZeroStage.NOTHING and partitions is not checkpoint.partitions_parameters:
        saved = "3" if checkpoint.partitions_parameters else "1 or 2"
        yield Hit(found=f"{checkpoint.folder} has ZeRO stage {saved}, but {stage.text}", place=stage.place)


RULES = declared(vars())
