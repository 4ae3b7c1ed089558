"""Run as a program: transformers' Trainer with auto_find_batch_size, as a user would take it, under a limit.

Arguments and result are those of benchmarks/measuring/trial_program.py: SPEC.json RESULT.json PARENT-ID. The
micro-batch of its spec is the batch that it begins with; tokens_per_s counts those that it really trained on.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from measuring.measure import NUM_WARM_UP
from measuring.memory import limited_memory, reset_after_creation, reset_peak
from measuring.random_model import SEED, make_model, make_samples
from measuring.results import TrialMeasurement
from measuring.trial_program import main
from transformers import Trainer, TrainerCallback, TrainingArguments

from zerofit.machine.this_node import process_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from measuring.results import TrialSpec

_NONE_FITS = "No executable batch size found"
"""accelerate/utils/memory.py, find_executable_batch_size."""


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):  # type: ignore[misc]
    """One batch's samples, over and over.

    Args:
        samples: tensors by the model's argument, the samples in the first dimension.
        count: how many there are to be.
    """

    def __init__(self, samples: dict[str, torch.Tensor], count: int) -> None:
        self._samples = samples
        self._size = len(next(iter(samples.values())))
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: tensor[index % self._size] for name, tensor in self._samples.items()}


class Clock(TrainerCallback):  # type: ignore[misc]
    """Takes the time after each step of the attempt that runs; peaks of memory are its own, too.

    Args:
        device: "cpu" or "cuda".
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._ended: list[float] = []
        self.batch_size = 0
        """Samples of a step."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin an attempt, with the batch that it has."""
        self._ended = []
        self.batch_size = int(state.train_batch_size)
        reset_peak()
        if self._device != "cpu":
            torch.cuda.reset_peak_memory_stats()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take the time once the step is really over."""
        if self._device != "cpu":
            torch.cuda.synchronize()
        self._ended.append(time.perf_counter())

    def times_s(self) -> tuple[float, ...]:
        """Return how long each step after the warm-up took, with all that Trainer does between steps."""
        timed = self._ended[NUM_WARM_UP - 1 :]
        return tuple(end - start for start, end in pairwise(timed))


def measure(spec: TrialSpec, *, tell: Callable[[str], None]) -> TrialMeasurement:
    """Let Trainer find its batch and train, and return what that took.

    Args:
        spec: model, samples and limit; of its strategy the batch alone is taken.
        tell: told what is being done.
    """
    device = "cpu" if spec.on_cpu else "cuda"
    num_steps = NUM_WARM_UP + spec.num_steps
    clock = Clock(device)
    reset_peak()
    imported = process_bytes("VmRSS")
    with limited_memory(spec.memory_limit_bytes, device):
        tell("making the model")
        model = make_model(spec, device)
        reset_after_creation(device)
        samples = Samples(make_samples(model, spec), spec.batch_size * num_steps)
        tell("training")
        arguments = _arguments(spec, num_steps)
        _train(Trainer(model=model, args=arguments, train_dataset=samples, callbacks=[clock]))
        peak = process_bytes("VmHWM")
    step_time_s = statistics.median(clock.times_s())
    return TrialMeasurement(
        process_bytes=max(0, peak - imported),
        process_peak_bytes=peak,
        allocated_bytes=None if spec.on_cpu else torch.cuda.max_memory_allocated(),
        reserved_bytes=None if spec.on_cpu else torch.cuda.max_memory_reserved(),
        step_times_s=clock.times_s(),
        step_time_s=step_time_s,
        tokens_per_s=clock.batch_size * spec.sequence_length / step_time_s,
        losses=(),
        counted=None,
        num_trained_parameters=sum(one.numel() for one in model.parameters() if one.requires_grad),
        num_threads=torch.get_num_threads(),
    )


def _train(trainer: Trainer) -> None:
    """Train; where not even one sample fits, that is for want of memory, though Trainer says it otherwise.

    On the CPU oneDNN stays out: that it gets no memory is nothing that accelerate goes on after.
    """
    try:
        with torch.backends.mkldnn.flags(enabled=False) if trainer.args.use_cpu else nullcontext():
            trainer.train()
    except RuntimeError as error:
        if _NONE_FITS in str(error):
            raise MemoryError(str(error)) from error
        raise


def _arguments(spec: TrialSpec, num_steps: int) -> TrainingArguments:
    """Return what a user says who wants bf16 and no thought about the batch; all else is Trainer's own."""
    arguments = TrainingArguments(
        output_dir=f"{tempfile.gettempdir()}/zerofit-trainer",  # nothing is saved in it
        per_device_train_batch_size=spec.batch_size,
        auto_find_batch_size=True,
        bf16=True,
        use_cpu=spec.on_cpu,
        max_steps=num_steps,
        seed=SEED,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    arguments._n_gpu = 1  # of several GPUs the first, as the ladder's loop has it, and no DataParallel
    return arguments


if __name__ == "__main__":
    main(*sys.argv[1:], measure=measure)
