"""zerofit config, run for real: the files, their text, and what happens to files that are there already."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import RunZerofit

_Golden = Callable[[str, str], None]

_NAMES = ["accelerate.yaml", "training_args.json", "launch.sh", "ds_config.json"]
_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
_EIGHT = ("--num-processes", "8", "--mixed-precision", "bf16")
_CASES = {
    "z3-offload": (*_EIGHT, "--preset", "z3-offload", "--micro-batch-size", "4", "--global-batch-size", "64"),
    "z2-nodes": (
        *("--num_processes", "16", "--num_machines", "2", "--mixed_precision", "fp16"),
        *("--zero_stage", "2", "--gradient_clipping", "0.5", "--gradient_accumulation_steps", "3"),
    ),
    "z3-nvme": (
        *(*_EIGHT, "--offload-optimizer", "nvme", "--offload-param", "nvme", "--nvme-path", "/nvme"),
        *("--optimizer", "adamw", "--gradient-checkpointing"),
    ),
    "z3-inference": (*_EIGHT, "--preset", "z3-inference"),
    "z3-default-auto": ("--num-processes", "8", "--preset", "z3", "--auto"),
    "z3-auto": (*_EIGHT, "--preset", "z3", "--auto"),
    "native-8": (*_EIGHT, "--engine", "native", "--compile"),
    "native-1": ("--num-processes", "1", "--mixed-precision", "fp16"),
    "cpu-2": ("--cpu", "--num-processes", "2", "--engine", "native"),
}


def _config(run_zerofit: RunZerofit, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return run_zerofit("config", *flags, cwd=folder, environment=_NO_GPU)


def _texts(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text("utf-8") for path in folder.iterdir()}


@pytest.mark.parametrize("name", _CASES)
def test_dry_run_prints_the_files_that_are_written(
    run_zerofit: RunZerofit, golden: _Golden, tmp_path: Path, name: str
) -> None:
    printed = _config(run_zerofit, tmp_path, "--dry-run", *_CASES[name])
    assert (printed.returncode, printed.stderr) == (0, "")
    golden(printed.stdout, f"config/{name}.txt")
    assert list(tmp_path.iterdir()) == []
    written = _config(run_zerofit, tmp_path, *_CASES[name])
    paths = written.stdout.splitlines()
    assert written.returncode == 0
    assert sorted(_texts(tmp_path)) == sorted(paths)
    assert printed.stdout == "".join(f"# {path}\n{(tmp_path / path).read_text()}\n" for path in paths)


def test_files_of_the_deepspeed_and_of_the_native_engine(run_zerofit: RunZerofit, tmp_path: Path) -> None:
    assert _config(run_zerofit, tmp_path, *_CASES["z2-nodes"]).stdout.splitlines() == _NAMES
    native = _config(run_zerofit, tmp_path, *_CASES["native-8"], "--output-dir", "native")
    assert native.stdout.splitlines() == [f"native/{name}" for name in _NAMES[:3]]


def test_a_second_run_changes_nothing_and_succeeds(run_zerofit: RunZerofit, tmp_path: Path) -> None:
    def state() -> dict[str, tuple[int, int, str]]:
        paths = sorted(tmp_path.iterdir())
        return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns, p.read_text()) for p in paths}

    first, before = _config(run_zerofit, tmp_path, *_CASES["z3-offload"]), state()
    second = _config(run_zerofit, tmp_path, *_CASES["z3-offload"])
    assert (second.returncode, second.stdout) == (0, first.stdout)
    assert state() == before


@pytest.mark.parametrize("content", [b"{}\n", b"\xff\xfe\x00", b""], ids=["text", "binary", "empty"])
def test_a_file_that_differs_is_kept_unless_forced(
    run_zerofit: RunZerofit, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "ds_config.json").write_bytes(content)
    refused = _config(run_zerofit, tmp_path, *_CASES["z3-offload"])
    assert refused.stderr == (
        "error[file-exists]: the file exists and differs\n"
        "  found: ds_config.json\n"
        "  why:   it may contain your work\n"
        "  fix:   write elsewhere with --output-dir DIR, or overwrite with --force\n"
    )
    assert (refused.returncode, refused.stdout) == (2, "")
    assert [path.name for path in tmp_path.iterdir()] == ["ds_config.json"]
    assert (tmp_path / "ds_config.json").read_bytes() == content

    forced = _config(run_zerofit, tmp_path, *_CASES["z3-offload"], "--force")
    assert forced.returncode == 0
    assert sorted(_texts(tmp_path)) == sorted(_NAMES)
    assert json.loads((tmp_path / "ds_config.json").read_text())["zero_optimization"]["stage"] == 3


def test_every_file_that_differs_is_named(run_zerofit: RunZerofit, tmp_path: Path) -> None:
    for name in _NAMES[:2]:
        (tmp_path / name).write_text("mine\n")
    refused = _config(run_zerofit, tmp_path, *_CASES["z3-offload"])
    assert refused.stderr.splitlines()[1] == "  found: accelerate.yaml, training_args.json"


def test_a_folder_of_a_files_name_is_never_replaced(run_zerofit: RunZerofit, tmp_path: Path) -> None:
    (tmp_path / "launch.sh").mkdir()
    refused = _config(run_zerofit, tmp_path, *_CASES["z3-offload"], "--force")
    assert refused.stderr.splitlines()[1] == "  found: Is a directory: launch.sh"
    assert refused.returncode == 2
    assert [path.name for path in tmp_path.iterdir()] == ["launch.sh"]


def test_the_folder_is_made_and_stands_in_every_path(run_zerofit: RunZerofit, tmp_path: Path) -> None:
    finished = _config(run_zerofit, tmp_path, *_CASES["z3-offload"], "--output-dir", "a/b c")
    assert finished.stdout.splitlines() == [f"a/b c/{name}" for name in _NAMES]
    texts = _texts(tmp_path / "a/b c")
    assert "deepspeed_config_file: a/b c/ds_config.json\n" in texts["accelerate.yaml"]
    assert json.loads(texts["training_args.json"])["deepspeed"] == "a/b c/ds_config.json"
    assert "--config_file 'a/b c/accelerate.yaml'" in texts["launch.sh"]


def _launched(folder: Path, *arguments: str, **environment: str) -> list[str]:
    """Return the arguments that launch.sh gives to accelerate."""
    accelerate = folder / "bin/accelerate"
    accelerate.parent.mkdir()
    accelerate.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    accelerate.chmod(0o755)
    finished = subprocess.run(
        ["./launch.sh", *arguments],
        cwd=folder,
        env={"PATH": f"{accelerate.parent}:/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
    )
    assert finished.stderr == ""
    return finished.stdout.splitlines()


def test_launch_script_runs_accelerate_with_the_users_arguments(
    run_zerofit: RunZerofit, tmp_path: Path
) -> None:
    _config(run_zerofit, tmp_path, *_CASES["z3-offload"])
    assert _launched(tmp_path, "train.py", "--name", "two words") == [
        *("launch", "--config_file", "accelerate.yaml", "--mixed_precision", "bf16"),
        *("--num_processes", "8", "--num_machines", "1", "--machine_rank", "0"),
        *("--main_process_port", "29500", "train.py", "--name", "two words"),
    ]


def test_launch_script_for_several_nodes_takes_the_node_as_the_shipped_recipe_does(
    run_zerofit: RunZerofit, tmp_path: Path
) -> None:
    _config(run_zerofit, tmp_path, *_CASES["z2-nodes"])
    assert _launched(tmp_path, "train.py", NODE_RANK="1", MASTER_ADDR="node0") == [
        *("launch", "--config_file", "accelerate.yaml", "--mixed_precision", "fp16"),
        *("--num_processes", "16", "--num_machines", "2", "--machine_rank", "1"),
        *("--main_process_ip", "node0", "--main_process_port", "29500", "train.py"),
    ]


def test_launch_script_tells_deepspeeds_ranks_to_compile(run_zerofit: RunZerofit, tmp_path: Path) -> None:
    _config(run_zerofit, tmp_path, *_EIGHT, "--zero-stage", "2", "--compile")
    assert "\nACCELERATE_DYNAMO_BACKEND=INDUCTOR accelerate launch" in (tmp_path / "launch.sh").read_text()


@pytest.mark.parametrize(
    ("flags", "setting"),
    [
        (("--num-processes", "1", "--zero-stage", "3"), "DS_ACCELERATOR=cpu"),
        (("--num-processes", "2", "--engine", "native"), "ACCELERATE_USE_CPU=true"),
    ],
)
def test_launch_script_for_the_cpu_says_so_to_accelerate(
    run_zerofit: RunZerofit, tmp_path: Path, flags: tuple[str, ...], setting: str
) -> None:
    _config(run_zerofit, tmp_path, "--cpu", *flags)
    text = (tmp_path / "launch.sh").read_text()
    assert [word for word in text.split() if word.startswith(("DS_", "ACCELERATE_"))] == [setting]


def test_decisions_are_printed_on_stderr(run_zerofit: RunZerofit, tmp_path: Path) -> None:
    finished = _config(run_zerofit, tmp_path, *_CASES["z3-offload"])
    assert finished.stderr.splitlines()[1:] == [
        "zerofit: strategy: DeepSpeed ZeRO-3, optimizer on cpu, parameters on cpu, bf16 on 8 GPU ranks",
        "zerofit:   zero_stage                   3: preset z3-offload: ZeRO-3, optimizer and parameters "
        "on CPU (preset)",
        "zerofit:   precision                    bf16: --mixed-precision says so (flag)",
        "zerofit:   micro_batch_size             4: --micro-batch-size says so (flag)",
        "zerofit:   gradient_accumulation_steps  2: global batch 64 = 4 x 2 x 8 ranks (flag)",
        "zerofit:   gradient_clipping            0.0: no flag says otherwise (default)",
    ]


_READ_BY_TRAINER = """
import json
from transformers import HfArgumentParser, TrainingArguments

(arguments,) = HfArgumentParser(TrainingArguments).parse_json_file("training_args.json")
config = arguments.hf_deepspeed_config
config.trainer_config_process(arguments, auto_find_batch_size=False)
print(json.dumps({
    "batch": [arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps],
    "clipping": arguments.max_grad_norm,
    "checkpointing": arguments.gradient_checkpointing,  # an alias from 5.23 on
    "optim": str(arguments.optim.value),
    "deepspeed": arguments.deepspeed,
    "stage": config.config["zero_optimization"]["stage"],
    "mismatches": config.mismatches,
}))
"""


@pytest.mark.slow
def test_trainer_reads_its_file_and_finds_it_at_one_with_the_deepspeed_file(
    run_zerofit: RunZerofit, tmp_path: Path
) -> None:
    _config(
        run_zerofit,
        tmp_path,
        *("--num-processes", "1", "--mixed-precision", "no", "--zero-stage", "3", "--micro-batch-size", "2"),
        *("--gradient-accumulation-steps", "3", "--gradient-clipping", "0.5", "--gradient-checkpointing"),
        *("--optimizer", "adamw"),
    )
    finished = subprocess.run(
        [sys.executable, "-c", _READ_BY_TRAINER],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu", **_NO_GPU},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout.splitlines()[-1]) == {
        "batch": [2, 3],
        "clipping": 0.5,
        "checkpointing": True,
        "optim": "adamw_torch_fused",
        "deepspeed": "ds_config.json",
        "stage": 3,
        "mismatches": [],
    }


def test_files_of_accelerate_and_deepspeed_are_imported(run_zerofit: RunZerofit, tmp_path: Path) -> None:
    (tmp_path / "acc.yaml").write_text(
        "deepspeed_config:\n  zero_stage: 3\n  offload_optimizer_device: cpu\ndistributed_type: DEEPSPEED\n"
        "mixed_precision: fp16\nnum_processes: 4\n"
    )
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}, "bf16": {"enabled": true}}')
    for source, flags, stage in (("acc.yaml", (), 3), ("ds.json", ("--num-processes", "4"), 1)):
        run = _config(run_zerofit, tmp_path, "--from", source, "--output-dir", source[:3], *flags)
        assert run.returncode == 0, run.stderr
        written = json.loads((tmp_path / source[:3] / "ds_config.json").read_text())
        assert written["zero_optimization"]["stage"] == stage
        assert "num_processes: 4" in (tmp_path / source[:3] / "accelerate.yaml").read_text()
    assert run.stderr.startswith("zerofit: ds.json sets engine deepspeed, zero_stage 1, precision bf16")


def test_what_a_deepspeed_file_leaves_to_the_script_stays_so(run_zerofit: RunZerofit, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        '{"zero_optimization": {"stage": 2, "overlap_comm": true}, "gradient_clipping": "auto", '
        '"train_micro_batch_size_per_gpu": "auto"}'
    )
    run = _config(run_zerofit, tmp_path, "--from", "ds.json", "--output-dir", "out")
    assert run.returncode == 0, run.stderr
    written = json.loads((tmp_path / "out" / "ds_config.json").read_text())
    assert written["gradient_clipping"] == written["train_micro_batch_size_per_gpu"] == "auto"
    assert "max_grad_norm" not in json.loads((tmp_path / "out" / "training_args.json").read_text())
    unused = "not used of ds.json, without effect on results: zero_optimization.overlap_comm"
    assert unused in " ".join(run.stderr.split())
    assert 'gradient_clipping, micro_batch_size of ds.json: "auto" stays' in " ".join(run.stderr.split())
    assert written["gradient_accumulation_steps"] == 1


@pytest.mark.parametrize("key", ["offload_params", "zero_quantized_gradients", "stage3_prefetch_bucketsize"])
def test_what_may_change_results_is_not_said_to_change_none(
    run_zerofit: RunZerofit, tmp_path: Path, key: str
) -> None:
    section = {"stage": 3, "overlap_comm": True, key: True}
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": section}))
    said = " ".join(_config(run_zerofit, tmp_path, "--from", "ds.json", "--output-dir", "out").stderr.split())
    assert f"zero_stage 3; not used: zero_optimization.{key} " in f"{said} "
    assert "without effect on results: zero_optimization.overlap_comm " in f"{said} "


def test_a_file_that_names_no_precision_means_fp32_as_for_accelerate(
    run_zerofit: RunZerofit, tmp_path: Path
) -> None:
    (tmp_path / "acc.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 8\n")
    run = _config(run_zerofit, tmp_path, "--from", "acc.yaml", "--output-dir", "out")
    assert run.returncode == 0, run.stderr
    assert "--mixed_precision no " in (tmp_path / "out" / "launch.sh").read_text()
    assert "fp32: acc.yaml, which names no precision, says so" in " ".join(run.stderr.split())
    run = _config(
        run_zerofit, tmp_path, "--from", "acc.yaml", "--mixed-precision", "bf16", "--output-dir", "own"
    )
    assert "--mixed_precision bf16 " in (tmp_path / "own" / "launch.sh").read_text()


_DEEPSPEED = {
    "fp16": {"enabled": True, "loss_scale_window": 500, "hysteresis": 2},
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "train_batch_size": 64,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    },
}


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_an_imported_file_keeps_its_batch_and_each_value_names_its_line(
    run_zerofit: RunZerofit, tmp_path: Path, engine: str
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(_DEEPSPEED, indent=1))
    run = _config(run_zerofit, tmp_path, "--from", "ds.json", "--engine", engine, "--output-dir", "out")
    said = " ".join(run.stderr.replace("zerofit:", "").split())
    assert run.returncode == 0, said
    arguments = json.loads((tmp_path / "out" / "training_args.json").read_text())
    assert (arguments["per_device_train_batch_size"], arguments["gradient_accumulation_steps"]) == (4, 8)
    assert "; not used: fp16.loss_scale_window " in f"{said} "
    lines = {
        "optimizer_offload cpu": 13,
        "param_offload cpu": 16,
        "micro_batch_size 4": 7,
        "precision fp16": 3,
    }
    assert [
        name for name, line in lines.items() if f"{name}: ds.json:{line} says so (file)" not in said
    ] == []
    left_out = "train_batch_size=64 (ds.json:9) is left out: micro-batch x accumulation x ranks decide it, "
    assert f"{left_out}4 x 8 x 1 rank = 32" in said
    if engine == "deepspeed":
        assert (
            json.loads((tmp_path / "out" / "ds_config.json").read_text())["train_micro_batch_size_per_gpu"]
            == 4
        )


_REMOVED = {
    "curriculum_learning": {"enabled": False},
    "zero_optimization": {"stage": 3, "mics_shard_size": -1},
}


def test_what_deepspeed_has_removed_matters_to_deepspeed_alone(
    run_zerofit: RunZerofit, tmp_path: Path
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(_REMOVED))
    run = _config(run_zerofit, tmp_path, "--from", "ds.json", "--engine", "fsdp2", "--output-dir", "out")
    assert run.returncode == 0, run.stderr
    assert "not used: curriculum_learning, zero_optimization.mics_shard_size" in " ".join(run.stderr.split())
    run = _config(run_zerofit, tmp_path, "--from", "ds.json", "--output-dir", "own")
    assert (run.returncode, run.stderr.count("error[deepspeed-key-removed]")) == (2, 2)


def test_a_global_batch_in_an_imported_file_gives_what_the_file_leaves_open(
    run_zerofit: RunZerofit, tmp_path: Path
) -> None:
    parts = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}
    (tmp_path / "ds.json").write_text(json.dumps(parts))
    run = _config(run_zerofit, tmp_path, "--from", "ds.json", "--num-processes", "8", "--output-dir", "out")
    assert run.returncode == 0, run.stderr
    assert json.loads((tmp_path / "out" / "ds_config.json").read_text())["gradient_accumulation_steps"] == 2
    assert "is left out" not in run.stderr


def test_an_imported_file_is_checked_and_its_lines_are_named(run_zerofit: RunZerofit, tmp_path: Path) -> None:
    section = {"stage": 2, "offload_param": {"device": "cpu"}, "overlap_com": True}
    text = json.dumps({"zero_optimization": section, "train_micro_batch_size_per_gpu": 1}, indent=1)
    (tmp_path / "ds.json").write_text(text)
    run = _config(run_zerofit, tmp_path, "--from", "ds.json", "--output-dir", "out")
    assert (run.returncode, (tmp_path / "out").exists()) == (2, False)
    assert "offload_param.device=cpu with zero_optimization.stage=2   (ds.json:5)\n" in run.stderr
    assert "  found: zero_optimization.overlap_com=true   (ds.json:7)\n" in run.stderr


def test_what_a_file_says_is_named_by_its_line_beside_a_flag_that_does_not_fit(
    run_zerofit: RunZerofit, tmp_path: Path
) -> None:
    section = {"stage": 3, "offload_param": {"device": "cpu"}}
    text = json.dumps({"zero_optimization": section, "train_micro_batch_size_per_gpu": 1}, indent=1)
    (tmp_path / "ds.json").write_text(text)
    run = _config(run_zerofit, tmp_path, "--from", "ds.json", "--zero-stage", "2", "--output-dir", "out")
    assert run.returncode == 2
    found = "zero_optimization.offload_param.device=cpu with --zero-stage 2   (ds.json:5)"
    assert (
        f"error[param-offload-needs-zero3]: parameter offload needs ZeRO-3\n  found: {found}\n" in run.stderr
    )
