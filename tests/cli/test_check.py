"""zerofit check, run as a user runs it: what it reads, what it prints, its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from runs import RunZerofit

from zerofit.checking.rules import ALL_RULES, DEEPSPEED_RULES

_FINDING = """\
error[param-offload-needs-zero3]: parameter offload needs ZeRO-3
  found: zero_optimization.offload_param.device=cpu with zero_optimization.stage=2   ({place})
  why:   only stage 3 partitions parameters, so lower stages ignore the setting
  fix:   set zero_optimization.stage to 3, or leave out offload_param
  see:   https://www.deepspeed.ai/docs/config-json/#parameter-offloading
"""
_BAD = """\
{
  "train_micro_batch_size_per_gpu": 4,
  "zero_optimization": {
    "stage": 2,
    "offload_param": {"device": "cpu"}
  }
}
"""
_GOOD = _BAD.replace('"stage": 2', '"stage": 2').replace(',\n    "offload_param": {"device": "cpu"}', "")
_ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
num_machines: 1
num_processes: 2
deepspeed_config:
  deepspeed_config_file: {file}
"""
_FILES = {
    "bad.json": _BAD,
    "good.json": _GOOD,
    "broken.json": '{"bf16": {"enabled": tru',
    "acc_bad.yaml": _ACCELERATE.format(file="bad.json"),
    "acc_good.yaml": _ACCELERATE.format(file="good.json"),
    "acc_gone.yaml": _ACCELERATE.format(file="gone.json"),
    "train.py": "from accelerate import Accelerator\n\naccelerator = Accelerator()\n",
    "trainer.py": "import transformers\n\ntransformers.TrainingArguments('o', deepspeed='bad.json')\n",
    "native.py": "import deepspeed\n\ndeepspeed.initialize(model=model, config='bad.json')\n",
    "pkg/train.py": "from accelerate import Accelerator\n\naccelerator = Accelerator()\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a file of each kind."""
    for name, text in _FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def _check(run: RunZerofit, folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    return run("check", *line.split(), cwd=folder, environment={"HF_HOME": str(folder / "no-home")})


def _document(run: RunZerofit, folder: Path, line: str) -> dict[str, object]:
    document: dict[str, object] = json.loads(_check(run, folder, f"--json {line}").stdout)
    return document


def test_an_error_is_printed_whole_and_exits_1(run_zerofit: RunZerofit, folder: Path) -> None:
    finished = _check(run_zerofit, folder, "--route accelerate bad.json")
    assert finished.stdout.startswith(_FINDING.format(place="bad.json:5") + "\n")
    assert finished.stdout.splitlines()[-1] == "bad.json: 1 error"
    assert (finished.returncode, finished.stderr) == (1, "")


def test_a_valid_configuration_exits_0_with_the_number_of_rules(
    run_zerofit: RunZerofit, folder: Path
) -> None:
    finished = _check(run_zerofit, folder, "--route accelerate good.json acc_good.yaml")
    assert finished.stdout.splitlines()[-1].startswith("ok: good.json, acc_good.yaml: ")
    assert (finished.returncode, finished.stderr) == (0, "")


@pytest.mark.parametrize(
    ("line", "files"),
    [
        ("bad.json", {"bad.json": None}),
        ("./bad.json bad.json", {"./bad.json": None}),
        ("acc_bad.yaml", {"acc_bad.yaml": None, "bad.json": "deepspeed_config_file: bad.json"}),
        ("acc_bad.yaml bad.json", {"acc_bad.yaml": None, "bad.json": None}),
        ("train.py --deepspeed bad.json", {"train.py": None, "bad.json": "--deepspeed bad.json"}),
        (
            "accelerate launch --config_file acc_bad.yaml train.py --lr 1",
            {
                "train.py": None,
                "acc_bad.yaml": "--config_file acc_bad.yaml",
                "bad.json": "deepspeed_config_file: bad.json",
            },
        ),
        (
            "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 2 train.py --deepspeed=bad.json",
            {"train.py": None, "bad.json": "--deepspeed=bad.json"},
        ),
        (
            "deepspeed train.py --deepspeed_config bad.json",
            {"train.py": None, "bad.json": "--deepspeed_config bad.json"},
        ),
        (
            "python -m pkg.train --deepspeed bad.json",
            {"pkg/train.py": None, "bad.json": "--deepspeed bad.json"},
        ),
        ("accelerate launch -m pkg.train", {"pkg/train.py": None}),
        ("accelerate launch -m installed.module", {}),
        ("good.json bad.json", {"good.json": None, "bad.json": None}),
        ("trainer.py", {"trainer.py": None, "bad.json": "deepspeed='bad.json'"}),
        ("native.py", {"native.py": None, "bad.json": "config='bad.json'"}),
    ],
)
def test_files_that_are_read_and_what_names_them(
    run_zerofit: RunZerofit, folder: Path, line: str, files: dict[str, str | None]
) -> None:
    document = _document(run_zerofit, folder, line)
    read = {file["name"]: (file["named_by"] or {}).get("text") for file in document["files"]}  # type: ignore[attr-defined]
    assert read == files
    found = [finding["rule"] for finding in document["findings"]]  # type: ignore[attr-defined]
    assert ("param-offload-needs-zero3" in found) is any(name.endswith("bad.json") for name in files)


def test_the_file_of_accelerate_config_is_read_where_no_flag_names_one(
    run_zerofit: RunZerofit, folder: Path
) -> None:
    home = folder / "no-home/accelerate"
    home.mkdir(parents=True)
    (home / "default_config.yaml").write_text(_FILES["acc_good.yaml"])
    document = _document(run_zerofit, folder, "accelerate launch train.py")
    assert [(file["name"], (file["named_by"] or {}).get("text")) for file in document["files"]] == [  # type: ignore[attr-defined]
        ("train.py", None),
        (str(home / "default_config.yaml"), "accelerate launch without --config_file"),
        ("good.json", "deepspeed_config_file: good.json"),
    ]


def test_a_file_that_is_named_and_missing_is_a_finding_at_the_naming_line(
    run_zerofit: RunZerofit, folder: Path
) -> None:
    finished = _check(run_zerofit, folder, "acc_gone.yaml")
    headline = "error[named-file-missing]: a named configuration does not exist"
    assert f"{headline}\n  found: deepspeed_config_file: gone.json   (acc_gone.yaml:6)\n" in finished.stdout
    assert finished.returncode == 1


def test_a_configuration_in_place_of_its_name_is_read(run_zerofit: RunZerofit, folder: Path) -> None:
    for argument in ('{"zero_optimization":{"stage":9}}', "eyJ6ZXJvX29wdGltaXphdGlvbiI6eyJzdGFnZSI6OX19"):
        document = _document(run_zerofit, folder, f"train.py --deepspeed {argument}")
        assert [file["name"] for file in document["files"]] == ["train.py", "--deepspeed"]  # type: ignore[attr-defined]
        places = [finding["file"] for finding in document["findings"]]  # type: ignore[attr-defined]
        assert "--deepspeed" in places


@pytest.mark.parametrize(
    "data",
    [
        _FILES["broken.json"].encode(),
        b"\x00\x01\x02" * 100,
        '{"bf16": {}}'.encode("utf-16"),
        b'{"a": "' + b"x" * 1_000_000 + b'"}',
        b"[" * 100_000,
        b"",
    ],
)
def test_a_file_that_cannot_be_read_as_what_it_should_be_is_a_finding(
    run_zerofit: RunZerofit, folder: Path, data: bytes
) -> None:
    (folder / "file.json").write_bytes(data)
    finished = _check(run_zerofit, folder, "file.json")
    assert finished.stdout.startswith("error[deepspeed-syntax]: ")
    assert "(file.json:" in finished.stdout
    assert (finished.returncode, finished.stderr) == (1, "")


@pytest.mark.parametrize(
    ("name", "data", "rule"),
    [
        ("file.yaml", b"distributed_type: [DEEPSPEED", "accelerate-syntax"),
        ("file.yaml", b'a: !!python/object/apply:os.system ["touch ran"]', "accelerate-syntax"),
        ("file.yaml", b"\xff\xfe\x00" * 100, "accelerate-syntax"),
        ("file.py", b"def train(:\n", "script-syntax"),
        ("file.py", b"\xff\xfe\x00" * 100, "script-syntax"),
        ("file.py", b"# -*- coding: nosuch -*-\n", "script-syntax"),
        ("file.py", b"x = " + b"(" * 5000 + b")" * 5000, "script-syntax"),
    ],
)
def test_a_broken_accelerate_file_or_script_is_a_finding(
    run_zerofit: RunZerofit, folder: Path, name: str, data: bytes, rule: str
) -> None:
    (folder / name).write_bytes(data)
    finished = _check(run_zerofit, folder, name)
    assert f"error[{rule}]: " in finished.stdout
    assert (finished.returncode, finished.stderr) == (1, "")
    assert not (folder / "ran").exists()


def test_standard_input(run_zerofit: RunZerofit, folder: Path) -> None:
    finished = run_zerofit("check", "--route", "accelerate", "-", cwd=folder, stdin=_BAD)
    assert finished.stdout.startswith(_FINDING.format(place="standard input:5") + "\n")
    assert (finished.returncode, finished.stderr) == (1, "")


def test_strict_fails_for_a_warning(run_zerofit: RunZerofit, folder: Path) -> None:
    line = "--route accelerate warned.json"
    (folder / "warned.json").write_text(_GOOD.replace("{", '{\n  "bfloat16": {"enabled": true},', 1))
    document = _document(run_zerofit, folder, line)
    assert document["counts"] == {"error": 0, "warning": 1, "advice": 0}
    assert _check(run_zerofit, folder, line).returncode == 0
    assert _check(run_zerofit, folder, f"--strict {line}").returncode == 1


def test_sarif_and_json_hold_the_same_findings(run_zerofit: RunZerofit, folder: Path) -> None:
    document = _document(run_zerofit, folder, "bad.json acc_gone.yaml")
    log = json.loads(_check(run_zerofit, folder, "--sarif bad.json acc_gone.yaml").stdout)
    assert [result["ruleId"] for result in log["runs"][0]["results"]] == [
        finding["rule"]
        for finding in document["findings"]  # type: ignore[attr-defined]
    ]


def test_colour_only_on_a_terminal(run_zerofit: RunZerofit, folder: Path) -> None:
    pty = pytest.importorskip("pty")
    reader, writer = pty.openpty()
    run_zerofit("check", "--route", "accelerate", "bad.json", cwd=folder, stdout=writer)
    os.close(writer)
    assert os.read(reader, 100).startswith(b"\x1b[31m\x1b[1merror\x1b[0m[param-offload-needs-zero3]")
    os.close(reader)


def test_a_file_for_fsdp_says_what_does_not_apply(run_zerofit: RunZerofit, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 2\n"
        "fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}\n"
    )
    finished = run_zerofit("check", "a.yaml", cwd=tmp_path)
    num_deepspeed, num_others = len(DEEPSPEED_RULES), len(ALL_RULES) - len(DEEPSPEED_RULES)
    assert finished.stdout == (
        f"not checked: with distributed_type=FSDP the {num_deepspeed} rules of DeepSpeed do not apply\n\n"
        f"ok: a.yaml: {num_others} rules passed\n"
    )


@pytest.mark.parametrize(
    ("deepspeed", "arguments", "found"),
    [
        ({"train_batch_size": 64}, "--gradient_accumulation_steps 8 --bf16", "train_batch_size=64 with "),
        ({"train_batch_size": 32}, "--gradient_accumulation_steps 8 --bf16", None),
        ({}, "--gradient_accumulation_steps 8", "bf16.enabled=true with no bf16, so it is False"),
    ],
)
def test_what_the_parser_of_a_trainers_script_makes_is_compared(
    run_zerofit: RunZerofit, folder: Path, deepspeed: dict[str, Any], arguments: str, found: str | None
) -> None:
    (folder / "trained.py").write_text(
        "from transformers import HfArgumentParser, Trainer, TrainingArguments\n"
        "(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()\n"
        "Trainer(model=None, args=args).train()\n"
    )
    auto = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    file = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}, **auto, **deepspeed}
    (folder / "ds.json").write_text(json.dumps(file))
    line = "torchrun --nproc_per_node 2 trained.py --output_dir o --per_device_train_batch_size 2"
    finished = _check(run_zerofit, folder, f"{line} {arguments} --deepspeed ds.json")
    assert ("[trainer-values-differ]" in finished.stdout) is (found is not None)
    assert found is None or found in finished.stdout
