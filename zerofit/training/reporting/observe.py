"""Writes this rank's state into its live file: phase, step, memory, last checkpoint.

zerofit/launching/hang.py reads it meanwhile, and zerofit/launching/diagnose.py once the rank is gone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.own_file import OwnFile
from zerofit.core.rank_observation import LiveFile, Phase, PhasePeak
from zerofit.core.upstream.transformers import SAVE_CHECKPOINT
from zerofit.training.wrapping import wrap

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings
    from zerofit.training.wrapping import Wrapper

_DUMP_SIGNAL = signal.SIGRTMAX - 3
"""Makes the rank write its stacks. ASSUMPTION: no script uses this one, since Slurm's users use SIGUSR1 and
SIGUSR2."""
_MEMORY_EVERY_S = 1.0
"""Reading the resident memory takes as long as ten updates of the live file (measured: 41 and 3 us). The
descriptor of the stacks is checked as often."""
_BEFORE_TRAINING = (Phase.LOADING, Phase.PREPARING)
_IN_A_STEP = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER_STEP)
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Observed:
    """This rank's phase, step and memory; only the main thread of its own process calls the methods."""

    def __init__(self, folder: Path, rank: int, *, on_cpu: bool = False) -> None:
        self._live = LiveFile(folder, rank)
        self._pid = os.getpid()
        self._on_cpu = on_cpu
        self._thread = threading.get_ident()
        self._is_here = True
        self.phase = Phase.LOADING
        self.is_held = False
        """True inside saving and evaluating, whose parts are no separate phases."""
        self._depth = 0
        self.step = 0
        self.num_steps = 0
        self._changed_at = time.time()
        self._longest_s = 0.0
        self._host_bytes, self._host_at = 0, 0.0
        self._checkpoint_step = 0
        self._peaks = {phase: PhasePeak(allocated_bytes=0, reserved_bytes=0) for phase in Phase}
        self._highest = (0, 0)
        self.engine: Any = None
        """The DeepSpeed engine that counts the steps; None without it."""
        self.optimizer: Any = None
        """The optimizer whose steps are counted: the first that steps."""
        self.data: int | None = None
        """id() of the DataLoader of the last batch."""
        self.training_data: int | None = None
        """id() of the one whose batch led to the last backward pass."""
        self.fetched: Any = None
        """The iterator of a batch received since the last backward pass."""
        self.on_step: Callable[[], None] | None = None
        """Called after each step."""
        self._step_before = 0
        self._step_seen = 0
        self._first_step, self._first_step_at = 0, 0.0
        self._stacks = OwnFile(folder / f"rank{rank}.stack")
        faulthandler.register(_DUMP_SIGNAL, file=self._stacks.number, all_threads=True)
        os.register_at_fork(after_in_child=self._leave)
        self._write()

    def _leave(self) -> None:
        self._is_here = False  # a DataLoader's worker, for example

    def move(self, phase: Phase) -> None:
        """Record that the rank has entered a phase, or has made progress within a held one."""
        if not self._is_here or threading.get_ident() != self._thread:
            return
        now = time.time()
        if self.phase in _IN_A_STEP:
            self._longest_s = max(self._longest_s, now - self._changed_at)
        if not self._on_cpu:
            self._note_peak()
        if not self.is_held:
            self.phase = phase
        if self.engine is not None:  # which steps in step(), or where the script calls the optimizer
            self.step = self.engine.global_steps
        if now - self._host_at > _MEMORY_EVERY_S:
            self._host_at, self._host_bytes = now, _resident_bytes()
            self._keep_stacks()
        self._changed_at = now
        if self.step > self._step_seen:
            self._step_seen = self.step
            if not self._first_step:
                self._first_step, self._first_step_at = self.step, now
        self._write()
        if self.on_step is not None and self.step > self._step_before:
            self._step_before = self.step
            self.on_step()

    def during(self, phase: Phase, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that is a phase; if it fails the phase is kept, to show where."""
        before, was_held = self.phase, self.is_held
        self.move(phase)
        self.is_held = was_held or phase in (Phase.SAVING, Phase.EVALUATING)
        self._depth += 1
        try:
            result = original(*args, **kwargs)
        finally:
            self.is_held = was_held
            self._depth -= 1
        self.move(before if self._depth or before in _BEFORE_TRAINING else Phase.BETWEEN_STEPS)
        return result

    def finish_step(self) -> None:
        """Count a step of an optimizer; a DeepSpeed engine counts its own."""
        self.step += 1

    def resume(self, step: int | None = None) -> None:
        """Count from a loaded checkpoint.

        Args:
            step: at which it was saved; None if it does not say. A DeepSpeed engine restores its own count.
        """
        if self.engine is not None:
            step = self.engine.global_steps
        if step is not None:
            self.step = self._step_before = step
        self._step_seen, self._first_step, self._first_step_at = self.step, 0, 0.0
        self._checkpoint_step = self.step

    def finish_checkpoint(self, path: Any) -> None:
        """Record a written checkpoint."""
        if self._is_here:
            self._checkpoint_step = self.step
            self._save(self._live.write_checkpoint, os.path.abspath(path))
            self._write()

    def note_collectives(self, collectives: int) -> None:
        """Record the number of collectives called so far; from the thread that watches this rank."""
        if self._is_here:
            self._save(self._live.write_collectives, collectives)

    def _note_peak(self) -> None:
        """Record the process's peak for the phase that ends, if this phase has raised it.

        The counters are not reset, since the script may use them, too.
        """
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return
        stats = torch.cuda.memory_stats_as_nested_dict()
        peaks = tuple(stats[f"{name}_bytes"]["all"]["peak"] for name in ("allocated", "reserved"))
        if peaks != self._highest:
            self._highest = peaks
            peak = PhasePeak(allocated_bytes=peaks[0], reserved_bytes=peaks[1])
            self._save(self._live.write_peak, self.phase, peak)

    def _write(self) -> None:
        dump = (_DUMP_SIGNAL, self._stacks.number)
        done = (self._checkpoint_step, self._first_step)
        numbers = (self._pid, self.step, self.num_steps, *dump, self._host_bytes, *done)
        try:
            times = (self._changed_at, self._longest_s, self._first_step_at)
            self._live.write(self.phase, numbers, times)
        except OSError:  # the disk is full or gone: no reason to end a training
            self._is_here = False

    def _save(self, write: Callable[..., None], *values: Any) -> None:
        try:
            write(*values)
        except OSError:
            self._is_here = False

    def _keep_stacks(self) -> None:
        """Open the file for stacks again if the script has closed its descriptor.

        faulthandler writes to the number that it was given. Until this notices, the launcher, which sends the
        signal, sees that the number is no longer the file's, and does not.
        """
        with contextlib.suppress(OSError):
            if self._stacks.reopen():
                faulthandler.register(_DUMP_SIGNAL, file=self._stacks.number, all_threads=True)


def _resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES


_observed: Observed | None = None
"""This rank; None if it is not observed, as without `zerofit launch`."""


def start(folder: Path, rank: int, *, on_cpu: bool) -> None:
    """Start recording this rank's state; an unwritable folder does not stop training."""
    global _observed
    try:
        _observed = Observed(folder, rank, on_cpu=on_cpu)
    except OSError as error:
        print(f"zerofit: rank {rank} can't be watched: {error}", file=sys.stderr)


def call_after_steps(function: Callable[[], None]) -> None:
    """Call a function on each rank right after each optimizer step."""
    if _observed is not None:
        _observed.on_step = function


def steps_done() -> int | None:
    """Return the optimizer steps of the whole training; None if this rank is not observed."""
    return None if _observed is None else _observed.step


def resume(step: int | None) -> None:
    """Count this rank's steps from a loaded checkpoint; None if it does not say at which it was saved."""
    if _observed is not None:
        _observed.resume(step)


def note_collectives(collectives: int) -> None:
    """Record the number of collectives that this rank has called."""
    if _observed is not None:
        _observed.note_collectives(collectives)


def end() -> None:
    """Record that the script has ended successfully."""
    if _observed is not None:
        _observed.is_held = False
        _observed.move(Phase.ENDED)


def _of_observed(install: Callable[[Any, Observed], None]) -> Callable[[Any, AppliedSettings, Changes], None]:
    """Return a hook's install() that only acts on observed ranks."""

    @functools.wraps(install)
    def install_where_observed(target: Any, settings: AppliedSettings, changes: Changes) -> None:
        if _observed is not None:
            install(target, _observed)

    return install_where_observed


def _where_observed(
    wrappers: Callable[[Observed], dict[str, Wrapper]],
) -> Callable[[Any, AppliedSettings, Changes], dict[str, Wrapper]]:
    """Return the wrappers of a class's methods for observed ranks only."""

    @functools.wraps(wrappers)
    def wrappers_where_observed(
        owner: Any, settings: AppliedSettings, changes: Changes
    ) -> dict[str, Wrapper]:
        return {} if _observed is None else wrappers(_observed)

    return wrappers_where_observed


@_of_observed
def install_backward(module: Any, rank: Observed) -> None:
    """Hook torch.autograd.backward(), which Tensor.backward() and every library call."""

    def backward(original: Any, *args: Any, **kwargs: Any) -> Any:
        rank.training_data = rank.data
        if rank.fetched is not None:
            rank.fetched._zerofit_untrained -= 1
            rank.fetched = None
        return rank.during(Phase.BACKWARD, original, *args, **kwargs)

    wrap(module, "backward", backward)


@_of_observed
def install_saving(module: Any, rank: Observed) -> None:
    """Hook torch.save()."""
    wrap(module, "save", functools.partial(rank.during, Phase.SAVING))


@_of_observed
def install_steps(module: Any, rank: Observed) -> None:
    """Count the steps of torch's optimizers, and record their start and end.

    Args:
        module: torch.optim.optimizer.
    """

    def before(optimizer: Any, *_: Any) -> None:
        rank.move(Phase.OPTIMIZER_STEP)

    def after(optimizer: Any, *_: Any) -> None:
        if rank.engine is not None:  # its own step() counts: it may step groups of parameters in turn
            return
        rank.optimizer = rank.optimizer or optimizer
        if optimizer is rank.optimizer:
            rank.finish_step()
        rank.move(Phase.BETWEEN_STEPS)

    module.register_optimizer_step_pre_hook(before)
    module.register_optimizer_step_post_hook(after)


@_where_observed
def data_loader_wrappers(rank: Observed) -> dict[str, Wrapper]:
    """Record batches: of data that led to a backward pass as training, of other data as evaluation."""

    def fetch(original: Any, self: Any) -> Any:
        rank.move(Phase.DATA)
        try:
            batch = original(self)
        except StopIteration:
            if rank.training_data == self._zerofit_data and self._zerofit_untrained > 0:
                come(self)  # accelerate, which prefetches one batch, only now returns the last one
            else:
                rank.move(Phase.BETWEEN_STEPS)
            raise
        self._zerofit_untrained += 1
        rank.fetched = self
        come(self)
        return batch

    def come(iterator: Any) -> None:
        rank.data = iterator._zerofit_data
        trains = rank.training_data is None or rank.training_data == rank.data
        rank.move(Phase.FORWARD if trains else Phase.EVALUATING)

    def iterate(original: Any, self: Any) -> Any:
        iterator = original(self)
        iterator._zerofit_data = id(self)
        iterator._zerofit_untrained = 0  # batches minus the backward passes that followed one directly
        owner: Any = next(base for base in type(iterator).__mro__ if "__next__" in vars(base))
        if not hasattr(owner.__next__, "__wrapped__"):
            wrap(owner, "__next__", fetch)
        return iterator

    return {"__iter__": iterate}


@_where_observed
def wrappers(rank: Observed) -> dict[str, Wrapper]:
    """Record an Accelerator's prepare() and saving."""

    def save_state(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        folder = rank.during(Phase.SAVING, original, self, *args, **kwargs)
        if folder is not None:
            rank.finish_checkpoint(folder)
        return folder

    return {
        "prepare": functools.partial(rank.during, Phase.PREPARING),
        "save_model": functools.partial(rank.during, Phase.SAVING),
        "save_state": save_state,
    }


@_where_observed
def trainer_wrappers(rank: Observed) -> dict[str, Wrapper]:
    """Record a Trainer's evaluation and saving."""
    return {
        "evaluate": functools.partial(rank.during, Phase.EVALUATING),
        "predict": functools.partial(rank.during, Phase.EVALUATING),
        "save_model": functools.partial(rank.during, Phase.SAVING),
        SAVE_CHECKPOINT: functools.partial(rank.during, Phase.SAVING),  # under FSDP2 it saves weights itself
    }


@_where_observed
def callback_wrappers(rank: Observed) -> dict[str, Wrapper]:
    """Record the number of steps and the checkpoints of a Trainer."""

    def on_train_begin(original: Any, self: Any, args: Any, state: Any, *rest: Any, **kwargs: Any) -> Any:
        rank.num_steps = state.max_steps
        rank.resume(state.global_step)
        return original(self, args, state, *rest, **kwargs)

    def on_save(original: Any, self: Any, args: Any, state: Any, *rest: Any, **kwargs: Any) -> Any:
        rank.finish_checkpoint(Path(args.output_dir) / f"checkpoint-{state.global_step}")
        return original(self, args, state, *rest, **kwargs)

    return {"on_train_begin": on_train_begin, "on_save": on_save}


@_where_observed
def engine_wrappers(rank: Observed) -> dict[str, Wrapper]:
    """Record the phases of a DeepSpeed engine."""

    def step(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        rank.engine = self
        return rank.during(Phase.OPTIMIZER_STEP, original, self, *args, **kwargs)

    def save_checkpoint(original: Any, self: Any, save_dir: Any, *args: Any, **kwargs: Any) -> Any:
        result = rank.during(Phase.SAVING, original, self, save_dir, *args, **kwargs)
        rank.finish_checkpoint(save_dir)
        return result

    def load_checkpoint(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        rank.engine = self
        rank.resume()
        return result

    return {
        "__init__": functools.partial(rank.during, Phase.PREPARING),
        "backward": functools.partial(rank.during, Phase.BACKWARD),
        "step": step,
        "load_checkpoint": load_checkpoint,
        "save_checkpoint": save_checkpoint,
    }
