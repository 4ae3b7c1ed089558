"""Rank 0 of N with the real DeepSpeed engine, and collectives that exchange nothing.

torch's "fake" process group pretends that there are N ranks and transfers nothing: the engine partitions,
allocates, gathers and steps as on rank 0 of N, with that rank's tensors, but it gathers N copies of its own
part, and reduces only its own gradients. So for N above 1 losses are meaningless, and steps wait for no
other rank; for N of 1 only NCCL's buffers are missing, which a run on one GPU does not need. How long NCCL
keeps tensors alive is not covered.
Source: torch/csrc/distributed/c10d/FakeProcessGroup.hpp (2.13; other versions were not checked).
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measuring.training_loop import CLIPPING, Trainee, apply_to_model
from zerofit.configs.write.deepspeed import deepspeed_config
from zerofit.core.errors import UserError
from zerofit.core.strategy import Engine, OffloadDevice, Precision
from zerofit.machine.extensions import extensions_folders, find_build_locks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from measuring.results import TrialSpec

_LOSS_SCALE_POWER = 4
"""ASSUMPTION: fp16 gradients of a loss times 2^4 overflow in no model here. With DeepSpeed's 2^16, the first
steps are skipped until the scale fits, which might be all steps of a short run."""


@dataclass(slots=True, kw_only=True)
class RankTrainee(Trainee):
    """Rank 0 with its engine; its optimizer updates only the rank's own part."""

    engine: Any

    def forward(self, batch: dict[str, Any]) -> Any:
        """Return the loss of one micro-batch."""
        return self.engine(**batch).loss

    def accumulate(self, loss: Any, *, num_micro_batches: int, is_last: bool) -> None:
        """Accumulate a micro-batch's gradients, as accelerate does.

        Source: accelerate/utils/deepspeed.py, DeepSpeedEngineWrapper.backward (1.15). The engine divides
            by the micro-batches of a step.
        """
        self.engine.set_gradient_accumulation_boundary(is_boundary=is_last)
        self.engine.backward(loss)

    def update(self) -> None:
        """Clip, step and drop the gradients."""
        self.engine.step()

    def timed_step(self) -> float:
        """Take one optimizer step and return its time in seconds.

        Raises:
            UserError: the engine skipped it.
        """
        skipped = self.engine.skipped_steps
        seconds = Trainee.timed_step(self)
        if self.engine.skipped_steps > skipped:
            raise UserError(
                "rank-skips-its-steps",
                "DeepSpeed skipped a timed step",
                found="gradients that overflowed (inf or NaN)",
                why="simulated ranks send nothing; the values used instead can be too large for fp16",
                fix="train the trial in bf16",
            )
        return seconds


_SHARED_MEMORY, _CPU_ADAM = "deepspeed_shm_comm", "cpu_adam"
"""Names of DeepSpeed's ops and of their build folders (deepspeed/op_builder/cpu/comm.py and cpu_adam.py,
NAME)."""


def import_ahead(spec: TrialSpec, *, tell: Callable[[str], None]) -> None:
    """Import DeepSpeed, and compile and load the ops that it needs; no GPU is touched.

    Args:
        spec: the trial.
        tell: receives the op that is being built.

    Raises:
        UserError: an op can't be built or loaded here.
    """
    programs, path = str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)
    if programs not in path.split(os.pathsep):  # torch compiles with ninja, found as `zerofit launch` does
        os.environ["PATH"] = os.pathsep.join((programs, path))
    with _built_for("a trial under DeepSpeed"):
        for name in ("deepspeed", "accelerate.utils.deepspeed", "transformers.integrations"):
            import_module(name)
    import_module("torch.testing._internal.distributed.fake_pg")
    if spec.on_cpu:
        _check_unlocked(_SHARED_MEMORY, tell)
        with _built_for("a trial under DeepSpeed on the CPU"):
            # The op that CPU ranks of one host reduce with (deepspeed/comm/torch.py, build_shm_op).
            accelerator: Any = import_module("deepspeed.accelerator").get_accelerator()
            accelerator.create_op_builder("ShareMemCommBuilder").load(verbose=False)
    if spec.strategy.optimizer_offload is not OffloadDevice.NONE:
        _check_unlocked(_CPU_ADAM, tell)
        with _built_for("a trial that offloads the optimizer"):
            _step_on_cpu()


@contextmanager
def joined(spec: TrialSpec) -> Iterator[None]:
    """Act as rank 0 of the spec's ranks while a model is created and trained; do nothing without DeepSpeed.

    Under stage 3 transformers partitions the model at construction.
    """
    if spec.strategy.engine is not Engine.DEEPSPEED:
        yield
        return
    import deepspeed
    import torch.distributed
    from transformers.integrations import HfDeepSpeedConfig

    os.environ.update(  # the variables of a launcher for rank 0, on one node; nobody listens at the address
        {
            **dict.fromkeys(("RANK", "LOCAL_RANK"), "0"),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(spec.num_ranks)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
        }
    )
    fake: Any = import_module("torch.testing._internal.distributed.fake_pg")
    torch.distributed.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=spec.num_ranks)
    deepspeed.init_distributed(dist_backend="fake", auto_mpi_discovery=False, verbose=False)
    held = HfDeepSpeedConfig(rank_config(spec))  # transformers itself only keeps a weak reference
    try:
        yield
    finally:
        del held
        torch.distributed.destroy_process_group()


def make_rank(model: Any, samples: dict[str, Any], spec: TrialSpec, device: str) -> RankTrainee:
    """Return rank 0 with its part of a model that was created inside joined().

    Raises:
        UserError: the model or this device does not support the strategy.
    """
    import deepspeed
    from accelerate.utils.deepspeed import map_pytorch_optim_to_deepspeed

    strategy = spec.strategy
    model, optimizer = apply_to_model(strategy, model)
    if strategy.optimizer_offload is not OffloadDevice.NONE:
        optimizer = map_pytorch_optim_to_deepspeed(optimizer)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=rank_config(spec), dist_init_required=False
    )
    if strategy.compile:
        engine.compile()
    return RankTrainee(
        model=engine.module,
        optimizer=engine.basic_optimizer,
        samples=samples,
        spec=spec,
        device=device,
        engine=engine,
    )


def rank_config(spec: TrialSpec) -> dict[str, Any]:
    """Return the complete DeepSpeed configuration of a trial, as `zerofit launch` writes it.

    It includes accelerate's additions: the total batch size, any optimizer, and no reports on stdout
    (accelerate/accelerator.py, _prepare_deepspeed; accelerate/utils/dataclasses.py, DeepSpeedPlugin). On the
    CPU nothing is pinned: page-locking is for copies to a GPU, and torch refuses it without one.
    """
    own = spec.strategy
    clipping = CLIPPING if own.gradient_clipping is None else own.gradient_clipping
    strategy = replace(
        own,
        precision=own.precision or Precision.FP32,
        micro_batch_size=own.micro_batch_size or 1,
        gradient_accumulation_steps=own.gradient_accumulation_steps or 1,
        gradient_clipping=clipping,
        pin_memory=own.pin_memory and not spec.on_cpu,
    )
    config = deepspeed_config(strategy)
    config["fp16"]["initial_scale_power"] = _LOSS_SCALE_POWER
    return config | {
        "train_batch_size": spec.batch_size * spec.num_ranks,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": float("inf"),
    }


def _check_unlocked(op: str, tell: Callable[[str], None]) -> None:
    """Announce that an op is built or loaded, which may take minutes, and check that there is no stale lock.

    Raises:
        UserError: torch would wait forever for the lock of a killed build.
    """
    tell(f"building or loading DeepSpeed's {op}")
    cuda = import_module("torch").version.cuda
    major, minor = map(int, str(cuda).split(".")[:2]) if cuda else (0, 0)
    version = (major, minor) if cuda else None
    _, folder = extensions_folders(environ=os.environ, home=Path.home(), cuda_version=version)
    for lock in find_build_locks(folder):
        if Path(lock.path).parent == folder / op and not lock.is_held:
            raise UserError(
                "deepspeed-build-locked",
                "a build of a DeepSpeed op was killed, and left its lock behind",
                found=lock.path,
                why="no process here holds it, and the next user of this op waits for it forever",
                fix=f"rm {lock.path} (unless another node that shares the folder is building)",
            )


def _step_on_cpu() -> None:
    """Update a small parameter with DeepSpeed's CPU Adam, as accelerate creates it."""
    import torch
    from accelerate.utils.deepspeed import map_pytorch_optim_to_deepspeed

    parameter = torch.nn.Parameter(torch.ones(64))
    parameter.grad = torch.ones(64)
    map_pytorch_optim_to_deepspeed(torch.optim.AdamW([parameter])).step()


@contextmanager
def _built_for(what: str) -> Iterator[None]:
    """Convert build errors into a readable error."""
    try:
        yield
    except Exception as error:
        cause = error.__cause__ or error
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
        raise UserError(
            "deepspeed-op-not-built",
            "a DeepSpeed op can't be built or loaded here",
            found=what,
            why=lines[0] if lines else type(cause).__name__,
            fix="see `zerofit doctor` on DeepSpeed's ops, or leave it out",
        ) from error
