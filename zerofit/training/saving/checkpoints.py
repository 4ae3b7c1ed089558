"""Saves checkpoints atomically, and lets ranks resume only from complete ones."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.checkpoints import (
    BEFORE,
    MANIFEST_NAME,
    MODEL_FOLDER,
    SAVING,
    Manifest,
    SavedLayout,
    damage,
    file_names,
    find_checkpoints,
    incomplete_checkpoint,
    inspect_checkpoint,
    note_checkpoint,
    remove_partial,
    state_dict_type_of,
    sync_and_digest,
    sync_folder,
    write_manifest,
)
from zerofit.core.errors import UserError
from zerofit.core.strategy import Engine, StateDictType
from zerofit.core.upstream.accelerate import (
    prepared_models,
    prepared_optimizers,
    prepared_schedulers,
)
from zerofit.models.changes.adapted_saving import adapted_of
from zerofit.training.reporting import observe
from zerofit.training.saving.resumed_schedules import follow_ranks, own_states
from zerofit.training.wrapping import wrap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from zerofit.core.checkpoints import SavedCheckpoint
    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings
    from zerofit.training.wrapping import Wrapper


_ENGINES = {Engine.NATIVE: "PyTorch alone", Engine.DEEPSPEED: "DeepSpeed", Engine.FSDP2: "FSDP2"}


def save_whole(
    folder: Path,
    write: Callable[[Path], None],
    *,
    layout: SavedLayout,
    run_folder: Path | None,
    step: int | None = None,
    can_resume: bool = True,
) -> None:
    """Save a checkpoint under a temporary name, and rename it when it is completely on disk.

    All ranks call it. An existing folder stays until the new files replace it, and foreign files in it are
    kept.

    Args:
        folder: the checkpoint.
        write: saves this rank's part into the given folder, which has the checkpoint's name.
        layout: how the state is distributed over the ranks.
        run_folder: the run folder, in which the save and its checkpoint are recorded.
        step: optimizer steps done, if known.
        can_resume: False for weights only, which are not recorded as a checkpoint.
    """
    folder = Path(os.path.abspath(folder))  # resolve() would follow a link that must be kept
    if Path.cwd().is_relative_to(folder):  # it can't be replaced under processes that work in it
        (folder / MANIFEST_NAME).unlink(missing_ok=True)
        return write(folder)
    outer = folder.parent / f"{SAVING}{folder.name}"
    partial = outer / folder.name
    rank, local_rank = rank_of_process(), int(os.environ.get("LOCAL_RANK", "0"))
    if rank == 0:
        _make_empty(outer, partial, run_folder)
    gather(None)
    is_shared = all(gather(partial.is_dir()))
    if not is_shared and local_rank == 0 and rank:
        _make_empty(outer, partial, run_folder)  # each node has its own disk
    gather(None)
    write(partial)
    gather(None)
    names = file_names(partial)
    leads = rank == 0 if is_shared else local_rank == 0
    mine = names[rank :: _world_size()] if is_shared else names if leads else []
    parts = gather([sync_and_digest(partial, name) for name in mine])
    if leads:
        files = sorted((file for part in parts for file in part), key=lambda file: file.name)
        if not is_shared:
            files = parts[rank]
        write_manifest(partial, Manifest(layout=layout, files=tuple(files), saved_at=time.time(), step=step))
        _take_place(partial, folder)
        shutil.rmtree(outer)
        if can_resume and rank == 0:
            _note(folder, run_folder)
    gather(None)
    return None


def _note(folder: Path, run_folder: Path | None) -> None:
    if run_folder is not None:
        with contextlib.suppress(OSError):  # the checkpoint is valid even if the run folder's disk is full
            note_checkpoint(run_folder, folder)


def check_resumed(folder: Path, settings: AppliedSettings) -> SavedCheckpoint:
    """Check that a checkpoint is complete and intact, and of this run's engine; all ranks call it."""
    checkpoint = inspect_checkpoint(folder)
    problem = _problem(checkpoint)
    if problem is not None:
        raise incomplete_checkpoint(folder, problem)
    _check_engine(folder, settings)
    if rank_of_process() == 0:
        _note(folder, settings.run_folder)
        if (said := _batch_change(checkpoint, settings)) is not None:
            print(f"zerofit: {said}", file=sys.stderr, flush=True)
    return checkpoint


def _batch_change(checkpoint: SavedCheckpoint, settings: AppliedSettings) -> str | None:
    """Return a warning if the checkpoint was saved with another global batch size; None otherwise."""
    manifest, now = checkpoint.manifest, settings.plan.workload.global_batch_size
    before = None if manifest is None else manifest.layout.global_batch_size
    if before is None or now is None or before == now:
        return None
    return (
        f"{checkpoint.path.name} was saved with a global batch size of {before}, and this run has {now}: "
        "positions in the data and in the learning-rate schedule differ; --global-batch-size "
        f"{before} keeps both"
    )


def newest_complete(folder: Path, settings: AppliedSettings) -> SavedCheckpoint | None:
    """Return the newest complete checkpoint in a folder, to resume from; all ranks call it.

    Skipped ones are reported.

    Raises:
        UserError: there are checkpoints, but none is complete.
    """
    newest = _newest(folder, find_checkpoints(folder), _problem)
    if newest is not None:
        _check_engine(newest.path, settings)
        if rank_of_process() == 0:
            _note(newest.path, settings.run_folder)
    return newest


def newest_by_sizes(folder: str) -> str | None:
    """Return what transformers' get_last_checkpoint does, but only complete checkpoints; not a collective."""
    candidates = [
        checkpoint
        for checkpoint in find_checkpoints(Path(folder))
        if checkpoint.path.name.startswith("checkpoint-")
    ]
    newest = _newest(Path(folder), candidates, lambda checkpoint: checkpoint.problem)
    return None if newest is None else str(newest.path)


def _newest(
    folder: Path, candidates: Iterable[SavedCheckpoint], problem_of: Callable[[SavedCheckpoint], str | None]
) -> SavedCheckpoint | None:
    """Return the first complete checkpoint, and report the skipped ones."""
    skipped: list[str] = []
    for checkpoint in candidates:
        problem = problem_of(checkpoint)
        if problem is None:
            if skipped and rank_of_process() == 0:
                said = f"zerofit: resumes from {checkpoint.path}, and skips {'; '.join(skipped)}"
                print(said, file=sys.stderr, flush=True)
            return checkpoint
        skipped.append(f"{checkpoint.path.name}: {problem}")
    if skipped:
        raise incomplete_checkpoint(folder, "; ".join(skipped))
    return None


def layout_of(settings: AppliedSettings, optimizer: Any) -> SavedLayout:
    """Return how this run's state is distributed over the ranks.

    Args:
        settings: the plan's.
        optimizer: possibly wrapped by accelerate or DeepSpeed; None if there is none.
    """
    while hasattr(optimizer, "optimizer"):  # accelerate's wrapper, ZeRO's
        optimizer = optimizer.optimizer
    strategy, kind = settings.strategy, type(optimizer)
    return SavedLayout(
        engine=strategy.engine.value,
        world_size=_world_size(),
        zero_stage=int(strategy.zero_stage),
        optimizer_offload=strategy.optimizer_offload.value,
        optimizer=f"{kind.__module__}.{kind.__qualname__}" if optimizer is not None else None,
        global_batch_size=settings.plan.workload.global_batch_size,
    )


def wrappers(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Make an Accelerator save its state atomically, and load only complete ones."""

    def save_state(original: Any, self: Any, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        project = self.project_configuration
        is_named = project.automatic_checkpoint_naming
        limit = project.total_limit
        if is_named:
            output_dir = Path(self.project_dir) / "checkpoints" / f"checkpoint_{self.save_iteration}"
        elif output_dir is None:
            return original(self, output_dir, *args, **kwargs)  # raises an error
        folder = Path(output_dir)
        project.automatic_checkpoint_naming = is_named and folder.exists()  # accelerate refuses it
        project.total_limit = None

        def write(partial: Path) -> None:
            original(self, str(partial), *args, **kwargs)
            if self.is_main_process and len(prepared_models(self)) == 1:
                describe_model(self.unwrap_model(prepared_models(self)[0]), partial / MODEL_FOLDER)

        try:
            if project.automatic_checkpoint_naming:
                return original(self, None, *args, **kwargs)
            optimizers = prepared_optimizers(self)
            save_whole(
                folder,
                write,
                layout=layout_of(settings, optimizers[0] if optimizers else None),
                run_folder=settings.run_folder,
                step=observe.steps_done(),
            )
        finally:
            project.automatic_checkpoint_naming, project.total_limit = is_named, limit
        if is_named and limit is not None and self.is_main_process:
            _prune(folder.parent, limit)
        return folder

    def load_state(original: Any, self: Any, input_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        checkpoint = None
        if input_dir is not None:
            folder = Path(input_dir).expanduser()
            if folder.is_dir():
                checkpoint = check_resumed(folder, settings)
        elif self.project_configuration.automatic_checkpoint_naming:
            checkpoint = newest_complete(Path(self.project_dir) / "checkpoints", settings)
        if checkpoint is None:
            return original(self, input_dir, *args, **kwargs)  # raises an error
        _check_expected(self, checkpoint.path, settings)
        schedulers = own_states(prepared_schedulers(self))
        found = original(self, str(checkpoint.path), *args, **kwargs)
        saved = _num_ranks_of(checkpoint) or self.num_processes
        follow_ranks(schedulers, saved=saved, now=self.num_processes, changes=changes)
        _take_step_of_other_ranks(self, checkpoint.path, settings, changes)
        observe.resume(_saved_step(self, checkpoint.manifest))
        return found

    return {"save_state": save_state, "load_state": load_state}


def install_last_checkpoint(module: Any, settings: AppliedSettings, changes: Changes) -> None:
    """Make transformers find the last complete checkpoint.

    Args:
        module: transformers.trainer_utils.
        settings: the plan's.
        changes: receives changes.
    """
    wrap(module, "get_last_checkpoint", lambda _, folder: newest_by_sizes(folder))


def _check_engine(folder: Path, settings: AppliedSettings) -> None:
    """Check that a checkpoint was saved by the engine that will load it, as this run saves."""
    saved, now = _engine_of(folder), settings.strategy.engine
    if saved is None or saved is now:
        if now is Engine.FSDP2:
            _check_state_dict(folder, settings)
        return
    raise UserError(
        "checkpoint-of-other-engine",
        "a checkpoint can only be resumed with the engine that saved it",
        found=f"{folder} was saved by {_ENGINES[saved]}, and this run uses {_ENGINES[now]}",
        why="each engine stores optimizer states in its own layout",
        fix=f"run with --engine {saved.value}, or start a new run from its weights (`zerofit export`)",
    )


def _engine_of(folder: Path) -> Engine | None:
    """Return the engine whose files are in a checkpoint; None if there are no optimizer states."""
    if any(folder.glob("*/*_states.pt")):
        return Engine.DEEPSPEED
    if state_dict_type_of(folder) is not None:
        return Engine.FSDP2
    return Engine.NATIVE if any(folder.glob("optimizer*")) else None


def _check_state_dict(folder: Path, settings: AppliedSettings) -> None:
    saved, now = state_dict_type_of(folder), settings.strategy.state_dict_type
    if saved not in (None, now):
        raise UserError(
            "checkpoint-of-other-state-dict",
            "the checkpoint has another type of state dict than this run",
            found=f"{folder} has {saved}, and this run {now}",
            why="accelerate looks for the files of the run's type alone",
            fix=f"run with --state-dict-type {saved.value.partition('_')[0].lower()}",
        )


def _num_ranks_of(checkpoint: SavedCheckpoint) -> int:
    """Return the ranks that saved a checkpoint; each leaves its random states. 0 if there are none."""
    if checkpoint.manifest is not None:
        return checkpoint.manifest.layout.world_size
    return len(list(checkpoint.path.glob("random_states_*.pkl")))


def _take_step_of_other_ranks(
    accelerator: Any, folder: Path, settings: AppliedSettings, changes: Changes
) -> None:
    """Load the count of micro-batches, saved with the random states, on a rank without a file of them."""
    import torch

    if (folder / f"random_states_{accelerator.process_index}.pkl").exists():
        return
    saved = torch.load(folder / "random_states_0.pkl", weights_only=not settings.plan.trusts_checkpoint)
    accelerator.step = saved.get("step", accelerator.step)
    changes.add(f"ranks without random states in {folder.name} keep their own")


def _saved_step(accelerator: Any, manifest: Manifest | None) -> int | None:
    """Return the optimizer steps of a loaded checkpoint, the same on all ranks; None if they are unknown.

    A checkpoint saved without zerofit has them only in the optimizer states.
    """
    step = None if manifest is None else manifest.step
    if step is None and (optimizers := prepared_optimizers(accelerator)):
        counts = (state.get("step") for state in optimizers[0].state.values())
        step = max((int(count) for count in counts if count is not None), default=None)
    return next((rank_step for rank_step in gather(step) if rank_step is not None), None)


def describe_model(model: Any, folder: Path) -> None:
    """Save the configurations of the model and its adapters, which `zerofit export` needs."""
    model = getattr(model, "_orig_mod", model)  # of torch.compile, whose class is none of the model's
    if not hasattr(getattr(model, "config", None), "save_pretrained"):
        return
    adapted = adapted_of(model) or model
    base = adapted.get_base_model() if hasattr(adapted, "get_base_model") else adapted
    config = copy.deepcopy(model.config)
    config.architectures = [type(base).__name__.removeprefix("FSDP")]  # FSDP2 makes a class of its own
    config.save_pretrained(folder)
    if getattr(base, "generation_config", None) is not None:
        base.generation_config.save_pretrained(folder)
    for adapter in list(getattr(adapted, "peft_config", {}).values())[:1]:
        adapter.save_pretrained(str(folder))


def _check_expected(accelerator: Any, folder: Path, settings: AppliedSettings) -> None:
    """Refuse a checkpoint that lacks files which this script's load_state() reads."""
    names = set(os.listdir(folder))
    schedulers = [
        scheduler
        for scheduler in prepared_schedulers(accelerator)
        if "DeepSpeed" not in type(scheduler).__name__
    ]
    expected = [f"scheduler{f'_{i}' * (i > 0)}.bin" for i in range(len(schedulers))]
    if settings.uses_fsdp2:
        expected += (
            ["optimizer.bin"] if settings.strategy.state_dict_type is StateDictType.FULL else ["optimizer_0"]
        )
    elif settings.uses_deepspeed:
        expected += [f"pytorch_model{f'_{i}' * (i > 0)}" for i in range(len(prepared_models(accelerator)))]
    else:
        expected += [
            f"optimizer{f'_{i}' * (i > 0)}.bin" for i in range(len(prepared_optimizers(accelerator)))
        ]
    missing = [name for name in expected if name not in names]
    if missing:
        raise incomplete_checkpoint(
            folder, f"{missing[0]} is missing, which load_state() of this script reads"
        )


def _problem(checkpoint: SavedCheckpoint) -> str | None:
    """Return the first problem that any rank finds in a checkpoint; each reads a share of the files."""
    problem = checkpoint.problem
    if problem is None and checkpoint.manifest is not None:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        files = checkpoint.manifest.files[local_rank::ranks_here]
        problem = damage(checkpoint.path, files, digests=True)
    return next((found for found in gather(problem) if found), None)


def _make_empty(outer: Path, partial: Path, run_folder: Path | None) -> None:
    outer.parent.mkdir(parents=True, exist_ok=True)
    for left in outer.parent.glob(f"{SAVING}*"):  # of runs whose zerofit was killed, too, while saving
        remove_partial(left)
    _note(outer, run_folder)
    partial.mkdir(parents=True)


def _take_place(partial: Path, folder: Path) -> None:
    """Rename a complete checkpoint; an existing one is removed, but its foreign files are kept."""
    if folder.is_symlink():
        folder = folder.resolve()
    if not folder.exists():
        partial.rename(folder)
        sync_folder(folder.parent)
        return
    earlier = inspect_checkpoint(folder).manifest
    saved_before = {file.name for file in earlier.files} if earlier is not None else set()
    for name in file_names(folder):
        if name not in saved_before and not (partial / name).exists():
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            _link(folder / name, partial / name)
    _exchange(partial, folder)
    sync_folder(folder.parent)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target, follow_symlinks=False)


_RENAME_EXCHANGE = 2
"""linux/fs.h."""
_AT_FDCWD = -100
"""linux/fcntl.h."""


def _exchange(folder: Path, other: Path) -> None:
    """Swap two folders' names, atomically if the file system supports it."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    paths = os.fsencode(folder), os.fsencode(other)
    if rename is not None and not rename(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE):
        return
    aside = folder.with_name(f"{folder.name}{BEFORE}")
    other.rename(aside)
    folder.rename(other)


def _prune(folder: Path, limit: int) -> None:
    """Delete an Accelerator's oldest checkpoints above its total_limit."""
    numbered = [
        (int(number), entry)
        for entry in folder.iterdir()
        if (number := entry.name.removeprefix("checkpoint_")).isdigit()
    ]
    for _, old in sorted(numbered)[: max(0, len(numbered) - limit)]:
        shutil.rmtree(old)


def rank_of_process() -> int:
    """Return this process's global rank."""
    return int(os.environ.get("RANK", "0"))


def _world_size() -> int:
    import torch.distributed

    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def gather(value: Any) -> list[Any]:
    """Return each rank's value on every rank; a collective call."""
    import torch.distributed

    if _world_size() == 1:
        return [value]
    found: list[Any] = [None] * _world_size()
    torch.distributed.all_gather_object(found, value)
    return found
