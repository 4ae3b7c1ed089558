"""Saves the order of samples in checkpoints, so that a loop can resume in the middle of an epoch.

accelerate saves and loads random states, but not the one from which an epoch's order was drawn: after
load_state(), skip_first_batches() skips batches of a newly drawn order (1.15, data_loader.py and
checkpointing.py), so that some samples are repeated in the epoch and others missing. Trainer restores its own
order.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.upstream.accelerate import prepared_data_loaders
from zerofit.training.wrapping import wrap

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings
    from zerofit.training.wrapping import Wrapper

_FILE_NAME = "zerofit_sample_order.bin"
_DRAWN_FROM = "_zerofit_order_drawn_from"
"""A sampler's attribute: the state of the generator that its last order was drawn from."""
_LOADED = "_zerofit_loaded_order"
"""A sampler's attribute: the same, as loaded from a checkpoint."""
_NEXT = "_zerofit_next_order"
"""A sampler's attribute: the state from which its next order is to be drawn."""
_KEEPS_RANDOM_STATE = "_zerofit_keeps_random_state"
"""A DataLoader's attribute: its next iteration leaves torch's random state as it is."""


def install_in_samplers(module: Any, settings: AppliedSettings, changes: Changes) -> None:
    """Make torch's random samplers record the random state that an order is drawn from.

    Args:
        module: torch.utils.data.sampler.
    """
    import torch

    def orders(original: Any, self: Any) -> Iterator[int]:
        own = self.generator
        state = vars(self).pop(_NEXT, None)
        self.generator = generator = torch.Generator() if own is None else own
        if state is not None:
            generator.set_state(state)
        elif own is None:
            # As torch does without a generator (torch/utils/data/sampler.py, RandomSampler).
            generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
        setattr(self, _DRAWN_FROM, generator.get_state())
        indices = original(self)
        try:
            first = next(indices, None)
        finally:
            self.generator = own
        if first is not None:
            yield first
            yield from indices

    wrap(module.RandomSampler, "__iter__", orders)


def install_in_loaders(module: Any, settings: AppliedSettings, changes: Changes) -> None:
    """Make skip_first_batches() skip batches of the order in the checkpoint.

    Args:
        module: accelerate.data_loader.
    """

    def skip(original: Any, dataloader: Any, num_batches: int = 0) -> Any:
        skipping = original(dataloader, num_batches)
        sampler = _sampler_of(dataloader)
        state = getattr(sampler, _LOADED, None)
        if state is not None and num_batches:
            setattr(sampler, _NEXT, state)
            setattr(getattr(skipping, "base_dataloader", skipping), _KEEPS_RANDOM_STATE, True)
        return skipping

    wrap(module, "skip_first_batches", skip)


def data_loader_wrappers(
    loader_class: Any, settings: AppliedSettings, changes: Changes
) -> dict[str, Wrapper]:
    """Make a resumed epoch start without changing the random state loaded from the checkpoint."""
    import torch

    def iterate(original: Any, self: Any) -> Any:
        state = torch.get_rng_state() if vars(self).pop(_KEEPS_RANDOM_STATE, False) else None
        iterator = original(self)
        if state is not None:
            torch.set_rng_state(state)
        return iterator

    return {"__iter__": iterate}


def wrappers(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Save and load the random states of orders beside accelerate's files."""

    def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.register_save_state_pre_hook(lambda models, weights, folder: _save(self, Path(folder)))
        self.register_load_state_pre_hook(lambda models, folder: _load(self, Path(folder)))

    return {"__init__": init}


def _save(accelerator: Any, folder: Path) -> None:
    import torch

    states = [getattr(sampler, _DRAWN_FROM, None) for sampler in _samplers(accelerator)]
    if accelerator.is_main_process and any(state is not None for state in states):
        torch.save(states, folder / _FILE_NAME)


def _load(accelerator: Any, folder: Path) -> None:
    import torch
    from accelerate.utils import broadcast_object_list

    path = folder / _FILE_NAME
    # All ranks draw the same order, also on nodes without the file.
    found = [torch.load(path) if accelerator.is_main_process and path.exists() else []]
    for sampler, state in zip(_samplers(accelerator), broadcast_object_list(found)[0], strict=False):
        if state is not None:
            setattr(sampler, _LOADED, state)


def _samplers(accelerator: Any) -> list[Any]:
    return [_sampler_of(loader) for loader in prepared_data_loaders(accelerator)]


def _sampler_of(loader: Any) -> Any:
    """Return the sampler inside the batch samplers that shard and skip; None without one."""
    batches = loader.batch_sampler or loader.sampler
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    return getattr(batches, "sampler", None)
