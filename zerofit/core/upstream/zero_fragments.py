"""This rank's part of a parameter in ZeRO's optimizer, from DeepSpeed 0.18.3 on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Fragment:
    """The elements of one parameter that this rank's optimizer steps.

    All tensors are one-dimensional views of the engine's own: writing to them changes what is trained.
    """

    weights: Any
    """In the training precision, as the next forward pass uses them."""
    master: Any
    """The copy that the optimizer steps; on the CPU if the optimizer is offloaded."""
    states: tuple[Any, ...]
    """Optimizer states with one value per element."""
    shard: Any = None
    """ZeRO-3's shard of a parameter that is gathered now, whose next gather reads it; else None."""


def fragment_of(engine: Any, parameter: Any) -> Fragment | None:
    """Return this rank's fragment of a trained parameter.

    Returns:
        None if other ranks step all of the parameter, if DeepSpeed holds the fragment in a file or is moving
        it, and without ZeRO.
    """
    if hasattr(parameter, "ds_tensor"):
        return _of_shard(engine.optimizer, parameter)
    mapping = getattr(parameter, "_hp_mapping", None)  # deepspeed/utils/mixed_precision_linkage.py
    if mapping is None:
        return None
    address, place = mapping.lp_fragment_address, mapping.hp_fragment_address
    optimizer = engine.optimizer
    flats = getattr(optimizer, "single_partition_of_fp32_groups", None)
    if flats is None:  # bf16 without ZeRO (deepspeed/runtime/bf16_optimizer.py)
        flats = optimizer.fp32_groups_flat_partition
    return Fragment(
        weights=parameter.detach().view(-1).narrow(0, address.start, address.numel),
        master=mapping.hp_fragment.detach(),
        states=_states(optimizer, flats[mapping.param_group_index], place.start, place.numel),
    )


def _of_shard(optimizer: Any, parameter: Any) -> Fragment | None:
    """Return the fragment of a parameter that ZeRO-3 shards (deepspeed/runtime/zero/stage3.py)."""
    position = optimizer.grad_position.get(parameter.ds_id)
    if position is None or getattr(optimizer, "swap_optimizer", False):
        return None
    group, offset, length = position
    flat, shard = optimizer.fp32_partitioned_groups_flat[group], parameter.ds_tensor.detach().view(-1)
    first = shard.numel() * parameter.ds_process_group.rank()
    size = min(length, shard.numel(), parameter.ds_numel - first)  # the last rank's shard is padded
    status = parameter.ds_status.name
    if flat is None or size <= 0 or status == "INFLIGHT" or shard.numel() < length:
        return None
    is_whole = status == "AVAILABLE"
    shard = shard.narrow(0, 0, size)
    return Fragment(
        weights=parameter.detach().view(-1).narrow(0, first, size) if is_whole else shard,
        master=flat.detach().narrow(0, offset, size),
        states=_states(optimizer, flat, offset, size),
        shard=shard if is_whole else None,
    )


def _states(optimizer: Any, flat: Any, offset: int, size: int) -> tuple[Any, ...]:
    states = optimizer.optimizer.state.get(flat, {}).values()
    return tuple(
        state.detach().view(-1).narrow(0, offset, size)
        for state in states
        if getattr(state, "shape", None) == flat.shape
    )


def zero_gradient(engine: Any, parameter: Any) -> None:
    """Zero this rank's part of a parameter's gradient, where an earlier window's would be stepped again.

    ZeRO-3 and offload keep gradients in buffers that only a backward pass overwrites (stage3.py,
    __param_id_to_grad_partition; stage_1_and_2.py, async_inplace_copy_grad_to_fp32_buffer_from_gpu).
    """
    optimizer = engine.optimizer
    if hasattr(parameter, "ds_tensor"):
        partitions = getattr(optimizer, "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition", {})
        if parameter.ds_id in partitions:
            partitions[parameter.ds_id].zero_()
        position = optimizer.grad_position.get(parameter.ds_id)
        if position is not None:
            _zero_part(optimizer.fp32_partitioned_groups_flat[position[0]], *position[1:])
    elif (mapping := getattr(parameter, "_hp_mapping", None)) is not None and mapping.use_offload:
        place = mapping.hp_fragment_address
        _zero_part(
            optimizer.single_partition_of_fp32_groups[mapping.param_group_index], place.start, place.numel
        )


def _zero_part(flat: Any, start: int, size: int) -> None:
    gradient = getattr(flat, "grad", None)
    if gradient is not None and gradient.numel() >= start + size:
        gradient.view(-1).narrow(0, start, size).zero_()


def is_gathered(parameter: Any) -> bool:
    """Return True if a parameter's weights are all there: always, but for ZeRO-3's."""
    return not hasattr(parameter, "ds_tensor") or parameter.ds_status.name == "AVAILABLE"


def holds_master_in_files(engine: Any) -> bool:
    """Return True if the master copy is in files, where no fragment of it can be read or written."""
    return bool(getattr(engine.optimizer, "swap_optimizer", False))


def rounds_weights_otherwise(engine: Any) -> bool:
    """Return True if the weights are no rounding of the master copy: quantized, or updated later.

    ZeRO++ gathers quantized weights; ZenFlow and SuperOffload step on the CPU while the GPU goes on.
    """
    zero = engine._config.zero_config
    later = any(getattr(zero, name, None) for name in ("zenflow", "super_offload"))
    return later or bool(getattr(zero, "zero_quantized_weights", False))


def has_unsplit_states(engine: Any) -> bool:
    """Return True if some states belong to several parameters at once, as scales of 8-bit blocks do."""
    return any(
        getattr(state, "numel", int)() > 1 and state.shape != flat.shape
        for flat, states in engine.optimizer.optimizer.state.items()
        for state in states.values()
    )


def counts_steps(engine: Any) -> bool:
    """Return True if the optimizer corrects its steps by how many there were, as Adam does."""
    optimizer = engine.optimizer.optimizer
    in_states = any("step" in states for states in optimizer.state.values())
    return in_states or any("step" in group for group in optimizer.param_groups)


def after_gathering(act: Callable[[list[Any]], None]) -> None:
    """Call a function after each GatheredParameters that broadcasts what one rank has written."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    original = GatheredParameters.__exit__

    def leave(self: Any, *exception: Any) -> Any:
        result = original(self, *exception)
        if getattr(self, "src_rank", None) is not None:
            act(self.params)
        return result

    GatheredParameters.__exit__ = leave
