"""Checkpoints on disk, and which of them are complete.

A checkpoint that was saved under `zerofit launch` has a manifest: the size and the digest of each of its
files, and the layout it was saved in. Checkpoints saved without zerofit have none; they are checked for
the files that accelerate, Trainer and DeepSpeed always write.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from zerofit.core.atomic_file import write_whole
from zerofit.core.bounded_read import open_regular, read_bounded, read_bounded_text
from zerofit.core.errors import UserError
from zerofit.core.facts import Checkpoint
from zerofit.core.optimizers.lookup import entry_of, optimizer_of_class
from zerofit.core.strategy import StateDictType
from zerofit.core.validation import parse_known, short_reason
from zerofit.core.vanishing_files import last_change

if TYPE_CHECKING:
    from collections.abc import Iterable

MANIFEST_NAME = "zerofit-checkpoint.json"
"""The manifest's file name in the checkpoint's folder."""
MANIFEST_VERSION = 1
MODEL_FOLDER = "zerofit-model"
"""Folder in a checkpoint of accelerate with the model's config.json, which accelerate does not save."""
SAVING = ".zerofit-saving."
"""Prefix of a checkpoint's folder name while it is being saved."""
BEFORE = ".before"
"""Suffix in that folder of an earlier checkpoint that is being replaced."""
_LARGEST_MANIFEST = 64 * 1024 * 1024
_LARGEST_NOTES = 16 * 1024 * 1024
"""Bytes; a file of a checkpoint takes some 150, a checkpoint's path less. ASSUMPTION."""
_NOTES = "checkpoints.jsonl"
"""File of the run's folder with one path per line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedLayout:
    """How a run's state was distributed over its ranks."""

    engine: str
    """A value of Engine: "deepspeed", "fsdp2" or "native"."""
    world_size: int
    """Number of ranks that saved."""
    zero_stage: int
    """0 with other engines than DeepSpeed."""
    optimizer_offload: str
    """A value of OffloadDevice."""
    optimizer: str | None
    """Module and class of the optimizer; None if there was none."""
    global_batch_size: int | None = None
    """Samples of an optimizer step; None if unknown."""

    @property
    def is_of_adam(self) -> bool:
        """True if DeepSpeed's converter supports the optimizer's states, or there are none."""
        if self.optimizer is None:
            return True
        entry = entry_of(optimizer_of_class(self.optimizer))
        return entry is not None and entry.is_converted


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """One file of a checkpoint."""

    name: str
    """Path relative to the checkpoint's folder, with forward slashes."""
    num_bytes: int
    sha256: str
    """SHA-256 of the file, in hexadecimal."""

    def __post_init__(self) -> None:
        """Check that the file is in the checkpoint.

        Raises:
            ValueError: it is elsewhere.
        """
        path = PurePosixPath(self.name)
        if path.is_absolute() or ".." in path.parts or "\0" in self.name:
            raise ValueError(f"name: {self.name!r} is not in the checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The files of a complete checkpoint, and how they were made."""

    layout: SavedLayout
    files: tuple[SavedFile, ...]
    saved_at: float
    """Seconds since the epoch."""
    step: int | None = None
    """Optimizer steps done; None if unknown."""
    version: int = MANIFEST_VERSION

    def __post_init__(self) -> None:
        """Check the time.

        Raises:
            ValueError: it is none.
        """
        if not math.isfinite(self.saved_at):
            raise ValueError(f"saved_at: {self.saved_at} is no time")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """One checkpoint on disk."""

    path: Path
    manifest: Manifest | None
    """None if it was saved without zerofit."""
    problem: str | None
    """Why it can't be resumed from, in one clause; None if it is complete."""
    saved_at: float
    """Seconds since the epoch: from the manifest, else the newest file's."""

    @property
    def is_complete(self) -> bool:
        """True if nothing is known to be missing or damaged."""
        return self.problem is None


def find_checkpoints(folder: Path, *, digests: bool = False) -> tuple[SavedCheckpoint, ...]:
    """Return all checkpoints in a folder, newest first, complete or not.

    Args:
        folder: a checkpoint, or a folder of checkpoints: Trainer's output_dir, Accelerator's project_dir.
        digests: also compare the files' digests, which takes as long as loading them; else only sizes.
    """
    places = [folder, *_subfolders(folder), *_subfolders(folder / "checkpoints")]
    found = [inspect_checkpoint(place, digests=digests) for place in places if is_checkpoint(place)]
    return tuple(sorted(found, key=_age, reverse=True))


def is_checkpoint(folder: Path) -> bool:
    """Return True if a folder contains a checkpoint of a training run, or a part of one."""
    if folder.name.startswith(SAVING):
        return False
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    return MANIFEST_NAME in names or any(_STATE.fullmatch(name) for name in names)


def inspect_checkpoint(folder: Path, *, digests: bool = False) -> SavedCheckpoint:
    """Return the state of one checkpoint.

    Args:
        folder: the checkpoint.
        digests: also compare the files' digests.
    """
    manifest, problem = None, None
    try:
        manifest = _read_manifest(folder)
    except (OSError, ValueError) as error:
        problem = f"its manifest {MANIFEST_NAME} can't be read ({short_reason(error)})"
    if manifest is not None:
        problem = damage(folder, manifest.files, digests=digests)
        saved_at = manifest.saved_at
    else:
        try:
            problem = problem or _problem_without_manifest(folder)
        except OSError as error:  # the run that saves may remove it meanwhile
            problem = f"it can't be read ({error.strerror})"
        saved_at = last_change(folder)
    return SavedCheckpoint(path=folder, manifest=manifest, problem=problem, saved_at=saved_at)


def damage(folder: Path, files: Iterable[SavedFile], *, digests: bool) -> str | None:
    """Return how the first damaged or missing file differs from its entry; None if all are intact."""
    for file in files:
        path = folder / file.name
        try:
            num_bytes = path.stat().st_size
            if num_bytes != file.num_bytes:
                return f"{file.name} has {num_bytes} bytes, but was saved with {file.num_bytes}"
            if digests and _digest(path) != file.sha256:
                return f"{file.name} differs from what was saved"
        except (FileNotFoundError, NotADirectoryError):
            return f"{file.name} is missing"
        except OSError as error:
            return f"{file.name} can't be read ({error.strerror})"
    return None


def file_names(folder: Path) -> list[str]:
    """Return the relative paths of all files below a folder except the manifest, sorted."""
    names = [
        (Path(root) / name).relative_to(folder).as_posix()
        for root, _, files in os.walk(folder)
        for name in files
    ]
    return sorted(name for name in names if name != MANIFEST_NAME)


def sync_and_digest(folder: Path, name: str) -> SavedFile:
    """Flush a file to disk and return its manifest entry."""
    path = folder / name
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return SavedFile(name=name, num_bytes=path.stat().st_size, sha256=_digest(path))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Mark a checkpoint complete; all of its files must be on disk already."""
    for root, _, _ in os.walk(folder):
        sync_folder(Path(root))
    write_whole(folder / MANIFEST_NAME, json.dumps(asdict(manifest), indent=1), sync=True)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk (fsync)."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_shards(folder: str, tag: str) -> Checkpoint:
    """Return the layout of a DeepSpeed checkpoint, judged by its file names.

    Args:
        folder: the checkpoint.
        tag: name of its subfolder that holds the shards.

    Raises:
        OSError: there is no such folder.
    """
    names = os.listdir(os.path.join(folder, tag))
    return Checkpoint(
        folder=folder,
        num_ranks=sum(_OPTIMIZER_SHARD.fullmatch(name) is not None for name in names),
        partitions_parameters=any(map(_PARAMETER_SHARD.fullmatch, names)),
        is_universal="zero" in names,  # deepspeed/checkpoint/ds_to_universal.py: one folder a parameter
        tensor_parallel_size=tensor_parallel_size_of(names),
    )


def state_dict_type_of(folder: Path) -> StateDictType | None:
    """Return how FSDP2 saved a checkpoint; None if another engine did.

    accelerate/utils/fsdp_utils.py, save_fsdp_model.
    """
    if (folder / f"{FSDP_WEIGHTS}_0").is_dir():
        return StateDictType.SHARDED
    return StateDictType.FULL if (folder / f"{FSDP_WEIGHTS}.bin").is_file() else None


def sharded_folders(folder: Path) -> tuple[Path, ...]:
    """Return the folders of torch.distributed.checkpoint in a checkpoint: weights, then optimizer states."""
    places = (folder / f"{name}_{number}" for name in (FSDP_WEIGHTS, "optimizer") for number in range(2))
    return tuple(place for place in places if place.is_dir())


def tensor_parallel_size_of(names: Iterable[str]) -> int:
    """Return the tensor-parallel size that a checkpoint's file names show."""
    return max(1, len({found[0] for name in names if (found := re.search(r"mp_rank_\d+", name))}))


def remove_partial(outer: Path) -> None:
    """Remove what an interrupted save left; a checkpoint that it was replacing is put back."""
    name = outer.name.removeprefix(SAVING)
    earlier, place = outer / f"{name}{BEFORE}", outer.parent / name
    if earlier.exists() and not place.exists():
        earlier.rename(place)
    shutil.rmtree(outer)


def remove_partial_of_run(run_folder: Path) -> None:
    """Remove what interrupted saves of a run left, after all of its ranks have ended."""
    for outer in _noted(run_folder / _NOTES):
        if outer.name.startswith(SAVING) and outer.is_dir():
            with contextlib.suppress(OSError):
                remove_partial(outer)


def note_checkpoint(run_folder: Path, checkpoint: Path) -> None:
    """Record in the run's folder a checkpoint that it saved or resumed from, or its folder while it saves."""
    with (run_folder / _NOTES).open("a", encoding="utf-8") as file:
        file.write(json.dumps(str(checkpoint)) + "\n")


def noted_checkpoints(run_folder: Path) -> tuple[Path, ...]:
    """Return the checkpoints that a run saved or resumed from in all of its attempts, newest first."""
    noted: list[Path] = []
    later = sorted(run_folder.glob(f"recovery-*/{_NOTES}"), key=lambda path: (len(path.parent.name), path))
    for notes in (run_folder / _NOTES, *later):
        noted += [path for path in _noted(notes) if not path.name.startswith(SAVING)]
    return tuple(reversed(noted))


def _noted(notes: Path) -> list[Path]:
    try:
        lines = read_bounded_text(notes, most_bytes=_LARGEST_NOTES).splitlines()
    except (OSError, ValueError):
        return []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(path := json.loads(line), str) and "\0" not in path:
                found.append(Path(path))
    return found


def incomplete_checkpoint(folder: Path, problem: str) -> UserError:
    """Return the error for an incomplete checkpoint."""
    others = [
        checkpoint.path
        for checkpoint in find_checkpoints(folder.parent)
        if checkpoint.is_complete and checkpoint.path != folder
    ]
    newest = f"take {others[0]}, the newest complete one" if others else "take an earlier one"
    return UserError(
        "checkpoint-incomplete",
        "the checkpoint is not complete",
        found=f"{folder}: {problem}",
        why="a run that was stopped while saving, or an interrupted copy, leaves only part of the state",
        fix=f"{newest}, and delete this one",
    )


def _read_manifest(folder: Path) -> Manifest | None:
    try:
        text = read_bounded_text(folder / MANIFEST_NAME, most_bytes=_LARGEST_MANIFEST)
    except FileNotFoundError:
        return None
    version = parse_known(_Versioned, text).version
    if version != MANIFEST_VERSION:
        raise ValueError(f"version {version}, and this zerofit reads {MANIFEST_VERSION}")
    return parse_known(Manifest, text)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Versioned:
    """The field of a manifest that tells how to read the others."""

    version: int


def _digest(path: Path) -> str:
    # SHA-256 is fast where processors have instructions for it: 1.0 GB/s on one core, BLAKE2b 0.5.
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# accelerate/utils/constants.py; transformers/trainer.py; deepspeed/runtime/engine.py. Without
# trainer_state.json, which Trainer also writes into its output_dir.
_STATE = re.compile(
    r"random_states_\d+\.pkl|optimizer(_\d+)?\.(bin|pt)|scheduler(_\d+)?\.(bin|pt)|custom_checkpoint_\d+\.pkl"
    r"|rng_state(_\d+)?\.pth|global_step\d+|latest|zero_to_fp32\.py"
)
FSDP_WEIGHTS = "pytorch_model_fsdp"
"""Name of FSDP's weights, as a file or with a number as a folder (accelerate/utils/constants.py)."""
_SHARDS_INDEX = ".metadata"
"""Written last (torch/distributed/checkpoint/filesystem.py)."""
# deepspeed/runtime/engine.py, _get_rank_zero_ckpt_name and _get_ckpt_name.
_OPTIMIZER_SHARD = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_\d+_optim_states\.pt")
_PARAMETER_SHARD = re.compile(r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt")
_RANDOM = re.compile(r"random_states_(\d+)\.pkl|rng_state_(\d+)\.pth")
_ARCHIVES = (".pt", ".pth", ".bin", ".pkl")
"""Files of torch.save: zip archives, whose directory is at their end."""
_NUMBERED = re.compile(r"(.*?)(\d+)")
_LONGEST_TAG = 4096
"""Bytes in `latest`: a folder's name."""


def _problem_without_manifest(folder: Path) -> str | None:
    """Return which file is missing in a checkpoint without a manifest that its library always writes."""
    names = file_names(folder)
    for name in names:
        if not (folder / name).is_file():
            return f"{name} is no file, or a link to none"
        if (folder / name).stat().st_size == 0:
            return f"{name} is empty"
        if name.endswith(_ARCHIVES) and not zipfile.is_zipfile(folder / name):
            return f"{name} is cut off"
    own = {name for name in names if "/" not in name}
    shards = _ranks(_OPTIMIZER_SHARD, (name.rpartition("/")[2] for name in names))
    if any(name.endswith("_states.pt") for name in names):
        if "latest" not in own:
            return "the file `latest`, which DeepSpeed writes last, is missing"
        tag = read_bounded(folder / "latest", most_bytes=_LONGEST_TAG, cuts=True).decode(errors="replace")
        if "\0" in tag or len(tag) == _LONGEST_TAG or not (folder / tag.strip()).is_dir():
            return "the file `latest` names a folder that is missing"
    elif "latest" in own or "zero_to_fp32.py" in own:
        return "DeepSpeed's states are missing"
    for place in sharded_folders(folder):
        if not (place / _SHARDS_INDEX).is_file():
            return f"{place.name}/{_SHARDS_INDEX}, which is written last, is missing"
    random = _ranks(_RANDOM, own)
    for ranks, what in ((shards, "the optimizer states"), (random, "the random states")):
        missing = sorted(set(range(max(len(shards), max(ranks, default=-1) + 1))) - ranks)
        if ranks and missing:
            return f"{what} of rank {missing[0]} are missing"
    if not random and "rng_state.pth" not in own:
        return "the random states are missing"
    if any(name.startswith("rng_state") for name in own) and "trainer_state.json" not in own:
        return "trainer_state.json is missing"
    return None


def _ranks(pattern: re.Pattern[str], names: Iterable[str]) -> set[int]:
    matches = (pattern.fullmatch(name) for name in names)
    return {int(next(group for group in match.groups() if group)) for match in matches if match}


def _subfolders(folder: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir()]
    except OSError:
        return []


def _age(checkpoint: SavedCheckpoint) -> tuple[float, int]:
    """Return a sort key: the time of saving, then the number in the name."""
    numbered = _NUMBERED.match(checkpoint.path.name)
    return checkpoint.saved_at, int(numbered[2]) if numbered else -1
