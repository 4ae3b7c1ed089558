"""Access to private attributes of a DeepSpeedEngine, from DeepSpeed 0.18.3 on."""

from __future__ import annotations

import contextlib
import functools
import inspect
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BROADCAST_MODEL = "_broadcast_model"
"""DeepSpeedEngine's method that broadcasts rank 0's weights at construction."""
CONVERT_PARAMETER = "_convert_to_deepspeed_param"
"""zero.Init's method that records a parameter's shape before it is partitioned."""

READ_WEIGHTS = ("save_checkpoint", "save_16bit_model", "_zero3_consolidated_16bit_state_dict")
"""Methods of a DeepSpeedEngine that save or gather its weights, or their master copy."""


def wait_for_every_gather(module: Any) -> None:
    """Make CPU ranks wait for all all-gathers before weights are used.

    Older releases wait only for the last one (seen in 0.18.3 to 0.19.0). On GPUs that suffices; under gloo
    the others may be incomplete, and occasionally a weight is used without its values.

    Args:
        module: deepspeed.runtime.zero.partition_parameters.
    """
    original = module.Init._allgather_params_coalesced
    if "launch_handles[-1].wait()" not in inspect.getsource(original):
        return

    @functools.wraps(original)
    def gather(*args: Any, **kwargs: Any) -> Any:
        handles: list[Any] = []
        collectives = {name: getattr(module.dist, name) for name in ("all_gather", "all_gather_into_tensor")}

        def noted(collective: Any, *tensors: Any, **options: Any) -> Any:
            handles.append(collective(*tensors, **options))
            return handles[-1]

        for name, collective in collectives.items():
            setattr(module.dist, name, functools.partial(noted, collective))
        try:
            result = original(*args, **kwargs)
        finally:
            for name, collective in collectives.items():
                setattr(module.dist, name, collective)
        for handle in handles:
            handle.wait()
        return result

    module.Init._allgather_params_coalesced = gather


def expect_another_backward(engine: Any) -> None:
    """Let a second backward pass after one forward pass add to the gradients of the first.

    By default the second overwrites the first (deepspeed/runtime/zero/stage3.py, clear_backward_seen_flag).
    """
    if hasattr(engine.optimizer, "clear_backward_seen_flag"):
        engine.optimizer.clear_backward_seen_flag()


def reduce_gradients(engine: Any) -> None:
    """Finalize gradients for a step after a backward pass that was not known to be the last.

    Raises:
        UserError: the release can't do that with optimizer states on the CPU.
    """
    optimizer = engine.optimizer
    engine.set_gradient_accumulation_boundary(is_boundary=True)
    if not engine.zero_optimization_partition_gradients():
        engine.allreduce_gradients()
    elif hasattr(optimizer, "finalize_gradient_accumulation_boundary"):  # ZeRO-2 from 0.19.4 on
        optimizer.finalize_gradient_accumulation_boundary()
    elif hasattr(optimizer, "all_grad_tensors"):  # ZeRO-2 before
        _finalize_before_0_19_4(optimizer)


def _finalize_before_0_19_4(optimizer: Any) -> None:
    """Cut out this rank's partition of the gradients, as a backward pass known to be the last does.

    Source: deepspeed/runtime/zero/stage_1_and_2.py, independent_gradient_partition_epilogue (0.18.3).
    """
    from deepspeed.accelerator import get_accelerator

    if optimizer.cpu_offload:
        raise UserError(
            "late-step-needs-newer-deepspeed",
            "this DeepSpeed can't step after a backward pass that it did not know to be the last",
            found="optimizer.step() after loss.backward(), or after another forward pass, under ZeRO-2 with "
            "optimizer states on the CPU",
            why="before DeepSpeed 0.19.4, gradients are copied to the CPU's optimizer only in the last "
            "backward pass",
            fix="install deepspeed>=0.19.4, call accelerator.backward(loss) right before the step, or use "
            "--zero-stage 3",
        )
    for group in range(len(optimizer.bit16_groups)):
        optimizer.averaged_gradients[group] = optimizer.get_flat_partition(
            optimizer.params_in_partition[group],
            optimizer.first_offset[group],
            optimizer.partition_size[group],
            dtype=optimizer.gradient_accumulation_dtype,
            device=get_accelerator().current_device_name(),
            param_group_idx=group,
            return_tensor_list=True,
        )
        optimizer.all_grad_tensors[group] = None


def hook_own_backward(engine: Any, begin: Callable[[], None]) -> None:
    """Make a script's own loss.backward() behave as in data parallelism: unscaled, and without a step.

    The engine notices it by hooks on the outputs of its forward pass (deepspeed/runtime/engine.py, forward),
    which would divide by the configured accumulation steps and treat the pass as a window's last.

    Args:
        engine: a DeepSpeedEngine.
        begin: called when such a backward pass begins.
    """
    original = engine._backward_prologue

    def prologue() -> None:
        if not engine._running_engine_backward:
            begin()
        original()

    engine._backward_prologue = prologue
    engine._backward_prologue_per_tensor = lambda gradient: gradient


def after_each_step(engine: Any, count: Callable[[bool], None]) -> None:
    """Call a function after each step of an engine's optimizer, with True if the step was skipped."""
    original = engine._take_model_step

    def take_model_step(*args: Any, **kwargs: Any) -> None:
        before = engine.skipped_steps
        original(*args, **kwargs)
        count(engine.skipped_steps > before)

    engine._take_model_step = take_model_step


def around_each_step(engine: Any, around: Callable[[Callable[[], None]], None]) -> None:
    """Replace each step of an engine's optimizer by a function, which gets the original to call."""
    original = engine._take_model_step
    engine._take_model_step = lambda *args, **kwargs: around(functools.partial(original, *args, **kwargs))


def forget_gradients(engine: Any) -> None:
    """Drop the gradients accumulated so far.

    ZeRO keeps them outside the parameters (deepspeed/runtime/zero/stage_1_and_2.py, all_grad_tensors); at
    stage 3 zero_grad() makes the next ones overwrite them.
    """
    optimizer = engine.optimizer
    optimizer.zero_grad()
    if hasattr(optimizer, "all_grad_tensors"):
        optimizer.all_grad_tensors.clear()
        optimizer.averaged_gradients.clear()
        optimizer.micro_step_id = -1
    engine.zero_grad()


@contextlib.contextmanager
def clipping_to(engine: Any, max_norm: float) -> Iterator[None]:
    """Clip to this norm inside the context, and as configured again after it.

    ZeRO optimizers read their own field (deepspeed/runtime/zero/stage3.py, unscale_and_clip_grads); at
    stage 0 in fp32 the engine reads its configuration (deepspeed/runtime/engine.py, _take_model_step).

    Args:
        engine: a DeepSpeedEngine.
        max_norm: maximum global gradient norm; 0 disables clipping.
    """
    holders = [(engine._config, "gradient_clipping")]
    if hasattr(engine.optimizer, "clip_grad"):
        holders.append((engine.optimizer, "clip_grad"))
    configured = [getattr(holder, name) for holder, name in holders]
    try:
        for holder, name in holders:
            setattr(holder, name, max_norm)
        yield
    finally:
        for (holder, name), value in zip(holders, configured, strict=True):
            setattr(holder, name, value)


@contextlib.contextmanager
def multiplying_gradients(engine: Any, factor: float) -> Iterator[None]:
    """Multiply all gradients, and so their norm, by a factor in the step inside the context.

    ZeRO optimizers divide by the loss scale as they step, which can be overridden
    (deepspeed/runtime/zero/stage_1_and_2.py, override_loss_scale); without ZeRO the gradients are multiplied.

    Args:
        engine: a DeepSpeedEngine whose gradients are reduced.
        factor: above 0.
    """
    optimizer = engine.optimizer
    if factor == 1.0:
        yield
    elif not engine.zero_optimization():
        for parameter in engine.module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        yield
    else:
        before = optimizer.custom_loss_scaler, optimizer.external_loss_scale
        optimizer.external_loss_scale = optimizer.loss_scale / factor
        optimizer.custom_loss_scaler = True
        try:
            yield
        finally:
            optimizer.custom_loss_scaler, optimizer.external_loss_scale = before


def norm_of_last_step(engine: Any) -> Any:
    """Return the global gradient norm of the last step, a tensor; not finite if the step was skipped."""
    import torch

    if getattr(engine.optimizer, "overflow", False):
        norm = float("inf")
    else:
        norm = float(engine.get_global_grad_norm() or 0.0)
        if norm < 0:  # DeepSpeed's value for a norm that is inf or NaN (deepspeed/runtime/utils.py)
            norm = float("nan")
    return torch.tensor(norm, device=device_of(engine))


def device_of(engine: Any) -> Any:
    """Return the device that an engine trains on; None means torch's default."""
    return getattr(engine, "device", None)


def partition_world_size(parameter: Any) -> int:
    """Return over how many ranks ZeRO-3 partitions a parameter; before 0.19.4 only its group has it."""
    if hasattr(parameter, "ds_zero_partition_world_size"):
        return int(parameter.ds_zero_partition_world_size)
    import torch.distributed as dist

    return int(dist.get_world_size(group=parameter.ds_process_group))


def is_gathered_whole(module: Any) -> bool:
    """Return True if ZeRO-3 gathers a module with its submodules at once (set_z3_leaf_modules)."""
    return getattr(module, "_z3_leaf", False) is True


def refused_keys() -> list[tuple[str, ...]]:
    """Return the paths of removed configuration keys, which DeepSpeed refuses."""
    from deepspeed.runtime import config

    top = [(key,) for key in getattr(config, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", ())]
    return [*top, *(("zero_optimization", key) for key in getattr(config, "_REMOVED_ZERO_CONFIG_KEYS", ()))]


@contextlib.contextmanager
def reading_universal(engine: Any) -> Iterator[None]:
    """Let an engine load checkpoints of ds_to_universal, as the key checkpoint.load_universal does."""
    before = engine._config.load_universal_checkpoint
    engine._config.load_universal_checkpoint = True
    try:
        yield
    finally:
        engine._config.load_universal_checkpoint = before


def base_optimizer(engine: Any) -> Any:
    """Return the optimizer that ZeRO's optimizer wraps."""
    optimizer = engine.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def takes_vocab_parallel_head() -> bool:
    """Return True if tensor_parallel.vocab_parallel_lm_head is a key of this release."""
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig

    return "vocab_parallel_lm_head" in TPTrainingConfig.model_fields


def why_not_cut(model: Any) -> str:
    """Return DeepSpeed's message why AutoTP can't shard a model; empty if it can.

    The checks are those of engine construction (runtime/engine.py, _apply_autotp_partitioning, 0.19.8).
    """
    from deepspeed.module_inject.auto_tp import AutoTP

    with contextlib.suppress(ImportError):  # older releases don't use transformers' plan
        from deepspeed.module_inject.tp_plan_converter import TPPlanConverter
        from deepspeed.runtime.tensor_parallel.config import _get_hf_tp_plan

        plan = _get_hf_tp_plan(model)
        try:
            if plan and TPPlanConverter.convert(plan) is not None:
                return ""
        except ValueError as refusal:
            return str(refusal).partition(". ")[0]
    try:
        AutoTP.tp_parser(model)
    except AssertionError as refusal:
        return str(refusal).partition(". ")[0]
    return ""


@functools.cache
def sequence_groups(size: int) -> Any:
    """Return the object that tells an engine its sequence-parallel groups, created once per process.

    DeepSpeed's own reports that models are sharded over the group too, so its converter can't read the
    engine's checkpoints, and at stage 0 gradients are clipped by a norm that counts each rank's whole model
    (0.19.8, runtime/sequence_parallel/parallel_state_sp.py, runtime/utils.py).

    Args:
        size: consecutive ranks per group.
    """
    import torch.distributed as dist
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    if parallel_state_sp._SEQUENCE_PARALLEL_GROUP is None:
        parallel_state_sp.initialize_sequence_parallel(size)
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    whole_models: dict[str, Callable[[], Any]] = {}
    for kind in ("model_parallel", "tensor_model_parallel"):
        whole_models |= {
            f"get_{kind}_rank": lambda: 0,
            f"get_{kind}_world_size": lambda: 1,
            f"get_{kind}_group": lambda: alone,
        }
    return SimpleNamespace(**{**vars(parallel_state_sp), **whole_models})
