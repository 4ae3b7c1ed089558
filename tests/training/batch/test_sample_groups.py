"""Groups of ranks that train on the same samples: which loaders accelerate would share among the groups."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from accelerators import quiet, settings
from refusals import refusal
from torch.utils.data import DataLoader, IterableDataset

from zerofit.core.plan import Topology
from zerofit.training.batch import sample_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class _Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


_SAMPLES: Any = range(8)
_LOADERS = {"stream": DataLoader(_Stream()), "samples": DataLoader(_SAMPLES)}


def _prepare(kind: str, *, world_size: int = 4) -> Callable[..., Any]:
    """Return prepare() of ranks in groups of two."""
    sizes: Any = {f"{kind}_parallel_size": 2}
    wanted = settings(uses_deepspeed=True)
    wanted = replace(wanted, plan=replace(wanted.plan, topology=Topology(world_size=world_size, **sizes)))
    return sample_groups.wrappers(None, wanted, quiet())["prepare"]


@pytest.mark.parametrize("kind", ["tensor", "sequence"])
@pytest.mark.parametrize(("data", "dispatches"), [("stream", None), ("stream", True), ("samples", True)])
def test_one_batch_for_all_groups_is_refused(kind: str, data: str, *, dispatches: bool | None) -> None:
    accelerator = SimpleNamespace(dispatch_batches=dispatches)
    error = refusal(_prepare(kind), None, accelerator, _LOADERS[data])
    assert error.rule == f"{kind}-parallel-dispatch"
    assert error.found == (
        f"dispatch_batches={dispatches}, 2 {kind}-parallel groups, and a dataset of type "
        + ("_Stream" if data == "stream" else "range")
    )


@pytest.mark.parametrize(
    ("data", "dispatches", "world_size"),
    [("stream", False, 4), ("samples", None, 4), ("samples", False, 4), ("stream", None, 2)],
)
def test_a_batch_for_each_group_is_not(data: str, world_size: int, *, dispatches: bool | None) -> None:
    accelerator = SimpleNamespace(dispatch_batches=dispatches)
    prepare = _prepare("tensor", world_size=world_size)
    assert prepare(lambda _, loader: loader, accelerator, _LOADERS[data]) is _LOADERS[data]
