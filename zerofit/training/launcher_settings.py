"""The launcher's own settings around a script that applies its plan: held against the plan, then replaced."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.configs.write.accelerate import fsdp_environment
from zerofit.configs.write.command import (
    MIXED_PRECISION,
    first_gpu,
    launch_environment,
    needs_one_gpu,
    rank_environment,
)
from zerofit.core.errors import UserError
from zerofit.core.strategy import Engine, describe_strategy
from zerofit.machine.port import free_port
from zerofit.training.settings import settings_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.core.plan import Plan
    from zerofit.training.changes import Changes

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OF_FSDP = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG")
_OTHER_ENGINES = ("ACCELERATE_USE_MEGATRON_LM",)
"""Set by `accelerate launch` for an engine that no plan has (accelerate/utils/launch.py, 1.15)."""
_DEEPSPEED = "ACCELERATE_DEEPSPEED_"
_ALSO_DEEPSPEED = ("ACCELERATE_CONFIG_DS_FIELDS", "ACCELERATE_GRADIENT_CLIPPING")
_DEFAULT_STAGE = 2
"""accelerate's, if neither a variable nor a file names a stage (accelerate/utils/dataclasses.py, 1.15)."""


def check_ranks(plan: Plan) -> None:
    """Check that the launcher has started the plan's ranks.

    Raises:
        UserError: it has started another number, or other numbers per node.
    """
    topology = plan.topology
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    on_node = int(os.environ.get("LOCAL_WORLD_SIZE", topology.ranks_per_node))
    if (world_size, on_node) == (topology.world_size, topology.ranks_per_node):
        return
    found = (
        f"{_ranks(world_size)}, and a plan for {topology.world_size}"
        if world_size != topology.world_size
        else f"{on_node} on this node, and a plan for {topology.ranks_per_node} on each of its nodes"
    )
    raise UserError(
        "world-size-differs",
        "the plan is for another number of ranks",
        found=found,
        why="batches and memory of each rank depend on how many share the work",
        fix=f"start {_ranks(topology.world_size)} (accelerate launch --num_processes {topology.world_size}, "
        f"or torchrun --nproc_per_node {topology.ranks_per_node}), or plan again",
    )


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def check_launcher(plan: Plan) -> None:
    """Check that the launcher's own settings don't contradict the plan.

    Raises:
        UserError: they do.
    """
    found = [f"{said}, and the plan says {planned}" for said, planned in _contradictions(plan)]
    if not found:
        return
    raise UserError(
        "launcher-contradicts-plan",
        "the launcher is configured for something else than the plan",
        found="; ".join(found),
        why="the script trains in one way only, and neither setting may silently win",
        fix="start it without them (accelerate launch reads them from --config_file or its default file; "
        f"torchrun has none), or plan for them: {describe_strategy(plan.strategy)} is the plan's strategy",
    )


def _contradictions(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the launcher's settings that contradict the plan, and what the plan says."""
    strategy, settings = plan.strategy, settings_of(plan)
    engine = f"engine {strategy.engine.value}"
    for name in (*_OTHER_ENGINES, *(() if settings.uses_fsdp2 else _OF_FSDP)):
        if _is_on(name):
            yield f"{name}=true", engine
    version = os.environ.get("FSDP_VERSION", "1")
    if settings.uses_fsdp2 and _is_on("ACCELERATE_USE_FSDP") and version != "2":
        yield f"ACCELERATE_USE_FSDP=true with FSDP_VERSION={version}", engine
    if _is_on("ACCELERATE_USE_DEEPSPEED"):
        if not settings.uses_deepspeed:
            yield "ACCELERATE_USE_DEEPSPEED=true", engine
        elif (stage := _stage())[0] != strategy.zero_stage:
            yield stage[1], f"stage {strategy.zero_stage.value}"
    if _is_on("ACCELERATE_USE_CPU") and not settings.on_cpu:
        yield "ACCELERATE_USE_CPU=true", "GPUs"
    if strategy.precision is not None and not settings.precision_is_default:
        planned = MIXED_PRECISION[strategy.precision]
        if _own_precision() not in (None, planned):
            yield f"ACCELERATE_MIXED_PRECISION={_own_precision()}", planned
    steps = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    if steps is not None and settings.forced_accumulation not in (None, int(steps)):
        yield f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS={steps}", str(settings.forced_accumulation)


def _is_on(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "y", "on", "t")


def _own_precision() -> str | None:
    """Return the mixed precision that the launcher sets; None for "no", which accelerate sets by default."""
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    return None if precision == "no" else precision


def _stage() -> tuple[int, str]:
    """Return the launcher's ZeRO stage, and where it says so."""
    file = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if file != "none":
        name = f"ACCELERATE_DEEPSPEED_CONFIG_FILE={file}"
        try:
            config: dict[str, Any] = json.loads(Path(file).read_text(encoding="utf-8"))
            stage = int(config.get("zero_optimization", {}).get("stage", 0))
        except (OSError, ValueError, AttributeError, TypeError):
            return -1, f"{name} can't be read"
        return stage, f"{name} with stage {stage}"
    stage = int(os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", _DEFAULT_STAGE))
    return stage, f"ACCELERATE_DEEPSPEED_ZERO_STAGE={stage}"


def set_environment(plan: Plan, *, deepspeed_file: Path | None, changes: Changes) -> None:
    """Set the variables that `zerofit launch` sets for ranks, in place of the launcher's.

    Args:
        plan: the plan.
        deepspeed_file: the DeepSpeed JSON; None for the native engine.
        changes: receives the launcher's settings that no longer count.

    Raises:
        UserError: torch already uses GPUs that the plan does not.
    """
    wanted = launch_environment(plan, inherited=os.environ)
    # torch calls ninja by name when it builds an op of DeepSpeed, also without an activated environment.
    wanted["PATH"] = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))
    if needs_one_gpu(plan):
        wanted["CUDA_VISIBLE_DEVICES"] = first_gpu(os.environ.get("CUDA_VISIBLE_DEVICES"))
    wanted |= rank_environment(plan, deepspeed_file=None if deepspeed_file is None else str(deepspeed_file))
    wanted |= fsdp_environment(plan)
    is_open = plan.strategy.precision is None or plan.is_default("precision")
    if is_open and _own_precision() is not None:
        del wanted["ACCELERATE_MIXED_PRECISION"]
    _check_gpus_unused(wanted.get("CUDA_VISIBLE_DEVICES"))
    _drop_deepspeed_settings(changes)
    if plan.strategy.engine is Engine.FSDP2:
        _drop_fsdp_settings(wanted, changes)
    if plan.strategy.engine is not Engine.NATIVE and "RANK" not in os.environ:  # python train.py: one rank
        values = ("0", "0", "1", "1", "127.0.0.1", str(free_port(0)))
        wanted |= dict(zip(_RANK_VARIABLES, values, strict=True))
    os.environ.update(wanted)


def _check_gpus_unused(visible: str | None) -> None:
    torch = sys.modules.get("torch")
    own = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible in (None, own) or torch is None or not torch.cuda.is_initialized():
        return
    raise UserError(
        "apply-too-late",
        "the plan comes after the GPUs are in use",
        found=f"CUDA is initialized with CUDA_VISIBLE_DEVICES={own or 'unset'}; the plan needs {visible!r}",
        why="the GPUs that a process sees are fixed by its first use of CUDA",
        fix=f"call zerofit.apply() first in the script, or start it with CUDA_VISIBLE_DEVICES={visible!r}",
    )


def _drop_fsdp_settings(wanted: dict[str, str], changes: Changes) -> None:
    """Drop the launcher's settings of FSDP that the plan's, which follow, don't replace."""
    prefixes = ("FSDP_", "PARALLELISM_CONFIG_", "ACCELERATE_USE_PARALLELISM_CONFIG")
    dropped = [name for name in os.environ if name.startswith(prefixes) and name not in wanted]
    others = [name for name in wanted if name.startswith("FSDP_") and name in os.environ]
    differs = any(os.environ[name].lower() != wanted[name].lower() for name in others)
    for name in dropped:
        del os.environ[name]
    if differs:
        changes.add("FSDP2 is configured as the plan says; the launcher brings its own configuration")


def _drop_deepspeed_settings(changes: Changes) -> None:
    dropped = [name for name in os.environ if name.startswith(_DEEPSPEED) or name in _ALSO_DEEPSPEED]
    for name in dropped:
        del os.environ[name]
    if f"{_DEEPSPEED}CONFIG_FILE" in dropped or f"{_DEEPSPEED}ZERO_STAGE" in dropped:
        changes.add("DeepSpeed is configured as the plan says; the launcher brings its own configuration")
