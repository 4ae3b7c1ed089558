"""An optimizer that no library knows, for what accelerate and DeepSpeed do with any other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable


class SignDescent(torch.optim.Optimizer):
    """Steps each weight by the learning rate against its gradient's sign."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Step once."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad.sign(), alpha=group["lr"])
