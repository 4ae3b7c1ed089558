"""Keys and values of accelerate's file: what is said of each, and what is left alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from zerofit.checking.engine import Finding, check
from zerofit.checking.inputs.example import situations_of_example
from zerofit.checking.rule import Example
from zerofit.checking.rules.accelerate import file as accelerate_file
from zerofit.configs.document import RenameKey, SetValue
from zerofit.configs.schemas.catalog import load_schemas
from zerofit.machine.versions import probe_versions

Check = Callable[..., list[Finding]]

_FILE = """\
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
num_machines: 1
num_processes: 2
"""
_NAME = "accelerate.yaml"


def test_a_misspelt_key_is_said_whole(check_example: Check) -> None:
    (finding,) = check_example("accelerate-unknown-key", accelerate=f"{_FILE}machine_rnak: 0\n")
    assert finding.as_text() == (
        "error[accelerate-unknown-key]: accelerate does not know a key of its file\n"
        "  found: machine_rnak=0   (accelerate.yaml:5)\n"
        "  why:   accelerate refuses a file with a key that it does not know\n"
        "  fix:   write machine_rank, or take it out\n"
        "  see:   https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/commands/config/"
        "config_args.py#L154"
    )
    assert finding.edits == (RenameKey(document=_NAME, path=("machine_rnak",), key="machine_rank"),)


_SAID = [
    ("accelerate-unknown-key", "ipex_config:\n  ipex: false\n", 'ipex_config={"ipex": false}'),
    ("accelerate-unknown-key", "zero_stage: 3\n", "zero_stage=3"),
    ("accelerate-ignored-key", "deepspeed_config:\n  zero_stag: 3\n", "deepspeed_config.zero_stag=3"),
    (
        "accelerate-ignored-key",
        "fsdp_config:\n  fsdp_backward_prefetch_policy: BACKWARD_PRE\n",
        "fsdp_config.fsdp_backward_prefetch_policy=BACKWARD_PRE",
    ),
    (
        "accelerate-value-type",
        "mixed_precision: no\n",
        "mixed_precision=no, where accelerate takes no, fp8, fp16 or bf16",
    ),
    ("accelerate-value-type", "gpu_ids: 0\n", "gpu_ids=0, where accelerate takes a text"),
    (
        "accelerate-value-type",
        'main_process_port: "29511"\n',
        'main_process_port="29511", where accelerate takes a whole number of at least 0 and of at most 65535',
    ),
    (
        "accelerate-value-type",
        "deepspeed_config: none\n",
        "deepspeed_config=none, where accelerate takes a mapping",
    ),
    (
        "accelerate-value-choice",
        "mixed_precision: bf61\n",
        "mixed_precision=bf61, where accelerate takes no, fp8, fp16 or bf16",
    ),
    (
        "accelerate-value-choice",
        "deepspeed_config:\n  offload_optimizer_device: gpu\n",
        "deepspeed_config.offload_optimizer_device=gpu, where accelerate takes none, cpu or nvme",
    ),
    (
        "accelerate-value-choice",
        "deepspeed_config:\n  zero_stage: 4\n",
        "deepspeed_config.zero_stage=4, where accelerate takes a whole number of at least 0 and of at most 3",
    ),
    (
        "accelerate-value-type",
        "deepspeed_config:\n  zero_stage: auto\n",
        "deepspeed_config.zero_stage=auto, where accelerate takes a whole number of at least 0 and of at "
        "most 3",
    ),
    ("accelerate-key-needs-flag", "enable_cpu_affinity: true\n", "enable_cpu_affinity=true"),
    ("accelerate-key-repeated", "num_processes: 4\n", "num_processes stands twice, the last time with 4"),
    (
        "accelerate-key-repeated",
        "deepspeed_config:\n  zero_stage: 3\n  zero_stage: 1\n",
        "deepspeed_config.zero_stage stands twice, the last time with 1",
    ),
    (
        "accelerate-value-choice",
        "main_process_port: 99999\n",
        "main_process_port=99999, where accelerate takes a whole number of at least 0 and of at most 65535",
    ),
    (
        "accelerate-value-type",
        "deepspeed_config:\n  zero3_init_flag: maybe\n",
        "deepspeed_config.zero3_init_flag=maybe, where accelerate takes true or false",
    ),
]


@pytest.mark.parametrize(("rule", "lines", "found"), _SAID)
def test_what_is_found(check_example: Check, rule: str, lines: str, found: str) -> None:
    assert [finding.found for finding in check_example(rule, accelerate=_FILE + lines)] == [found]


_SILENT = [
    ("accelerate-unknown-key", "fp16: true\n"),  # accelerate still reads it
    ("accelerate-ignored-key", "deepspeed_config:\n  num_processes: 3\n"),  # it acts: it goes to the flag
    ("accelerate-ignored-key", "fsdp_config:\n  fsdp_ignored_modules: null\n"),
    ("accelerate-ignored-key", "fsdp_config:\n  version: 2\n"),  # accelerate puts fsdp_ before it
    ("accelerate-value-type", "mixed_precision: 'no'\n"),
    ("accelerate-value-type", "mixed_precision:\n"),
    ("accelerate-value-type", "machine_rank: '0'\n"),
    ("accelerate-value-type", "deepspeed_config:\n  gradient_clipping: auto\n  zero3_init_flag: false\n"),
    ("accelerate-value-choice", "mixed_precision: BF16\n"),
    ("accelerate-value-choice", "deepspeed_config:\n  offload_optimizer_device: CPU\n"),
    ("accelerate-key-repeated", "num_processes: 2\n"),  # the same value
    ("accelerate-key-repeated", "deepspeed_config:\n  zero_stage: 3\n  zero_stage: 3\n"),
    ("accelerate-key-repeated", "deepspeed_config:\n  zero_stage: 3\nfsdp_config:\n  zero_stage: 3\n"),
    ("accelerate-value-choice", "main_process_port: 0\n"),
    ("accelerate-value-choice", "dynamo_config:\n  dynamo_backend: nope\n"),  # with DeepSpeed it is not read
    ("accelerate-value-type", "deepspeed_config:\n  zero3_init_flag: 'Yes'\n"),
    ("accelerate-key-needs-flag", "rdzv_backend: static\nenable_cpu_affinity: false\nsame_network: true\n"),
]


@pytest.mark.parametrize(("rule", "lines"), _SILENT)
def test_what_is_right_is_left_alone(check_example: Check, rule: str, lines: str) -> None:
    assert check_example(rule, accelerate=_FILE + lines) == []


_DYNAMO: list[tuple[str, str, list[str]]] = [
    (
        "accelerate-value-choice",
        "dynamo_config:\n  dynamo_backend: inducter\n",
        ["write dynamo_config.dynamo_backend: inductor"],
    ),
    ("accelerate-value-choice", "dynamo_backend: inducter\n", ["write dynamo_backend: inductor"]),
    ("accelerate-value-choice", "dynamo_config:\n  backend: Inductor\n", []),
    ("accelerate-value-type", "dynamo_config:\n  backend: no\n", ['write dynamo_config.backend: "no"']),
    ("accelerate-value-type", "dynamo_config:\n  backend:\n", []),
]


@pytest.mark.parametrize(("rule", "lines", "fixes"), _DYNAMO)
def test_the_backend_of_dynamo_counts_without_deepspeed(
    check_example: Check, rule: str, lines: str, fixes: list[str]
) -> None:
    text = _FILE.replace("DEEPSPEED", "'NO'") + lines
    assert [finding.fix for finding in check_example(rule, accelerate=text)] == fixes


_MENDED: list[tuple[str, tuple[str, ...], Any]] = [
    ("mixed_precision: no\n", ("mixed_precision",), "no"),
    ("gpu_ids: 0\n", ("gpu_ids",), "0"),
    ('main_process_port: "29511"\n', ("main_process_port",), 29511),
]


@pytest.mark.parametrize(("line", "path", "value"), _MENDED)
def test_a_type_is_mended(check_example: Check, line: str, path: tuple[str, ...], value: Any) -> None:
    (finding,) = check_example("accelerate-value-type", accelerate=_FILE + line)
    assert finding.edits == (SetValue(document=_NAME, path=path, value=value),)


def test_a_spelling_that_is_taken_is_not_written_twice(check_example: Check) -> None:
    (finding,) = check_example("accelerate-unknown-key", accelerate=f"{_FILE}num_proceses: 2\n")
    assert finding.edits == ()


def test_a_file_for_sagemaker_is_another_file(check_example: Check) -> None:
    text = "compute_environment: AMAZON_SAGEMAKER\nec2_instance_type: ml.p3.2xlarge\n"
    assert check_example("accelerate-unknown-key", accelerate=text) == []
    assert check_example("accelerate-needs-distributed-type", accelerate=text) == []


_WITHOUT_COUNT = _FILE.replace("num_processes: 2\n", "")
_COMMAND = "accelerate launch --config_file accelerate.yaml"
_COUNTED = [
    (_WITHOUT_COUNT, _COMMAND, ["no num_processes and no --num_processes"]),
    (f"{_WITHOUT_COUNT}num_processes: -1\n", _COMMAND, ["num_processes=-1"]),
    (_WITHOUT_COUNT, f"{_COMMAND} --num_processes 2", []),
    (_WITHOUT_COUNT.replace("DEEPSPEED", "'NO'"), _COMMAND, []),
    (_WITHOUT_COUNT, None, []),  # the command line may say it
]


@pytest.mark.parametrize(("text", "command", "found"), _COUNTED)
def test_who_counts_the_ranks(check_example: Check, text: str, command: str | None, found: list[str]) -> None:
    findings = check_example("accelerate-needs-num-processes", accelerate=text, command=command)
    assert [finding.found for finding in findings] == found


@pytest.mark.parametrize("line", ["", "num_processes: -1\n"])
def test_without_the_command_line_nobody_knows_whether_it_says_num_processes(line: str) -> None:
    example = Example(accelerate=_FILE.replace("num_processes: 2\n", line), command="accelerate launch")
    (situation,) = situations_of_example(example, schemas=load_schemas(), versions=probe_versions())
    rules = [rule for rule in accelerate_file.RULES if rule.id == "accelerate-needs-num-processes"]
    verdict = check(replace(situation, command=None), rules=rules)
    assert verdict.findings == ()
    assert [item.fact for item in verdict.unknown] == ["the command line, which may have --num_processes"]
