"""Replaces a model's modules by Liger's kernels."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.models.changes.checkpointing import transformers_parts

if TYPE_CHECKING:
    from collections.abc import Collection

SEE = "https://github.com/linkedin/Liger-Kernel"
FAMILIES = frozenset(
    (
        *("deepseek_v4", "exaone4", "falcon_h1", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma4"),
        *("gemma4_text", "glm4", "glm4v", "glm4v_moe", "gpt_oss", "granite", "hunyuan_v1_dense"),
        *("hunyuan_v1_moe", "internvl", "llama", "llama4", "llama4_text", "llava", "ministral"),
        *("mistral", "mixtral", "mllama", "mllama_text_model", "nemotron", "olmo2", "olmo3", "paligemma"),
        *("phi3", "pixtral", "qwen2", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_vl", "qwen2_vl_text"),
        *("qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe"),
        *("qwen3_next", "qwen3_vl", "qwen3_vl_moe", "qwen3_vl_moe_text", "qwen3_vl_text", "smollm3"),
        "smolvlm",
    )
)
"""Model types that it has kernels for (MODEL_TYPE_TO_APPLY_LIGER_FN of August 2026), to plan without it."""


def use_liger(model: Any) -> tuple[str, ...]:
    """Use Liger's kernels for a model's norms, feed-forward blocks and loss.

    A causal model then computes its loss in chunks of the sequence, and never materializes all logits.

    Args:
        model: a torch.nn.Module that is not yet wrapped for training.

    Returns:
        Notes on what was changed.

    Raises:
        UserError: liger-kernel is not installed, there is no GPU, or the family has no kernels.
    """
    check_liger()
    parts = tuple(transformers_parts(model))
    if not parts:
        return (f"Liger's kernels are not used: {type(model).__name__} contains no transformers model",)
    # As in transformers (transformers/integrations/liger.py, 5.23).
    kernels = import_module("liger_kernel.transformers")
    families = import_module("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
    for part in parts:
        check_family(part, families)
        kernels._apply_liger_kernel_to_instance(model=part)
    return tuple(f"Liger's kernels run in {type(part).__name__}" for part in parts)


def check_family(part: Any, families: Collection[str]) -> None:
    """Check that Liger has kernels for a transformers model.

    Args:
        part: the model.
        families: the model types that Liger knows.

    Raises:
        UserError: it has none.
    """
    if part.config.model_type in families:
        return
    raise UserError(
        "liger-family-unknown",
        "Liger has no kernels for this family of models",
        found=f"Liger's kernels, and {type(part).__name__} of the family {part.config.model_type}",
        why=f"liger-kernel supports {', '.join(sorted(families))}",
        fix="train without Liger's kernels",
        see=SEE,
    )


def check_liger() -> None:
    """Check that Liger's kernels can run in this process.

    Raises:
        UserError: the package or a GPU is missing.
    """
    import torch

    if find_spec("liger_kernel") is None:
        raise UserError(
            "liger-not-installed",
            "liger-kernel is not installed",
            found="Liger's kernels, and no package liger_kernel in this environment",
            why="its kernels replace transformers' modules",
            fix="pip install liger-kernel, or train without Liger's kernels",
            see=SEE,
        )
    if not torch.cuda.is_available():
        raise UserError(
            "liger-needs-gpu",
            "Liger's kernels only run on GPUs",
            found="Liger's kernels, and no GPU in this process",
            why="they are written in Triton, which compiles for GPUs",
            fix="train without Liger's kernels",
            see=SEE,
        )
