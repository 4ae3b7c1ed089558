"""Rules of ZeRO and offload: which stage can move what, and where to."""

from __future__ import annotations

from dataclasses import replace

from zerofit.compat.rule import Rule, Situation
from zerofit.plan import Topology
from zerofit.strategy import Engine, OffloadDevice, OptimizerName, Strategy, ZeroStage

_DOCS = "https://www.deepspeed.ai/docs/config-json/"
_TWO_RANKS = Topology(world_size=2)
_ZERO3 = Situation(
    strategy=Strategy(engine=Engine.DEEPSPEED, zero_stage=ZeroStage.PARAMETERS), topology=_TWO_RANKS
)


def _with(situation: Situation, **changes: object) -> Situation:
    return replace(situation, strategy=replace(situation.strategy, **changes))  # type: ignore[arg-type]


def _zero_without_deepspeed(situation: Situation) -> str | None:
    strategy = situation.strategy
    if strategy.engine is Engine.NATIVE and (strategy.zero_stage or strategy.offloads):
        settings = {
            "--zero-stage": strategy.zero_stage.value,
            "--offload-optimizer": strategy.optimizer_offload,
            "--offload-param": strategy.param_offload,
        }
        needing = [f"{flag} {value}" for flag, value in settings.items() if value not in (0, "none")]
        return f"--engine native with {' and '.join(needing)}"
    return None


def _optimizer_offload_without_zero(situation: Situation) -> str | None:
    strategy = situation.strategy
    if strategy.optimizer_offload is not OffloadDevice.NONE and strategy.zero_stage is ZeroStage.NOTHING:
        return f"--offload-optimizer {strategy.optimizer_offload} with --zero-stage 0"
    return None


def _param_offload_below_zero3(situation: Situation) -> str | None:
    strategy = situation.strategy
    if strategy.param_offload is not OffloadDevice.NONE and strategy.zero_stage < ZeroStage.PARAMETERS:
        return f"--offload-param {strategy.param_offload} with --zero-stage {strategy.zero_stage.value}"
    return None


def _nvme_below_zero3(situation: Situation) -> str | None:
    strategy = situation.strategy
    if strategy.optimizer_offload is OffloadDevice.NVME and strategy.zero_stage < ZeroStage.PARAMETERS:
        return f"--offload-optimizer nvme with --zero-stage {strategy.zero_stage.value}"
    return None


def _nvme_without_path(situation: Situation) -> str | None:
    if situation.strategy.uses_nvme and not situation.strategy.nvme_path:
        return "offload to nvme without --nvme-path"
    return None


def _offload_without_adam(situation: Situation) -> str | None:
    strategy = situation.strategy
    if strategy.optimizer_offload is OffloadDevice.NONE or strategy.optimizer in (None, OptimizerName.ADAMW):
        return None
    return f"--optimizer {strategy.optimizer} with --offload-optimizer {strategy.optimizer_offload}"


RULES = (
    Rule(
        id="zero-needs-deepspeed",
        summary="ZeRO and offload need DeepSpeed",
        why="PyTorch's own data parallelism keeps whole parameters, gradients and states on every GPU",
        fix="leave out --engine native, or set --zero-stage 0 without offload",
        see=f"{_DOCS}#zero-optimizations-for-fp16-training",
        found=_zero_without_deepspeed,
        bad=_with(_ZERO3, engine=Engine.NATIVE),
        good=_ZERO3,
    ),
    Rule(
        id="optimizer-offload-needs-zero",
        summary="optimizer offload needs ZeRO-1 or higher",
        why="at stage 0 DeepSpeed runs its CPU optimizer without partitioning anything, on every rank alike",
        fix="set --zero-stage to 1, 2 or 3, or leave out --offload-optimizer",
        see=f"{_DOCS}#optimizer-offloading",
        found=_optimizer_offload_without_zero,
        bad=_with(_ZERO3, zero_stage=ZeroStage.NOTHING, optimizer_offload=OffloadDevice.CPU),
        good=_with(_ZERO3, optimizer_offload=OffloadDevice.CPU),
    ),
    Rule(
        id="param-offload-needs-zero3",
        summary="parameter offload needs ZeRO-3",
        why="only stage 3 partitions parameters, so lower stages ignore the setting",
        fix="set --zero-stage 3, or leave out --offload-param",
        see=f"{_DOCS}#parameter-offloading",
        found=_param_offload_below_zero3,
        bad=_with(_ZERO3, zero_stage=ZeroStage.GRADIENTS, param_offload=OffloadDevice.CPU),
        good=_with(_ZERO3, param_offload=OffloadDevice.CPU),
    ),
    Rule(
        id="nvme-offload-needs-zero3",
        summary="offload to NVMe needs ZeRO-3",
        why="at stages 1 and 2 DeepSpeed takes nvme for cpu, and the host's memory fills instead of the disk",
        fix="set --zero-stage 3, or offload to cpu",
        see=f"{_DOCS}#optimizer-offloading",
        found=_nvme_below_zero3,
        bad=_with(
            _ZERO3,
            zero_stage=ZeroStage.GRADIENTS,
            optimizer_offload=OffloadDevice.NVME,
            nvme_path="/local_nvme",
        ),
        good=_with(_ZERO3, optimizer_offload=OffloadDevice.NVME, nvme_path="/local_nvme"),
    ),
    Rule(
        id="nvme-needs-path",
        summary="offload to NVMe needs a folder on that disk",
        why="DeepSpeed has no default folder and fails later with an error that does not name the setting",
        fix="name a writable folder: --nvme-path /local_nvme",
        see=f"{_DOCS}#optimizer-offloading",
        found=_nvme_without_path,
        bad=_with(_ZERO3, optimizer_offload=OffloadDevice.NVME),
        good=_with(_ZERO3, optimizer_offload=OffloadDevice.NVME, nvme_path="/local_nvme"),
    ),
    Rule(
        id="offload-needs-adam",
        summary="optimizer offload needs Adam or AdamW",
        why="accelerate swaps SGD and 8-bit AdamW for DeepSpeed's CPU Adam, and Adafactor fails in its first "
        "step",
        fix="set --optimizer adamw, or leave out --offload-optimizer",
        see="https://github.com/huggingface/accelerate/blob/main/src/accelerate/utils/deepspeed.py",
        found=_offload_without_adam,
        bad=_with(_ZERO3, optimizer_offload=OffloadDevice.CPU, optimizer=OptimizerName.SGD),
        good=_with(_ZERO3, optimizer_offload=OffloadDevice.CPU, optimizer=OptimizerName.ADAMW),
    ),
)
