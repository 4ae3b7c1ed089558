"""The unsharded reference: the same script and global batch in one process, in fp32, without DeepSpeed."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.observe import START

if TYPE_CHECKING:
    from harness.observe import Observer

NUM_RANKS = 2
"""Ranks of the run that the reference stands for; its batches are so many times larger."""
DEFAULT_CLIPPING = 1.0
"""What DeepSpeed clips at where nobody names it (runtime/constants.py), and accelerate as well."""
ASKED = "asked.json"
"""What its run was asked to do: gradient_accumulation_steps, gradient_clipping, optimizer."""


def without_deepspeed(observer: Observer) -> None:
    """Take DeepSpeed, number formats and ranks out of what the script is about to import."""
    asked = json.loads(Path(ASKED).read_text())
    _double_batches()
    _patch_accelerator(asked)
    _patch_trainer()
    _patch_deepspeed(observer)
    _start_from_the_same_weights()


def _double_batches() -> None:
    from torch.utils.data import DataLoader

    original = DataLoader.__init__

    @functools.wraps(original)
    def init(self: Any, dataset: Any, batch_size: Any = 1, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("batch_sampler") is None and batch_size is not None:
            batch_size *= NUM_RANKS
        original(self, dataset, batch_size, *args, **kwargs)

    DataLoader.__init__ = init


def _patch_accelerator(asked: dict[str, Any]) -> None:
    import accelerate.utils
    from accelerate import Accelerator
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    original = Accelerator.__init__
    is_trainer = []

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        arguments = inspect.signature(original).bind(self, *args, **kwargs).arguments
        for name in ("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "mixed_precision"):
            arguments.pop(name, None)
        is_trainer.append(_is_called_by_trainer())
        if "gradient_accumulation_steps" in asked and not is_trainer[-1]:
            arguments.pop("gradient_accumulation_plugin", None)
            arguments["gradient_accumulation_steps"] = asked["gradient_accumulation_steps"]
        arguments.pop("self")
        original(self, **arguments)

    def clip(optimizer: Any, args: Any, kwargs: Any) -> None:
        from torch.nn.utils import clip_grad_norm_

        by_trainer = not is_trainer or is_trainer[-1]  # it clips by itself
        if not by_trainer and asked["gradient_clipping"] > 0:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            clip_grad_norm_(parameters, asked["gradient_clipping"])

    Accelerator.__init__ = init
    accelerate.utils.DummyOptim = functools.partial(_configured_optimizer, asked)
    accelerate.utils.DummyScheduler = _constant_scheduler
    register_optimizer_step_pre_hook(clip)


def _is_called_by_trainer() -> bool:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "transformers.trainer":
            return True
        frame = frame.f_back
    return False


def _configured_optimizer(
    config: dict[str, Any], params: Any, lr: float = 1e-3, weight_decay: float = 0.0
) -> Any:
    """Return the torch optimizer that the file's section asks for; AdamW is the one our examples name."""
    import torch

    section = config["optimizer"]
    asked = {key: value for key, value in section.get("params", {}).items() if value != "auto"}
    return getattr(torch.optim, section["type"])(params, **{"lr": lr, "weight_decay": weight_decay, **asked})


def _constant_scheduler(optimizer: Any, total_num_steps: int, **_: Any) -> Any:
    """Return a constant rate: the scheduler's numbers are no part of what our good examples show."""
    from torch.optim.lr_scheduler import LambdaLR

    return LambdaLR(optimizer, lambda _: 1.0)


def _start_from_the_same_weights() -> None:
    from accelerate import Accelerator

    original = Accelerator.prepare_model

    @functools.wraps(original)
    def prepare_model(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        _load_start(model)
        return original(self, model, *args, **kwargs)

    Accelerator.prepare_model = prepare_model


def _load_start(model: Any) -> None:
    import numpy
    import torch

    if not Path(START).exists():
        return
    with numpy.load(START) as weights, torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in weights:
                parameter.copy_(torch.from_numpy(weights[name]))


def _patch_trainer() -> None:
    from transformers import TrainingArguments

    original = TrainingArguments.__post_init__

    @functools.wraps(original)
    def post_init(self: Any) -> None:
        self.deepspeed, self.bf16, self.fp16, self.use_cpu = None, False, False, True
        self.fsdp, self.fsdp_config = None, None
        original(self)

    TrainingArguments.__post_init__ = post_init


def _patch_deepspeed(observer: Observer) -> None:
    import deepspeed
    import torch
    import transformers.integrations

    # What DeepSpeed's engine holds in `.module` is the model itself here.
    torch.nn.Module.module = property(lambda model: model)

    def initialize(
        model: Any = None,
        optimizer: Any = None,
        config: Any = None,
        config_params: Any = None,
        model_parameters: Any = None,
        args: Any = None,
        **_: Any,
    ) -> tuple[Any, Any, None, None]:
        asked = config or config_params or getattr(args, "deepspeed_config", None)
        asked = asked if isinstance(asked, dict) else json.loads(Path(asked).read_text())
        _load_start(model)
        engine = _Engine(model, optimizer, asked)
        observer.model = model
        return engine, engine.optimizer, None, None

    deepspeed.initialize = initialize
    deepspeed.init_distributed = _one_rank
    deepspeed.zero.Init = lambda *args, **kwargs: contextlib.nullcontext()
    transformers.integrations.HfDeepSpeedConfig = lambda config: config


def _one_rank(*args: Any, **kwargs: Any) -> None:
    import torch.distributed

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


class _Engine:
    """Steps as a native DeepSpeed engine does, in plain torch."""

    def __init__(self, model: Any, optimizer: Any, config: dict[str, Any]) -> None:
        self._model = model
        self.optimizer = optimizer or _configured_optimizer(config, model.parameters())
        self._config = config
        self._steps = int(config.get("gradient_accumulation_steps", 1))
        self._micro_step = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples of one micro-step of all ranks that this process stands for."""
        whole = int(self._config.get("train_batch_size", 0)) // self._steps
        return int(self._config.get("train_micro_batch_size_per_gpu", 0)) * NUM_RANKS or whole

    def gradient_accumulation_steps(self) -> int:
        return self._steps

    def backward(self, loss: Any) -> None:
        (loss / self._steps).backward()

    def step(self) -> None:
        from torch.nn.utils import clip_grad_norm_

        self._micro_step += 1
        if self._micro_step % self._steps:
            return
        norm = self._config.get("gradient_clipping", DEFAULT_CLIPPING)
        if norm > 0:
            clip_grad_norm_(self._model.parameters(), norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
