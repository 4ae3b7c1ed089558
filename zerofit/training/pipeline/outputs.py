"""The output of a pipeline's training pass: the loss, and an error for scripts that read logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import ModelOutput

from zerofit.core.errors import UserError


class NoLogitsError(UserError, AttributeError):
    """A script reads the logits of a training pass; an AttributeError, so that hasattr() is False."""


@dataclass
class LossOutput(ModelOutput):  # type: ignore[misc]
    """The output of a training pass."""

    loss: torch.Tensor | None = None
    """The mean over the labels of the whole batch."""

    def __getattr__(self, name: str) -> Any:
        if name == "logits":
            raise _no_logits()
        if name in ("past_key_values", "hidden_states", "attentions"):
            return None
        raise AttributeError(f"{type(self).__name__} has no {name}")

    def __getitem__(self, key: Any) -> Any:
        """Return a value by its name or index.

        Raises:
            NoLogitsError: for the logits.
        """
        if key in ("logits", 1):
            raise _no_logits()
        return super().__getitem__(key)


def _no_logits() -> NoLogitsError:
    return NoLogitsError(
        "pipeline-logits-in-training",
        "a training pass of a pipeline returns only the loss",
        found="outputs.logits of a forward pass with labels, outside torch.no_grad()",
        why="the backward pass of each micro-batch has already run and freed its logits",
        fix="use outputs.loss in training; evaluate inside torch.no_grad(), which returns logits",
    )
