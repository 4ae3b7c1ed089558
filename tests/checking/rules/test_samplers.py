"""Which scripts train each epoch in the same order, by a DistributedSampler that is not told of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.utils.data import DistributedSampler

from zerofit.checking.check_run import check
from zerofit.core.setting import Confidence

_SCRIPT = """\
import torch
{imports}
sampler = {sampler}
loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
for {loop}:
    {told}
    for batch in loader:
        model(batch).sum().backward()
"""
_MADE = {
    "imports": "from torch.utils.data.distributed import DistributedSampler",
    "sampler": "DistributedSampler(data)",
    "loop": "epoch in range(3)",
    "told": "pass",
}

_ACCELERATED = f"{_MADE['imports']}\nfrom accelerate import Accelerator\naccelerator = Accelerator()"


def _found(tmp_path: Path, **changes: str) -> list[Confidence]:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT.format(**{**_MADE, **changes}))
    findings = check(script).findings
    return [finding.confidence for finding in findings if finding.rule == "sampler-without-set-epoch"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sampler": "DistributedSampler(data, shuffle=True, drop_last=True)"},
        {"imports": "", "sampler": "torch.utils.data.DistributedSampler(data, seed=3)"},
        {"imports": "import torch.utils.data as tud", "sampler": "tud.distributed.DistributedSampler(data)"},
        {"loop": "_ in range(args.num_epochs)"},
        {"loop": "number in range(start_epoch, end)"},
        {"imports": _ACCELERATED, "told": "model = accelerator.prepare(torch.nn.Linear(8, 1))"},
    ],
)
def test_the_same_order_in_each_epoch_is_found(tmp_path: Path, changes: dict[str, str]) -> None:
    assert _found(tmp_path, **changes) == [Confidence.LIKELY]


@pytest.mark.parametrize(
    "changes",
    [
        {"told": "sampler.set_epoch(epoch)"},
        {"told": "loader.sampler.set_epoch(epoch)"},
        {"told": "if sampler is not None: sampler.set_epoch(epoch)"},
        {"sampler": "DistributedSampler(data, shuffle=False)"},
        {"sampler": "DistributedSampler(data, shuffle=args.shuffle)"},
        {"sampler": "DistributedSampler(data, **options)"},
        {"loop": "part in parts"},
        {"imports": "from mine import DistributedSampler"},
        {"sampler": "torch.utils.data.RandomSampler(data)"},
        {"imports": _ACCELERATED, "told": "loader = accelerator.prepare(loader)"},  # which tells the sampler
    ],
)
def test_other_samplers_and_loops_are_right(tmp_path: Path, changes: dict[str, str]) -> None:
    assert _found(tmp_path, **changes) == []


def test_torch_repeats_the_order_until_it_is_told() -> None:
    sampler = DistributedSampler(range(64), num_replicas=2, rank=0)  # type: ignore[arg-type]
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
