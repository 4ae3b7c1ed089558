"""What a run really does: the engine that DeepSpeed made, the optimizer's steps, the weights at the end."""

from __future__ import annotations

import functools
import inspect
import os
from typing import TYPE_CHECKING, Any

from harness import sharding

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

START = "start.npz"
"""The whole parameters before the first step, of which the reference starts too: a model that is made under
ZeRO-3 takes other random numbers than one that is made whole."""


class Observer:
    """Looks on: it notes which engine, models and optimizers a script makes, and changes nothing."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.model: Any = None
        self.learning_rates: list[float] = []
        self.first_weights: dict[int, torch.Tensor] = {}
        self._stepping: Any = None

    def install(self) -> None:
        """Look on deepspeed.initialize, Accelerator.prepare_model and every optimizer's step."""
        import deepspeed
        from accelerate import Accelerator
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        initialize, prepare_model = deepspeed.initialize, Accelerator.prepare_model

        @functools.wraps(initialize)
        def initialize_and_note(*args: Any, **kwargs: Any) -> Any:
            made = initialize(*args, **kwargs)
            if self.engine is None:
                self.engine = made[0]
                _save_start(_whole_weights(self.engine))
            return made

        @functools.wraps(prepare_model)
        def prepare_model_and_note(accelerator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            is_first = self.model is None
            self.model = self.model or model
            if is_first and os.environ.get("ACCELERATE_USE_FSDP") == "true":
                _save_start(_plain_weights(model))
            prepared = prepare_model(accelerator, model, *args, **kwargs)
            if is_first and sharding.is_sharded(prepared):
                self.model = prepared
            return prepared

        def note_sharded(model: Any) -> None:
            self.model = model

        deepspeed.initialize = initialize_and_note
        Accelerator.prepare_model = prepare_model_and_note
        register_optimizer_step_pre_hook(self._note_step)
        sharding.note_sharded(lambda model: _save_start(_plain_weights(model)), note_sharded)

    def _note_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._stepping is None:
            self._stepping = optimizer
        # A ZeRO engine steps its inner optimizer once a parameter group; only then does global_steps go on.
        number = len(self.learning_rates) if self.engine is None else self.engine.global_steps
        if optimizer is not self._stepping or number < len(self.learning_rates):
            return
        self.learning_rates.append(float(optimizer.param_groups[0]["lr"]))
        if not self.first_weights and self.engine is None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self.first_weights = {id(p): p.detach().clone() for p in parameters}

    def seen(self, asks: Sequence[str]) -> dict[str, Any]:
        """Return the standard observations, and those asked for as a path that begins with "engine."."""
        seen = _of_engine(self.engine) if self.engine is not None else _of_plain(self._stepping)
        if sharding.is_sharded(self.model):
            seen |= sharding.shown_by(self.model)
        seen["learning_rates"] = [round(rate, 10) for rate in self.learning_rates]
        seen["optimizer_steps"] = len(self.learning_rates)
        for path in asks:
            if path.startswith("engine."):
                seen[path] = _follow(self.engine, path.split(".")[1:])
        return seen

    def weights(self) -> dict[str, Any]:
        """Return each trained parameter, whole and in fp32; of a run without an engine, also the first ones.

        Under DeepSpeed and FSDP every rank must call this.
        """
        if self.engine is not None:
            return {f"last/{name}": weight.numpy() for name, weight in _whole_weights(self.engine).items()}
        if self.model is None:
            return {}
        if sharding.is_sharded(self.model):
            state = sharding.whole_state(self.model)
            return {f"last/{name}": weight.float().numpy() for name, weight in state.items()}
        arrays = {}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and id(parameter) in self.first_weights:
                name = name.removeprefix("module.")
                arrays[f"last/{name}"] = parameter.detach().float().numpy()
                arrays[f"first/{name}"] = self.first_weights[id(parameter)].float().numpy()
        return arrays


def _save_start(weights: dict[str, torch.Tensor]) -> None:
    import numpy

    if os.environ.get("RANK", "0") == "0":
        numpy.savez(START, **{name: weight.numpy() for name, weight in weights.items()})


def _plain_weights(model: Any) -> dict[str, torch.Tensor]:
    """Return the trained parameters of a model before it is sharded; those that this rank has."""
    return {
        name: weight.detach().float()
        for name, weight in model.named_parameters()
        if weight.requires_grad and not weight.is_meta
    }


def _of_plain(optimizer: Any) -> dict[str, Any]:
    return {"zero_stage": None, "optimizer": type(optimizer).__name__}


def _of_engine(engine: Any) -> dict[str, Any]:
    from accelerate import PartialState

    stage = engine.zero_optimization_stage()
    wrapper = engine.optimizer
    optimizer = _innermost(wrapper)
    whole = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters() if p.requires_grad)
    return {
        "zero_stage": stage,
        "world_size": engine.world_size,
        "engine_optimizer": type(wrapper).__name__,
        "optimizer": type(optimizer).__name__,
        "weight_decay_is_decoupled": getattr(optimizer, "adam_w_mode", None),
        "partitions_optimizer_states": 0 < _num_state_elements(optimizer) < 0.75 * whole,
        "partitions_parameters": any(hasattr(p, "ds_id") for p in engine.module.parameters()),
        "offloads_parameters": bool(getattr(wrapper, "offload_param", False)),
        "optimizer_states_on": _states_on(wrapper),
        "optimizer_nvme_path": _nvme_path(engine),
        "accelerate_world_size": PartialState().num_processes if PartialState().initialized else None,
        "parameter_dtype": str(next(engine.module.parameters()).dtype).removeprefix("torch."),
        "micro_batch_size": engine.train_micro_batch_size_per_gpu(),
        "train_batch_size": engine.train_batch_size(),
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "gradient_clipping": engine.gradient_clipping(),
        "global_steps": engine.global_steps,
        "skipped_steps": engine.skipped_steps,
    }


def _nvme_path(engine: Any) -> str | None:
    section = engine._config.zero_config.offload_optimizer
    return None if section is None or section.nvme_path is None else str(section.nvme_path)


def _innermost(optimizer: Any) -> Any:
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _num_state_elements(optimizer: Any) -> int:
    """Return the elements of the largest of the optimizer's states, over all its parameters on this rank."""
    sizes: dict[str, int] = {}
    for state in getattr(optimizer, "state", {}).values():
        for name, value in state.items():
            if hasattr(value, "numel") and value.numel() > 1:
                sizes[name] = sizes.get(name, 0) + value.numel()
    return max(sizes.values(), default=0)


def _states_on(wrapper: Any) -> str:
    """Return where DeepSpeed keeps the optimizer's states: all ranks here are on the CPU, so it must say."""
    if getattr(wrapper, "swap_optimizer", False):
        return "nvme"
    offloads = getattr(wrapper, "offload_optimizer", False) or getattr(wrapper, "cpu_offload", False)
    return "cpu" if offloads or type(wrapper).__name__.startswith("DeepSpeedCPU") else "gpu"


def _whole_weights(engine: Any) -> dict[str, torch.Tensor]:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    weights = {}
    has_optimizer = type(engine.optimizer).__name__ not in ("NoneType", "DeepSpeedZeRoOffload")
    masters = _masters_at_stage_0(engine.optimizer)
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        master = safe_get_full_fp32_param(parameter) if has_optimizer else None
        master = masters.get(id(parameter)) if master is None else master
        if master is None:
            with deepspeed.zero.GatheredParameters([parameter]):
                master = parameter.detach().clone()
        weights[name] = master.detach().float().reshape(getattr(parameter, "ds_shape", parameter.shape)).cpu()
    return weights


def _masters_at_stage_0(wrapper: Any) -> dict[int, torch.Tensor]:
    """Return the fp32 weights that 16-bit training without ZeRO keeps beside each parameter."""
    if type(wrapper).__name__ != "FP16_UnfusedOptimizer":
        return {}
    pairs = zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True)
    return {id(low): high for group in pairs for low, high in zip(*group, strict=True)}


def _follow(value: Any, path: Sequence[str]) -> Any:
    for name in path:
        value = value[name] if isinstance(value, dict) else getattr(value, name)
        if inspect.ismethod(value):
            value = value()
    return value if isinstance(value, (str, int, float, bool, type(None), list, dict)) else str(value)
