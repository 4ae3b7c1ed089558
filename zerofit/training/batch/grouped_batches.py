"""Batches of samples with similar length in a script's own training DataLoader."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.upstream.accelerate import is_prepared, prepared_data_loaders
from zerofit.data.known_lengths import sample_lengths
from zerofit.data.sampler import LengthGroupedBatches

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.data.bucketing import Lengths
    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings
    from zerofit.training.wrapping import Wrapper

_GROUPED = "_zerofit_grouped"
"""Field of an Accelerator: whether batches of any of its DataLoaders are grouped."""
_WHY_NOT = "_zerofit_why_not_grouped"
"""Field of an Accelerator: why DataLoaders keep their batches; cleared once reported."""
_STATE_FILE = "zerofit_batches.json"
"""Written beside accelerator.save_state()'s files: seed and epoch of each batch sampler."""


def wrappers(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Group the batches of prepared DataLoaders; report at the first step if nothing is grouped."""
    if not settings.strategy.group_by_length:
        return {}

    def prepare_data_loader(original: Any, self: Any, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        batches = None if is_prepared(data_loader) else _batches_for(self, data_loader)
        if batches is None:
            return original(self, data_loader, *args, **kwargs)
        # DataLoader refuses to set the field after construction, since its iterators might be running;
        # accelerate creates a new one from its fields.
        changed = copy.copy(data_loader)
        changed.__dict__["batch_sampler"] = batches
        prepared = original(self, changed, *args, **kwargs)
        if prepared.batch_sampler is not batches:
            # accelerate, and Trainer when it resumes, set the epoch on the sampler that they find here.
            prepared.batch_sampler.sampler = batches
        _keep(self, changes)
        changes.add("batches are made of samples of like length, in a new order in each epoch")
        return prepared

    def backward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.__dict__.get(_GROUPED):  # one DataLoader of several is enough
            for why in self.__dict__.pop(_WHY_NOT, ()):
                changes.add(f"batches are not grouped by length: a DataLoader is left as it is, as {why}")
        return original(self, *args, **kwargs)

    return {"prepare_data_loader": prepare_data_loader, "backward": backward}


class _ScriptBatches(LengthGroupedBatches):
    """Batches in a new order each time they are read, as in a script that shuffles.

    Their epoch only increases. accelerate counts a DataLoader's epochs from 0 in each process, and does not
    count those after skip_first_batches() or ended by a break (accelerate/data_loader.py): by its count a
    script would read the same order again.
    """

    begun = -1
    """The last started epoch."""

    def __iter__(self) -> Iterator[list[int]]:
        if self.begun == self.epoch:
            super().set_epoch(self.epoch + 1)
        self.begun = self.epoch
        return super().__iter__()

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(max(epoch, self.epoch))

    def go_on(self, *, seed: int, epoch: int) -> None:
        """Continue in the order of another process, with this epoch."""
        self._seed, self.begun = seed, -1
        super().set_epoch(epoch)


def _batches_for(accelerator: Any, loader: Any) -> _ScriptBatches | None:
    """Return the batches that replace a DataLoader's own; None to keep them."""
    num_ranks = _num_ranks(accelerator)
    why = _why_not(loader, num_ranks=num_ranks)
    lengths, seed = None, 0
    if why is None:
        lengths, seed = _agreed(accelerator, loader)
        if lengths is None:
            why = "neither a column input_ids or length nor a field lengths gives the length of its samples"
        elif lengths.min() == lengths.max():
            why = f"all of its samples have {int(lengths[0])} tokens"
    if why is not None or lengths is None:
        accelerator.__dict__.setdefault(_WHY_NOT, []).append(why)
        return None
    return _ScriptBatches(
        lengths,
        batch_size=loader.batch_size,
        num_ranks=1 if accelerator.split_batches else num_ranks,
        seed=seed,
        drop_last=loader.drop_last,
        pack_last=not loader.drop_last,
    )


def _num_ranks(accelerator: Any) -> int:
    """Return the number of ranks with different batches: tensor- and sequence-parallel ranks read the same.

    Source: accelerate/data_loader.py, prepare_data_loader.
    """
    mesh: Any = getattr(accelerator, "torch_device_mesh", None)
    names = () if mesh is None else mesh.mesh_dim_names or ()
    num_alike = math.prod(int(mesh[name].size()) for name in ("tp", "cp") if name in names)
    plugin = getattr(accelerator, "deepspeed_plugin", None)
    config = {} if plugin is None else plugin.deepspeed_config
    num_alike *= int(config.get("tensor_parallel", {}).get("autotp_size", 1))
    num_alike *= int(config.get("sequence_parallel_size", 1))
    return int(accelerator.num_processes) // num_alike


def _why_not(loader: Any, *, num_ranks: int) -> str | None:
    """Return why a DataLoader's batches can't be replaced; None if they can."""
    from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

    sampler = loader.sampler
    if isinstance(loader.dataset, IterableDataset):
        return "its samples come as a stream"
    if type(loader.batch_sampler) is not BatchSampler:
        return f"its batches are the script's own ({type(loader.batch_sampler).__name__})"
    if isinstance(sampler, SequentialSampler):
        return "it does not shuffle: the order of its samples is the script's (SequentialSampler)"
    if not isinstance(sampler, RandomSampler):
        return f"the order of its samples comes from a sampler of its own ({type(sampler).__name__})"
    if sampler.replacement or sampler.num_samples != len(loader.dataset):
        return "it does not read every sample once in an epoch"
    if loader.batch_size == 1 and num_ranks == 1:
        return "batches of one sample have no padding"
    return None


def _agreed(accelerator: Any, loader: Any) -> tuple[Lengths | None, int]:
    """Return the lengths and the seed found by the first rank, for all ranks.

    The lengths are None if unknown, or if ranks have different data.
    """
    from accelerate.utils import broadcast_object_list, gather_object

    found: list[Any] = [None, 0]
    if accelerator.is_main_process:
        found = [_lengths(loader.dataset), _seed(accelerator, loader)]
    if accelerator.num_processes > 1:
        found = broadcast_object_list(found)
    lengths, seed = found
    if lengths is not None and accelerator.num_processes > 1:
        fits = gather_object([len(lengths) == len(loader.dataset)])
        lengths = lengths if all(fits) else None
    return lengths, seed


def _lengths(dataset: Any) -> Lengths | None:
    try:
        return sample_lengths(dataset)
    except Exception:
        return None  # a column with other content


def _seed(accelerator: Any, loader: Any) -> int:
    """Return the seed of the script's own order."""
    import torch

    generator = loader.sampler.generator
    if generator is not None:
        return int(generator.initial_seed())
    own = accelerator.dataloader_config.data_seed
    return int(torch.initial_seed() if own is None else own) % 2**64  # torch accepts a negative one here


def _keep(accelerator: Any, changes: Changes) -> None:
    """Make save_state() and load_state() include the batches of the DataLoaders prepared at that time."""
    if accelerator.__dict__.get(_GROUPED):
        return
    accelerator.__dict__[_GROUPED] = True

    def save(models: Any, weights: Any, folder: Any) -> None:
        if accelerator.is_main_process:
            state = [
                {"seed": batches.seed, "epoch": _epoch_under_way(accelerator, batches)}
                for batches in _kept(accelerator)
            ]
            Path(folder, _STATE_FILE).write_text(json.dumps(state), encoding="utf-8")

    def load(models: Any, folder: Any) -> None:
        path = Path(folder, _STATE_FILE)
        if not path.exists():
            return
        states, kept = json.loads(path.read_text(encoding="utf-8")), _kept(accelerator)
        if len(states) != len(kept):
            changes.add(
                f"the order of batches is not restored from {folder}: it was saved for {len(states)} "
                f"DataLoaders with grouped batches, and the script has {len(kept)}"
            )
            return
        for batches, state in zip(kept, states, strict=True):
            batches.go_on(**state)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def _kept(accelerator: Any) -> list[_ScriptBatches]:
    """Return the batches of the currently prepared DataLoaders: free_memory() drops earlier ones."""
    found = (_sampler_in(loader) for loader in prepared_data_loaders(accelerator))
    # One prepared twice, such as after skip_first_batches(), keeps its batches.
    return list({id(batches): batches for batches in found if isinstance(batches, _ScriptBatches)}.values())


def _epoch_under_way(accelerator: Any, batches: _ScriptBatches) -> int:
    """Return the script's current epoch: workers prefetch, and may have read all of it."""
    loader: Any
    for loader in accelerator.gradient_state.dataloader_references:
        if loader is not None and not loader.end_of_dataloader and _sampler_in(loader) is batches:
            return batches.begun
    return batches.epoch


def _sampler_in(loader: Any) -> object:
    """Return the innermost batch sampler of a prepared DataLoader."""
    found = loader.batch_sampler
    while hasattr(found, "batch_sampler"):
        found = found.batch_sampler
    return found
