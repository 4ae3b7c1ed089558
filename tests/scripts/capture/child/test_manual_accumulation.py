"""How many forward passes a loop of its own makes to each step, where it counts them itself."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from zerofit.scripts.capture.child.observations import CaptureSpec, Observations
from zerofit.scripts.capture.child.script_source import manual_accumulation

_LOOP = """
import torch
from accelerate import Accelerator
accelerator = Accelerator()
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for step, batch in enumerate(loader):
    accelerator.backward(model(batch).sum() / 4)
    CONDITION
        optimizer.step()
"""
_SKIPS = "if (step + 1) % every:\n        continue\n    if True:"
_CASES = [
    ("if (step + 1) % 4 == 0:", 4),
    ("if (step + 1) % every == 0 or step == len(loader) - 1:", 6),
    ("if (step + 1) % args.gradient_accumulation_steps == 0 or step == len(loader) - 1 and args.keeps:", 5),
    ("if step % config['every'] == config['every'] - 1:", 3),
    ("if not (step + 1) % every:", 6),
    (_SKIPS, 6),
    ("if step % unknown == 0:", None),
    ("if step % args.unknown == 0:", None),
    ("if accelerator.sync_gradients:", None),
    ("if True:", None),
]


@pytest.mark.parametrize(("condition", "expected"), _CASES)
def test_the_count_is_read_off_the_condition_and_the_running_frame(
    condition: str, expected: int | None, tmp_path: Path
) -> None:
    every, args, config = 6, SimpleNamespace(gradient_accumulation_steps=5), {"every": 3}
    seen = Observations(folder=tmp_path, target=("train.py",), spec=CaptureSpec(num_batches=8))
    text = _LOOP.replace("CONDITION", condition)
    assert manual_accumulation(seen, ["def broken(:", text], sys._getframe()) == expected
    assert (every, len(config)) == (6, 1)
    is_unknown = "unknown" in condition
    assert [note.partition(" batches")[0] for note in seen.notes] == (
        [f"the optimizer only steps after every {'args.' if args and 'args' in condition else ''}unknown"]
        if is_unknown
        else []
    )
