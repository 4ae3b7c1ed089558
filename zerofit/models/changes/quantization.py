"""The quantized base of QLoRA: bitsandbytes' nf4 with double quantization, applied while loading.

Other weights, such as norms and embeddings, keep their dtype. peft's prepare_model_for_kbit_training converts
all of them to fp32, even embeddings. Frozen weights don't need it, and norms compute in fp32 by themselves or
under autocast.
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


def quantization_config(precision: Precision | None, storage: Precision | None = None) -> Any:
    """Return the BitsAndBytesConfig of an nf4 base.

    Blocks of 64 weights share a scale, and scales are quantized again, as in QLoRA: half a byte and 0.016
    bytes per weight (https://arxiv.org/abs/2305.14314, section 3).

    Args:
        precision: compute dtype of dequantized weights; None means fp32.
        storage: dtype in whose elements the 4-bit weights are stored, so that FSDP2 shards them; None for
            bytes.
    """
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch_dtype(precision or Precision.FP32),
        bnb_4bit_quant_storage=None if storage is None else torch_dtype(storage),
    )


@contextmanager
def whole_heads() -> Iterator[None]:
    """Keep transformers from quantizing new task heads while it loads a model.

    transformers only excludes the last layer, but a head may have two
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

    Layers missing in the checkpoint, such as a new pooler, become plain ones: transformers 5.23 initializes
    them unquantized, in a class that only supports quantized weights. The others keep their layout: in
    evaluation on a CPU, bitsandbytes 0.50 would permanently convert them to a layout without a backward pass.

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
        UserError: it gets no adapters, is not quantized, or its head is.
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
            found=f"weights in nf4, and {type(model).__name__} with unquantized weights",
            why="from_pretrained() quantizes weights while it loads them; a model created from a "
            "configuration loads none, and an untrained model is no base for adapters",
            fix="load the model with from_pretrained() under `zerofit launch`; elsewhere pass "
            "quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4', "
            f"bnb_4bit_use_double_quant=True{_heads_said(model)}); a second model loaded before training "
            "is taken for a teacher: load the trained model first",
            see=SEE,
        )
    packed = _packed_heads(model)
    if packed:
        raise UserError(
            "quantized-head",
            "the head is quantized, but must be trained",
            found=f"weights in nf4, and {type(model).__name__} with {', '.join(packed)} in 4 bit",
            why="a new task head is fully trained, which 4-bit weights don't support",
            fix=f"load it with BitsAndBytesConfig(...{_heads_said(model)})",
            see=SEE,
        )


def _heads_said(model: Any) -> str:
    heads = list(head_modules(model))
    return f", llm_int8_skip_modules={heads}" if heads else ""


def _packed_heads(model: Any) -> list[str]:
    """Return the names of heads in 4 bits, whatever dtype bitsandbytes stores them in."""
    return [
        name
        for name in head_modules(model)
        if any(hasattr(parameter, "quant_state") for parameter in model.get_submodule(name).parameters())
    ]


def store_frozen_in(model: Any, precision: Precision) -> tuple[str, ...]:
    """Convert the frozen weights under adapters to 16 bits, which saves autocast's copies.

    Autocast alone leaves embeddings and norms in fp32, and therefore the activations between blocks. Measured
    on small random models in bf16, the error of logits against fp32 rises from 0.0170 to 0.0239 (Llama) and
    from 0.0112 to 0.0163 (BERT).

    Args:
        model: with adapters, before it is wrapped for training.
        precision: BF16 or FP16.

    Returns:
        A note on what was changed.
    """
    import torch

    changed = [
        weight for weight in model.parameters() if not weight.requires_grad and weight.dtype is torch.float32
    ]
    for parameter in changed:
        parameter.data = parameter.data.to(torch_dtype(precision))
    if not changed:
        return ()
    return (f"the frozen weights, including embeddings and norms, are stored in {precision}",)


def torch_dtype(precision: Precision) -> Any:
    """Return torch's dtype for a precision."""
    import torch

    dtypes = {Precision.FP32: torch.float32, Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}
    return dtypes[precision]
