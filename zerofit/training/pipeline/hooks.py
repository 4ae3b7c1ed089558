"""Hooks that let an unmodified script train a model in pipeline stages."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.upstream.transformers import SAVE_CHECKPOINT
from zerofit.training.wrapping import wrap

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import ModuleType

    from zerofit.training.changes import Changes
    from zerofit.training.pipeline.whole_state import WholeStates
    from zerofit.training.settings import AppliedSettings

_running: list[WholeStates] = []
"""The pipeline of this process; a process trains one model so."""


def install(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> None:
    """Hook prepare(), and what saves and loads: weights and states are whole in every file."""
    if settings.pipeline_parallel_size == 1:
        return

    def prepare(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        for one in args:
            if isinstance(one, torch.nn.Module) and any(own.requires_grad for own in one.parameters()):
                _running_for(one, settings, changes).pipeline.accelerator = self
        for one in args:
            if isinstance(one, torch.optim.Optimizer) and _running:
                _running[0].cut_optimizer(getattr(one, "optimizer", one))
        prepared = original(self, *args, **kwargs)
        if _running:
            _running[0].take_over_optimizers()
        return prepared

    def prepare_model(
        original: Any, self: Any, model: Any, device_placement: Any = None, evaluation_mode: bool = False
    ) -> Any:
        # accelerate would wrap it in DistributedDataParallel, which averages unlike stages.
        return original(self, model, device_placement, evaluation_mode or _is_pipeline(model))

    def get_state_dict(original: Any, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        return _running[0].weights() if _is_pipeline(model) else original(self, model, *args, **kwargs)

    def save_state(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        with _gathered():
            return original(self, *args, **kwargs)

    wrap(accelerator_class, "prepare", prepare)
    wrap(accelerator_class, "prepare_model", prepare_model)
    wrap(accelerator_class, "get_state_dict", get_state_dict)
    wrap(accelerator_class, "save_state", save_state)


def install_in_trainer(trainer_class: Any, settings: AppliedSettings, changes: Changes) -> None:
    """Cut a Trainer's model before it goes to the GPU, and let Trainer save whole weights."""
    if settings.pipeline_parallel_size == 1:
        return

    def init(original: Any, self: Any, model: Any = None, *args: Any, **kwargs: Any) -> None:
        if model is not None:
            _running_for(model, settings, changes)
        original(self, model, *args, **kwargs)

    def save(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        with _gathered():
            return original(self, *args, **kwargs)

    wrap(trainer_class, "__init__", init)
    for name in ("save_model", SAVE_CHECKPOINT):
        wrap(trainer_class, name, save)


def install_in_accelerate(module: ModuleType, settings: AppliedSettings, changes: Changes) -> None:
    """Let the ranks of a pipeline get the same batches.

    Args:
        module: accelerate.accelerator, which asks prepare_data_loader() for a rank's share.
    """
    topology = settings.plan.topology

    def prepare_data_loader(original: Any, loader: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["num_processes"] = topology.data_parallel_size
        kwargs["process_index"] //= topology.sample_group_size
        kwargs["dispatch_batches"] = False  # the dispatcher counts ranks
        return original(loader, *args, **kwargs)

    if settings.pipeline_parallel_size > 1:
        wrap(module, "prepare_data_loader", prepare_data_loader)


def install_in_clipping(module: ModuleType, settings: AppliedSettings, changes: Changes) -> None:
    """Let the norm of gradients be that of all stages.

    Args:
        module: torch.nn.utils.
    """

    def clip(
        original: Any,
        parameters: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Any:
        import torch

        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if not _running or not _are_of_pipeline(parameters):
            return original(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
        norm = _running[0].pipeline.norm(parameters, norm_type, error_if_nonfinite)
        module.clip_grads_with_norm_(parameters, max_norm, norm, foreach)
        return norm

    if settings.pipeline_parallel_size > 1:
        wrap(module, "clip_grad_norm_", clip)
        module.clip_grad.clip_grad_norm_ = module.clip_grad_norm_


def _running_for(model: Any, settings: AppliedSettings, changes: Changes) -> WholeStates:
    """Return the pipeline of a model, which is made the first time.

    Raises:
        UserError: another model is in stages already, or this one can't be.
    """
    from zerofit.training.pipeline.make_pipeline import make_pipeline

    if not _running:
        _running.append(make_pipeline(model, settings, changes))
    first = _running[0].pipeline.model
    if first is not model:
        raise UserError(
            "pipeline-second-model",
            "one model of a script can train in pipeline stages",
            found=f"{type(first).__name__}, then {type(model).__name__}",
            why="the second would have to wait for stages that run the first",
            fix="train without --pipeline-parallel-size",
        )
    return _running[0]


def _gathered() -> Any:
    return _running[0].gathered() if _running else contextlib.nullcontext()


def _is_pipeline(model: Any) -> bool:
    return bool(_running) and _running[0].pipeline.model is model


def _are_of_pipeline(parameters: Iterable[Any]) -> bool:
    return all(_running[0].has(one) for one in parameters)
