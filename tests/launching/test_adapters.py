"""--lora and --qlora train adapters and new heads alone, and leave what peft reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from changed_runs import facts_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from runs import Run

pytestmark = pytest.mark.slow


def is_adapter(name: str) -> bool:
    return ".lora_" in name or "classifier.modules_to_save" in name


def check_saved(run: Run, folder: Path) -> None:
    """Check that the adapters load onto the base by peft, and are not as they began."""
    from peft import PeftModel
    from transformers import BertForSequenceClassification

    names = {one.name for one in (run.folder / "saved").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names
    assert "model.safetensors" not in names
    base = BertForSequenceClassification.from_pretrained(folder / "base")
    model = PeftModel.from_pretrained(base, run.folder / "saved")
    second = [one for name, one in model.named_parameters() if ".lora_B." in name]
    assert second
    assert all(one.abs().sum() > 0 for one in second)
    assert model(torch.ones(1, 4, dtype=torch.long)).logits.shape == (1, 2)


def test_qlora_trains_adapters_beside_a_base_in_4_bit_and_the_scripts_variable_saves_them(
    launch: Callable[..., Run], tmp_path: Path
) -> None:
    run, (facts,) = facts_of(launch, tmp_path, "own-variable", "--num-processes", "1", "--qlora")
    assert "zerofit: BertForSequenceClassification is loaded in nf4 (bitsandbytes)" in run.stderr
    assert facts["dtypes"] == ["float32", "uint8"]
    assert facts["trains"] == facts["moved"] == facts["gradients"]
    assert all(map(is_adapter, facts["trains"]))
    assert facts["num_held"] == facts["num_in_states"]
    check_saved(run, tmp_path)


@pytest.mark.evidence
@pytest.mark.parametrize("route", ["accelerate", "late", "trainer"])
@pytest.mark.parametrize(
    ("stage", "flag"),
    [(None, "--lora"), ("2", "--lora"), ("3", "--lora"), (None, "--qlora"), ("2", "--qlora")],
)
def test_adapters_alone_train_and_are_saved(
    stage: str | None, flag: str, route: str, launch: Callable[..., Run], tmp_path: Path
) -> None:
    if (route, stage) == ("late", "3"):
        pytest.skip("ZeRO-3 needs the optimizer before prepare()")
    engine = ("--engine", "deepspeed", "--zero-stage", stage) if stage else ("--engine", "native")
    run, ranks = facts_of(launch, tmp_path, route, "--num-processes", "2", *engine, flag)
    for facts in ranks:
        assert facts["moved"] == facts["trains"]
        assert facts["trains"]
        assert all(map(is_adapter, facts["trains"]))
        assert ("uint8" in facts["dtypes"]) == (flag == "--qlora")
    check_saved(run, tmp_path)
