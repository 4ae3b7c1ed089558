"""What `--allow freeze` freezes, in two steps."""

from __future__ import annotations

from zerofit.freezing import BLOCKS, EMBEDDINGS

FROZEN_EMBEDDINGS = (EMBEDDINGS,)
"""Their gradients and states are large and seldom matter."""
FROZEN_LAYERS = (BLOCKS,)
"""Every transformer block: embeddings and head train."""
FREEZES = {FROZEN_EMBEDDINGS: "frozen embeddings", FROZEN_LAYERS: "frozen layers"}
"""What is frozen, in words: what changes the training less comes first."""
