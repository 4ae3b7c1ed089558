"""Gathering of ZeRO-3's partitioned weights for a call of generate: all at once, or layer by layer.

Gathered at once, every rank has all weights and ZeRO's hooks are disabled, so that ranks don't wait for
each other. DeepSpeed's own state, such as the module order for prefetching, is not changed.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.units import MIB, format_bytes
from zerofit.core.upstream.deepspeed import partition_world_size
from zerofit.generation.free_memory import free_bytes
from zerofit.generation.generation_job import Gather
from zerofit.ranks.exchange import say

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.nn import Module, Parameter

_BUCKET_BYTES = 256 * MIB
"""Weights gathered at a time: a bucket's shards are on the GPU twice for a moment if they come from the CPU
or NVMe. ASSUMPTION: large compared with the latency of a collective, small compared with a GPU."""
_RESERVE = 0.1
"""Share of the allocations that fragmentation may cost: PyTorch's allocator rounds blocks to 2 MiB and shares
segments of 20 MiB. ASSUMPTION. https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management"""
_HOLDER = -1
"""Marks a module in use, whose weights DeepSpeed does not release; DeepSpeed's own ids start at 0. Source:
deepspeed (0.19.8), runtime/zero/partitioned_param_coordinator.py, __release_param."""
_printed: set[str] = set()
"""Messages already printed by this process: a loop that generates in every step prints each only once."""


def missing_bytes(model: Module) -> int:
    """Return the bytes that gathering all weights of a partitioned model allocates on this rank now."""
    return sum(map(gathered_bytes, _missing(model)))


def will_gather(model: Module, gather: Gather, *, needed_bytes: int) -> bool:
    """Return True if the call gathers the weights first; equal on all ranks. Rank 0 prints the decision.

    A collective over all ranks, except with Gather.NEVER.

    Args:
        needed_bytes: memory of the call beside the weights on this rank.
    """
    if gather is Gather.NEVER:
        return False
    if any(offload.zenflow for offload in _offloads(model)):
        return _refuse_zenflow(gather)
    added = missing_bytes(model)
    passing = max((sum(map(gathered_bytes, bucket)) for bucket in _buckets(_missing(model))), default=0)
    taken = added + passing + needed_bytes
    taken, free = _over_all_ranks(taken + int(taken * _RESERVE), free_bytes())
    fits = taken <= free
    whole = sum(
        map(gathered_bytes, partitioned_parameters(model))
    )  # once per model, whatever is gathered now
    sentence = _sentence(gather, fits=fits, added=added, taken=taken, free=free)
    _print_once(sentence, once=f"{gather} {fits} {whole}")
    return fits or gather is Gather.ALWAYS


def _refuse_zenflow(gather: Gather) -> bool:
    why = "ZenFlow stores weights transposed, and its hooks transpose them back at each layer"
    if gather is Gather.ALWAYS:
        raise UserError(
            "gather-under-zenflow",
            "weights can't be gathered at once for a call",
            found="gather=always, and zenflow in the DeepSpeed configuration",
            why=why,
            fix="leave gather at auto, or remove zenflow from zero_optimization",
        )
    _print_once(f"weights are gathered layer by layer for each token: {why}", once="zenflow")
    return False


def _over_all_ranks(taken_bytes: int, free_bytes: int) -> tuple[int, int]:
    """Return the maximum needed and the minimum free over all ranks."""
    import torch
    from deepspeed.accelerator import get_accelerator

    device = get_accelerator().current_device_name()
    least = torch.tensor([-taken_bytes, free_bytes], dtype=torch.int64, device=device)
    torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN)
    return -int(least[0]), int(least[1])


def _sentence(gather: Gather, *, fits: bool, added: int, taken: int, free: int) -> str:
    from deepspeed.accelerator import get_accelerator

    place = "rank" if get_accelerator().device_name() == "cpu" else "GPU"
    weights = f"{format_bytes(added)} of weights on each {place}"
    room = f"{format_bytes(taken)} with cache, activations and a reserve, of {format_bytes(free)} free"
    if fits:
        return f"gathers {weights} once for the call: {room}"
    if gather is Gather.ALWAYS:
        return (
            f"gathers {weights} once for the call, because of gather=always, and may run out of memory: "
            f"{room}"
        )
    return f"weights are gathered layer by layer for each token, since {weights} would be too much: {room}"


def _print_once(line: str, *, once: str) -> None:
    if once not in _printed:
        say(line)
    _printed.add(once)


def is_available(parameter: Parameter) -> bool:
    """Return True if this rank holds the whole parameter now."""
    status = getattr(parameter, "ds_status", None)
    return status is None or status.name == "AVAILABLE"


def partitioned_parameters(model: Module) -> tuple[Parameter, ...]:
    """Return all parameters that ZeRO-3 partitions, without duplicates, in the same order on every rank."""
    found = {}
    for module in model.modules():
        external: Iterable[Any] = getattr(module, "ds_external_parameters", tuple)()
        for _, parameter in (*module.named_parameters(recurse=False), *external):
            if hasattr(parameter, "ds_id"):
                found[parameter.ds_id] = parameter
    return tuple(found[number] for number in sorted(found))


def _missing(model: Module) -> list[Parameter]:
    return [each for each in partitioned_parameters(model) if not is_available(each)]


def gathered_bytes(parameter: Parameter) -> int:
    """Return the bytes of a gathered parameter: each rank's shard with its padding."""
    shard = parameter.ds_tensor
    is_quantized = hasattr(shard, "ds_quant_scale")
    dtype = parameter.dtype if is_quantized else shard.dtype
    return int(shard.ds_numel * partition_world_size(parameter) * dtype.itemsize)


@contextmanager
def gathered_once(model: Module) -> Iterator[None]:
    """Gather all weights on every rank, with ZeRO's hooks disabled; restore both, also after errors.

    A collective: all ranks of the model enter it. Weights that were gathered before, such as inside the
    caller's own GatheredParameters, stay so afterwards.

    Args:
        model: a module partitioned by ZeRO-3, not in the middle of a forward pass.
    """
    from deepspeed.runtime.zero import GatheredParameters

    with ExitStack() as undo:
        offloads = _offloads(model)
        for offload in offloads:
            _end_prefetches(offload)
        for bucket in _buckets(_missing(model)):
            undo.enter_context(GatheredParameters(bucket))
            for parameter in filter(_is_on_nvme, bucket):
                # The few buffers for reading shards are needed for the next ones.
                parameter.nvme_swapper.remove_partition_and_release_buffers([parameter])
        undo.enter_context(_hooks_off(offloads))
        yield


@contextmanager
def layer_by_layer(model: Module) -> Iterator[None]:
    """Let ZeRO's hooks gather weights as needed; at the end, the same weights are gathered as before.

    Weights that are gathered before stay so: the script may be inside its own GatheredParameters and have
    written to them. Others are released: after some training, DeepSpeed 0.19.8 keeps weights for a backward
    pass that does not follow here, since it decides what to release by the order of modules in training.
    Source: deepspeed/runtime/zero/partitioned_param_coordinator.py, __params_to_release.
    """
    every = partitioned_parameters(model)
    partitioned = [each for each in every if each.ds_status.name == "NOT_AVAILABLE"]
    held = [each for each in every if is_available(each)]
    for parameter in held:
        parameter.ds_active_sub_modules.add(_HOLDER)
    try:
        yield
        for offload in _offloads(model):
            _end_prefetches(offload)
    finally:
        for parameter in held:
            parameter.ds_active_sub_modules.discard(_HOLDER)
        for parameter in filter(is_available, partitioned):
            parameter.ds_active_sub_modules.clear()  # an error leaves those of the failed module
            parameter.partition()


def each_whole(model: Module) -> Iterator[Parameter]:
    """Yield each parameter of a model, gathered meanwhile; a collective if ZeRO-3 partitions them.

    Args:
        model: not in the middle of a forward pass.
    """
    missing = {id(each) for each in _missing(model)}
    if not missing:
        yield from model.parameters()
        return
    from deepspeed.runtime.zero import GatheredParameters

    for offload in _offloads(model):
        _end_prefetches(offload)
    for parameter in model.parameters():
        with GatheredParameters([parameter], enabled=id(parameter) in missing):
            yield parameter


def _is_on_nvme(parameter: Parameter) -> bool:
    return bool(parameter.ds_tensor.final_location == "nvme")


def _buckets(parameters: Iterable[Parameter]) -> Iterator[list[Parameter]]:
    """Yield parameters to gather together; one by one from NVMe, which may have a single buffer."""
    bucket: list[Parameter] = []
    num_bytes = 0
    for parameter in parameters:
        is_full = num_bytes + gathered_bytes(parameter) > _BUCKET_BYTES
        if bucket and (is_full or _is_on_nvme(parameter) or _is_on_nvme(bucket[-1])):
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(parameter)
        num_bytes += gathered_bytes(parameter)
    if bucket:
        yield bucket


def has_hooks(model: Module) -> bool:
    """Return True if a model has ZeRO's hooks, which gather and release its weights."""
    return bool(_offloads(model))


def _offloads(model: Module) -> tuple[Any, ...]:
    """Return DeepSpeed's objects that own the hooks of a model, found in the hooks' closures."""
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

    found = {}
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            for held in _closure_contents(hook, depth=3):
                if isinstance(held, DeepSpeedZeRoOffload):
                    found[id(held)] = held
    return tuple(found.values())


def _closure_contents(function: Any, *, depth: int) -> Iterator[Any]:
    """Yield the contents of a function's closure, and of the closures of functions in it."""
    for cell in getattr(function, "__closure__", None) or ():
        try:
            held = cell.cell_contents
        except ValueError:  # an empty cell
            continue
        yield held
        if depth > 1 and callable(held):
            yield from _closure_contents(held, depth=depth - 1)


def _end_prefetches(offload: Any) -> None:
    """Wait for weights that the last forward pass prefetched without using, and release them.

    DeepSpeed does so when the whole model's next pass begins. An encoder's pass comes before that: weights
    still registered as in flight, but released since, can't be gathered again ("already in registry").
    """
    inflight = offload.module.ds_inflight_param_registry
    for parameter, handle in inflight.items():
        handle.wait()
        if not parameter.ds_active_sub_modules:
            parameter.partition()
    inflight.clear()


@contextmanager
def _hooks_off(offloads: Iterable[Any]) -> Iterator[None]:
    """Remove ZeRO's hooks from their modules; restore them at their positions among other hooks."""
    with ExitStack() as undo:
        for hooks, taken in _hooks_of(offloads):
            undo.callback(_put_back, hooks, dict(hooks), taken)
            for number in taken:
                del hooks[number]
        yield


def _hooks_of(offloads: Iterable[Any]) -> list[tuple[dict[int, Any], set[int]]]:
    """Return each module's hooks of one kind, by id, and the ids of ZeRO's."""
    found: dict[int, tuple[dict[int, Any], set[int]]] = {}
    for offload in offloads:
        for handle in (*offload.forward_hooks, *offload.backward_hooks, offload.fwd_pre_hook):
            hooks = handle.hooks_dict_ref()
            if hooks is not None and handle.id in hooks:
                found.setdefault(id(hooks), (hooks, set()))[1].add(handle.id)
    return list(found.values())


def _put_back(hooks: dict[int, Any], before: dict[int, Any], taken: set[int]) -> None:
    """Restore removed hooks, and keep changes that others made to a module's hooks meanwhile."""
    now = dict(hooks)
    hooks.clear()
    hooks.update({number: hook for number, hook in before.items() if number in taken or number in now})
    hooks.update(now)
