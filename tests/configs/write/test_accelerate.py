"""The accelerate YAML: its text, and the real accelerate reading it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from runs import run_command

from zerofit.configs.write.accelerate import accelerate_config, accelerate_yaml
from zerofit.core.plan import Topology
from zerofit.core.presets import PRESETS
from zerofit.core.strategy import Strategy

_ROOT = Path(__file__).parents[3]

# accelerate/utils/dataclasses.py, DeepSpeedPlugin: each of these beside deepspeed_config_file is an error.
_REFUSED = {
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_optimizer_nvme_path",
    "offload_param_device",
    "offload_param_nvme_path",
    "zero3_save_16bit_model",
    "mixed_precision",
}


def _config(case: Any) -> dict[str, Any]:
    deepspeed_file = "ds_config.json" if case.is_deepspeed else None
    return accelerate_config(case.plan.strategy, topology=case.plan.topology, deepspeed_file=deepspeed_file)


def test_text(plan_case: Any, golden: Callable[[str, str], None]) -> None:
    deepspeed_file = "ds_config.json" if plan_case.is_deepspeed else None
    text = accelerate_yaml(
        plan_case.plan.strategy, topology=plan_case.plan.topology, deepspeed_file=deepspeed_file
    )
    golden(text, f"accelerate/{plan_case.name}.yaml")
    assert yaml.safe_load(text) == _config(plan_case)


def test_no_key_that_accelerate_refuses_beside_a_deepspeed_file(deepspeed_case: Any) -> None:
    config = _config(deepspeed_case)
    assert _REFUSED.isdisjoint(config)
    assert _REFUSED.isdisjoint(config["deepspeed_config"])


def test_use_cpu_is_never_on_as_it_would_switch_deepspeed_off(plan_case: Any) -> None:
    assert _config(plan_case)["use_cpu"] is False


@pytest.mark.parametrize(
    ("topology", "distributed_type"),
    [
        (None, "NO"),
        (Topology(), "NO"),
        (Topology(world_size=2), "MULTI_GPU"),
        (Topology(num_nodes=2, world_size=2), "MULTI_GPU"),
    ],
)
def test_native_engine_is_distributed_from_two_ranks_on(
    topology: Topology | None, distributed_type: str
) -> None:
    config = accelerate_config(Strategy(), topology=topology, deepspeed_file=None)
    assert config["distributed_type"] == distributed_type
    assert "deepspeed_config" not in config


# What `accelerate launch --config_file FILE` does up to the start of the ranks, and then what each rank's
# Accelerator() does with the environment that it is given.
_READ_BY_ACCELERATE = """
import json, os, sys
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DeepSpeedPlugin
from accelerate.utils.launch import prepare_deepspeed_cmd_env

clean = dict(os.environ)
seen = {}
for name in sys.argv[1:]:
    os.environ.clear()
    os.environ.update(clean)
    load_config_from_file(name)
    options = ["--config_file", name, "--num_processes", "2", "--mixed_precision", "bf16"]
    args = launch_command_parser().parse_args([*options, "--main_process_port", "0", "train.py"])
    args, defaults, precision_is_in_file = _validate_launch_command(args)
    fields = list(defaults.deepspeed_config) + ["mixed_precision"] * precision_is_in_file
    args.deepspeed_fields_from_accelerate_config = ",".join(fields)
    command, environment = prepare_deepspeed_cmd_env(args)
    os.environ.update(environment)
    try:
        plugin = DeepSpeedPlugin()
    except ValueError as refusal:
        seen[name] = str(refusal).splitlines()[0][:40]
        continue
    seen[name] = {
        "uses_deepspeed": bool(args.use_deepspeed),
        "launcher": args.deepspeed_multinode_launcher,
        "ranks": args.nproc_per_node,
        "stage": plugin.deepspeed_config["zero_optimization"]["stage"],
        "zero3_init": plugin.zero3_init_flag,
    }
print(json.dumps(seen))
"""


def _accelerate_reads(folder: Path, *files: str) -> dict[str, Any]:
    program = folder / "read_by_accelerate.py"
    program.write_text(_READ_BY_ACCELERATE)
    finished = run_command((sys.executable, str(program), *files), _ROOT, DS_ACCELERATOR="cpu").check()
    document: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return document


def test_accelerate_takes_every_shipped_file_and_refuses_a_key_too_many(tmp_path: Path) -> None:
    with_deepspeed = [preset for preset in PRESETS if preset.deepspeed_file is not None]
    shipped = {f"ds_configs/{preset.accelerate_file}": preset for preset in with_deepspeed}
    text = (_ROOT / "ds_configs/accelerate_z3.yaml").read_text()
    planted = tmp_path / "planted.yaml"
    planted.write_text(
        text.replace("  zero3_init_flag: true\n", "  zero3_init_flag: true\n  zero_stage: 3\n")
    )

    seen = _accelerate_reads(tmp_path, *shipped, str(planted))

    assert seen.pop(str(planted)) == "When using `deepspeed_config_file`, the "
    assert seen == {
        name: {
            "uses_deepspeed": True,
            "launcher": "standard",
            "ranks": "2",
            "stage": preset.strategy.zero_stage.value,
            "zero3_init": preset.strategy.zero_stage.value == 3,
        }
        for name, preset in shipped.items()
    }
