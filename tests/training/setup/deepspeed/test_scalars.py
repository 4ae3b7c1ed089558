"""Parameters without dimensions, and models that nothing prepares, under the real engine."""

from __future__ import annotations

import re
import runpy
import sys
from typing import TYPE_CHECKING

import pytest
from runs import SCRIPTS, run_command

if TYPE_CHECKING:
    from pathlib import Path

_SCRIPT = SCRIPTS / "scaled_pairs.py"


def _numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"^(?:loss|scale \(\)) (\S+)$", text, re.MULTILINE)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of both models."""
    import torch
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    runpy.run_path(str(_SCRIPT))["Scaled"](BertConfig(vocab_size=64, **sizes)).save_pretrained(
        folder / "scaled"
    )
    BertModel(BertConfig(vocab_size=64, **sizes)).save_pretrained(folder / "teacher")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "how"), [("2", ()), ("3", ()), ("3", ("copies",))])
def test_they_train_as_in_one_process(stage: str, how: tuple[str, ...], models: Path, tmp_path: Path) -> None:
    alone = run_command((sys.executable, str(_SCRIPT), str(models), "8", *how), tmp_path).check()
    flags = ("--cpu", "--gpus", "2xA100-40G", "--zero-stage", stage)
    command = (sys.executable, "-m", "zerofit", "launch", *flags, str(_SCRIPT), str(models), "4", *how)
    run = run_command(command, tmp_path, CUDA_VISIBLE_DEVICES="").check()
    expected = _numbers(alone.stdout)
    assert len(expected) == 5
    assert expected[0] > expected[3]
    assert _numbers(run.stdout) == pytest.approx(expected, rel=1e-4)
    said = run.stderr + run.stdout
    for name in ("BertModel", "BertForSequenceClassification"):
        assert (f"{name} is loaded whole on each rank, since the script does not prepare it" in said) == (
            stage == "3"
        )
    assert ("Scaled is loaded whole on each rank, since it can't be created partitioned" in said) == bool(how)
    assert "zero3-model-needs-engine" not in said
