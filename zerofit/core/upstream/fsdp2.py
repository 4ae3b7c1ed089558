"""FSDP2's private names in torch, and how accelerate calls it, from torch 2.8 and accelerate 1.10 on."""

from __future__ import annotations

import functools
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ENGINE_FILES = "/_fully_shard/"
"""Part of the paths of FSDP2's own files, torch/distributed/fsdp/_fully_shard/."""
ALL_GATHER, REDUCE, ACCUMULATE = "all-gather", "reduce", "accumulate"
GATHERED_BY = ("init_all_gather_outputs", "alloc_storage", "init_unsharded_param")
"""Functions of FSDP2 that allocate whole weights."""
PART_OF = {
    "foreach_all_gather": ALL_GATHER,
    "foreach_reduce": REDUCE,
    "to_accumulated_grad_if_needed": ACCUMULATE,
}
"""Functions of FSDP2 that allocate buffers and gradients."""
_STREAMS = ("all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream", "all_reduce_stream")
_HOST_COPY = "_fsdp_collectives.py"
_DEVICE_COPY = "_fsdp_param.py"
"""The files that copy an offloaded gradient to the host, and an offloaded shard to the device."""


@contextmanager
def fake_ranks(copies: int, shard_size: int) -> Iterator[Any]:
    """Make this process rank 0 of a process group whose collectives do nothing, and return its mesh.

    A group of this process alone, which a captured script makes, is set aside meanwhile.

    Raises:
        RuntimeError: the process is in a process group with others.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError("this process is in a process group, beside which it can't be rank 0 of another")
    with _without_groups(dist.distributed_c10d):
        dist.init_process_group("fake", rank=0, world_size=copies * shard_size, store=FakeStore())
        try:
            sizes = (copies, shard_size) if copies > 1 else (shard_size,)
            names = ("dp_replicate", "dp_shard") if copies > 1 else ("dp_shard",)
            yield init_device_mesh("cpu", sizes, mesh_dim_names=names)
        finally:
            dist.destroy_process_group()


_GROUPS = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg")
"""torch's dictionaries of process groups (torch/distributed/distributed_c10d.py, _World; 2.8 and 2.13)."""


@contextmanager
def _without_groups(c10d: Any) -> Iterator[None]:
    """Set the process groups of this process aside, and join them again afterwards.

    What follows may destroy all groups that it has made.
    """
    from torch._C._distributed_c10d import _register_process_group

    world, kept = c10d._world, {name: dict(getattr(c10d._world, name)) for name in _GROUPS}
    default, count = world.default_pg, world.group_count
    for name in _GROUPS:
        getattr(world, name).clear()
    c10d._update_default_pg(None)
    try:
        yield
    finally:
        for name, groups in kept.items():
            getattr(world, name).update(groups)
        for group, name in kept["pg_names"].items():
            _register_process_group(name, group)
        c10d._update_default_pg(default)
        world.group_count = count


def classes_to_wrap(model: Any) -> list[str]:
    """Return the classes of transformers' _no_split_modules that can be units.

    accelerate makes each a unit, and the input embeddings another. It fails if one of the classes contains
    them, as BertEmbeddings does ("Cannot concatenate overlapping meshes", accelerate 1.15), and if the model
    has no module of a class.
    """
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    modules: dict[str, list[Any]] = {}
    for module in model.modules():
        modules.setdefault(type(module).__name__, []).append(module)

    def holds_embeddings(module: Any) -> bool:
        return module is not embeddings and any(part is embeddings for part in module.modules())

    return [
        name
        for name in getattr(model, "_no_split_modules", None) or ()
        if modules.get(name) and not any(holds_embeddings(module) for module in modules[name])
    ]


def make_plugin(
    model: Any,
    *,
    reshard_after_forward: bool,
    cpu_offload: bool,
    mixed_precision: str,
    ignored_modules: list[Any] | None = None,
) -> Any:
    """Return accelerate's plugin for FSDP2, with the units of transformers' _no_split_modules.

    Args:
        model: that it is to shard.
        mixed_precision: accelerate's; "no" for none.
        ignored_modules: whose weights are not sharded.
    """
    import os

    from accelerate.utils import FullyShardedDataParallelPlugin

    known = os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING")
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=reshard_after_forward,
        cpu_offload=cpu_offload,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=classes_to_wrap(model),
        activation_checkpointing=False,
        ignored_modules=ignored_modules,
        cpu_ram_efficient_loading=False,
    )
    if known is None:  # the plugin sets it
        os.environ.pop("FSDP_CPU_RAM_EFFICIENT_LOADING", None)
    else:
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = known
    if mixed_precision != "no":
        plugin.set_mixed_precision(mixed_precision)
    return plugin


def shard(model: Any, plugin: Any, mesh: Any, *, mixed_precision: str) -> Any:
    """Shard a model as Accelerator.prepare does, and return it.

    Args:
        plugin: of make_plugin.
        mesh: of one dimension, or of copies and shards.
        mixed_precision: accelerate's; "no" keeps the formats of trained weights.
    """
    import torch
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    names = tuple(mesh.mesh_dim_names)
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh={names: mesh},
        parallelism_config=SimpleNamespace(fsdp_dim_names=names),
        mixed_precision=mixed_precision,
        is_main_process=False,
        device=torch.device("cpu"),
    )
    return fsdp2_prepare_model(accelerator, model)


def units_of(model: Any) -> list[list[Any]]:
    """Return the parameters of each unit of a sharded model, as FSDP2 describes them."""
    from torch.distributed.fsdp import FSDPModule

    units: list[list[Any]] = []
    seen: set[int] = set()
    for module in model.modules():
        for group in _groups(module) if isinstance(module, FSDPModule) else ():
            if id(group) not in seen:  # several modules may be one unit
                seen.add(id(group))
                units.append(group.fsdp_params)
    return units


def _groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.12 and later
    if groups is not None:
        return list(groups)
    group = state._fsdp_param_group
    return [] if group is None else [group]


def sharded_parameter(parameter: Any) -> Any:
    """Return the DTensor of one parameter of a unit."""
    return parameter.sharded_param


def whole_parameter(parameter: Any) -> Any:
    """Return the gathered tensor of one parameter of a unit; None before it was gathered."""
    return getattr(parameter, "_unsharded_param", None)


def padded_elements(parameter: Any) -> int:
    """Return the elements of a shard with its padding."""
    return int(parameter._sharded_param_data.numel())


def local_tensor(tensor: Any) -> Any:
    """Return a DTensor's own part, or the tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def stream_numbers(model: Any) -> dict[int, int]:
    """Return the numbers of FSDP2's CUDA streams by the ids of their stand-ins on the CPU.

    Args:
        model: sharded, after its first forward pass.
    """
    context = model._get_fsdp_state()._comm_ctx
    return {id(getattr(context, name)): number for number, name in enumerate(_STREAMS, start=1)}


@contextmanager
def ends_told(tell: Callable[[], None]) -> Iterator[None]:
    """Call a function whenever FSDP2 begins to end a backward pass."""
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    original = FSDPState._root_post_backward_final_callback

    @functools.wraps(original)
    def final(self: Any) -> None:
        tell()
        original(self)

    FSDPState._root_post_backward_final_callback = final
    try:
        yield
    finally:
        FSDPState._root_post_backward_final_callback = original


def offload_mode(host: list[Any], keep: Any) -> Any:
    """Return a mode in which FSDP2's copies between host and device are copies, on a CPU alone too.

    Args:
        host: takes the tensors that live in host memory.
        keep: a context in which these are made.
    """
    import sys

    import torch
    from torch.overrides import TorchFunctionMode

    class Copies(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            if func is torch.Tensor.pin_memory:
                return args[0]
            if func is torch.Tensor.is_pinned:
                return True
            if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], torch.device):
                caller = sys._getframe(1).f_code.co_filename
                if caller.endswith(_DEVICE_COPY):
                    return args[0].clone()
                if caller.endswith(_HOST_COPY):
                    with keep():
                        host.append(args[0].clone())
                    return host[-1]
            return func(*args, **kwargs)

    return Copies()


def whole_state_dict(model: Any) -> Any:
    """Return the state dict that rank 0 gathers, as Accelerator.get_state_dict does."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=True)
    return get_model_state_dict(model, options=options)


@contextmanager
def host_copies(keep: Any) -> Iterator[None]:
    """Make the copies that a gathered state dict makes on the host real ones, on a CPU alone too.

    Args:
        keep: a context in which these are made.
    """
    import sys

    import torch
    from torch.overrides import TorchFunctionMode

    class Copies(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            is_here = sys._getframe(1).f_code.co_filename.endswith("_state_dict_utils.py")
            if func is torch.Tensor.to and is_here and isinstance(args[1], torch.device):
                with keep():
                    return args[0].clone()
            return func(*args, **(kwargs or {}))

    with Copies():
        yield
