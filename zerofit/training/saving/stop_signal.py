"""On SIGUSR1, sent before a scheduler reclaims the nodes, all ranks save one checkpoint and exit."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from zerofit.training.reporting import observe
from zerofit.training.wrapping import wrap

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings
    from zerofit.training.wrapping import Wrapper

_ASK_EVERY_S = 1.0
"""Ranks synchronize about once a second, at the same steps: an all-reduce at each step would make the host
wait for the GPU."""


class _Stop:
    """The request to stop, and this rank's state."""

    def __init__(self, run_folder: Path) -> None:
        self.run_folder = run_folder
        self.is_asked = False
        """True if this rank received the signal."""
        self.saved_to: str | None = None
        self.is_agreed = False
        """True when all ranks know of the request."""
        self.next_step = 1
        """The step after which the ranks synchronize again."""
        self.asked_step: int | None = None
        self.asked_at = time.monotonic()
        self.loader: Any = None
        """The DataLoader of the last batch."""
        self.accelerator: Any = None
        self.has_trainer = False
        """True if a Trainer trains, which saves in its own way."""

    def receive(self, *_: Any) -> None:
        """Handle the signal."""
        self.is_asked = True

    def agrees(self, step: int) -> bool:
        """Return True if any rank received the signal; all ranks call it after the same steps.

        Args:
            step: optimizer steps done.
        """
        if step < self.next_step:
            return False
        import torch
        from torch import distributed

        now = time.monotonic()
        said = torch.tensor([float(self.is_asked), now - self.asked_at], dtype=torch.float64)
        if distributed.is_initialized():
            said = said.to("cuda" if "nccl" in distributed.get_backend() else "cpu", dtype=torch.float32)
            distributed.all_reduce(said, op=distributed.ReduceOp.MAX)
        is_asked, took_s = said.tolist()
        steps = 0 if self.asked_step is None else step - self.asked_step
        self.asked_step, self.asked_at = step, now
        self.next_step = step + max(1, int(_ASK_EVERY_S * steps / max(took_s, 1e-3)))
        self.is_agreed = bool(is_asked)
        return self.is_agreed

    def leave(self, folder: Path) -> NoReturn:
        """End this rank after its state is saved."""
        self.saved_to = str(folder)
        print(f"zerofit: told to stop: saved in {folder}, and ends", file=sys.stderr, flush=True)
        raise SystemExit(0)


_stop: _Stop | None = None
"""None if nothing may stop the ranks."""


def start(run_folder: Path) -> None:
    """Handle SIGUSR1; a script's own handler takes precedence."""
    global _stop
    _stop = _Stop(run_folder)
    signal.signal(signal.SIGUSR1, _stop.receive)


def saved_to() -> str | None:
    """Return the checkpoint with which this rank has ended its training; None if it has not."""
    return None if _stop is None else _stop.saved_to


def callback_wrappers(handler_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Make a Trainer save and end, as its own callbacks may."""
    if (stop := _stop) is None:
        return {}

    def on_train_begin(original: Any, self: Any, args: Any, state: Any, *rest: Any, **kwargs: Any) -> Any:
        stop.has_trainer = True
        return original(self, args, state, *rest, **kwargs)

    def on_step_end(
        original: Any, self: Any, args: Any, state: Any, control: Any, *rest: Any, **kwargs: Any
    ) -> Any:
        control = original(self, args, state, control, *rest, **kwargs)
        if stop.agrees(state.global_step):
            control.should_save = True
            control.should_evaluate = False  # takes too long
        return control

    def on_save(original: Any, self: Any, args: Any, state: Any, *rest: Any, **kwargs: Any) -> Any:
        control = original(self, args, state, *rest, **kwargs)
        if stop.is_agreed:
            stop.leave(Path(args.output_dir).absolute() / f"checkpoint-{state.global_step}")
        return control

    return {"on_train_begin": on_train_begin, "on_step_end": on_step_end, "on_save": on_save}


def install_in_loaders(module: Any, settings: AppliedSettings, changes: Changes) -> None:
    """Make a loop save before its next batch, when the step is complete.

    Args:
        module: accelerate.data_loader.
    """
    if (stop := _stop) is None:
        return

    def iterate(original: Any, self: Any) -> Iterator[Any]:
        batches = original(self)
        while True:
            if stop.loader is self:
                _save_if_told(stop)
            stop.loader = self
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    for loader in (module.DataLoaderShard, module.DataLoaderDispatcher):
        wrap(loader, "__iter__", iterate)


def wrappers(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Record the Accelerator that saves."""
    if (stop := _stop) is None:
        return {}

    def prepare(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        stop.accelerator = stop.accelerator or self
        return original(self, *args, **kwargs)

    return {"prepare": prepare}


def _save_if_told(stop: _Stop) -> None:
    step, accelerator = observe.steps_done(), stop.accelerator
    if accelerator is None or stop.has_trainer or not step or not stop.agrees(step):
        return
    if accelerator.project_configuration.automatic_checkpoint_naming:
        stop.leave(Path(accelerator.save_state()).absolute())
    # accelerate's examples parse the step to resume from this name
    folder = stop.run_folder / "checkpoints" / f"step_{step}"
    accelerator.save_state(str(folder))
    stop.leave(folder)
