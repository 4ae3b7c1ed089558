"""Hooks that make an unmodified script train its model in pipeline stages."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.upstream.accelerate import prepared_optimizers
from zerofit.core.upstream.torch import is_compiled, loading_to_host
from zerofit.core.upstream.transformers import LOAD_OPTIMIZER, SAVE_CHECKPOINT
from zerofit.training.setup.trained_groups import trains
from zerofit.training.wrapping import wrap

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from zerofit.training.changes import Changes
    from zerofit.training.pipeline.whole_state import WholeStates
    from zerofit.training.settings import AppliedSettings
    from zerofit.training.wrapping import Wrapper

_running: list[WholeStates] = []
"""The pipeline of this process, which trains one model only; empty before it is created."""


def wrappers(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Train in stages, and save and load files with whole weights and optimizer states."""
    if settings.pipeline_parallel_size == 1:
        return {}

    def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.mixed_precision == "fp16":
            from zerofit.training.pipeline.pipeline import fp16_refusal

            raise fp16_refusal("mixed_precision=fp16 of the script")

    def prepare(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        for model in args:
            if isinstance(model, torch.nn.Module) and trains(model):
                _running_for(model, settings, changes).pipeline.accelerator = self
        before = [optimizer for optimizer in args if isinstance(optimizer, torch.optim.Optimizer)]
        for optimizer in (*before, *prepared_optimizers(self)):
            if _running:
                _running[0].cut_optimizer(getattr(optimizer, "optimizer", optimizer))
        prepared = original(self, *args, **kwargs)
        if _running:
            _running[0].wrap_optimizers()
        for model in prepared if isinstance(prepared, (tuple, list)) else (prepared,):
            if isinstance(model, torch.nn.Module) and is_compiled(model) and _is_pipeline(model):
                changes.add("torch.compile does nothing to a model in pipeline stages, which run uncompiled")
        return prepared

    def prepare_model(
        original: Any, self: Any, model: Any, device_placement: Any = None, evaluation_mode: bool = False
    ) -> Any:
        # accelerate would wrap it in DistributedDataParallel, which would average different stages.
        return original(self, model, device_placement, evaluation_mode or _is_pipeline(model))

    def get_state_dict(original: Any, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_pipeline(model):
            return original(self, model, *args, **kwargs)
        return _running[0].weights("accelerator.get_state_dict")

    def save_state(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        with _gathered("accelerator.save_state", optimizers=True):
            return original(self, *args, **kwargs)

    def load_state(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        # accelerate would load the states of all stages to each GPU.
        return original(self, *args, **{"map_location": "cpu", **kwargs})

    return {
        "__init__": init,
        "prepare": prepare,
        "prepare_model": prepare_model,
        "get_state_dict": get_state_dict,
        "save_state": save_state,
        "load_state": load_state,
    }


def trainer_wrappers(trainer_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Split a Trainer's model before it is moved to the GPU, and make Trainer save whole weights."""
    if settings.pipeline_parallel_size == 1:
        return {}

    def init(original: Any, self: Any, model: Any = None, *args: Any, **kwargs: Any) -> None:
        if model is not None and not _running and trains(model):
            _running_for(model, settings, changes)
        original(self, model, *args, **kwargs)

    def save_model(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        with _gathered("trainer.save_model", optimizers=False):
            return original(self, *args, **kwargs)

    def save_checkpoint(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        with _gathered("trainer.save_checkpoint", optimizers=not self.args.save_only_model):
            return original(self, *args, **kwargs)

    def load_optimizer(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        with loading_to_host():
            return original(self, *args, **kwargs)

    def prediction_step(
        original: Any,
        self: Any,
        model: Any,
        inputs: Any,
        prediction_loss_only: bool,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        with _without_logits(model, prediction_loss_only):
            return original(self, model, inputs, prediction_loss_only, *args, **kwargs)

    return {
        "__init__": init,
        "save_model": save_model,
        SAVE_CHECKPOINT: save_checkpoint,
        LOAD_OPTIMIZER: load_optimizer,
        "prediction_step": prediction_step,
    }


def install_in_accelerate(module: ModuleType, settings: AppliedSettings, changes: Changes) -> None:
    """Give all ranks of a pipeline the same batches.

    Args:
        module: accelerate.accelerator, which calls prepare_data_loader() for this rank's batches.
    """
    topology = settings.plan.topology

    def prepare_data_loader(original: Any, loader: Any, *args: Any, **kwargs: Any) -> Any:
        from zerofit.training.pipeline.random_states import synchronize_sampler

        kwargs["num_processes"] = topology.data_parallel_size
        kwargs["process_index"] //= topology.sample_group_size
        kwargs["dispatch_batches"] = False  # the dispatcher splits batches over all ranks
        has_seed = bool(kwargs.get("use_seedable_sampler"))
        seed = synchronize_sampler(loader, has_seed=has_seed)
        if has_seed and kwargs.get("data_seed") is None:
            kwargs["data_seed"] = seed
        return original(loader, *args, **kwargs)

    if settings.pipeline_parallel_size > 1:
        wrap(module, "prepare_data_loader", prepare_data_loader)


def clipping_wrappers(module: ModuleType, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Make clip_grad_norm_() use the gradient norm over all stages.

    Args:
        module: torch.nn.utils.
    """
    if settings.pipeline_parallel_size == 1:
        return {}

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
        if not _running or not all(_running[0].has(parameter) for parameter in parameters):
            return original(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
        norm = _running[0].pipeline.norm(parameters, norm_type, error_if_nonfinite)
        module.clip_grads_with_norm_(parameters, max_norm, norm, foreach)
        return norm

    return {"clip_grad_norm_": clip}


def _running_for(model: Any, settings: AppliedSettings, changes: Changes) -> WholeStates:
    """Return the pipeline of a model, created in the first call.

    Raises:
        UserError: another model is already in stages, or this one can't be split.
    """
    from zerofit.training.pipeline.make_pipeline import make_pipeline

    model = _uncompiled(model)
    if not _running:
        _running.append(make_pipeline(model, settings, changes))
    first = _running[0].pipeline.model
    if first is not model:
        raise UserError(
            "pipeline-second-model",
            "only one model of a script can train in pipeline stages",
            found=f"{type(first).__name__}, then {type(model).__name__}",
            why="a second one would wait for ranks that run the first",
            fix="train without --pipeline-parallel-size",
        )
    return _running[0]


def _gathered(call: str, *, optimizers: bool) -> Any:
    return _running[0].gathered(call, optimizers=optimizers) if _running else contextlib.nullcontext()


@contextlib.contextmanager
def _without_logits(model: Any, loss_only: bool) -> Iterator[None]:
    """Keep logits on the last stage while a Trainer only needs the loss."""
    if not (loss_only and _is_pipeline(model)):
        yield
        return
    pipeline = _running[0].pipeline
    pipeline.gives_logits = False
    try:
        yield
    finally:
        pipeline.gives_logits = True


def _is_pipeline(model: Any) -> bool:
    return bool(_running) and _running[0].pipeline.model is _uncompiled(model)


def _uncompiled(model: Any) -> Any:
    """Return a model without torch.compile's wrapper."""
    return getattr(model, "_orig_mod", model)
