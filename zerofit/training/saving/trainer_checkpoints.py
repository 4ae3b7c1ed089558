"""Hooks that make Trainer save checkpoints atomically, and resume only from complete ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.checkpoints import MODEL_FOLDER
from zerofit.core.upstream.transformers import (
    RUN_EPOCH,
    SAVE_CHECKPOINT,
    after_checkpoint,
    checkpoint_folder,
    save_checkpoint_in,
)
from zerofit.training.saving.checkpoints import (
    check_resumed,
    describe_model,
    layout_of,
    newest_complete,
    save_whole,
)

if TYPE_CHECKING:
    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings
    from zerofit.training.wrapping import Wrapper


def trainer_wrappers(trainer_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Save under a temporary name, prune after the commit, and check the checkpoint to resume from."""
    left = [] if settings.plan.resume_from is None else [settings.plan.resume_from]

    def recovered(trainer: Any) -> str | None:
        """Return the checkpoint from which a recovered run's first training that saves beside it resumes."""
        if not left:
            return None
        if Path(trainer.args.output_dir).resolve() != Path(left[0]).parent.resolve():
            changes.add(
                f"a Trainer that saves in {trainer.args.output_dir} starts at its first step: the run's "
                f"newest checkpoint is {left[0]}"
            )
            return None
        changes.add(f"Trainer resumes from {left[0]}")
        return left.pop()

    def save_checkpoint(original: Any, self: Any, model: Any, trial: Any, *args: Any) -> None:
        folder = checkpoint_folder(self, trial)

        def write(partial: Path) -> None:
            save_checkpoint_in(self, partial, folder.parent, lambda: original(self, model, trial, *args))
            if settings.uses_fsdp2 and self.is_world_process_zero():  # Trainer writes no config beside shards
                describe_model(self.accelerator.unwrap_model(self.model), partial / MODEL_FOLDER)

        save_whole(
            folder,
            write,
            layout=layout_of(settings, self.optimizer),
            run_folder=settings.run_folder,
            step=self.state.global_step,
            # Weights alone can't be resumed from: optimizer and schedule would start from scratch.
            can_resume=not self.args.save_only_model,
        )
        after_checkpoint(self, folder)

    def train(original: Any, self: Any, resume_from_checkpoint: Any = None, *args: Any, **named: Any) -> Any:
        resumed = recovered(self) or resume_from_checkpoint
        if resumed is True:
            newest = newest_complete(Path(self.args.output_dir), settings)
            resumed = True if newest is None else newest.path  # Trainer reports that there is none
        elif resumed and Path(resumed).is_dir():
            check_resumed(Path(resumed), settings)
        return original(self, str(resumed) if isinstance(resumed, Path) else resumed, *args, **named)

    def run_epoch(original: Any, self: Any, *args: Any, **named: Any) -> Any:
        if self.state.global_step < self.state.max_steps:
            return original(self, *args, **named)
        # Resumed from its last checkpoint: transformers only checks after a step, and would do one more.
        self.control.should_training_stop = True
        return None

    found: dict[str, Wrapper] = {SAVE_CHECKPOINT: save_checkpoint, "train": train}
    return {**found, RUN_EPOCH: run_epoch} if hasattr(trainer_class, RUN_EPOCH) else found
