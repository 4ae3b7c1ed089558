"""Attention scores: what a pair of a query and a key takes where no fused kernel computes attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerofit.planning.estimate.closed_form.shape import Shape

FUSED_FAMILIES = frozenset(
    {
        "bart", "biogpt", "cohere", "cohere2", "falcon", "gemma", "gemma3_text", "glm", "glm4", "gpt2",
        "gpt_bigcode", "gpt_neox", "granite", "granitemoe", "llama", "m2m_100", "marian", "mbart",
        "mistral", "mixtral", "mt5", "nemotron", "olmo", "olmo2", "olmoe", "opt", "pegasus", "phi",
        "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "stablelm",
        "starcoder2", "t5", "umt5"
    }
)  # fmt: skip
"""Families whose attention goes through torch's scaled_dot_product_attention, and there into a fused kernel.
Source: transformers 5.23, _supports_sdpa in models/*/modeling_*.py."""
EAGER_FAMILIES = frozenset({"bloom", "codegen", "gemma2", "gpt_neo", "gpt_oss", "gptj", "longt5", "xglm"})
"""Families that compute all scores; one that stands nowhere here is taken to as well. Source: the same."""
LATENT_FAMILIES = frozenset({"deepseek_v2", "deepseek_v3"})
"""Families with multi-head latent attention: query and key are wider than the value."""
_FP32 = 4
_EAGER_TENSORS = {"gemma2": 1}
"""Tensors of the scores' size before the softmax, in the format of the weights."""
_MOST_TENSORS = 3
"""Those of other families: bloom's; no more were counted (tests/planning/inference/test_activations.py)."""


def is_eager(shape: Shape) -> bool:
    """Return whether a family computes its scores in Python, or is not known."""
    family = shape.facts.model_type
    return family not in FUSED_FAMILIES and family not in LATENT_FAMILIES


def scores_bytes(shape: Shape) -> int:
    """Return the bytes of one query and one key, all heads together; 0 with a fused kernel.

    Scores in the format of the weights, their softmax in fp32, and that in the format of the weights again.
    Without a fused kernel torch computes with fp32 scores and their softmax: heads of one key and value that
    falcon does not repeat, values narrower than keys. ASSUMPTION: the latter on a GPU too; seen on the CPU.
    Source: transformers 5.23, eager_attention_forward of its modeling files;
    aten/src/ATen/native/transformers/sdp_utils_cpp.h, check_batch_size_and_num_heads_dense and
    attention.cpp, _scaled_dot_product_attention_math.
    """
    model, width = shape.facts, shape.compute_bytes
    heads = max(1, model.num_attention_heads)
    if is_eager(shape):
        cast = width if width < _FP32 else 0
        return heads * (_EAGER_TENSORS.get(model.model_type, _MOST_TENSORS) * width + _FP32 + cast)
    is_unrepeated = model.model_type == "falcon" and model.num_key_value_heads == 1 < heads
    if is_unrepeated or model.model_type in LATENT_FAMILIES:
        return heads * 2 * _FP32
    return 0


def kept_scores_bytes(shape: Shape) -> int:
    """Return what of these a layer holds while its feed-forward block runs: what its attention returned."""
    if not is_eager(shape):
        return 0
    tensors = min(2, _EAGER_TENSORS.get(shape.facts.model_type, _MOST_TENSORS))
    return max(1, shape.facts.num_attention_heads) * tensors * shape.compute_bytes
