"""Windows that --gradient-accumulation-steps sets are one batch of their samples, on all ranks together."""

from __future__ import annotations

import runpy

import pytest
import torch
from runs import SCRIPTS, Launch

pytestmark = pytest.mark.slow

STEPS = 4
SCRIPT = SCRIPTS / "ragged_windows.py"
SAME = 1e-5
"""Relative to how far the weights went, in fp32."""


def _big_batches(num_ranks: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the weights before and after one step a window, of one batch of all its samples."""
    script = runpy.run_path(str(SCRIPT))
    model = script["make_model"]()
    start = {name: weight.clone() for name, weight in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=script["RATE"])
    size = STEPS * script["BATCH_SIZE"] * num_ranks
    for batch in torch.utils.data.DataLoader(
        script["make_samples"](), batch_size=size, collate_fn=script["collate"]
    ):
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), script["CLIP"])
        optimizer.step()
        optimizer.zero_grad()
    return start, model.state_dict()


@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [
        pytest.param(2, ("--engine", "native"), id="data parallel", marks=pytest.mark.evidence),
        pytest.param(2, ("--preset", "z1"), id="ZeRO-1", marks=pytest.mark.evidence),
        pytest.param(2, ("--preset", "z2"), id="ZeRO-2"),
        pytest.param(2, ("--preset", "z3"), id="ZeRO-3", marks=pytest.mark.evidence),
    ],
)
def test_a_window_is_one_batch_of_all_ranks(num_ranks: int, flags: tuple[str, ...], launch: Launch) -> None:
    flags = (*flags, "--num-processes", str(num_ranks), "--gradient-accumulation-steps", str(STEPS))
    run = launch(*flags, "--mixed-precision", "no", str(SCRIPT), "weights.pt").check()
    assert "zerofit: batches of a window are weighted by the labels or elements" in run.stderr
    ours = torch.load(run.folder / "weights.pt")
    start, theirs = _big_batches(num_ranks)
    apart = sum((ours[name] - theirs[name]).square().sum() for name in theirs).sqrt()
    went = sum((start[name] - theirs[name]).square().sum() for name in theirs).sqrt()
    assert apart < SAME * went
