"""The DeepSpeed JSON: its text, its laws, and the real DeepSpeed reading it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runs import run_command

from zerofit.configs.write.deepspeed import deepspeed_config, deepspeed_json
from zerofit.core.plan import Topology
from zerofit.core.presets import PRESETS, Preset, find_preset
from zerofit.core.strategy import Engine, OffloadDevice, Precision, Strategy, ZeroStage

_ROOT = Path(__file__).parents[3]
_EVERY_STAGE = [Strategy(engine=Engine.DEEPSPEED, zero_stage=stage) for stage in ZeroStage]
_PRESETS = [preset for preset in PRESETS if preset.deepspeed_file is not None]
_EVERY_PRESET = pytest.mark.parametrize("preset", _PRESETS, ids=lambda preset: preset.name)


def test_text(deepspeed_case: Any, golden: Callable[[str, str], None]) -> None:
    golden(deepspeed_json(deepspeed_case.plan.strategy), f"deepspeed/{deepspeed_case.name}.json")


def _autos(document: dict[str, Any], above: str = "") -> list[str]:
    found = []
    for name, value in document.items():
        if isinstance(value, dict):
            found += _autos(value, f"{above}{name}.")
        elif value == "auto":
            found.append(above + name)
    return found


@_EVERY_PRESET
def test_auto_stands_only_where_accelerate_and_trainer_both_fill_it_in(preset: Preset) -> None:
    config = deepspeed_config(preset.strategy, trains=preset.trains)
    batch = ["train_micro_batch_size_per_gpu"]
    training = ["gradient_accumulation_steps", "gradient_clipping"] if preset.trains else []
    assert _autos(config) == [*batch, *training, "bf16.enabled", "fp16.enabled"]


@pytest.mark.parametrize("strategy", _EVERY_STAGE, ids=lambda strategy: strategy.zero_stage.name)
def test_explicit_numbers_leave_no_auto(strategy: Strategy) -> None:
    explicit = replace(
        strategy,
        precision=Precision.FP16,
        micro_batch_size=2,
        gradient_accumulation_steps=3,
        gradient_clipping=0.0,
    )
    assert _autos(deepspeed_config(explicit)) == []


@pytest.mark.parametrize(
    ("precision", "bf16", "fp16"),
    [
        (Precision.BF16, True, False),
        (Precision.FP16, False, True),
        (Precision.FP32, False, False),
        (None, "auto", "auto"),
    ],
)
def test_one_number_format_at_most(precision: Precision | None, bf16: object, fp16: object) -> None:
    config = deepspeed_config(Strategy(engine=Engine.DEEPSPEED, precision=precision))
    assert (config["bf16"]["enabled"], config["fp16"]["enabled"]) == (bf16, fp16)


@pytest.mark.parametrize("strategy", _EVERY_STAGE, ids=lambda strategy: strategy.zero_stage.name)
@pytest.mark.parametrize("trains", [True, False])
def test_no_file_states_the_total_batch_or_the_optimizer(strategy: Strategy, trains: bool) -> None:
    config = deepspeed_config(strategy, trains=trains)
    assert config.keys().isdisjoint({"train_batch_size", "optimizer", "scheduler"})


@pytest.mark.parametrize("strategy", _EVERY_STAGE, ids=lambda strategy: strategy.zero_stage.name)
def test_only_stage_3_has_stage_3_keys(strategy: Strategy) -> None:
    zero = deepspeed_config(strategy)["zero_optimization"]
    has_stage3_keys = any(name.startswith("stage3_") for name in zero)
    assert has_stage3_keys == (strategy.zero_stage is ZeroStage.PARAMETERS)
    # accelerate reads this spelling only (get_state_dict), so that weights are saved whole.
    assert zero.get("stage3_gather_16bit_weights_on_model_save", has_stage3_keys) is has_stage3_keys


@pytest.mark.parametrize("strategy", _EVERY_STAGE, ids=lambda strategy: strategy.zero_stage.name)
def test_tensor_parallelism_adds_its_section_and_whole_weights(strategy: Strategy) -> None:
    alone = deepspeed_config(strategy)
    assert deepspeed_config(strategy, topology=Topology(world_size=2)) == alone
    cut = deepspeed_config(strategy, topology=Topology(world_size=2, tensor_parallel_size=2))
    assert cut.pop("tensor_parallel") == {"autotp_size": 2}
    gathers = {"stage3_gather_16bit_weights_on_model_save": True}
    assert cut == {**alone, "zero_optimization": alone["zero_optimization"] | gathers}


@pytest.mark.parametrize("strategy", _EVERY_STAGE, ids=lambda strategy: strategy.zero_stage.name)
def test_sequence_parallelism_adds_its_size_alone(strategy: Strategy) -> None:
    shared = deepspeed_config(strategy, topology=Topology(world_size=4, sequence_parallel_size=2))
    assert shared == {**deepspeed_config(strategy), "sequence_parallel_size": 2}


@pytest.mark.parametrize("device", list(OffloadDevice))
def test_aio_stands_beside_nvme_only(device: OffloadDevice) -> None:
    strategy = replace(_EVERY_STAGE[3], optimizer_offload=device, nvme_path="/nvme")
    assert ("aio" in deepspeed_config(strategy)) == (device is OffloadDevice.NVME)


# Reads each shipped file as DeepSpeed does, with numbers for "auto", and prints what DeepSpeed never looked
# at: it says nothing of most keys that it does not know.
_READ_BY_DEEPSPEED = """
import collections, json, pathlib, sys
from deepspeed.runtime.config import DeepSpeedConfig

class Watched(dict):
    read = set()
    def get(self, key, default=None):
        self.read.add(key)
        return super().get(key, default)
    def __getitem__(self, key):
        self.read.add(key)
        return super().__getitem__(key)

NUMBERS = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "gradient_clipping": 0.5}
seen = {}
for name in sys.argv[1:]:
    for precision in ("bf16", "fp16", "fp32"):
        document = json.loads(pathlib.Path(name).read_text())
        for key, number in NUMBERS.items():
            if key in document:
                document[key] = number
        for section in ("bf16", "fp16"):
            document[section]["enabled"] = section == precision
        watched = Watched(document)
        keys = set(document)
        if "aio" in document:
            watched["aio"] = Watched(document["aio"])
            keys |= set(document["aio"])
        Watched.read.clear()
        config = DeepSpeedConfig(watched)
        zero = config.zero_config
        seen[f"{name} {precision}"] = {
            "unread": sorted(keys - Watched.read),
            "stage": zero.stage,
            "optimizer": getattr(zero.offload_optimizer, "device", "none"),
            "param": getattr(zero.offload_param, "device", "none"),
            "precision": [config.bfloat16_config.enabled, config.float16_config.enabled],
            "gathers": zero.gather_16bit_weights_on_model_save,
            "train_batch_size": config.train_batch_size,
        }
print(json.dumps(seen))
"""


def _deepspeed_reads(folder: Path, *files: str) -> dict[str, dict[str, Any]]:
    program = folder / "read_by_deepspeed.py"
    program.write_text(_READ_BY_DEEPSPEED)
    finished = run_command((sys.executable, str(program), *files), _ROOT, DS_ACCELERATOR="cpu").check()
    document: dict[str, dict[str, Any]] = json.loads(finished.stdout.splitlines()[-1])
    return document


def test_deepspeed_takes_every_shipped_file_and_knows_every_key(tmp_path: Path) -> None:
    files = {f"ds_configs/{preset.deepspeed_file}": preset for preset in _PRESETS}
    seen = _deepspeed_reads(tmp_path, *files)
    for name, preset in files.items():
        strategy = preset.strategy
        for precision in Precision:
            assert seen[f"{name} {precision}"] == {
                "unread": [],
                "stage": strategy.zero_stage.value,
                "optimizer": strategy.optimizer_offload.value,
                "param": strategy.param_offload.value,
                "precision": [precision is Precision.BF16, precision is Precision.FP16],
                "gathers": strategy.zero_stage is ZeroStage.PARAMETERS,
                "train_batch_size": 8 if preset.trains else 2,
            }


def test_a_key_that_deepspeed_does_not_know_is_noticed(tmp_path: Path) -> None:
    document = deepspeed_config(find_preset("z3-nvme").strategy)
    document["zero_optimisation"] = {}
    document["aio"]["thread_count"] = 1
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(document))
    seen = _deepspeed_reads(tmp_path, str(path))
    assert seen[f"{path} bf16"]["unread"] == ["thread_count", "zero_optimisation"]
