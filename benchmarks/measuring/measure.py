"""Measures one trial in this process: warm-up steps for the losses, timed steps, then tensor sizes."""

from __future__ import annotations

import gc
import statistics
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from measuring.deepspeed_rank import joined, make_rank
from measuring.fsdp2_rank import joined_sharded, make_sharded
from measuring.memory import (
    LiveTensors,
    gradient_bytes,
    limited_memory,
    read_gpu,
    reset_after_creation,
    reset_peak,
    state_bytes,
    weight_bytes,
)
from measuring.random_model import make_model, make_samples, micro_batch, without_dropout
from measuring.results import TensorBytes, TrialMeasurement
from measuring.training_loop import make_plain
from zerofit.core.strategy import Engine
from zerofit.machine.this_node import process_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from measuring.results import TrialSpec
    from measuring.training_loop import Trainee

_PARALLEL_ELEMENTS = 1 << 20
"""ASSUMPTION: enough elements to use all of torch's threads (at/Parallel.h: GRAIN_SIZE is 32768)."""
NUM_WARM_UP = 3
"""Steps before the timed ones: the first creates the optimizer's states, torch.compile compiles, and the last
one's loss is after two updates. They run without dropout, whose random numbers depend on the micro-batch
size, so that lossless changes give equal losses."""


def measure(spec: TrialSpec, *, tell: Callable[[str], None]) -> TrialMeasurement:
    """Train a trial after its imports, and return the measurements.

    Args:
        spec: the trial.
        tell: receives the current stage.

    Raises:
        UserError: the model or this machine does not support the strategy.
    """
    device = "cpu" if spec.on_cpu else "cuda"
    gpu = None if spec.on_cpu else _StartedGpu()
    warm_up(spec, device)
    reset_peak()
    imported = process_bytes("VmRSS")
    has_deepspeed = spec.strategy.engine is Engine.DEEPSPEED
    limit = limited_memory(spec.memory_limit_bytes, device, has_deepspeed=has_deepspeed)
    with joined(spec), joined_sharded(spec, device), limit:
        trained = _train(spec, device, tell)
        peak = process_bytes("VmHWM")
        on_gpu = gpu.figures() if gpu else {}
    tell("counting tensors")
    return _measured(trained, process_bytes=max(0, peak - imported), process_peak_bytes=peak, **on_gpu)


def warm_up(spec: TrialSpec, device: str) -> None:
    """Run small layers and optimizers and start torch's threads, so that neither counts for the trial.

    Args:
        spec: the trial.
        device: "cpu" or "cuda", where it trains.
    """
    import torch
    from transformers import optimization

    layer = torch.nn.Linear(64, 64)
    for optimizer in (
        torch.optim.AdamW(layer.parameters(), foreach=True),
        optimization.Adafactor(layer.parameters()),
    ):
        layer(torch.ones(64, 64)).sum().backward()
        optimizer.step()
    if spec.strategy.quantization is not None:
        _warm_up_4_bit(device)
    torch.ones(_PARALLEL_ELEMENTS).add_(1)
    gc.collect()


def _warm_up_4_bit(device: str) -> None:
    """Trigger the imports of saving a model and computing in 4 bit."""
    import torch
    from transformers.integrations import deepspeed

    if deepspeed.is_deepspeed_available():
        import_module("deepspeed")  # accelerate uses it to save a model (accelerate/utils/other.py)
    layers: Any = import_module("bitsandbytes.nn")
    layer = layers.Linear4bit(64, 64, compress_statistics=True, quant_type="nf4").to(device)
    layer(torch.ones(64, 64, device=device, requires_grad=True)).sum().backward()


class _StartedGpu:
    """The GPU after CUDA initialization, with the driver's readings before and after it."""

    def __init__(self) -> None:
        import torch

        self._before = read_gpu()
        torch.cuda.init()
        torch.cuda.synchronize()
        self._context_bytes = read_gpu().held_since(self._before)

    def figures(self) -> dict[str, int | None]:
        """Return the GPU's fields of TrialMeasurement, by name."""
        import torch

        now = read_gpu()
        reserved_bytes = torch.cuda.max_memory_reserved()
        return {
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": reserved_bytes,
            "device_bytes": peak_on_device(
                now.held_since(self._before),
                reserved_bytes=torch.cuda.memory_reserved(),
                most_reserved_bytes=reserved_bytes,
            ),
            "device_process_bytes": now.process_bytes,
            "device_used_bytes": now.used_since(self._before),
            "context_bytes": self._context_bytes,
        }


def peak_on_device(held_bytes: int | None, *, reserved_bytes: int, most_reserved_bytes: int) -> int | None:
    """Return a process's peak GPU memory by the driver's count.

    The driver only knows the present, and torch may have released memory by then: DeepSpeed empties the cache
    once the parameters are partitioned (stage_1_and_2.py, empty_cache). Memory outside torch, the context,
    kernels and libraries, stays until the process ends.

    Args:
        held_bytes: its current memory; None if the driver does not tell.
        reserved_bytes: the part reserved by torch's allocator.
        most_reserved_bytes: the allocator's peak.
    """
    return None if held_bytes is None else held_bytes - reserved_bytes + most_reserved_bytes


def make_trainee(model: Any, samples: dict[str, Any], spec: TrialSpec, device: str) -> Trainee:
    """Return a model with its optimizer under the strategy: rank 0 under an engine, else a plain loop.

    Raises:
        UserError: the model or this machine does not support the strategy.
    """
    make = _MAKERS[spec.strategy.engine]
    return make(model, samples, spec, device)


_MAKERS: dict[Engine, Callable[[Any, dict[str, Any], TrialSpec, str], Trainee]] = {
    Engine.DEEPSPEED: make_rank,
    Engine.FSDP2: make_sharded,
    Engine.NATIVE: make_plain,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trained:
    """The result of training."""

    trainee: Trainee
    gradients: int
    """Bytes of all gradients before a step."""
    losses: tuple[float, ...]
    times_s: tuple[float, ...]


def _train(spec: TrialSpec, device: str, tell: Callable[[str], None]) -> _Trained:
    """Create the model and run all steps."""
    tell("making the model")
    model = make_model(spec, device)
    reset_after_creation(device)
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
    return _Trained(trainee=trainee, gradients=gradients, losses=tuple(losses), times_s=tuple(times))


def _measured(trained: _Trained, **memory: Any) -> TrialMeasurement:
    """Return the measurements, given the fields of process and GPU."""
    import torch

    trainee, spec = trained.trainee, trained.trainee.spec
    step_time_s = statistics.median(trained.times_s)
    counted = None
    if spec.strategy.engine is Engine.NATIVE:  # of the others only a rank's part is here
        counted = TensorBytes(
            weights=weight_bytes(trainee.model),
            gradients=trained.gradients,
            optimizer_states=state_bytes(trainee.optimizer),
            activations=_activation_bytes(trainee),
        )
    return TrialMeasurement(
        **memory,
        step_times_s=trained.times_s,
        step_time_s=step_time_s,
        tokens_per_s=spec.batch_size * spec.sequence_length / step_time_s,
        losses=trained.losses,
        counted=counted,
        num_trained_parameters=num_trained(trainee.model),
        num_threads=torch.get_num_threads(),
    )


def num_trained(model: Any) -> int:
    """Return the number of trained parameters, counting whole ones if ZeRO-3 has partitioned them."""
    sizes = (getattr(one, "ds_numel", None) or one.numel() for one in model.parameters() if one.requires_grad)
    return sum(int(size) for size in sizes)


def _activation_bytes(trainee: Trainee) -> int | None:
    """Return the bytes that one micro-batch's forward pass and loss keep for the backward pass.

    On a GPU from torch's allocator. On the CPU by tracking the operators' storages, which a compiled model
    does not allow.
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
