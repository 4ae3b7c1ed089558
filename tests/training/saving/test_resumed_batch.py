"""A run that resumes with another global batch than the run that saved."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zerofit.core.checkpoints import Manifest, SavedLayout, write_manifest
from zerofit.training.saving.checkpoints import check_resumed


@pytest.mark.parametrize(("saved", "now", "is_said"), [(8, 4, True), (8, 8, False), (None, 4, False)])
def test_another_global_batch_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], saved: int | None, now: int, is_said: bool
) -> None:
    layout = SavedLayout(
        engine="native",
        world_size=2,
        zero_stage=0,
        optimizer_offload="none",
        optimizer=None,
        global_batch_size=saved,
    )
    write_manifest(tmp_path, Manifest(layout=layout, files=(), saved_at=0.0))
    plan = SimpleNamespace(workload=SimpleNamespace(global_batch_size=now))
    settings: Any = SimpleNamespace(
        plan=plan, strategy=SimpleNamespace(engine=SimpleNamespace(value="native")), run_folder=None
    )
    settings.uses_deepspeed = False
    check_resumed(tmp_path, settings)
    said = capsys.readouterr().err
    expected = (
        f"zerofit: {tmp_path.name} was saved with a global batch size of 8, and this run has 4: positions in "
        "the data and in the learning-rate schedule differ; --global-batch-size 8 keeps both\n"
    )
    assert said == (expected if is_said else "")
