"""Formats of quantized checkpoints, read from their configs, against sizes that were published."""

from __future__ import annotations

from typing import Any

import pytest

from zerofit.core.units import GIB
from zerofit.models.find import probe_model
from zerofit.models.weight_formats import Product, format_of, notes_on_format

_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
_INT8 = {"load_in_8bit": True, "llm_int8_threshold": 6.0}
_LAYER = ((4096, 4096),) * 4 + ((11008, 4096),) * 2 + ((4096, 11008),)
"""The matrices of a layer of Llama 2 7B, of which it has 32."""
_WIDE = 2 * (2 * 32000 * 4096 + 65 * 4096)
"""Its embedding, head and norms in 16 bits."""


def _held(said: dict[str, Any]) -> int:
    form = format_of({"quantization_config": said})
    assert form is not None
    widths = {"int8": 1, "uint8": 1, "float16": 2, "float32": 4, "int32": 4}
    return 32 * sum(
        tensor.num_elements * widths[tensor.dtype] for shape in _LAYER for tensor in form.stored(*shape)
    )


@pytest.mark.parametrize(
    ("said", "published_gb"),
    [
        (_GPTQ, 3.90),  # https://huggingface.co/TheBloke/Llama-2-7B-GPTQ, branch main
        (_AWQ, 3.89),  # https://huggingface.co/TheBloke/Llama-2-7B-AWQ
    ],
)
def test_a_checkpoint_of_llama_2_7b_has_the_size_that_its_page_says(
    said: dict[str, Any], published_gb: float
) -> None:
    assert (_held(said) + _WIDE) / 1e9 == pytest.approx(published_gb, rel=0.002)  # some have biases of 0


@pytest.mark.parametrize(
    ("name", "num_layers", "num_experts", "published_gib"),
    [("gpt-oss-20b", 24, 32, 12.8), ("gpt-oss-120b", 36, 128, 60.8)],  # https://arxiv.org/abs/2508.10925
)
def test_a_checkpoint_of_gpt_oss_has_the_size_that_its_card_says(
    name: str, num_layers: int, num_experts: int, published_gib: float
) -> None:
    form = format_of({"quantization_config": {"quant_method": "mxfp4"}})
    assert form is not None
    experts = num_layers * num_experts * 3 * 2880 * 2880
    wide = probe_model(name).facts.num_parameters - experts
    assert round((experts * form.bits / 8 + 2 * wide) / GIB, 1) == published_gib


@pytest.mark.parametrize(
    ("said", "bits"),
    [
        (
            {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
            4.127,
        ),  # QLoRA, section 3: 0.127 for scales
        ({"load_in_4bit": True}, 4.5),  # QLoRA, section 3: 0.5 bits for fp32 scales of blocks of 64
        (_INT8, 8.008),
        (_GPTQ, 4.164),
        ({**_GPTQ, "group_size": -1}, 4.013),
        ({**_GPTQ, "bits": 8, "group_size": 32}, 8.758),
        (_AWQ, 4.156),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8.002),
        ({"quant_method": "fp8", "weight_block_size": None}, 8.0),
        ({"quant_method": "fbgemm_fp8"}, 8.008),
        (
            {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64}}},
            4.5,
        ),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}, 8.004),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}}, 4.25),
        ({"quant_method": "eetq"}, 8.004),
        ({"quant_method": "quanto", "weights": "int8"}, 8.004),
        ({"quant_method": "mxfp4"}, 16),
        ({"quant_method": "compressed-tensors"}, 16),
        ({"quant_method": "fp8", "dequantize": True}, 16),
    ],
)
def test_a_weight_takes_its_bits_and_its_share_of_the_scales(said: dict[str, Any], bits: float) -> None:
    form = format_of({"quantization_config": said})
    assert form is not None
    assert form.bits_with_scales == pytest.approx(bits, abs=0.0006)


def test_the_format_of_a_part_with_the_text_is_that_of_the_model() -> None:
    found = format_of({"model_type": "qwen2_5_vl", "text_config": {"quantization_config": _AWQ}})
    assert found is not None
    assert found.label == "AWQ in 4 bits, groups of 128"


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"quantization_config": None},
        {"quantization_config": {"quant_method": "spqr"}},
        {"quantization_config": {"quant_method": "gptq", "bits": "four"}},
        {"quantization_config": {"quant_method": "gptq", "bits": [4]}},
        {"quantization_config": {"quant_method": "quanto", "weights": "int4"}},
        {"quantization_config": [1]},
        {"quantization_config": {"quant_method": "gptq", "bits": -4}},
        {"quantization_config": {"quant_method": "hqq", "nbits": "nan"}},
        {"quantization_config": {"quant_method": "hqq", "quant_config": "x"}},
        {"quantization_config": {"quant_method": "hqq", "quant_config": {"weight_quant_params": [1]}}},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": {"a": 1}}},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [-128, 128]}},
    ],
)
def test_what_is_not_known_has_no_format(config: dict[str, Any]) -> None:
    assert format_of(config) is None


def test_what_stays_wide_and_what_is_not_known_is_said() -> None:
    skips = {**_INT8, "llm_int8_skip_modules": ["lm_head", "score"]}
    form = format_of({"quantization_config": skips})
    assert form is not None
    assert form.product is Product.INT8
    assert notes_on_format("mine", form) == (
        "the linear layers of mine are in bitsandbytes' int8: 8 bits a weight; embeddings, norms, lm_head "
        "and score stay wide",
        "not known of bitsandbytes' int8: the copies of outlier columns, which depend on the values of "
        "activations",
    )
    whole = format_of({"quantization_config": {"quant_method": "mxfp4"}})
    assert whole is not None
    assert notes_on_format("gpt-oss", whole) == (
        "the weights of gpt-oss are in MXFP4 (4.25 bits in its files), as wide as 16 bits: transformers "
        "trains them only unpacked to bf16, by Mxfp4Config(dequantize=True)",
    )
