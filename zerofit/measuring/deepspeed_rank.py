"""Rank 0 of N under the real DeepSpeed engine, among collectives that exchange nothing.

torch's "fake" process group says that there are N ranks and carries nothing between them: the engine
partitions, allocates, gathers and steps as it does on rank 0 of N, with the tensors of that rank, while what
it gathers is its own part N times, and what it reduces its own gradients. So with N above 1 its losses are of
no use, and its step waits for no other rank; with N of 1 that is all there is, and NCCL's buffers, which a
run on one GPU has no use for, are not taken. How long NCCL keeps tensors alive is not in it.
Source: torch/csrc/distributed/c10d/FakeProcessGroup.hpp (2.13; other versions were not looked at).
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.configs.write.deepspeed import deepspeed_config
from zerofit.core.errors import UserError
from zerofit.core.strategy import Engine, OffloadDevice, Precision
from zerofit.machine.extensions import extensions_folders, find_build_locks
from zerofit.measuring.training_loop import CLIPPING, Trainee, apply_to_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerofit.measuring.results import TrialSpec

_LOSS_SCALE_POWER = 4
"""ASSUMPTION: fp16 gradients of a loss times 2^4 overflow in no model here. From DeepSpeed's 2^16 on, the
first steps would be skipped until the scale fits, and none of a short run might be taken."""


@dataclass(slots=True, kw_only=True)
class RankTrainee(Trainee):
    """Rank 0 with its engine; its optimizer is the one that steps the rank's own part."""

    engine: Any

    def forward(self, batch: dict[str, Any]) -> Any:
        """Return the loss of one micro-batch."""
        return self.engine(**batch).loss

    def accumulate(self, loss: Any, *, num_micro_batches: int, is_last: bool) -> None:
        """Add a micro-batch's gradients to those of its step, as accelerate does.

        Source: accelerate/utils/deepspeed.py, DeepSpeedEngineWrapper.backward (1.15). The engine divides by
        the micro-batches of a step.
        """
        self.engine.set_gradient_accumulation_boundary(is_boundary=is_last)
        self.engine.backward(loss)

    def update(self) -> None:
        """Clip, step and let go of the gradients."""
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
                "DeepSpeed skipped a step that was to be timed",
                found="gradients that overflowed (inf or NaN)",
                why="ranks that do not exist send nothing; what stands in for it can be too large for fp16",
                fix="train the trial in bf16",
            )
        return seconds


_SHARED_MEMORY, _CPU_ADAM = "deepspeed_shm_comm", "cpu_adam"
"""Names of DeepSpeed's ops, and of the folders that they are built in (deepspeed/op_builder/cpu/comm.py and
cpu_adam.py, NAME)."""


def import_ahead(spec: TrialSpec, *, tell: Callable[[str], None]) -> None:
    """Import DeepSpeed, and compile and load what of it compiles at its first use; no GPU is touched.

    Args:
        spec: the trial.
        tell: told what is being built.

    Raises:
        UserError: something of it can't be built or loaded here.
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
            # What ranks on one host's CPU reduce by (deepspeed/comm/torch.py, build_shm_op).
            accelerator: Any = import_module("deepspeed.accelerator").get_accelerator()
            accelerator.create_op_builder("ShareMemCommBuilder").load(verbose=False)
    if spec.strategy.optimizer_offload is not OffloadDevice.NONE:
        _check_unlocked(_CPU_ADAM, tell)
        with _built_for("a trial that offloads the optimizer"):
            _step_on_cpu()


@contextmanager
def joined(spec: TrialSpec) -> Iterator[None]:
    """Be rank 0 of the spec's ranks while a model is made and trains; do nothing without DeepSpeed.

    Under stage 3 transformers partitions the model as it makes it.
    """
    if spec.strategy.engine is not Engine.DEEPSPEED:
        yield
        return
    import deepspeed
    import torch.distributed
    from transformers.integrations import HfDeepSpeedConfig

    os.environ.update(  # what a launcher sets for rank 0, on one node; nobody listens at the address
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
    held = HfDeepSpeedConfig(rank_config(spec))  # transformers itself holds it weakly
    try:
        yield
    finally:
        del held
        torch.distributed.destroy_process_group()


def make_rank(model: Any, samples: dict[str, Any], spec: TrialSpec, device: str) -> RankTrainee:
    """Return rank 0 with its part of a model that was made while it had joined() the others.

    Raises:
        UserError: the model or this device can't take the strategy.
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
    """Return the DeepSpeed configuration of a trial as `zerofit launch` has it, complete.

    What accelerate adds is added: the whole batch, any optimizer, and no reports on stdout
    (accelerate/accelerator.py, _prepare_deepspeed; accelerate/utils/dataclasses.py, DeepSpeedPlugin). On the
    CPU nothing is pinned: page-locking is for a GPU's copies, and torch refuses it without one.
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
    """Say that an op is built or loaded next, which may take minutes, and check that no lock is left of it.

    Raises:
        UserError: torch would wait for ever: a build that was killed has left its lock.
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
                "a build of a part of DeepSpeed was killed, and its lock is still there",
                found=lock.path,
                why="no process here holds it, and whoever uses the part next waits for it for ever",
                fix=f"rm {lock.path} (unless another node that shares the folder is building)",
            )


def _step_on_cpu() -> None:
    """Take a step of a small parameter with DeepSpeed's CPU Adam, as accelerate makes it."""
    import torch
    from accelerate.utils.deepspeed import map_pytorch_optim_to_deepspeed

    parameter = torch.nn.Parameter(torch.ones(64))
    parameter.grad = torch.ones(64)
    map_pytorch_optim_to_deepspeed(torch.optim.AdamW([parameter])).step()


@contextmanager
def _built_for(what: str) -> Iterator[None]:
    """Turn what fails of a build into what a user can read."""
    try:
        yield
    except Exception as error:
        cause = error.__cause__ or error
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
        raise UserError(
            "deepspeed-op-not-built",
            "a part of DeepSpeed can't be built or loaded here",
            found=what,
            why=lines[0] if lines else type(cause).__name__,
            fix="see what `zerofit doctor` says of DeepSpeed's ops, or leave it out",
        ) from error
