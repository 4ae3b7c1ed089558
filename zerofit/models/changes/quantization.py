"""The quantized base of QLoRA: bitsandbytes' nf4 with double quantization, applied while loading.

Other weights, such as norms and embeddings, keep the format they were loaded in. peft's
prepare_model_for_kbit_training converts all of them to fp32, even embeddings; frozen weights get no small
updates that would need it, and norms compute in fp32 by themselves or under autocast.
"""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.strategy import Precision
from zerofit.models.changes.adapters import head_modules
from zerofit.models.changes.checkpointing import transformers_parts

if TYPE_CHECKING:
    from collections.abc import Iterator

SEE = "https://huggingface.co/docs/transformers/en/quantization/bitsandbytes"


def quantization_config(precision: Precision | None) -> Any:
    """Return transformers' configuration of an nf4 base, for from_pretrained(quantization_config=...).

    Blocks of 64 weights share a scale, and scales are quantized again, as in QLoRA: half a byte and 0.016
    bytes per weight (https://arxiv.org/abs/2305.14314, section 3).

    Args:
        precision: compute dtype of dequantized weights; None means fp32.
    """
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch_dtype(precision or Precision.FP32),
    )


@contextmanager
def whole_heads() -> Iterator[None]:
    """Keep transformers from quantizing new task heads while it loads a model.

    By default it only excludes the last layer, but a head may have two layers to train
    (transformers/quantizers/base.py, get_keys_to_not_convert).
    """
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

    original = Bnb4BitHfQuantizer.get_modules_to_not_convert

    def with_heads(model: Any, *args: Any, **kwargs: Any) -> list[str]:
        return [*original(model, *args, **kwargs), *head_modules(model)]

    quantizer: Any = Bnb4BitHfQuantizer
    quantizer.get_modules_to_not_convert = staticmethod(with_heads)
    try:
        yield
    finally:
        del quantizer.get_modules_to_not_convert


def make_trainable(model: Any) -> None:
    """Prepare a model loaded in nf4 for training and intermediate evaluation.

    Layers without weights in the checkpoint, such as a new pooler, become plain ones: transformers 5.23
    initialises them unquantized, in a class that only computes with quantized weights. The others keep their
    weights in one layout: in evaluation on a CPU, bitsandbytes 0.50 would permanently convert them to another
    one, which supports no backward pass, and only sizes that are a multiple of 32.

    Args:
        model: as returned by from_pretrained.
    """
    import torch

    layers: Any = importlib.import_module("bitsandbytes.nn")  # it has no type annotations
    for name, module in [*model.named_modules()]:
        if not isinstance(module, layers.Linear4bit):
            continue
        module.support_avx512bf16_for_cpu = False
        if not isinstance(module.weight, layers.Params4bit):
            parent, _, own = name.rpartition(".")
            whole = torch.nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
            whole.weight, whole.bias = module.weight, module.bias
            setattr(model.get_submodule(parent), own, whole.train(module.training))


def is_quantized(model: Any) -> bool:
    """Return True if the base of a model was loaded in 4 bit."""
    return any(getattr(part, "is_loaded_in_4bit", False) for part in transformers_parts(model))


def check_quantized(model: Any, *, has_adapters: bool) -> None:
    """Check that a model is a quantized base for adapters.

    Args:
        model: the one that trains.
        has_adapters: whether it gets adapters.

    Raises:
        UserError: it is not quantized, its head is, or nothing in it could train.
    """
    if not has_adapters:
        raise UserError(
            "quantization-needs-lora",
            "quantized weights do not train",
            found="weights in nf4 without LoRA",
            why="updates are smaller than the resolution of 4 bits, so adapters are trained instead",
            fix="add --lora",
        )
    if not is_quantized(model):
        raise UserError(
            "quantization-without-checkpoint",
            "the base is not quantized",
            found=f"weights in nf4, and {type(model).__name__} with whole weights",
            why="weights are quantized while from_pretrained() loads them; a model made from a "
            "configuration loads none, and an untrained model is no base for adapters",
            fix="load the model with from_pretrained() under `zerofit launch`; elsewhere pass "
            "quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4', "
            f"bnb_4bit_use_double_quant=True{_heads_said(model)}); a second model loaded before training "
            "counts as a teacher: load the trained model first",
            see=SEE,
        )
    packed = _packed_heads(model)
    if packed:
        raise UserError(
            "quantized-head",
            "the head is quantized, but must train",
            found=f"weights in nf4, and {type(model).__name__} with {', '.join(packed)} in 4 bit",
            why="a new task head is fully trained, which 4-bit weights can't be",
            fix=f"load it with BitsAndBytesConfig(...{_heads_said(model)})",
            see=SEE,
        )


def _heads_said(model: Any) -> str:
    heads = list(head_modules(model))
    return f", llm_int8_skip_modules={heads}" if heads else ""


def _packed_heads(model: Any) -> list[str]:
    import torch

    return [
        name
        for name in head_modules(model)
        if any(one.dtype is torch.uint8 for one in model.get_submodule(name).parameters())
    ]


def store_frozen_in(model: Any, precision: Precision) -> tuple[str, ...]:
    """Store the frozen weights under adapters in 16 bit, which saves autocast's copies.

    Autocast alone leaves embeddings and norms in fp32, and therefore the activations between blocks. Measured
    on small random models in bf16: the error of logits against fp32 is 0.0239 instead of 0.0170 (Llama),
    0.0163 instead of 0.0112 (BERT).

    Args:
        model: an adapted one, before it is wrapped for training.
        precision: BF16 or FP16.

    Returns:
        What was changed, in words.
    """
    import torch

    dtype, num_changed = torch_dtype(precision), 0
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.dtype is torch.float32:
            parameter.data = parameter.data.to(dtype)
            num_changed += 1
    return (
        (f"the frozen weights, including embeddings and norms, are stored in {precision}",)
        if num_changed
        else ()
    )


def torch_dtype(precision: Precision) -> Any:
    """Return torch's dtype for a precision."""
    import torch

    return {Precision.FP32: torch.float32, Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}[
        precision
    ]
