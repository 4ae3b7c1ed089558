"""Measures one rung in this process: warm-up for the losses, timed steps, then what its tensors hold."""

from __future__ import annotations

import gc
import statistics
from contextlib import nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

from zerofit.ladder.made import make_model, make_samples, micro_batch, without_dropout
from zerofit.ladder.memory import (
    LiveTensors,
    device_bytes,
    device_used_bytes,
    forget_making,
    forget_peak,
    gradient_bytes,
    process_bytes,
    state_bytes,
    weight_bytes,
)
from zerofit.ladder.train import make_trainee
from zerofit.ladder_results import Measured, Parts

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerofit.ladder.spec import Spec
    from zerofit.ladder.train import Trainee

NUM_WARM_UP = 3
"""Steps before those that are timed: the first makes the optimizer's states, torch.compile compiles, and the
last one's loss is after two updates. They run without dropout, whose random numbers fall otherwise in small
batches than in large ones, so that what does not change the mathematics has the same losses."""


def measure(spec: Spec, *, tell: Callable[[str], None]) -> Measured:
    """Train a rung and return what it took.

    Args:
        spec: the rung.
        tell: told what is being done.

    Raises:
        UserError: the model or this machine can't take the strategy.
    """
    import torch

    device = "cpu" if spec.on_cpu else "cuda"
    used_before = None if spec.on_cpu else device_used_bytes()
    _import_all(spec)
    forget_peak()
    imported = process_bytes("VmRSS")
    tell("making the model")
    model = make_model(spec, device)
    forget_making(device)
    samples = make_samples(model, spec)
    trainee = make_trainee(model, samples, spec, device)
    del model
    losses, gradients = [], 0
    for index in range(NUM_WARM_UP):
        tell(f"taking warm-up step {index + 1} of {NUM_WARM_UP}")
        with without_dropout(trainee.model):
            losses.append(trainee.backward())
        gradients = gradient_bytes(trainee.model)
        trainee.update()
    if spec.strategy.compile:
        tell("compiling with dropout")
        trainee.step()
    times = []
    for index in range(spec.num_steps):
        tell(f"taking step {index + 1} of {spec.num_steps}")
        times.append(trainee.timed_step())
    peak = process_bytes("VmHWM")
    on_gpu: dict[str, int | None] = {}
    if not spec.on_cpu:
        on_gpu = {
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "device_bytes": device_bytes(used_before=used_before),
        }
    tell("counting tensors")
    step_time_s = statistics.median(times)
    return Measured(
        process_bytes=max(0, peak - imported),
        process_peak_bytes=peak,
        **on_gpu,
        step_times_s=tuple(times),
        step_time_s=step_time_s,
        tokens_per_s=spec.batch_size * spec.sequence_length / step_time_s,
        losses=tuple(losses),
        counted=Parts(
            weights=weight_bytes(trainee.model),
            gradients=gradients,
            optimizer_states=state_bytes(trainee.optimizer),
            activations=_activation_bytes(trainee),
        ),
        num_trained_parameters=sum(one.numel() for one in trainee.model.parameters() if one.requires_grad),
        num_threads=torch.get_num_threads(),
    )


def _import_all(spec: Spec) -> None:
    """Import what the rung needs and take a step of a small layer, so that neither is counted as its own."""
    import torch
    import transformers
    from transformers import optimization

    from zerofit.probe.model_task import Task
    from zerofit.runtime.optimizer_kinds import KINDS

    strategy = spec.strategy
    names = ["zerofit.runtime.by_hand"]
    names += ["peft"] if strategy.lora is not None else []
    is_of_bitsandbytes = strategy.optimizer is not None and KINDS[strategy.optimizer].bits is not None
    names += ["bitsandbytes"] if is_of_bitsandbytes or strategy.quantization is not None else []
    for name in names:
        import_module(name)
    getattr(transformers, Task(spec.task).auto_class)
    if strategy.quantization is not None:
        _import_for_4_bit("cpu" if spec.on_cpu else "cuda")
    layer = torch.nn.Linear(64, 64)
    for optimizer in (
        torch.optim.AdamW(layer.parameters(), foreach=True),
        optimization.Adafactor(layer.parameters()),
    ):
        layer(torch.ones(64, 64)).sum().backward()
        optimizer.step()
    gc.collect()


def _import_for_4_bit(device: str) -> None:
    """Import what saving a model and computing in 4 bit load at their first use."""
    import torch
    from transformers.integrations import deepspeed

    if deepspeed.is_deepspeed_available():
        import_module("deepspeed")  # accelerate does, to save a model (accelerate/utils/other.py)
    layers: Any = import_module("bitsandbytes.nn")
    layer = layers.Linear4bit(64, 64, compress_statistics=True, quant_type="nf4").to(device)
    layer(torch.ones(64, 64, device=device, requires_grad=True)).sum().backward()


def _activation_bytes(trainee: Trainee) -> int | None:
    """Return what one micro-batch's forward pass leaves for its backward pass, and its loss.

    On a GPU torch's allocator says so. On the CPU the storages that operators made are followed, which a
    compiled model does not allow.
    """
    import torch

    if trainee.device == "cpu" and trainee.spec.strategy.compile:
        return None
    batch = micro_batch(trainee.samples, 0, trainee.spec.strategy.micro_batch_size or 1, trainee.device)
    gc.collect()
    if trainee.device == "cpu":
        live = LiveTensors([*trainee.model.parameters(), *trainee.model.buffers(), *batch.values()])
        return _after_forward(trainee, batch, live.mode, live.num_bytes)
    before = torch.cuda.memory_allocated()
    return _after_forward(trainee, batch, nullcontext(), lambda: torch.cuda.memory_allocated() - before)


def _after_forward(trainee: Trainee, batch: Any, mode: Any, count: Callable[[], int]) -> int:
    with mode:
        loss = trainee.forward(batch)
    num_bytes = count()
    del loss
    return num_bytes
