"""Hooks on torch and accelerate for custom training loops: what they prepare, and where training begins."""

from __future__ import annotations

import inspect
import os
import sys
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

from zerofit.scripts.capture.child.model_record import outermost
from zerofit.scripts.capture.child.outcome import exit_failed, is_own_code, mark_met_meta, place_in_script
from zerofit.scripts.capture.child.record import finish
from zerofit.scripts.on_import import around, when_imported

if TYPE_CHECKING:
    from zerofit.scripts.capture.child.observations import Observations

_GPU_PRECISIONS = ("fp16", "fp8")
"""Mixed precision that needs a GPU."""
_ENGINE_ARGUMENTS = (
    "deepspeed_plugin",
    "deepspeed_plugins",
    "fsdp_plugin",
    "megatron_lm_plugin",
    "parallelism_config",
)
"""Arguments of Accelerator for multi-GPU training (accelerate 1.15, accelerator.py)."""


def install(seen: Observations) -> None:
    """Install the hooks on torch's modules, optimizers and DataLoaders, and on Accelerator."""
    when_imported("torch.nn.modules.module", lambda module: _watch_calls(module.Module, seen))
    when_imported("torch.nn.modules.module", lambda module: _watch_eval(module.Module, seen))
    when_imported(
        "torch.optim.optimizer", lambda module: _track_instances(module.Optimizer, seen.all_optimizers)
    )
    when_imported("torch.optim.lr_scheduler", lambda module: _watch_schedulers(module, seen))
    when_imported("torch.utils.data.dataloader", lambda module: _watch_loaders(module.DataLoader, seen))
    when_imported("accelerate.local_sgd", lambda module: _watch_local_sgd(module.LocalSGD, seen))
    when_imported("accelerate.accelerator", lambda module: _watch_accelerator(module.Accelerator, seen))


def _track_instances(made: Any, references: list[Any]) -> None:
    """Collect a weak reference to each new object of a class."""

    @around(made, "__init__")
    def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if all(reference() is not self for reference in references):
            references.append(weakref.ref(self))


def _watch_schedulers(module: Any, seen: Observations) -> None:
    names = ("LRScheduler", "ReduceLROnPlateau", "SequentialLR", "ChainedScheduler")
    for made in [getattr(module, name) for name in names]:
        if "__init__" in vars(made):
            _track_instances(made, seen.all_schedulers)


def _watch_loaders(loader: Any, seen: Observations) -> None:
    @around(loader, "__iter__")
    def iterate(original: Any, self: Any) -> Any:
        seen.loader = self
        return original(self)


def _watch_local_sgd(context: Any, seen: Observations) -> None:
    signature = inspect.signature(context.__init__)

    @around(context, "__init__")
    def init(original: Any, *args: Any, **kwargs: Any) -> None:
        # With a single process, as here, it disables itself.
        seen.uses_local_sgd |= bool(signature.bind(*args, **kwargs).arguments.get("enabled", True))
        original(*args, **kwargs)


def _watch_calls(module_class: Any, seen: Observations) -> None:
    """Observe calls of prepared and of outermost models; the first in training ends the capture.

    A prepared model may be called by another module, such as one that computes the loss.
    """
    depth = 0

    @around(module_class, "__call__")
    def call(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        if seen.is_ending:
            return original(self, *args, **kwargs)
        is_candidate = not depth or any(model is self for _, model in seen.models)
        if is_candidate and _trains(seen, self) and seen.is_here:
            _finish_at_forward(seen, self, args, kwargs)
        if depth:
            return original(self, *args, **kwargs)
        depth += 1
        try:
            return original(self, *args, **kwargs)
        except Exception as error:
            if any(parameter.is_meta for parameter in self.parameters()):
                mark_met_meta(error)
            raise
        finally:
            depth -= 1


def _trains(seen: Observations, module: Any) -> bool:
    """Return True if a call belongs to training: with gradients, and not after the script's own eval().

    from_pretrained leaves a model in evaluation mode, and scripts that never call train() train it like that.
    """
    import torch

    return torch.is_grad_enabled() and (module.training or id(module) not in seen.evaluated)


def _watch_eval(module_class: Any, seen: Observations) -> None:
    @around(module_class, "eval")
    def evaluate(original: Any, self: Any) -> Any:
        if is_own_code(sys._getframe(2).f_code.co_filename):
            seen.evaluated.update(id(module) for module in self.modules())
        return original(self)


def _finish_at_forward(seen: Observations, module: Any, args: Any, kwargs: Any) -> None:
    """End the capture when a prepared model is called, or without prepared models, one that trains.

    Frozen models may also be prepared and called with gradients enabled: a teacher is not the trained model.
    """
    for accelerator, model in seen.models:
        if module is model and _has_trained(seen, module):
            if not module.training:
                seen.note("the model trains in evaluation mode, without dropout: nothing calls its train()")
            finish(seen, accelerator, model, (args, kwargs))
    if seen.models or not _is_optimized(seen, module):
        return
    if seen.accelerators:
        finish(seen, seen.accelerators[-1], module, (args, kwargs))
    exit_failed(
        seen,
        "unsupported",
        f"the script trains {type(module).__name__} without Accelerator or Trainer",
        where=place_in_script(sys._getframe(1)),
    )


def _trained_by(optimizer: Any) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _is_optimized(seen: Observations, module: Any) -> bool:
    """Return True if everything that a living optimizer trains is in this module."""
    own = {id(parameter) for parameter in module.parameters()}
    return any(trained and trained <= own for trained in map(_trained_by, seen.optimizers()))


def _has_trained(seen: Observations, module: Any) -> bool:
    """Return True if a module contains parameters of an optimizer; without optimizers, if it is trainable."""
    own = list(module.parameters())
    trained = set[int]().union(*map(_trained_by, seen.optimizers()))
    if not trained:  # an optimizer unknown to torch, or one that is created later
        return any(parameter.requires_grad for parameter in own)
    return any(id(parameter) in trained for parameter in own)


def _watch_accelerator(accelerator_class: Any, seen: Observations) -> None:
    _watch_init(accelerator_class, seen)

    @around(accelerator_class, "prepare_model")
    def prepare_model(original: Any, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = original(self, model, *args, **kwargs)
        if all(known is not prepared for _, known in seen.models):
            seen.models.append((self, prepared))
        return prepared

    @around(accelerator_class, "accumulate")
    def accumulate(original: Any, self: Any, *models: Any) -> Any:
        seen.accumulates = True
        return original(self, *models)

    @around(accelerator_class, "backward")
    def backward(original: Any, self: Any, loss: Any, **kwargs: Any) -> Any:
        # The last opportunity, if the model was never called as a whole.
        if seen.is_here and not seen.is_ending:
            _finish_at_backward(seen, self)
        return original(self, loss, **kwargs)

    original = accelerator_class.mixed_precision.fget
    accelerator_class.mixed_precision = property(
        lambda self: getattr(self, "_zerofit_precision_said", None) or original(self)
    )


def _watch_init(accelerator_class: Any, seen: Observations) -> None:
    """Make each Accelerator run here: one process, no GPU, no DeepSpeed, no FSDP."""
    signature = inspect.signature(accelerator_class.__init__)

    @around(accelerator_class, "__init__")
    def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        arguments = signature.bind(self, *args, **kwargs).arguments
        own = arguments.get("mixed_precision")
        said = str(own or os.environ.get("ACCELERATE_MIXED_PRECISION", "no"))
        if said in _GPU_PRECISIONS:
            arguments["mixed_precision"] = "no"
        engine = ""
        for name in _ENGINE_ARGUMENTS:
            plugin = arguments.pop(name, None)
            if plugin is not None:
                seen.note(f"the script uses a {name}, which is left out of the capture")
                engine = engine or _engine_of(name, plugin)
        asks_for_cpu = bool(arguments.get("cpu"))
        arguments.pop("dynamo_backend", None)
        arguments.pop("dynamo_plugin", None)
        original(**arguments)
        self._zerofit_names_precision = own is not None
        self._zerofit_asks_for_cpu = asks_for_cpu
        self._zerofit_engine = engine
        if said in _GPU_PRECISIONS:
            self._zerofit_precision_said = said
        seen.accelerators.append(self)


def _engine_of(name: str, plugin: Any) -> str:
    """Return the engine that an argument of Accelerator configures, in words; "" if it is none."""
    if name.startswith("deepspeed"):
        plugins = plugin.values() if isinstance(plugin, dict) else [plugin]
        return f"DeepSpeed ZeRO-{next(iter(plugins)).zero_stage}"
    return {"fsdp_plugin": "FSDP", "megatron_lm_plugin": "Megatron-LM"}.get(name, "")


def _finish_at_backward(seen: Observations, accelerator: Any) -> NoReturn:
    prepared = (model for _, model in seen.models if _has_trained(seen, model))
    model = next(prepared, None) or outermost(lambda module: _is_optimized(seen, module))
    if model is None:
        where = place_in_script(sys._getframe(1))
        exit_failed(
            seen, "unsupported", "no model contains the parameters of the script's optimizer", where=where
        )
    seen.note("the model is never called as a whole: its first batch is taken from the DataLoader")
    finish(seen, accelerator, model, None)
