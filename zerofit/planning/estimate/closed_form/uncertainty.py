"""By how much closed forms may be wrong about a strategy's GPU memory, and where that is from."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerofit.core.facts import ModelFacts
    from zerofit.core.strategy import Strategy

UNCERTAINTY = 0.2
UNCERTAINTY_SOURCE = (
    "32 of 33 published runs on one GPU lay within 20 % of closed forms (docs/reference/predictions.md)"
)
OFFLOADED = 0.4
OFFLOADED_SOURCE = (
    "with offload PyTorch's allocator fragments: by a trace 150 strategies of eleven models fit in 0.9 to "
    "1.4 times the closed form"
)
_ADAPTED = 0.4
_ADAPTED_SOURCE = (
    "ASSUMPTION: activations under LoRA are counted as if all trained; 0.8 times as much was traced"
)
_FUSED = 0.4
_FUSED_SOURCE = (
    "ASSUMPTION: of Liger's kernels only the loss is counted; with its norms and gates up to 1.4 times too "
    "much is said"
)
_COMPARED_FAMILIES = frozenset(
    {
        "bart",
        "bert",
        "deepseek_v2",
        "deepseek_v3",
        "distilbert",
        "electra",
        "gemma",
        "gemma3_text",
        "gpt2",
        "gpt_neox",
        "gptj",
        "llama",
        "mistral",
        "mixtral",
        "mt5",
        "opt",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "roberta",
        "stablelm",
        "t5",
        "vit",
        "whisper",
        "xlm-roberta",
    }
)
"""Families whose traced live tensors lie within 13 % of closed forms: 26 of the catalog's 31."""
_OTHER_FAMILIES = 0.6
_OTHER_FAMILIES_SOURCE = (
    "closed forms of this family were not compared with a trace, or differ: up to 1.5 times as much is traced"
)
FROZEN = 0.6
"""Uncertainty with frozen layers, whose activations are counted as if they trained: 2.8 GiB against 1.1
traced with all but the head frozen."""
FROZEN_SOURCE = "ASSUMPTION: frozen layers save as many activations as trained ones, up to 2.5 times too much"


def closed_form_uncertainty(strategy: Strategy, model: ModelFacts) -> tuple[float, str]:
    """Return the share by which a closed form may be wrong about a strategy's GPU memory, and its source."""
    if strategy.freeze:
        return FROZEN, FROZEN_SOURCE
    if model.model_type not in _COMPARED_FAMILIES:
        return _OTHER_FAMILIES, _OTHER_FAMILIES_SOURCE
    if strategy.liger:
        return _FUSED, _FUSED_SOURCE
    if strategy.lora is not None:
        return _ADAPTED, _ADAPTED_SOURCE
    return (OFFLOADED, OFFLOADED_SOURCE) if strategy.offloads else (UNCERTAINTY, UNCERTAINTY_SOURCE)
