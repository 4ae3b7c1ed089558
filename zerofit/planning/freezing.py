"""What `--allow freeze` freezes: name patterns of parameters that do not train, in two steps."""

from __future__ import annotations

FROZEN_EMBEDDINGS = (
    "*embedding*",
    "*embed_tokens*",
    "*embed_positions*",
    "*embed_in*",
    "*wte.*",
    "*wpe.*",
    "*shared.weight",
)
"""The embeddings of the catalog's families, whose gradients and states are large and seldom matter.
GPT-NeoX's embed_out is its head, and the shared experts of Qwen and DeepSeek are none."""
FROZEN_LAYERS = ("*.layer.*", "*.layers.*", "*.h.*", "*.block.*", "*.blocks.*")
"""Every transformer block of these families: embeddings and head train."""
FREEZES = {FROZEN_EMBEDDINGS: "frozen embeddings", FROZEN_LAYERS: "frozen layers"}
"""What is frozen, in words: what changes the training less comes first."""
