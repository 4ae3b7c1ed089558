"""Files for FSDP2: accelerate, Trainer and zerofit read the strategy that they were written for."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
from runs import run_command

from zerofit.configs.write.accelerate import accelerate_config, accelerate_yaml
from zerofit.configs.write.trainer import training_arguments, training_arguments_json
from zerofit.core.plan import Topology
from zerofit.core.presets import PRESETS
from zerofit.core.strategy import Engine, OffloadDevice, Precision, StateDictType, Strategy
from zerofit.planning.resolve import Verb, resolve

_ROOT = Path(__file__).parents[3]
_NUM_RANDOM = 24


def _strategy(
    *,
    reshards: bool = True,
    offloads: bool = False,
    state_dict: StateDictType = StateDictType.SHARDED,
    checkpoints: bool | None = None,
    precision: Precision | None = Precision.BF16,
) -> Strategy:
    device = OffloadDevice.CPU if offloads else OffloadDevice.NONE
    return Strategy(
        engine=Engine.FSDP2,
        reshard_after_forward=reshards,
        optimizer_offload=device,
        param_offload=device,
        state_dict_type=state_dict,
        gradient_checkpointing=checkpoints,
        precision=precision,
    )


def _cases() -> list[tuple[Strategy, Topology]]:
    """Return every strategy on ranks that differ, and the same cases in each run."""
    choose = Random(42).choice
    topologies = [
        Topology(world_size=2),
        Topology(world_size=8, dp_replicate_size=2),
        Topology(num_nodes=2, world_size=16, dp_replicate_size=2),
        Topology(num_nodes=2, world_size=16),
    ]
    every = [
        _strategy(reshards=reshards, offloads=offloads, state_dict=kind, checkpoints=checkpoints)
        for reshards, offloads, kind, checkpoints in product(
            (True, False), (True, False), StateDictType, (None, True)
        )
    ]
    formats = (Precision.BF16, Precision.FP16, None)
    return [(strategy, choose(topologies)) for strategy in every] + [
        (_strategy(precision=choose(formats), reshards=choose((True, False))), choose(topologies))
        for _ in range(_NUM_RANDOM - len(every))
    ]


_CASES = _cases()


def _expected(strategy: Strategy, topology: Topology | None) -> dict[str, Any]:
    return {
        "version": 2,
        "reshard_after_forward": strategy.reshard_after_forward,
        "offloads": strategy.param_offload is OffloadDevice.CPU,
        "state_dict": strategy.state_dict_type.value,
        "checkpoints": bool(strategy.gradient_checkpointing),
        "wraps": "transformer_auto_wrap_policy",
        "efficient": True,
        "precision": {Precision.BF16: "bf16", Precision.FP16: "fp16"}.get(strategy.precision, "no"),  # type: ignore[arg-type]
        "copies": 1 if topology is None else topology.dp_replicate_size,
        "shards": 1 if topology is None or topology.dp_replicate_size == 1 else topology.dp_shard_size,
    }


# What `accelerate launch --config_file FILE` does up to the start of the ranks, and then what each rank's
# Accelerator() and Trainer do with the environment and arguments that they are given.
_READ_BY_ACCELERATE = """
import json, os, sys
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from transformers import TrainingArguments

clean = dict(os.environ)


def described(plugin):
    return {
        "version": plugin.fsdp_version,
        "reshard_after_forward": plugin.reshard_after_forward,
        "offloads": type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy",
        "state_dict": plugin.state_dict_type.name,
        "checkpoints": plugin.activation_checkpointing,
        "wraps": plugin.auto_wrap_policy.__name__,
        "efficient": plugin.cpu_ram_efficient_loading,
    }


seen = {}
for name in sys.argv[1:]:
    os.environ.clear()
    os.environ.update(clean)
    if name.endswith(".json"):
        with open(name) as file:
            arguments = json.load(file)
        arguments["bf16"] = arguments["fp16"] = False  # needs a GPU
        made = TrainingArguments(output_dir="out", **arguments)
        seen[name] = described(FullyShardedDataParallelPlugin(**made.fsdp_plugin_args))
        continue
    load_config_from_file(name)
    options = ["--config_file", name, "--main_process_port", "0"]
    options += ["--num_processes", "2"] if name.startswith("ds_configs/") else []
    args = launch_command_parser().parse_args([*options, "train.py"])
    args, _, _ = _validate_launch_command(args)
    os.environ.update(prepare_multi_gpu_env(args))
    groups = ParallelismConfig()
    seen[name] = {
        **described(FullyShardedDataParallelPlugin()),
        "precision": os.environ["ACCELERATE_MIXED_PRECISION"],
        "copies": groups.dp_replicate_size,
        "shards": groups.dp_shard_size,
    }
print(json.dumps(seen))
"""


def _accelerate_reads(folder: Path, *files: str) -> dict[str, Any]:
    program = folder / "read_by_accelerate.py"
    program.write_text(_READ_BY_ACCELERATE)
    finished = run_command((sys.executable, str(program), *files), _ROOT).check()
    document: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return document


def test_accelerate_and_trainer_read_what_was_written(tmp_path: Path) -> None:
    expected = {}
    for number, (strategy, topology) in enumerate(_CASES):
        file = tmp_path / f"{number}.yaml"
        file.write_text(accelerate_yaml(strategy, topology=topology, deepspeed_file=None, is_used_alone=True))
        expected[str(file)] = _expected(strategy, topology)
        arguments = tmp_path / f"{number}.json"
        text = training_arguments_json(
            strategy, deepspeed_file=None, transformers="5.23.0", is_used_alone=True
        )
        arguments.write_text(text)
        of_plugin = {"precision", "copies", "shards"}
        expected[str(arguments)] = {
            name: value for name, value in expected[str(file)].items() if name not in of_plugin
        }
    shipped = [preset for preset in PRESETS if preset.deepspeed_file is None]
    expected |= {
        f"ds_configs/{preset.accelerate_file}": _expected(preset.strategy, None) for preset in shipped
    }
    assert _accelerate_reads(tmp_path, *expected) == expected


@pytest.mark.parametrize("number", range(_NUM_RANDOM))
def test_zerofit_reads_what_it_wrote(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    strategy, topology = _CASES[number]
    text = accelerate_yaml(strategy, topology=topology, deepspeed_file=None, is_used_alone=True)
    Path("accelerate.yaml").write_text(text)
    spec = resolve(None, verb=Verb.CONFIG, config_file="accelerate.yaml", deepspeed_file=None)
    said = spec.overrides
    assert Strategy(**said.strategy) == strategy
    assert (
        Topology(
            num_nodes=said.get("num_nodes") or 1,
            world_size=said.get("world_size"),
            dp_replicate_size=said.get("dp_replicate_size") or 1,
        )
        == topology
    )
    assert spec.files is not None
    assert spec.files.notes == ()


@pytest.mark.parametrize(
    ("release", "fsdp"),
    [
        (None, True),
        ("5.23.0", True),
        ("5.10.0", True),
        ("5.9.0", "full_shard auto_wrap"),
        ("5.0.0", "full_shard auto_wrap"),
    ],
)
def test_trainers_fsdp_has_the_form_of_the_release(release: str | None, fsdp: bool | str) -> None:
    arguments = training_arguments(
        _strategy(reshards=False), deepspeed_file=None, transformers=release, is_used_alone=True
    )
    assert arguments["fsdp"] == fsdp
    assert arguments["fsdp_config"]["version"] == 2
    assert arguments["fsdp_config"]["reshard_after_forward"] is False


@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("accelerate", [None, "1.15.0", "1.14.0"])
def test_trainer_checkpoints_once(accelerate: str | None, every: int, offloads: bool) -> None:
    strategy = Strategy(
        engine=Engine.FSDP2,
        gradient_checkpointing=True,
        checkpoint_every=every,
        activation_offload=offloads,
    )
    arguments = training_arguments(strategy, deepspeed_file=None, is_used_alone=True, accelerate=accelerate)
    is_of_fsdp = every == 1 and not (offloads and accelerate == "1.14.0")
    assert arguments["fsdp_config"]["activation_checkpointing"] is is_of_fsdp
    assert arguments.get("activation_checkpointing", False) is not is_of_fsdp
    kwargs = arguments.get("activation_checkpointing_kwargs", {})
    assert kwargs.get("offload", False) is (offloads and not is_of_fsdp)
    config = accelerate_config(
        strategy, topology=None, deepspeed_file=None, is_used_alone=True, accelerate=accelerate
    )["fsdp_config"]
    assert config["fsdp_activation_checkpointing"] is is_of_fsdp
    assert config.get("fsdp_activation_checkpointing_offload", False) is (offloads and is_of_fsdp)


def test_accelerate_stores_inputs_of_blocks_on_the_host_as_its_file_and_trainers_arguments_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainer makes FSDP's plugin of its arguments, and accelerate's launcher sets the rest from the YAML."""
    import transformers
    from accelerate.utils import FullyShardedDataParallelPlugin

    if "activation_checkpointing_offload" not in {
        field.name for field in fields(FullyShardedDataParallelPlugin)
    }:
        pytest.skip("accelerate has it from 1.15 on")
    strategy = Strategy(engine=Engine.FSDP2, gradient_checkpointing=True, activation_offload=True)
    config = accelerate_config(strategy, topology=None, deepspeed_file=None, is_used_alone=True)
    for key, value in config["fsdp_config"].items():  # accelerate/utils/launch.py, prepare_multi_gpu_env
        monkeypatch.setenv(key.upper(), str(value).lower() if isinstance(value, bool) else str(value))
    own = training_arguments(
        strategy, deepspeed_file=None, is_used_alone=True, transformers=transformers.__version__
    )
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), report_to="none", use_cpu=True, **own
    )
    plugins = (
        FullyShardedDataParallelPlugin(),
        FullyShardedDataParallelPlugin(**arguments.fsdp_plugin_args),
    )
    for plugin in plugins:
        assert (plugin.activation_checkpointing, plugin.activation_checkpointing_offload) == (True, True)


def test_ranks_of_zerofit_get_no_fsdp_in_their_arguments() -> None:
    arguments = training_arguments(_strategy(checkpoints=True), deepspeed_file=None)
    assert {"fsdp", "fsdp_config"}.isdisjoint(arguments)
    config = accelerate_yaml(_strategy(checkpoints=True), topology=None, deepspeed_file=None)
    assert "fsdp_activation_checkpointing: false" in config
