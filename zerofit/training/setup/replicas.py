"""Refuses parameters that begin to train after DistributedDataParallel has wrapped their model.

DDP averages the gradients of what required them when it wrapped the model. What is unfrozen or added later
would be stepped by each rank's own gradients, and the ranks' copies would drift apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.upstream.accelerate import prepared_optimizers
from zerofit.training.setup.trained_groups import parameters_of

if TYPE_CHECKING:
    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings
    from zerofit.training.wrapping import Wrapper


def wrappers(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Watch each model that prepare_model() wraps."""
    if settings.plan.topology.world_size == 1 or settings.uses_deepspeed:
        return {}

    def prepare_model(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        model = original(self, *args, **kwargs)
        if type(model).__name__ == "DistributedDataParallel" and "_zerofit_averaged" not in vars(model):
            model._zerofit_averaged = {
                id(parameter) for parameter in model.parameters() if parameter.requires_grad
            }
            model.register_forward_pre_hook(lambda model, _: _check(model, self))
        return model

    return {"prepare_model": prepare_model}


def _check(model: Any, accelerator: Any) -> None:
    import torch

    if not (model.training and torch.is_grad_enabled()):
        return
    late = {
        id(parameter)
        for optimizer in prepared_optimizers(accelerator)
        for parameter in parameters_of(optimizer)
        if parameter.requires_grad and id(parameter) not in model._zerofit_averaged
    }
    for name, parameter in model.named_parameters() if late else ():
        if id(parameter) in late:
            raise _not_averaged(name)


def _not_averaged(name: str) -> UserError:
    return UserError(
        "parameter-not-averaged",
        "a parameter begins to train after DistributedDataParallel has wrapped the model",
        found=f"{name}, unfrozen or added to the optimizer after accelerator.prepare()",
        why="DDP averages the gradients of what required them when it wrapped the model, so that each rank "
        "would "
        "train this one by its own samples",
        fix="train it from the start with a learning rate of 0, prepare() the model again after "
        "unfreezing, or "
        "train on one GPU: --num-processes 1",
        see="https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html",
    )
