"""trace_live: the trace of a model created by a script, for a batch of the script."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.strategy import Precision
from zerofit.core.upstream.accelerate import take_autocast_off
from zerofit.core.upstream.transformers import attention_of
from zerofit.models.changes.quantization import torch_dtype
from zerofit.models.trace.entry import trace_made
from zerofit.models.trace.live_batch import live_batch
from zerofit.models.trace.nested import named_tensors
from zerofit.models.trace.packed import packed_as, packs_in_4_bit
from zerofit.models.trace.packed_formats import MARK, packed_in, packed_int8, packs_in_8_bit
from zerofit.models.trace.prepare import as_requested

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from zerofit.core.allocation_log import Trace, TraceRequest
    from zerofit.models.trace.run import Batch
    from zerofit.models.trace.script_loss import ScriptLoss

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Where torch.nn.Module stores the hooks that its __call__ runs."""

_MAX_SIZES = 8
"""Maximum elements of an integer tensor whose values are kept. ASSUMPTION: these are sizes."""


def trace_live(
    model: Any,
    given: Batch,
    request: TraceRequest,
    *,
    has_tokens: bool = True,
    has_samples: bool = True,
    micro_batch_size: int | None = None,
    loss: ScriptLoss | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Trace:
    """Return the logs of an existing model, which is not changed.

    A copy without values runs, with weights in the request's format, and the request's checkpointing and
    attention. The script's other changes are kept: adapters, frozen parts, configuration, modules in
    evaluation mode.

    Args:
        model: any torch.nn.Module, on any device, without accelerate's wrappers.
        given: the arguments of the first training forward pass.
        has_tokens: whether the samples have lengths, so that the request's replace the batch's own.
        has_samples: whether batches of other sizes can be made; else the batch counts as one sample.
        micro_batch_size: the script's batch size; None if unknown.
        loss: computes the loss of such a batch, if the model alone does not.

    Raises:
        UserError: the model can't run on fake tensors, or not with this batch or request.
    """
    _check_plain(model)
    config = getattr(model, "config", None)
    has_decoder = bool(getattr(config, "is_encoder_decoder", False))
    batch = live_batch(
        given,
        has_tokens=has_tokens,
        has_decoder=has_decoder,
        has_samples=has_samples,
        micro_batch_size=micro_batch_size,
    )

    def make_model() -> Any:
        prepared = prepare_live(model, request)
        if loss is not None:
            loss.bind(prepared, copy_without_values)
        return prepared

    return trace_made(
        make_model,
        batch.feed,
        request,
        name=type(model).__name__,
        attention=attention_of(config) or None,
        loss=loss,
        on_progress=on_progress,
    )


def _check_plain(model: Any) -> None:
    """Check that the weights are plain tensors that fake tensors can represent."""
    packed = {
        id(module.weight) for module in model.modules() if packs_in_4_bit(module) or packs_in_8_bit(module)
    }
    is_marked = any(hasattr(module, MARK) for module in model.modules())
    others = (parameter for parameter in model.parameters() if id(parameter) not in packed)
    odd = {type(other).__name__ for other in others if not _is_plain(other)}
    if odd or (getattr(model, "is_quantized", False) and not packed and not is_marked):
        raise UserError(
            "trace-quantized",
            "a quantized model can't run on fake tensors",
            found=f"{type(model).__name__} with {', '.join(sorted(odd)) or 'quantized weights'}",
            why="its layers dequantize weights in kernels that don't support fake tensors; of libraries' own "
            "layers only those of bitsandbytes are simulated",
            fix="launch with an explicit strategy, such as --zero-stage 2 --micro-batch-size 1",
        )


def _is_plain(parameter: Any) -> bool:
    import torch

    known = (torch.Tensor, torch.nn.Parameter)
    return type(parameter) in known or type(parameter).__name__ == "FakeTensor"


def prepare_live(model: Any, request: TraceRequest) -> Any:
    """Return a copy of a model as requested; a FakeTensorMode must be active."""
    copied = copy_without_values(model, request)
    if request.attention and hasattr(copied, "set_attn_implementation"):
        copied.set_attn_implementation(request.attention)
    was_training = {name: module.training for name, module in copied.named_modules()}
    copied = as_requested(copied, request)
    if model.training:
        for name, module in copied.named_modules():
            module.training = was_training.get(name, True)
    return copied.eval() if request.evaluates else copied


def copy_without_values(
    model: Any, request: TraceRequest | None = None, *, known: Mapping[int, Any] | None = None
) -> Any:
    """Return a copy of a model on fake CPU tensors, without zerofit's hooks.

    Weights in the model's main dtype get the request's. Others, such as norms in fp32, keep theirs if the
    request's equals the model's own.

    Args:
        request: None keeps all dtypes.
        known: existing replacements of objects inside, by id.
    """
    memo: dict[int, Any] = dict(known or {})
    own = main_dtype(weight for weight in model.parameters() if weight.dtype.is_floating_point)
    adapters = tuple(f".{name}." for name in getattr(model, "peft_config", None) or ())
    for name, parameter in model.named_parameters():
        is_adapter = any(adapter in f"{name}." for adapter in adapters)
        dtype = parameter.dtype
        if request is not None:
            dtype = _dtype_of(dtype, own, request, is_adapter=is_adapter)
        memo[id(parameter)] = _fake_parameter(parameter, dtype)
    for module in model.modules():
        for _, tensor in named_tensors([*vars(module).values()]):  # buffers, and other tensors
            if id(tensor) not in memo:
                memo[id(tensor)] = _fake(tensor, tensor.dtype)
        for name in _HOOKS:
            hooks = getattr(module, name)
            memo[id(hooks)] = OrderedDict((key, hook) for key, hook in hooks.items() if not _is_ours(hook))
    for module in model.modules():
        if packs_in_4_bit(module):
            memo[id(module)] = packed_as(module, memo.get(id(module.bias)))
        elif packs_in_8_bit(module):
            memo[id(module)] = packed_int8(module, memo.get(id(module.bias)))
        elif hasattr(module, MARK):
            memo[id(module)] = packed_in(module, getattr(module, MARK), bias=memo.get(id(module.bias)))
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        take_autocast_off(module)
    return copied


def _is_ours(hook: Any) -> bool:
    function = getattr(hook, "func", hook)
    module = getattr(function, "__module__", None) or type(function).__module__
    return str(module).partition(".")[0] == "zerofit"


def main_dtype(parameters: Iterable[Any]) -> Any:
    """Return the dtype of most elements; None if there are none."""
    elements: Counter[Any] = Counter()
    for parameter in parameters:
        elements[parameter.dtype] += parameter.numel()
    return elements.most_common(1)[0][0] if elements else None


def _dtype_of(dtype: Any, own: Any, request: TraceRequest, *, is_adapter: bool) -> Any:
    wanted = torch_dtype(request.weights)
    if not dtype.is_floating_point:
        return dtype
    if is_adapter and request.adapters is not Precision.FP32:
        return torch_dtype(request.adapters)
    keeps = (is_adapter and request.weights is not Precision.FP32) or (dtype != own and wanted == own)
    return dtype if keeps else wanted


def _fake(tensor: Any, dtype: Any) -> Any:
    """Return a tensor without values; small integer tensors keep theirs, which may be sizes."""
    import torch

    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")
    is_known = type(tensor) is torch.Tensor and not tensor.is_meta and not dtype.is_floating_point
    if is_known and tensor.numel() <= _MAX_SIZES:
        made.constant = tensor
    return made


def _fake_parameter(parameter: Any, dtype: Any) -> Any:
    import torch

    return torch.nn.Parameter(_fake(parameter, dtype), requires_grad=parameter.requires_grad)
