"""WeightFormat: quantized formats of checkpoints: bytes of a weight, what its product allocates, what trains.

A format is read from a config's quantization_config, whether config.json has it or a script passes it to
from_pretrained(). Everything that is known of the formats is in this file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from zerofit.core.upstream.transformers import torchao_kind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_GPTQMODEL = "gptqmodel, nn_modules/qlinear"
_TRANSFORMERS = "transformers 5.23"


class Product(StrEnum):
    """What the matrix product with a packed weight allocates and keeps for the backward pass."""

    UNPACKS = "unpacks the weight in both passes, and keeps neither it nor the input"
    UNPACKS_KEEPS_INPUT = "unpacks the weight in both passes, and keeps the input"
    KEEPS_WHOLE = "unpacks the weight, and keeps it whole for the backward pass"
    COPIES_WHOLE = "unpacks the weight, once for each sample in the backward pass, and keeps the input"
    INT8 = "multiplies in int8, keeps the input, and unpacks the weight in the backward pass"
    FP8 = "multiplies in FP8, and unpacks the weight in the backward pass"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One tensor of a packed layer."""

    name: str
    dtype: str
    """torch's name: "int32"."""
    num_elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """How a checkpoint's weights lie on the GPU while adapters train beside them."""

    method: str
    """quant_method, with _4bit or _8bit behind "bitsandbytes"."""
    label: str
    """For the user: "GPTQ in 4 bits, groups of 128"."""
    bits: float = 16.0
    """Bits of a weight, without scales; of MXFP4 with them, in its files."""
    group_size: int = 0
    """Weights that share a scale; 0 for those of a row."""
    product: Product = Product.UNPACKS
    kept: tuple[str, ...] | None = None
    """Names of modules that stay wide; None for transformers' default, the head."""
    kept_beside_default: bool = False
    """True if the default stays wide as well as the names."""
    is_whole: bool = False
    """True if the weights are unpacked when they are loaded, or at the first forward pass."""
    is_plain: bool = False
    """True if it is unpacked while it is loaded into a plain model, of which every weight can train."""
    two_levels: bool = True
    """True if bitsandbytes' scales of 4 bits are quantized too."""
    why_not_trained: str = ""
    """Why adapters can't train beside packed weights; empty if they can."""
    not_known: str = ""
    """What of its memory is not known; empty if all is."""
    source: str = ""

    def stored(self, out_features: int, in_features: int) -> tuple[Stored, ...]:
        """Return the tensors of a layer; the first one is the weight."""
        return _STORED[self.method](self, out_features, in_features)

    @property
    def bits_with_scales(self) -> float:
        """Bits of a weight with its share of the scales, in a layer of 4096 x 4096; 16 if it is whole."""
        if self.is_whole:
            return 16.0
        size = 4096
        num_bytes = sum(tensor.num_elements * WIDTHS[tensor.dtype] for tensor in self.stored(size, size))
        return 8 * num_bytes / size**2


WIDTHS = {"int8": 1, "uint8": 1, "float16": 2, "float32": 4, "int32": 4, "int64": 8}
"""Bytes per element of the stored tensors. FP8 counts as uint8."""

_METHODS: dict[str, Callable[[Mapping[str, Any]], WeightFormat]] = {}


def format_of(config: Mapping[str, Any]) -> WeightFormat | None:
    """Return the format of a config's weights; None if it is not quantized, or the method is not known.

    Args:
        config: the content of a config.json; in a composite one, its text_config may say it.
    """
    said = said_format(config)
    if said is None:
        return None
    read = _METHODS.get(method_of(said))
    if read is None:
        return None
    try:
        found = read(said)
        is_possible = found.is_whole or (1 <= found.bits <= 16 and found.bits_with_scales >= found.bits)
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError):
        return None  # values that no release writes
    return found if is_possible else None


def said_format(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return a config's quantization_config; None if it has none."""
    for part in (config, config.get("text_config")):
        said = part.get("quantization_config") if isinstance(part, dict) else None
        if isinstance(said, dict) and said:
            return said
    return None


def method_of(said: Mapping[str, Any]) -> str:
    """Return the method that a quantization_config names."""
    for name in ("4bit", "8bit"):
        if said.get(f"load_in_{name}"):
            return f"bitsandbytes_{name}"
    return str(said.get("quant_method") or "unknown method")


def notes_on_format(name: str, form: WeightFormat) -> tuple[str, ...]:
    """Return how the weights of a model in a format are counted, one sentence each.

    Args:
        name: of the model.
    """
    if form.is_whole:
        return (f"the weights of {name} are in {form.label}",)
    head = ["the head"] if form.kept is None or form.kept_beside_default else []
    *wide, last = ("embeddings", "norms", *head, *(form.kept or ()))
    bits = f"{form.bits_with_scales:.2g}"
    stays = f"{', '.join(wide)} and {last} stay wide"
    notes = [f"the linear layers of {name} are in {form.label}: {bits} bits a weight; {stays}"]
    if form.not_known:
        notes.append(f"not known of {form.label}: {form.not_known}")
    return tuple(notes)


def _names(said: Mapping[str, Any], *keys: str) -> tuple[str, ...] | None:
    for key in keys:
        if isinstance(value := said.get(key), list):
            return tuple(map(str, value))
    return None


def _ceil(count: int, divisor: int) -> int:
    return -(-count // divisor)


def _groups(size: int, group_size: int) -> int:
    return _ceil(size, group_size) if group_size > 0 else 1


# bitsandbytes

_NF4_BLOCK, _NF4_SCALE_BLOCK = 64, 256
"""Weights per scale, and scales per second-level scale."""
_VALUES, _SCALE_VALUES = 16, 256
"""Entries of the fp32 lookup tables of 4 and 8 bits."""


def _bnb_4bit(said: Mapping[str, Any]) -> WeightFormat:
    two_levels = bool(said.get("bnb_4bit_use_double_quant", False))
    return WeightFormat(
        method="bitsandbytes_4bit",
        label="bitsandbytes' 4 bits" + (" with quantized scales" if two_levels else ""),
        bits=4,
        group_size=_NF4_BLOCK,
        kept=_names(said, "llm_int8_skip_modules"),
        two_levels=two_levels,
        source="bitsandbytes 0.50.2, functional.py (quantize_4bit), autograd/_functions.py (MatMul4Bit)",
    )


def _stored_nf4(form: WeightFormat, out: int, size: int) -> tuple[Stored, ...]:
    weight = Stored(name="weight", dtype="uint8", num_elements=_ceil(out * size, 2))
    return (weight, *beside_nf4(out * size, two_levels=form.two_levels))


def beside_nf4(num_weights: int, *, two_levels: bool) -> tuple[Stored, ...]:
    """Return what bitsandbytes stores beside the weights of a layer in 4 bits.

    Args:
        two_levels: True if the scales are quantized too.
    """
    scales = _ceil(num_weights, _NF4_BLOCK)
    found = [
        Stored(name="scales", dtype="uint8" if two_levels else "float32", num_elements=scales),
        Stored(name="values", dtype="float32", num_elements=_VALUES),
    ]
    if two_levels:
        more = (
            ("scale_scales", _ceil(scales, _NF4_SCALE_BLOCK)),
            ("scale_values", _SCALE_VALUES),
            ("mean", 1),
        )
        found += [Stored(name=name, dtype="float32", num_elements=count) for name, count in more]
    return tuple(found)


def _bnb_8bit(said: Mapping[str, Any]) -> WeightFormat:
    return WeightFormat(
        method="bitsandbytes_8bit",
        label="bitsandbytes' int8",
        bits=8,
        product=Product.INT8,
        kept=_names(said, "llm_int8_skip_modules"),
        not_known="the copies of outlier columns, which depend on the values of activations",
        source="bitsandbytes 0.50.2, autograd/_functions.py (MatMul8bitLt), backends/cuda/ops.py",
    )


def _stored_in_rows(form: WeightFormat, out: int, size: int) -> tuple[Stored, ...]:
    """Return weights of a byte each, and a scale for each row."""
    return (
        Stored(name="weight", dtype="int8", num_elements=out * size),
        Stored(name="scales", dtype="float32", num_elements=out),
    )


# Integers packed into int32: GPTQ, AWQ.


def _gptq(said: Mapping[str, Any]) -> WeightFormat:
    bits, group = int(said.get("bits", 4)), int(said.get("group_size", 128))
    return WeightFormat(
        method="gptq",
        label=f"GPTQ in {bits} bits, {_in_groups(group)}",
        bits=bits,
        group_size=max(0, group),
        product=Product.KEEPS_WHOLE,
        kept=() if said.get("lm_head") else None,
        not_known="what unpacking a weight takes for a moment: gptqmodel compiles it",
        source=f"{_GPTQMODEL}/torch.py (TorchQuantLinear.forward, which trains); optimum, gptq/quantizer.py",
    )


def _awq(said: Mapping[str, Any]) -> WeightFormat:
    bits = int(said.get("bits", said.get("w_bit", 4)))
    group = int(said.get("group_size", said.get("q_group_size", 128)))
    return WeightFormat(
        method="awq",
        label=f"AWQ in {bits} bits, {_in_groups(group)}",
        bits=bits,
        group_size=max(0, group),
        product=Product.COPIES_WHOLE,
        kept=_names(said, "modules_to_not_convert"),
        kept_beside_default=True,
        source=f"{_GPTQMODEL}/gemm_awq.py (AwqGemmFn); {_TRANSFORMERS}, quantizers/quantizer_awq.py",
    )


def _in_groups(size: int) -> str:
    return f"groups of {size}" if size > 0 else "one group a row"


def _stored_in_int32(form: WeightFormat, out: int, size: int) -> tuple[Stored, ...]:
    bits, groups = int(form.bits), _groups(size, form.group_size)
    found = (
        Stored(name="weight", dtype="int32", num_elements=_ceil(out * size * bits, 32)),
        Stored(name="zeros", dtype="int32", num_elements=groups * _ceil(out * bits, 32)),
        Stored(name="scales", dtype="float16", num_elements=groups * out),
    )
    if form.method == "awq":
        return found
    return (*found, Stored(name="groups", dtype="int32", num_elements=size))


# FP8


def _fp8(said: Mapping[str, Any]) -> WeightFormat:
    sizes = said.get("weight_block_size", (128, 128))
    block = int(sizes[0]) * int(sizes[1]) if sizes else 0
    if said.get("dequantize"):
        return _whole("fp8", "FP8", "dequantize=True unpacks them while they are loaded")
    return WeightFormat(
        method="fp8",
        label="FP8" + (f" in blocks of {sizes[0]} x {sizes[1]}" if sizes else ""),
        bits=8,
        group_size=block,
        product=Product.FP8,
        kept=_names(said, "modules_to_not_convert", "ignored_layers"),
        source=f"{_TRANSFORMERS}, integrations/finegrained_fp8.py (FP8Linear, FP8LinearFunction)",
    )


def _stored_fp8(form: WeightFormat, out: int, size: int) -> tuple[Stored, ...]:
    side = round(form.group_size**0.5) if form.group_size else 0
    blocks = _ceil(out, side) * _ceil(size, side) if side else 1
    return (
        Stored(name="weight", dtype="uint8", num_elements=out * size),
        Stored(name="scales", dtype="float32", num_elements=blocks),
    )


def _fbgemm_fp8(said: Mapping[str, Any]) -> WeightFormat:
    return WeightFormat(
        method="fbgemm_fp8",
        label="FBGEMM's FP8",
        bits=8,
        product=Product.FP8,
        kept=_names(said, "modules_to_not_convert"),
        why_not_trained="transformers' Trainer refuses it: its products have no backward pass",
        source=f"{_TRANSFORMERS}, quantizers/quantizer_fbgemm_fp8.py (is_trainable)",
    )


# torchao, HQQ, EETQ, Quanto: weights are quantized while they are loaded, or were with the same classes.


def _torchao(said: Mapping[str, Any]) -> WeightFormat:
    name, data = torchao_kind(said.get("quant_type"))
    bits = 4 if "int4" in name.lower() else 8
    group = int(data.get("group_size") or (128 if bits == 4 else 0))
    not_8 = "peft and transformers' Trainer take torchao's 8 bits alone" if bits != 8 else ""
    return WeightFormat(
        method="torchao",
        label=f"torchao's {name or 'int8'}",
        bits=bits,
        group_size=group,
        product=Product.KEEPS_WHOLE,
        kept=_names(said, "modules_to_not_convert"),
        why_not_trained=not_8,
        not_known="which copies torchao's own tensors keep for the backward pass; a whole one is counted",
        source=f"{_TRANSFORMERS}, quantizers/quantizer_torchao.py (is_trainable); peft 0.21, lora/torchao.py",
    )


def _hqq(said: Mapping[str, Any]) -> WeightFormat:
    inner = said.get("quant_config") or {}
    values = inner.get("weight_quant_params") or said
    bits, group = float(values.get("nbits", 4)), int(values.get("group_size") or 64)
    return WeightFormat(
        method="hqq",
        label=f"HQQ in {bits:g} bits, {_in_groups(group)}",
        bits=bits,
        group_size=group,
        product=Product.UNPACKS_KEEPS_INPUT,
        kept=_names(said, "skip_modules"),
        not_known="what unpacking a weight takes for a moment beside the weight",
        source="hqq, core/quantize.py (HQQMatmulNoCacheDeq)",
    )


def _eetq(said: Mapping[str, Any]) -> WeightFormat:
    return _of_8_bits("eetq", "EETQ's int8", said)


def _quanto(said: Mapping[str, Any]) -> WeightFormat:
    found = _of_8_bits("quanto", f"Quanto's {said.get('weights', 'int8')}", said)
    if "8" in str(said.get("weights", "int8")):
        return found
    raise ValueError("groups of Quanto's narrower weights are not known")


def _of_8_bits(method: str, label: str, said: Mapping[str, Any]) -> WeightFormat:
    return WeightFormat(
        method=method,
        label=label,
        bits=8,
        product=Product.UNPACKS_KEEPS_INPUT,
        kept=_names(said, "modules_to_not_convert"),
        not_known="what its products allocate; an unpacked weight and the input are counted",
        source=f"{_TRANSFORMERS}, quantizers/quantizer_{method}.py",
    )


def _stored_with_scales(form: WeightFormat, out: int, size: int) -> tuple[Stored, ...]:
    """Return packed weights, and a 16-bit scale and zero a group; one scale a row without groups."""
    per_byte = max(1, 8 // max(1, int(form.bits)))
    scales = out * _groups(size, form.group_size) * (2 if form.group_size else 1)
    return (
        Stored(name="weight", dtype="uint8", num_elements=_ceil(out * size, per_byte)),
        Stored(name="scales", dtype="float16", num_elements=scales),
    )


# Formats of which a trained model holds nothing.


def _whole(method: str, label: str, how: str, *, is_plain: bool = True) -> WeightFormat:
    said = f"{label}, as wide as 16 bits: {how}"
    return WeightFormat(method=method, label=said, is_whole=True, is_plain=is_plain, source=_TRANSFORMERS)


MXFP4_BITS = 4.25
"""Bits of an expert's weight: 4, and a byte for each 32 (https://arxiv.org/abs/2508.10925, section 2.1)."""


def _mxfp4(said: Mapping[str, Any]) -> WeightFormat:
    how = "transformers trains them only unpacked to bf16, by Mxfp4Config(dequantize=True)"
    return replace(_whole("mxfp4", f"MXFP4 ({MXFP4_BITS} bits in its files)", how), bits=MXFP4_BITS)


def _compressed_tensors(said: Mapping[str, Any]) -> WeightFormat:
    how = "compressed-tensors unpacks a weight at its first forward pass for good"
    return _whole(
        "compressed-tensors", "compressed-tensors", how, is_plain=bool(said.get("dequantize", False))
    )


_METHODS.update(
    {
        "bitsandbytes_4bit": _bnb_4bit,
        "bitsandbytes_8bit": _bnb_8bit,
        "gptq": _gptq,
        "awq": _awq,
        "fp8": _fp8,
        "fbgemm_fp8": _fbgemm_fp8,
        "torchao": _torchao,
        "hqq": _hqq,
        "eetq": _eetq,
        "quanto": _quanto,
        "mxfp4": _mxfp4,
        "compressed-tensors": _compressed_tensors,
    }
)
_STORED: dict[str, Callable[[WeightFormat, int, int], tuple[Stored, ...]]] = {
    "bitsandbytes_4bit": _stored_nf4,
    "bitsandbytes_8bit": _stored_in_rows,
    "gptq": _stored_in_int32,
    "awq": _stored_in_int32,
    "fp8": _stored_fp8,
    "fbgemm_fp8": _stored_in_rows,
    **dict.fromkeys(("torchao", "hqq", "eetq", "quanto"), _stored_with_scales),
}
