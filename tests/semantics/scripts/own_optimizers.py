"""Optimizers that scripts have of their own, for edits.py."""

from typing import Any

import torch


class Sharpness(torch.optim.Optimizer):
    """SAM: a second pass from a perturbed point."""

    def __init__(self, parameters: Any, **settings: Any) -> None:
        super().__init__(parameters, settings)
        self.base = torch.optim.SGD(self.param_groups, **settings)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def perturb(self) -> None:
        held = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        norm = torch.stack([one.grad.norm() for one in held]).norm()
        for one in held:
            self.state[one]["offset"] = one.grad * (0.05 / (norm + 1e-12))
            one.add_(self.state[one]["offset"])
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if "offset" in self.state[one]:
                    one.sub_(self.state[one].pop("offset"))
        self.base.step()


class ByOwnNorm(torch.optim.Optimizer):
    """Each tensor moves by lr times its own norm, against its gradient's direction."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    one.add_(one.grad / (one.grad.norm() + 1e-9), alpha=-group["lr"] * float(one.norm()))


class OwnAdam(torch.optim.Optimizer):
    """Element-wise, with its bias correction."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is None:
                    continue
                state = self.state[one]
                state["step"] = count = state.get("step", 0) + 1
                mean = state.setdefault("mean", torch.zeros_like(one)).lerp_(one.grad, 0.1)
                square = state.setdefault("square", torch.zeros_like(one)).lerp_(one.grad**2, 0.01)
                size = (square / (1 - 0.99**count)).sqrt() + 1e-8
                one.sub_(group["lr"] * mean / (1 - 0.9**count) / size)
