"""FSDP2's private names in torch, and how accelerate calls it, from torch 2.8 and accelerate 1.10 on."""

from __future__ import annotations

import dataclasses
import functools
import sys
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

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
_MOST_CALLS = 10
"""Python calls between FSDP2 and a module's __setattr__(), at most."""
_AROUND_FORWARD = "_zerofit_gathers_around_forward"
"""Attribute of a model whose forward() has FSDP2's hooks."""


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


def keep_output_formats(plugin: Any) -> None:
    """Leave what a unit returns in the dtype that it was computed in, such as a loss in fp32.

    accelerate's mixed precision casts all of it to 16 bits (1.15, utils/dataclasses.py, set_mixed_precision):
    the loss that a script logs is then rounded by up to 0.4 %, where under DDP it is in fp32. A trace leaves
    accelerate's policy, whose casts allocate no less.
    """
    policy = plugin.mixed_precision_policy
    if getattr(policy, "output_dtype", None) is not None and policy.output_dtype == policy.param_dtype:
        plugin.mixed_precision_policy = dataclasses.replace(policy, output_dtype=None)


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


def prepare_alone(accelerator: Any, objects: tuple[Any, ...]) -> Any:
    """Do what Accelerator.prepare does under FSDP2 with a model without an optimizer, or the reverse.

    It refuses both (accelerate/accelerator.py, 1.15), though an optimizer that is made from a sharded model's
    parameters needs no exchange of them.
    """
    prepared = accelerator._prepare_fsdp2(*objects)
    for item in prepared:
        item._is_accelerate_prepared = True
    return tuple(prepared) if len(prepared) > 1 else prepared[0]


def is_called_by_engine() -> bool:
    """Return True in a call of FSDP2, which puts gathered weights in the places of shards and back."""
    frame = sys._getframe(1)
    for _ in range(_MOST_CALLS):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if ENGINE_FILES in frame.f_code.co_filename:
            return True
    return False


def canonical_parameters(model: Any) -> dict[str, Any]:
    """Return the parameters of a model by names without the parts of torch.compile's and other wrappers."""
    from accelerate.utils.fsdp_utils import fsdp2_canonicalize_names

    return dict(fsdp2_canonicalize_names(dict(model.named_parameters())))


def check_tied(kind: str, names: list[str], model: Any) -> None:
    """Check that sharding has not made two weights out of one.

    Args:
        kind: the model's class before.
        names: of its parameters before.
    """
    apart = sorted({name for name, _ in model.named_parameters()} - {*names})
    if apart:
        raise UserError(
            "fsdp2-unties-weights",
            "FSDP2 would train tied weights apart",
            found=f"{kind}: {', '.join(apart)} is no longer the weight that it is tied to",
            why="accelerate shards the input and output embeddings as one unit, and others that share their "
            "weight, such as an encoder's, with the rest (utils/fsdp_utils.py, fsdp2_prepare_model)",
            fix="train it with DDP or ZeRO: --engine deepspeed",
        )


def units_of(model: Any) -> list[list[Any]]:
    """Return the parameters of each unit of a sharded model, as FSDP2 describes them."""
    return [group.fsdp_params for group in _all_groups(model)]


def gather_each_unit(model: Any) -> None:
    """Gather each unit of a sharded model as in its first forward pass, and reshard it.

    Needed once, as FSDP2 then makes what it keeps: streams, and gathered weights that are resized later.
    """
    from torch.distributed.fsdp import FSDPModule

    model._get_fsdp_state()._lazy_init()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            module.reshard()


def is_sharded(model: Any) -> bool:
    """Return True if FSDP2 has sharded a model, which torch.compile may have wrapped."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # nothing is sharded before this is imported
    return fsdp is not None and isinstance(_inner(model), fsdp.FSDPModule)


def gather_around_generate(model: Any) -> None:
    """Make a sharded model's generate(), which may call a part of it, gather as forward() does.

    Trainer does the same (transformers/trainer.py, _prepare_for_training, 5.23).
    """
    inner = _inner(model)
    if hasattr(inner, "generate") and is_sharded(inner):
        from torch.distributed.fsdp import register_fsdp_forward_method

        register_fsdp_forward_method(inner, "generate")


def reshard_after_evaluation(model: Any) -> None:
    """Make a sharded model release the weights that it has gathered for a pass without gradients.

    FSDP2 keeps those of the root and of the last unit, without resharding all, until a backward pass. Until
    then they are the model's parameters, and what a script writes into them is lost.
    """
    from torch.distributed.fsdp import FSDPModule

    inner = _inner(model)

    def release(*_: Any) -> None:
        import torch

        if not torch.is_grad_enabled():
            for module in inner.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    inner.register_forward_hook(release)


def gather_around_forward(model: Any) -> None:
    """Make a sharded model gather around its forward() rather than around its call.

    What replaces the forward may then run the original several times. Outside of FSDP2's own hooks a unit
    would take itself for the root.
    """
    inner = _inner(model)
    if inner.__dict__.get(_AROUND_FORWARD):
        return
    state, original = inner._get_fsdp_state(), inner.forward
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = state._pre_forward(inner, args, kwargs)
        return state._post_forward(inner, args, original(*args, **kwargs))

    inner.forward = forward
    inner.__dict__[_AROUND_FORWARD] = True


def is_shard(value: Any) -> bool:
    """Return True for a DTensor: of a weight, its gradient or an optimizer state."""
    tensors = sys.modules.get("torch.distributed.tensor")  # there are none before this is imported
    return tensors is not None and isinstance(value, tensors.DTensor)


def has_shards(model: Any) -> bool:
    """Return True if any parameter of a model is sharded."""
    return any(map(is_shard, model.parameters()))


def complete_scalars(module: ModuleType) -> None:
    """Make .item(), float() and bool() of a DTensor return the value over all ranks: a collective.

    torch returns each rank's own part, so that a norm of a sharded gradient differs from rank to rank
    (torch/distributed/tensor/_sharding_prop.py, "special case op", 2.13).

    Args:
        module: torch.distributed.tensor.
    """
    import torch

    def read(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return operator(args[0].full_tensor())

    handlers = module.DTensor._op_dispatcher._custom_op_handlers
    handlers.setdefault(torch.ops.aten._local_scalar_dense.default, read)


def draw_whole(module: ModuleType) -> None:
    """Make random numbers for a DTensor those of the whole tensor, of which each rank takes its part.

    torch draws each rank's part by itself: on CPUs like numbers on all ranks, on GPUs others than for a whole
    tensor (torch/distributed/tensor/_random.py).

    Args:
        module: torch.distributed.tensor.
    """
    import torch

    dispatcher = module.DTensor._op_dispatcher

    def draw(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given, *others = args
        in_place = operator._schema.is_mutable
        whole = given.full_tensor()
        drawn = operator(whole, *others, **kwargs)
        part = module.distribute_tensor(drawn, given.device_mesh, given.placements, src_data_rank=None)
        if not in_place:
            return part
        given._local_tensor.copy_(part._local_tensor)
        return given

    for operator in dispatcher._random_ops:
        if operator is not torch.ops.aten.native_dropout.default:  # of activations, which are no DTensors
            dispatcher._custom_op_handlers.setdefault(operator, draw)


def refuse_hooks(module: ModuleType, refuse: Callable[[], Exception]) -> None:
    """Refuse a hook on the gradient of a sharded parameter, which autograd never computes.

    Args:
        module: torch.distributed.tensor.
        refuse: returns the error.
    """
    from torch.nn import Parameter

    original = module.DTensor.register_hook

    @functools.wraps(original)
    def register_hook(self: Any, hook: Any) -> Any:
        if isinstance(self, Parameter):
            raise refuse()
        return original(self, hook)

    module.DTensor.register_hook = register_hook


def keep_assigned_data(module: ModuleType) -> None:
    """Make `parameter.data = value` change a DTensor's own part, which torch leaves as it was.

    Writes into `.data` are counted as other writes are (Tensor._version).

    Args:
        module: torch.distributed.tensor.
    """
    import torch

    tensor_class = module.DTensor

    def assign(self: Any, value: Any) -> None:
        if not isinstance(value, tensor_class):
            raise RuntimeError("a plain tensor was assigned to the data of a DTensor")
        if (value.shape, value.dtype) != (self.shape, self.dtype):
            raise RuntimeError(f"data of another shape or dtype was assigned to a DTensor: {value.dtype}")
        with torch.no_grad():
            self.detach().copy_(value.detach())

    tensor_class.data = property(lambda self: self.detach(), assign)


def whole_tensor(value: Any, *, keeps: bool) -> Any:
    """Return a tensor in host memory, gathered if it is sharded: a collective; None if it is not kept."""
    whole = value.detach()
    if is_shard(whole):
        whole = whole.full_tensor()
    return whole.to("cpu", copy=True) if keeps else None


def reduces_gradients(model: Any) -> bool:
    """Return True if the next backward pass of a sharded model reduces its gradients."""
    return all(group.reduce_grads for group in _all_groups(model))


@contextmanager
def gradients_unreduced(model: Any) -> Iterator[None]:
    """Keep gradients whole inside, as accelerate's no_sync does, but restore what was set before."""
    inner, before = _inner(model), reduces_gradients(model)
    inner.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        inner.set_requires_gradient_sync(before)


def unreduced_gradients(model: Any) -> Iterator[Any]:
    """Yield the whole gradients of a sharded model that wait for a backward pass that reduces them."""
    for parameter in _held_parameters(model):
        if parameter.unsharded_accumulated_grad is not None:
            yield parameter.unsharded_accumulated_grad
        elif (whole := whole_parameter(parameter)) is not None and whole.grad is not None:
            yield whole.grad


def drop_unreduced_gradients(model: Any) -> None:
    """Forget the whole gradients of a sharded model, which its parameters don't show in .grad."""
    for parameter in _held_parameters(model):
        parameter.unsharded_accumulated_grad = None
        if (whole := whole_parameter(parameter)) is not None:
            whole.grad = None


def _held_parameters(model: Any) -> Iterator[Any]:
    for group in _all_groups(model):
        yield from group.fsdp_params


def _all_groups(model: Any) -> list[Any]:
    """Return the groups of a sharded model; several modules may share one."""
    from torch.distributed.fsdp import FSDPModule

    found: dict[int, Any] = {}
    for module in _inner(model).modules():
        if isinstance(module, FSDPModule):
            found |= {id(group): group for group in _groups(module)}
    return list(found.values())


def _inner(model: Any) -> Any:
    """Return the module that FSDP2 has sharded: torch.compile's wrapper, what is inside of it, or a model."""
    from torch.distributed.fsdp import FSDPModule

    return model if isinstance(model, FSDPModule) else getattr(model, "_modules", {}).get("_orig_mod", model)


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
