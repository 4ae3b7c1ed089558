"""--freeze, --lora and --qlora train what they name alone, as the plan counts it and peft loads it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from changed_runs import facts_of
from runs import SCRIPTS, Launch, Run, run_command

pytestmark = pytest.mark.slow

FREEZE = ("--freeze", "embeddings+1")
_FROZEN_IN_BERT = ("embeddings", ".layer.0.")
_COUNTS_TRAINED = str(SCRIPTS / "counts_trained.py")


def is_adapter(name: str) -> bool:
    return ".lora_" in name or "classifier.modules_to_save" in name


def is_unfrozen(name: str) -> bool:
    return not any(part in name for part in _FROZEN_IN_BERT)


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
    launch: Launch, tmp_path: Path
) -> None:
    run, (facts,) = facts_of(launch, tmp_path, "own-variable", "--num-processes", "1", "--qlora")
    assert "zerofit: BertForSequenceClassification is loaded in nf4 (bitsandbytes)" in run.stderr
    assert facts["dtypes"] == ["float32", "uint8"]
    assert facts["trains"] == facts["moved"] == facts["gradients"]
    assert all(map(is_adapter, facts["trains"]))
    assert facts["num_held"] == facts["num_in_states"]
    check_saved(run, tmp_path)


def test_under_zero_3_frozen_parameters_are_partitioned_and_have_no_state(
    launch: Launch, tmp_path: Path
) -> None:
    flags = ("--num-processes", "2", "--engine", "deepspeed", "--zero-stage", "3", *FREEZE)
    run, ranks = facts_of(launch, tmp_path, "accelerate", *flags)
    assert "parameters of BertForSequenceClassification are frozen (embeddings+1)" in run.stderr
    assert len(ranks) == 2
    for facts in ranks:
        names = [*facts["shards"]]
        assert facts["trains"] == facts["moved"] == [name for name in names if is_unfrozen(name)]
        assert all(shard == -(-whole // 2) for whole, shard in facts["shards"].values())
        trained = sum(shard for name, (_, shard) in facts["shards"].items() if is_unfrozen(name))
        assert facts["num_in_states"] == trained


@pytest.mark.evidence
@pytest.mark.parametrize("route", ["accelerate", "late", "trainer"])
@pytest.mark.parametrize(
    ("stage", "flags"),
    [
        *((stage, FREEZE) for stage in (None, "2", "3")),
        *((stage, ("--lora",)) for stage in (None, "2", "3")),
        *((stage, ("--qlora",)) for stage in (None, "2")),
    ],
)
def test_only_trained_parameters_change(
    stage: str | None, flags: tuple[str, ...], route: str, launch: Launch, tmp_path: Path
) -> None:
    if (route, stage) == ("late", "3"):
        pytest.skip("ZeRO-3 needs the optimizer before prepare()")
    engine = ("--engine", "deepspeed", "--zero-stage", stage) if stage else ("--engine", "native")
    run, ranks = facts_of(launch, tmp_path, route, "--num-processes", "2", *engine, *flags)
    is_to_train = is_unfrozen if flags == FREEZE else is_adapter
    for facts in ranks:
        assert facts["moved"] == facts["trains"]
        assert facts["trains"]
        assert all(map(is_to_train, facts["trains"]))
        if flags != FREEZE:
            assert ("uint8" in facts["dtypes"]) == (flags == ("--qlora",))
            continue
        assert all(map(is_unfrozen, facts["gradients"]))
        if stage is None:
            assert facts["num_held"] == facts["num_in_states"]
    if flags != FREEZE:
        check_saved(run, tmp_path)


@pytest.mark.parametrize(
    "flags",
    [
        ("--qlora", "--lora-rank", "4"),
        *(
            pytest.param(flags, marks=pytest.mark.evidence)
            for flags in (
                ("--lora",),
                ("--lora", "--lora-targets", "all-linear"),
                ("--freeze", "embeddings+2"),
                ("--freeze", "*.q_proj.*", "--freeze", "all-but-head"),
                ("--freeze", "blocks", "--attention", "eager", "--checkpoint-every", "2"),
            )
        ),
    ],
    ids=" ".join,
)
def test_a_plan_counts_what_its_run_trains(tmp_path: Path, flags: tuple[str, ...]) -> None:
    run_command([sys.executable, _COUNTS_TRAINED, "make"], tmp_path).check()
    zerofit = [sys.executable, "-m", "zerofit"]
    planned = [*zerofit, "plan", "--gpus", "1xA100-80G", *flags, "--output", "plan.json", _COUNTS_TRAINED]
    run_command(planned, tmp_path).check()
    plan = json.loads((tmp_path / "plan.json").read_text())
    run_command([*zerofit, "launch", "--cpu", "--plan", "plan.json", _COUNTS_TRAINED], tmp_path).check()
    trained, held = map(int, (tmp_path / "trained.txt").read_text().split())
    assert plan["estimate"]["num_trained"] == trained == held
