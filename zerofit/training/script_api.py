"""The explicit API: a plan applied by the script itself, in subclasses that patch no one else's classes."""

from __future__ import annotations

import copyreg
import os
import sys
from dataclasses import replace
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.checking.engine import check
from zerofit.checking.inputs.strategy import situation_of_strategy
from zerofit.checking.rule import Severity
from zerofit.checking.rules import ALL_RULES
from zerofit.configs.write.command import MIXED_PRECISION
from zerofit.configs.write.deepspeed import deepspeed_config
from zerofit.core.errors import UserError
from zerofit.core.plan import Plan, Topology, plan_from_json
from zerofit.core.strategy import Engine, Strategy, ZeroStage
from zerofit.machine.port import free_port
from zerofit.machine.this_node import probe_machine
from zerofit.machine.versions import probe_versions
from zerofit.training.changes import Changes
from zerofit.training.hooks import install_accelerator, install_trainer
from zerofit.training.settings import settings_of
from zerofit.training.setup.accelerator_arguments import set_number_formats
from zerofit.training.setup.trainer_arguments import install_arguments, script_batches
from zerofit.training.step.trainer_loss import overridden

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import Trainer, TrainingArguments

    from zerofit.training.settings import AppliedSettings

_HOOKED_BY = ("zerofit.training.runner", "zerofit.scripts.capture.child")
"""Modules that run a script with their own hooks: a plan already exists, or is made from what they
observe."""
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_OF_THE_MODEL = ("freeze", "lora", "quantization", "attention", "liger")
"""Fields of Strategy without TrainingArguments: a Trainer class has to apply them."""


def accelerator(
    *, plan: Plan | Strategy | str | os.PathLike[str] | None = None, **arguments: Any
) -> Accelerator:
    """Return an Accelerator for a plan.

    Args:
        plan: a plan, the path of a plan file, or a strategy for the current ranks; None uses the plan of
            `zerofit launch`.
        arguments: those of Accelerator.

    Raises:
        UserError: there is no plan, or it is for another number of ranks.
    """
    from accelerate import Accelerator

    if _is_hooked():
        return Accelerator(**arguments)
    found = _checked(plan)
    _prepare_process(found)
    strategy = found.strategy
    if strategy.precision is not None and not (
        found.is_default("precision") and "mixed_precision" in arguments
    ):
        arguments.setdefault("mixed_precision", MIXED_PRECISION[strategy.precision])
    if strategy.compile:
        arguments.setdefault("dynamo_backend", "inductor")
    if found.topology.on_cpu and strategy.engine is Engine.NATIVE:
        arguments.setdefault("cpu", True)
    return _accelerator_class(settings_of(found), _changes())(**arguments)


def training_arguments(
    *,
    plan: Plan | Strategy | str | os.PathLike[str] | None = None,
    cls: type[TrainingArguments] | None = None,
    **fields: Any,
) -> TrainingArguments:
    """Return TrainingArguments for a plan; create them before the model, which ZeRO-3 partitions.

    A plain Trainer makes the plan's micro-batches by its own accumulation; `zerofit.trainer` restores the
    script's batches and splits its forward pass, unless both are known to be equivalent.

    Args:
        plan: a plan, the path of a plan file, or a strategy for the current ranks; None uses the plan of
            `zerofit launch`.
        cls: TrainingArguments or a subclass.
        fields: those of the class.

    Raises:
        UserError: there is no plan, or it is for other ranks or another global batch.
    """
    from transformers import TrainingArguments

    base: Any = cls or TrainingArguments
    if _is_hooked():
        return base(**fields)
    found = _checked(plan)
    if model_changes := [name for name in _OF_THE_MODEL if getattr(found.strategy, name)]:
        _changes().add(
            f"{', '.join(model_changes)}: zerofit.trainer(args=...) applies that to the model; a plain "
            "Trainer(args=...) leaves the model as it is"
        )
    _prepare_process(found)
    if found.strategy.compile:
        fields.setdefault("torch_compile", True)
    if found.topology.on_cpu and found.strategy.engine is Engine.NATIVE:
        fields.setdefault("use_cpu", True)
    elif found.topology.on_cpu:
        fields.setdefault("accelerator_config", {"use_configured_state": True})
    settings = replace(settings_of(found), trainer_accumulates=True)
    planned = planned_arguments(base, settings, _changes(), config=_deepspeed_config(found))
    planned._zerofit_plan = found
    return planned(**fields)


def trainer(*, args: TrainingArguments, cls: type[Trainer] | None = None, **arguments: Any) -> Trainer:
    """Return a Trainer that trains under a plan with unchanged results.

    It runs the script's own batches in micro-batches inside the forward pass, weights the loss of accumulated
    batches if the model does not, and keeps a given optimizer under DeepSpeed.

    Args:
        args: from zerofit.training_arguments().
        cls: Trainer or a subclass.
        arguments: the others of the class.

    Raises:
        UserError: the arguments were created in another way.
    """
    import transformers

    base: Any = cls or transformers.Trainer
    if _is_hooked():
        return base(args=args, **arguments)
    plan: Plan | None = getattr(args, "_zerofit_plan", None)
    if plan is None:
        raise UserError(
            "arguments-without-plan",
            "these TrainingArguments have no plan",
            found=f"zerofit.trainer(args=...) with {type(args).__name__}",
            why="arguments must have their plan before the model is created",
            fix="create them with zerofit.training_arguments(plan=...)",
        )
    settings = _trainer_settings(plan, base, arguments)
    if not settings.trainer_accumulates and script_batches(args) is not None:
        _changes().add("zerofit.trainer takes the script's own batches again, and splits their forward pass")
    return planned_trainer(base, settings, _changes())(args=args, **arguments)


def planned_arguments(
    base: Any, settings: AppliedSettings, changes: Changes, *, config: dict[str, Any] | None = None
) -> Any:
    """Return a subclass of TrainingArguments that applies a plan.

    Args:
        base: TrainingArguments or a subclass.
        settings: the plan's.
        changes: receives changes.
        config: DeepSpeed's configuration; None without DeepSpeed.
    """

    class PlannedArguments(base):  # type: ignore[misc]
        def __post_init__(self) -> None:
            if config is not None:
                self.deepspeed = config
            super().__post_init__()

        def __reduce_ex__(self, protocol: Any) -> Any:
            # Trainer pickles its arguments into each checkpoint, which must be readable without this class.
            return copyreg._reconstructor, (base, object, None), self.__dict__  # type: ignore[attr-defined]

    install_arguments(PlannedArguments, settings, changes)
    return _named_as(base, PlannedArguments)


def planned_trainer(base: Any, settings: AppliedSettings, changes: Changes) -> Any:
    """Return a subclass of Trainer that trains as planned.

    Args:
        base: Trainer or a subclass.
        settings: the plan's.
        changes: receives changes.
    """
    planned = _accelerator_class(settings, changes)

    class PlannedTrainer(base):  # type: ignore[misc]
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.accelerator.__class__ = planned
            self.accelerator._zerofit_by_script = False
            set_number_formats(settings, changes)

    install_trainer(PlannedTrainer, settings, changes)
    return _named_as(base, PlannedTrainer)


def _accelerator_class(settings: AppliedSettings, changes: Changes) -> Any:
    from accelerate import Accelerator

    class PlannedAccelerator(Accelerator):  # type: ignore[misc]
        @wraps(Accelerator.__init__)  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if (config := _deepspeed_config(settings.plan)) is not None:
                kwargs["deepspeed_plugin"] = _plugin(config)
            super().__init__(*args, **kwargs)

    install_accelerator(PlannedAccelerator, settings, changes)
    return _named_as(Accelerator, PlannedAccelerator)


def _named_as(base: Any, planned: Any) -> Any:
    """Give a class the name of its base, for messages."""
    planned.__name__ = base.__name__
    planned.__qualname__ = base.__qualname__
    return planned


def _trainer_settings(plan: Plan, base: Any, arguments: dict[str, Any]) -> AppliedSettings:
    """Return settings in which Trainer makes its micro-batches itself only if that changes nothing.

    The plan knows it for the captured script; a custom loss, which may be a mean over each batch, is checked
    again.
    """
    settings = settings_of(plan)
    is_own = bool(overridden(base)) or arguments.get("compute_loss_func") is not None
    return replace(settings, trainer_accumulates=settings.trainer_accumulates and not is_own)


def _deepspeed_config(plan: Plan) -> dict[str, Any] | None:
    """Return the plan's DeepSpeed configuration, with "auto" for the script's own settings."""
    if plan.strategy.engine is not Engine.DEEPSPEED:
        return None
    open_fields = ("precision", "micro_batch_size", "gradient_accumulation_steps", "gradient_clipping")
    strategy = replace(plan.strategy, **dict.fromkeys(open_fields))  # type: ignore[arg-type]
    return deepspeed_config(strategy, trains=plan.trains)


def _plugin(config: dict[str, Any]) -> Any:
    from accelerate import DeepSpeedPlugin

    partitions_parameters = config["zero_optimization"]["stage"] == ZeroStage.PARAMETERS
    return DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=partitions_parameters)


def _is_hooked() -> bool:
    """Return True if zerofit runs this script with its hooks."""
    return any(name in sys.orig_argv for name in _HOOKED_BY)


@cache
def _changes() -> Changes:
    """Return the only list of this process: repeated changes are reported once."""
    return Changes(announce=os.environ.get("RANK", "0") == "0")


def _checked(plan: Plan | Strategy | str | os.PathLike[str] | None) -> Plan:
    if plan is None:
        raise UserError(
            "no-plan",
            "the script requests a plan from zerofit, and there is none",
            found="no plan=, and no `zerofit launch` around the script",
            why="zerofit.accelerator() and zerofit.training_arguments() apply a plan, but don't make one",
            fix="write one with `zerofit plan SCRIPT --output plan.json` and give plan='plan.json', give "
            "plan=zerofit.Strategy(...), or start the script with `zerofit launch`",
        )
    if isinstance(plan, Strategy):
        return plan_of_strategy(plan)
    found = plan if isinstance(plan, Plan) else _read(Path(plan))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != found.topology.world_size:
        raise UserError(
            "world-size-differs",
            "the plan is for another number of ranks",
            found=f"{world_size} ranks, and a plan for {found.topology.world_size}",
            why="batches and memory of each rank depend on how many share the work",
            fix=f"start {found.topology.world_size} ranks (accelerate launch --num_processes "
            f"{found.topology.world_size}), or plan again",
        )
    topology = found.topology
    if topology.sample_group_size > 1:
        kind = "tensor" if topology.tensor_parallel_size > 1 else "sequence"
        raise UserError(
            f"{kind}-parallel-in-script",
            f"a script can't apply a plan with {kind} parallelism by itself",
            found=f"{kind}-parallel groups of {topology.sample_group_size} ranks in the plan",
            why="accelerate's counts per rank must be patched when it is imported, which is too late here",
            fix="start the script with `zerofit launch --plan FILE`",
        )
    return found


def _read(path: Path) -> Plan:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            "plan-file-missing",
            "the plan file can't be read",
            found=f"plan={str(path)!r}: {error.strerror}",
            why="the script is to train as that plan says",
            fix="write it with `zerofit plan SCRIPT --output FILE`",
        ) from None
    return plan_from_json(text, name=str(path))


def _prepare_process(plan: Plan) -> None:
    """Set environment variables that DeepSpeed needs, and that a launcher may not have set."""
    if plan.strategy.engine is not Engine.DEEPSPEED:
        return
    if not any(name in os.environ for name in _RANK_VARIABLES):  # python train.py: one rank
        values = ("0", "0", "1", "127.0.0.1", str(free_port(0)))
        os.environ.update(zip(_RANK_VARIABLES, values, strict=True))
    if plan.topology.on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        from accelerate import PartialState

        # Without a backend accelerate treats each CPU rank as rank 0 of 1 (accelerate/state.py).
        PartialState(backend="gloo")


def plan_of_strategy(strategy: Strategy) -> Plan:
    """Return a plan that runs a strategy on the current ranks and machine.

    The ranks are the launcher's WORLD_SIZE, on the CPU if torch sees no GPU or accelerate was told to ignore
    it.

    Raises:
        UserError: a rule forbids the strategy.
    """
    import torch

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    wants_cpu = os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true", "yes")
    plan = Plan(
        strategy=strategy,
        topology=Topology(
            num_nodes=max(1, world_size // ranks_per_node),
            world_size=world_size,
            on_cpu=wants_cpu or not torch.cuda.is_available(),
        ),
        machine=probe_machine(may_be_unreadable=True),
        versions=probe_versions(),
    )
    situation = situation_of_strategy(strategy, topology=plan.topology, versions=plan.versions, typed=())
    for finding in check(situation, rules=ALL_RULES).of(Severity.ERROR):
        raise finding.as_error()
    return plan
