"""save_pretrained() under ZeRO-3 writes whole weights, and says so where one rank alone calls it."""

from __future__ import annotations

import json
from pathlib import Path

from runs import run_on_ranks

_RANKS = Path(__file__).parents[2] / "support" / "ranks_of_saving.py"


def test_two_ranks_save_all_weights_together_and_none_alone(tmp_path: Path, built_ops: None) -> None:
    run_on_ranks(_RANKS, tmp_path)
    assert json.loads((tmp_path / "out.json").read_text()) == {
        "tied": True,
        "adapted": True,
        "given": True,
        "alone": [
            "zero3-saves-on-all-ranks",
            "model.save_pretrained() was not called on all ranks",
            "each rank only holds a part of each weight, and rank 0 gathers them from all; rank 0 waited 1 s",
            "call it on all ranks, outside of `if accelerator.is_main_process`; rank 0 alone writes",
        ],
    }
    assert not (tmp_path / "alone").exists()
