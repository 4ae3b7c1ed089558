"""Linear layers of a trace in formats of quantized checkpoints: their tensors, and what products allocate."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from zerofit.core.allocation_log import Packing
from zerofit.core.upstream.transformers import kept_in_fp32
from zerofit.models.trace.packed import packed_like
from zerofit.models.weight_formats import Product, format_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.models.weight_formats import WeightFormat

MARK = "zerofit_format"
"""Attribute of a linear layer with the format that its weight would be loaded in."""
_BITS_4 = "bitsandbytes_4bit"


def take_format(config: Any) -> WeightFormat | None:
    """Take the quantized format off a configuration of transformers, and return it; None if it has none."""
    found = None
    for part in (config, getattr(config, "text_config", None)):
        said = getattr(part, "quantization_config", None)
        if part is None or said is None:
            continue
        values = said if isinstance(said, dict) else said.to_dict()
        found = found or format_of({"quantization_config": values})
        del part.quantization_config
    return found


def pack_checkpoint(model: Any, form: WeightFormat) -> None:
    """Replace the layers that a checkpoint in a format has packed.

    Args:
        model: of transformers on fake tensors; it is changed.
    """
    for name, module in [*layers_in(model, form)]:
        model.set_submodule(name, packed_in(module, form))


def mark_layers(model: Any, form: WeightFormat) -> None:
    """Mark the layers of a wide model that would be loaded in a format, so that its trace packs them."""
    for _, module in layers_in(model, form):
        setattr(module, MARK, form)


def layers_in(model: Any, form: WeightFormat) -> Iterator[tuple[str, Any]]:
    """Yield names and linear layers that are packed; experts in one tensor stay wide."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    if form.is_whole:
        return
    fp32 = [*(kept_in_fp32(model) or ())]
    skipped = None if form.kept is None else [*form.kept]
    kept = HfQuantizer.get_modules_to_not_convert(model, skipped, fp32, form.kept_beside_default)
    for name, module in model.named_modules():
        if (type(module) is nn.Linear or isinstance(module, Conv1D)) and should_convert_module(name, kept):
            yield name, module


def packed_in(module: Any, form: WeightFormat, *, bias: Any = None) -> Any:
    """Return a packed layer that replaces torch's Linear or transformers' Conv1D.

    Args:
        bias: on a fake tensor, in place of the layer's own.
    """
    from transformers.pytorch_utils import Conv1D

    if form.method == _BITS_4:
        return packed_like(module, Packing(two_levels=form.two_levels))
    shape = tuple(module.weight.shape)
    out_features, in_features = shape[::-1] if isinstance(module, Conv1D) else shape
    own = module.bias if bias is None else bias
    return _layer_class()(out_features, in_features, own, module.weight.dtype, form)


def packed_int8(layer: Any, bias: Any) -> Any:
    """Return a packed layer that replaces bitsandbytes' Linear8bitLt.

    Args:
        bias: its bias on a fake tensor; None without one.
    """
    form = format_of({"quantization_config": {"load_in_8bit": True}})
    assert form is not None
    return _layer_class()(layer.out_features, layer.in_features, bias, None, form)


def packs_in_8_bit(module: Any) -> bool:
    """Return True if a module is bitsandbytes' 8-bit linear layer with weights quantized once."""
    is_own = any(kind.__name__ == "Linear8bitLt" for kind in type(module).__mro__[:-1])
    return is_own and not getattr(getattr(module, "state", None), "has_fp16_weights", True)


@cache
def _layer_class() -> Any:
    import torch
    from torch import nn

    class FormatLinear(nn.Linear):  # type: ignore[misc]
        """A frozen linear layer whose weight is stored in a checkpoint's format."""

        def __init__(
            self, out_features: int, in_features: int, bias: Any, dtype: Any, form: WeightFormat
        ) -> None:
            nn.Module.__init__(self)
            self.out_features, self.in_features = out_features, in_features
            self.computes_in = dtype
            self.clones = False
            self.multiply = _product(form.product)
            first, *others = form.stored(out_features, in_features)
            packed = torch.empty(first.num_elements, dtype=getattr(torch, first.dtype))
            self.weight: Any = nn.Parameter(packed, requires_grad=False)
            self.weight.packs_weights = True
            self.bias = bias if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
            for tensor in others:
                kind = getattr(torch, tensor.dtype)
                self.register_buffer(
                    tensor.name, torch.empty(tensor.num_elements, dtype=kind), persistent=False
                )

        def forward(self, inputs: Any) -> Any:
            output = self.multiply(inputs, self.weight, (self.out_features, self.in_features))
            return output if self.bias is None else output + self.bias.to(output.dtype)

    return FormatLinear


@cache
def _product(kind: Product) -> Any:
    """Return the function of input, packed weight and shape that allocates what a format's product does."""
    import torch

    def unpacked(packed: Any, shape: tuple[int, int], dtype: Any) -> Any:
        return packed.new_zeros(shape, dtype=dtype)

    def whole(given: Any, packed: Any, shape: tuple[int, int]) -> Any:
        return torch.nn.functional.linear(given, unpacked(packed, shape, given.dtype))

    class Unpacking(torch.autograd.Function):  # type: ignore[misc]
        """A weight is unpacked for each product; the backward pass needs it for the input's gradient."""

        @staticmethod
        def forward(ctx: Any, given: Any, packed: Any, shape: Any) -> Any:
            ctx.packed, ctx.shape = packed, shape
            ctx.kept = None if kind in (Product.UNPACKS, Product.FP8) else given
            if kind is Product.INT8:
                return _int8_product(given, packed, shape)
            if kind is Product.FP8:
                return _fp8_product(given, packed, shape)
            return torch.nn.functional.linear(given, unpacked(packed, shape, given.dtype))

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            weight = unpacked(ctx.packed, ctx.shape, gradient.dtype)
            if kind is Product.COPIES_WHOLE and gradient.dim() == 3:
                copies = weight.unsqueeze(0).repeat(gradient.shape[0], 1, 1)
                return torch.bmm(gradient, copies), None, None
            return torch.matmul(gradient, weight), None, None

    return whole if kind is Product.KEEPS_WHOLE else Unpacking.apply


def _int8_product(given: Any, packed: Any, shape: tuple[int, int]) -> Any:
    """Allocate what LLM.int8() does for a product, but for the copies of outlier columns.

    The input is cast to fp16 and searched for outliers, its rows are quantized, the int32 product is scaled
    to fp16, and that is cast (bitsandbytes 0.50.2, MatMul8bitLt.forward; backends/cuda/ops.py,
    int8_vectorwise_quant, int8_linear_matmul, int8_mm_dequant).
    """
    import torch

    rows = given.reshape(-1, given.shape[-1])
    half = rows.to(torch.float16)
    row_scales = half.new_empty(half.shape[0], dtype=torch.float32)
    quantized = torch.empty_like(half, dtype=torch.int8)
    outliers = half.abs() >= 6.0
    del outliers, half
    whole = quantized.new_empty((quantized.shape[0], shape[0]), dtype=torch.int32)
    output = _multiplied(rows, packed, shape, torch.float16)
    del whole, row_scales, quantized
    return output.to(given.dtype).reshape(*given.shape[:-1], shape[0])


def _fp8_product(given: Any, packed: Any, shape: tuple[int, int]) -> Any:
    """Allocate what FP8Linear does for a product: the input's rows in FP8, their scales, and the output.

    Source: transformers 5.23, integrations/finegrained_fp8.py (fp8_linear).
    """
    import torch

    rows = given.reshape(-1, given.shape[-1])
    quantized = torch.empty_like(rows, dtype=torch.uint8)
    scales = rows.new_empty((rows.shape[0], -(-rows.shape[1] // 128)), dtype=torch.float32)
    output = _multiplied(rows, packed, shape, given.dtype)
    del quantized, scales
    return output.reshape(*given.shape[:-1], shape[0])


def _multiplied(rows: Any, packed: Any, shape: tuple[int, int], dtype: Any) -> Any:
    """Return the product of rows with a weight that a kernel reads packed: one that takes no memory here."""
    weight = packed.new_zeros((1, 1), dtype=dtype).expand(shape)
    return rows.new_empty((1, 1), dtype=dtype).expand(rows.shape) @ weight.t()
