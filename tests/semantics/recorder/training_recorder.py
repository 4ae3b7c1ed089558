"""Records what a training really does, step by step, from outside of whatever else hooks into it.

For each optimizer step on this rank: the learning rates, the samples that went through the model, the losses
that the script saw, and how far the parameters have moved. Written as JSON when the process ends.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recorded_weights import Weights, sample_ids

from zerofit.scripts.on_import import when_imported

if TYPE_CHECKING:
    from types import ModuleType


def install(folder: str) -> None:
    """Record the training of this process, if it trains, into a file of that folder."""
    recorder = Recorder(Path(folder))
    when_imported("accelerate.accelerator", recorder.hook_accelerate)
    when_imported("torch.optim.optimizer", recorder.hook_optimizers)
    when_imported("deepspeed.runtime.engine", recorder.hook_deepspeed)
    when_imported("transformers.trainer_callback", recorder.hook_trainer)


class Recorder:
    """What one rank has done so far."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._weights = Weights()
        self._samples: list[str] = []
        self._losses: list[float] = []
        self._optimizers: list[Any] = []
        self._in_engine = False
        self._zero_stage: int | None = None
        self._is_sharded = False
        self._rates: list[float] = []
        self._steps: list[dict[str, Any]] = []
        self._lengths: list[int | None] = []
        self._trainer: dict[str, Any] = {}
        self._hooked: set[type] = set()

    def hook_accelerate(self, module: ModuleType) -> None:
        """Hook the class of each Accelerator when it is made: all others have hooked into it by then."""
        original, recorder = module.Accelerator.__init__, self

        @functools.wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:  # others may give `self` by its name
            original(self, *args, **kwargs)
            if type(self) not in recorder._hooked:
                recorder._hooked.add(type(self))
                recorder._hook_accelerator(type(self))
                atexit.register(recorder._write)

        module.Accelerator.__init__ = init

    def _hook_accelerator(self, accelerator_class: Any) -> None:
        prepare, backward = accelerator_class.prepare, accelerator_class.backward

        @functools.wraps(prepare)
        def seen_prepare(accelerator: Any, *args: Any, **kwargs: Any) -> Any:
            prepared = prepare(accelerator, *args, **kwargs)
            for item in prepared if isinstance(prepared, tuple) else (prepared,):
                self._see(item)
            return prepared

        @functools.wraps(backward)
        def seen_backward(accelerator: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
            self._losses.append(float(loss.detach()))
            return backward(accelerator, loss, *args, **kwargs)

        accelerator_class.prepare, accelerator_class.backward = seen_prepare, seen_backward

    def _see(self, item: Any) -> None:
        import torch

        if isinstance(item, torch.nn.Module):
            self._is_sharded |= any(hasattr(parameter, "full_tensor") for parameter in item.parameters())
            self._weights.add(item)
            item.register_forward_hook(self._after_forward, with_kwargs=True)
        elif isinstance(item, torch.utils.data.DataLoader):
            try:
                self._lengths.append(len(item))
            except TypeError:
                self._lengths.append(None)

    def _after_forward(self, model: Any, args: Any, kwargs: dict[str, Any], _: Any) -> None:
        import torch

        if model.training and torch.is_grad_enabled():
            self._samples += sample_ids(args, kwargs)

    def hook_optimizers(self, module: ModuleType) -> None:
        """Watch the steps of torch's optimizers, whatever class."""
        module.register_optimizer_step_pre_hook(lambda optimizer, *_: self._before_step(optimizer))
        module.register_optimizer_step_post_hook(lambda optimizer, *_: self._after_step(optimizer))

    def hook_deepspeed(self, module: ModuleType) -> None:
        """Watch the steps of DeepSpeed's engine, each of which may be many of the optimizer inside."""
        original = module.DeepSpeedEngine._take_model_step

        @functools.wraps(original)
        def step(engine: Any, *args: Any, **kwargs: Any) -> Any:
            self._zero_stage = engine.zero_optimization_stage()
            self._before_step(engine.optimizer, is_engine=True)
            self._in_engine = True
            try:
                return original(engine, *args, **kwargs)
            finally:
                self._in_engine = False
                self._after_step(engine.optimizer)

        module.DeepSpeedEngine._take_model_step = step

    def hook_trainer(self, module: ModuleType) -> None:
        """Note a Trainer's own counters and logs when it has trained."""
        original = module.CallbackHandler.on_train_end

        @functools.wraps(original)
        def on_train_end(handler: Any, args: Any, state: Any, control: Any) -> Any:
            self._trainer = {
                "global_step": state.global_step,
                "max_steps": state.max_steps,
                "epoch": state.epoch,
                "logs": state.log_history,
            }
            return original(handler, args, state, control)

        module.CallbackHandler.on_train_end = on_train_end

    def _before_step(self, optimizer: Any, *, is_engine: bool = False) -> None:
        if not self._in_engine:
            # DeepSpeed drops groups without parameters, and at stage 3 holds the others' elsewhere.
            groups = [group for group in optimizer.param_groups if group["params"] or is_engine]
            self._rates = [float(group["lr"] or 0) for group in groups]

    def _after_step(self, optimizer: Any) -> None:
        if self._in_engine or not self._hooked:
            return
        if not any(optimizer is known for known in self._optimizers):
            self._optimizers.append(optimizer)
        self._steps.append(
            {
                "optimizer": next(i for i, known in enumerate(self._optimizers) if known is optimizer),
                "rates": self._rates,
                "samples": self._samples,
                "losses": self._losses,
                "weights": self._weights.measure(),
            }
        )
        self._samples, self._losses = [], []

    def _write(self) -> None:
        record = {
            "rank": int(os.environ.get("RANK", "0")),
            "world_size": int(os.environ.get("WORLD_SIZE", "1")),
            "zero_stage": self._zero_stage,
            "is_sharded": self._is_sharded,
            "optimizers": [type(getattr(one, "optimizer", one)).__name__ for one in self._optimizers],
            "loader_lengths": self._lengths,
            "initial_weights": self._weights.initial,
            "steps": self._steps,
            "samples_without_step": self._samples,
            "trainer": self._trainer,
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rank{record['rank']}.json"
        path.write_text(json.dumps(record), encoding="utf-8")
        if "RECORD_ENDS" in os.environ:
            # Threads of gloo sometimes abort a stock process while it is torn down, after all was done.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1 if hasattr(sys, "last_value") else 0)
