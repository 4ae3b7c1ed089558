"""nf4 linear layers for a trace: bitsandbytes' storage and temporaries, without its kernels.

A weight of n elements takes n / 2 bytes. Blocks of 64 share a scale; scales are quantized again to a byte
each, and 256 of them share an fp32 scale: n / 2 + n / 64 + 4 n / 16384 bytes. In addition each layer stores
the mean of its scales, 4 bytes, and the lookup tables of 4 and 8 bits, 64 bytes and 1 KiB.
Source: bitsandbytes 0.50.2, functional.py (quantize_4bit, quantize_blockwise).
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from zerofit.core.upstream.transformers import kept_in_fp32
from zerofit.models.changes.quantization import torch_dtype
from zerofit.models.weight_formats import beside_nf4

if TYPE_CHECKING:
    from zerofit.core.allocation_log import Packing

PER_BYTE = 2
"""Weights per byte."""


def pack_linear_layers(model: Any, packing: Packing) -> None:
    """Replace the layers that transformers would quantize while loading by packed layers.

    Args:
        model: of transformers on fake tensors; it is changed.
    """
    from torch import nn
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    from zerofit.models.changes.adapters import head_modules

    kept = [*(kept_in_fp32(model) or ())]
    if not packing.with_head:
        kept = [*HfQuantizer.get_modules_to_not_convert(model, None, kept), *head_modules(model)]
    for name, module in [*model.named_modules()]:
        if (type(module) is nn.Linear or isinstance(module, Conv1D)) and should_convert_module(name, kept):
            model.set_submodule(name, packed_like(module, packing))


def packs_in_4_bit(module: Any) -> bool:
    """Return True if a module is bitsandbytes' 4-bit linear layer."""
    return any(kind.__name__ == "Linear4bit" for kind in type(module).__mro__[:-1]) and hasattr(
        module, "compute_dtype"
    )


def is_packed(module: Any) -> bool:
    """Return True if a module is one of the packed layers here."""
    return hasattr(module, "computes_in")


def packed_like(module: Any, packing: Packing) -> Any:
    """Return a packed layer that replaces torch's Linear or transformers' Conv1D."""
    from transformers.pytorch_utils import Conv1D

    shape = tuple(module.weight.shape)
    is_turned = isinstance(module, Conv1D)
    return _layer_class()(
        shape[::-1] if is_turned else shape,
        module.bias,
        module.weight.dtype,
        has_two_levels=packing.two_levels,
        stored_in=torch_dtype(packing.stored_in) if packing.stored_in else None,
        saves_inputs=packing.saves_inputs,
        unpacks_to=torch_dtype(packing.unpacks_to) if packing.unpacks_to else None,
    )


def packed_as(layer: Any, bias: Any) -> Any:
    """Return a packed layer that replaces bitsandbytes' own, in its format and with its scales.

    Args:
        layer: a Linear4bit.
        bias: its bias on a fake tensor; None without one.
    """
    has_two_levels = bool(getattr(layer.weight, "compress_statistics", True))
    shape = (layer.out_features, layer.in_features)
    state = getattr(layer.weight, "quant_state", None)
    return _layer_class()(
        shape,
        bias,
        layer.compute_dtype,
        has_two_levels=has_two_levels,
        stored_in=layer.weight.dtype if layer.weight.element_size() > 1 and state is not None else None,
        unpacks_to=state.dtype if state is not None else None,
    )


@cache
def _layer_class() -> Any:
    import torch
    from torch import nn

    class PackedLinear(nn.Linear):  # type: ignore[misc]
        """A frozen linear layer whose weight is stored in nf4.

        peft treats it as torch's own and creates another adapter class than for bitsandbytes' layer: `clones`
        imitates the latter's copy of the output.
        """

        def __init__(
            self,
            shape: tuple[int, int],
            bias: Any,
            dtype: Any,
            *,
            has_two_levels: bool,
            stored_in: Any = None,
            saves_inputs: bool = False,
            unpacks_to: Any = None,
        ) -> None:
            nn.Module.__init__(self)
            self.out_features, self.in_features = shape
            self.computes_in = dtype
            self.clones = False
            self.product = _product(saves_inputs=saves_inputs, unpacks_to=unpacks_to)
            num_elements = shape[0] * shape[1]
            stored_in = stored_in or torch.uint8
            size = -(-num_elements // (PER_BYTE * stored_in.itemsize))
            packed = torch.empty((size, 1), dtype=stored_in)
            self.weight: Any = nn.Parameter(packed, requires_grad=False)
            self.weight.packs_weights = True
            self.bias = bias if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
            for tensor in beside_nf4(num_elements, two_levels=has_two_levels):
                made = torch.empty(tensor.num_elements, dtype=getattr(torch, tensor.dtype))
                self.register_buffer(tensor.name, made, persistent=False)

        def forward(self, inputs: Any) -> Any:
            given = inputs.to(self.computes_in or inputs.dtype)
            bias = self.bias if self.bias is None else self.bias.to(given.dtype)
            shape = (self.out_features, self.in_features)
            output = self.product.apply(given, self.weight, self.scales, bias, shape)
            output = output.to(inputs.dtype)
            return output.clone() if self.clones else output

    return PackedLinear


@cache
def _product(*, saves_inputs: bool, unpacks_to: Any) -> Any:
    import torch

    def unpacked(packed: Any, scales: Any, shape: tuple[int, int], dtype: Any) -> Any:
        return _unpacked(packed, scales, shape, unpacks_to or dtype).to(dtype)

    class Product(torch.autograd.Function):  # type: ignore[misc]
        """The allocations of MatMul4Bit: a dequantized weight per product, and only packed ones saved.

        bitsandbytes' fused kernel, used in the forward pass for few tokens, does not dequantize; the backward
        pass always does (0.50.2, autograd/_functions.py; backends/cuda/ops.py, gemm_4bit).
        """

        @staticmethod
        def forward(ctx: Any, given: Any, packed: Any, scales: Any, bias: Any, shape: Any) -> Any:
            ctx.packed, ctx.scales, ctx.shape = packed, scales, shape
            ctx.kept = given if saves_inputs else None
            return torch.nn.functional.linear(given, unpacked(packed, scales, shape, given.dtype), bias)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            weight = unpacked(ctx.packed, ctx.scales, ctx.shape, gradient.dtype)
            return torch.matmul(gradient, weight), None, None, None, None

    return Product


def _unpacked(packed: Any, scales: Any, shape: tuple[int, int], dtype: Any) -> Any:
    import torch

    if scales.dtype is torch.uint8:
        whole = scales.to(torch.float32)
        whole += 0.0  # the mean of the scales
    return packed.new_zeros(shape, dtype=dtype)


def mend_adapters(model: Any, *, dtype: Any, has_autocast: bool) -> None:
    """Make peft's adapters on packed layers behave as on bitsandbytes' own.

    peft keeps an adapter beside packed weights in fp32 whatever the dtype of others, copies the output of the
    base, and does not cast the input under autocast (peft 0.21, tuners/lora/bnb.py, Linear4bit.forward).

    Args:
        model: an adapted one, on fake tensors; it is changed.
        dtype: torch dtype of adapters.
        has_autocast: whether the model runs under autocast.
    """
    import torch

    kind = _layer_class()
    for module in model.modules():
        base = getattr(module, "base_layer", None)
        if not isinstance(base, kind):
            continue
        base.clones = True
        module.cast_input_dtype_enabled = not has_autocast
        for name in ("lora_A", "lora_B"):
            for part in getattr(module, name).values():
                part.weight = torch.nn.Parameter(torch.empty_like(part.weight, dtype=dtype))
