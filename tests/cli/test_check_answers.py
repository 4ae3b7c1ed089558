"""What zerofit check answers: exit codes, values as written, the section of a key, what --fix fixes."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from runs import RunZerofit

_ZERO = {"stage": 2}
_DS = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "zero_optimization": _ZERO,
}
_IMPORTS = "from transformers import HfArgumentParser, Seq2SeqTrainingArguments, Trainer, TrainingArguments\n"
_TRAINS = "Trainer(model=model, args=args, train_dataset=rows).train()\n"
_PARSES = f"{_IMPORTS}(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()\n{_TRAINS}"
_CALLS = _IMPORTS + "args = TrainingArguments('out', {}, deepspeed='ds.json')\n" + _TRAINS
_AGREES = "bf16=True, per_device_train_batch_size=8, gradient_accumulation_steps=2"
_WITHOUT_TRAINER = "from mine import run\nrun()\n"


def _check(run: RunZerofit, folder: Path, line: str, **files: Any) -> subprocess.CompletedProcess[str]:
    for name, content in files.items():
        path = folder / {"ds": "ds.json", "acc": "acc.yaml", "script": "train.py"}[name]
        path.write_text(content if isinstance(content, str) else json.dumps(content, indent=2))
    return run("check", *shlex.split(line), cwd=folder, environment={"HF_HOME": str(folder / "no-home")})


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        (_PARSES, "--deepspeed ds.json --output_dir o --bf16 --per_device_train_batch_size 4"),
        (_PARSES, "--deepspeed ds.json --output_dir o --bf16 --gradient_accumulation_steps=4"),
        (_PARSES, "--deepspeed ds.json --output_dir o"),
        (_WITHOUT_TRAINER, "--deepspeed ds.json --output_dir o --bf16 --per_device_train_batch_size 4"),
        (_CALLS.format("bf16=True, per_device_train_batch_size=4, gradient_accumulation_steps=2"), ""),
        (_CALLS.format("bf16=True, gradient_accumulation_steps=1"), ""),
        (_CALLS.format("bf16=True, per_device_train_batch_size=8"), ""),
        (_CALLS.format("fp16=True, per_device_train_batch_size=8, gradient_accumulation_steps=2"), ""),
        (
            f"{_IMPORTS}def main():\n    args = Seq2SeqTrainingArguments('o', deepspeed='ds.json')\n"
            f"    {_TRAINS}if __name__ == '__main__':\n    main()\n",
            "",
        ),
    ],
)
def test_a_file_that_contradicts_its_trainer_fails(
    run_zerofit: RunZerofit, tmp_path: Path, script: str, arguments: str
) -> None:
    finished = _check(run_zerofit, tmp_path, f"train.py {arguments}", script=script, ds=_DS)
    assert "error[trainer-values-differ]" in finished.stdout
    assert finished.returncode == 1


_CLASS = "from dataclasses import dataclass\n@dataclass\nclass Data:\n    {}: str = ''\n"
_BOTH = _PARSES.replace("(TrainingArguments)", "((Data, TrainingArguments))")
_FOREIGN = f"from mine import Data\n{_BOTH}"


@pytest.mark.parametrize(
    ("script", "argument", "is_certain"),
    [
        (_PARSES, "--evaluation_strategy epoch", True),
        (_PARSES, "--no_cuda", True),
        (_CLASS.format("path") + _BOTH, "--evaluation_strategy=steps", True),
        (_CLASS.format("evaluation_strategy") + _BOTH, "--evaluation_strategy steps", False),
        (_FOREIGN, "--evaluation_strategy steps", False),
    ],
)
def test_a_field_that_is_gone_is_refused_on_the_command_line(
    run_zerofit: RunZerofit, tmp_path: Path, script: str, argument: str, is_certain: bool
) -> None:
    finished = _check(run_zerofit, tmp_path, f"train.py --output_dir o {argument}", script=script)
    severity = "error" if is_certain else "warning"
    assert f"{severity}[training-argument-unknown]" in finished.stdout
    assert finished.returncode == is_certain


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        (_PARSES, "--deepspeed ds.json --output_dir o --bf16 --per_device_train_batch_size 8 "
         "--gradient_accumulation_steps 2"),
        (_CALLS.format(_AGREES), ""),
        (_CALLS.format("bf16=True, per_device_train_batch_size=size, gradient_accumulation_steps=2"), ""),
        (_CALLS.format("**settings"), ""),
        (_IMPORTS + "if small:\n    args = TrainingArguments('o', deepspeed='ds.json', bf16=True)\n", ""),
        (_CALLS.format(_AGREES) + "TrainingArguments('other', per_device_train_batch_size=1)\n", ""),
        (_WITHOUT_TRAINER, "--deepspeed ds.json --gradient_accumulation_steps 4"),
    ],
)  # fmt: skip
def test_what_is_not_certain_does_not_fail(
    run_zerofit: RunZerofit, tmp_path: Path, script: str, arguments: str
) -> None:
    finished = _check(run_zerofit, tmp_path, f"train.py {arguments}", script=script, ds=_DS)
    assert "error[" not in finished.stdout
    assert finished.returncode == 0


_BF16 = "bf16-needs-ampere"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("--gpus 8xV100-32G ds.json", "bf16.enabled=true on Tesla V100-SXM2-32GB (compute capability 7.0)"),
        ("--gpus T4 acc.yaml", "mixed_precision=bf16 on Tesla T4 (compute capability 7.5)"),
        ("--gpus 1xT4 accelerate launch --mixed_precision bf16 train.py", "--mixed_precision bf16 on"),
        ("--gpus 1xT4 train.py --bf16 --output_dir o", "--bf16 on Tesla T4"),
        ("--gpus=4xT4 --num-processes 4 train.py --output_dir o --bf16 true", "--bf16 true on Tesla T4"),
    ],
)
def test_gpus_of_a_node_are_named(run_zerofit: RunZerofit, tmp_path: Path, line: str, found: str) -> None:
    acc = "distributed_type: NO\nmixed_precision: bf16\nnum_processes: 1\n"
    finished = _check(run_zerofit, tmp_path, line, script=_PARSES, ds=_DS, acc=acc)
    assert f"error[{_BF16}]" in finished.stdout
    assert f"  found: {found}" in finished.stdout
    newer = _check(run_zerofit, tmp_path, line.replace("V100-32G", "T4").replace("T4", "A100-80G"))
    assert _BF16 not in newer.stdout


@pytest.mark.parametrize(
    ("line", "flags", "fixed"),
    [
        ("ds.json --num-processes 8", "--num-processes 8", "--num-processes 8 ds.json"),
        ("--strict ds.json --gpus=4xT4 --cpu", "--gpus=4xT4 --cpu", "--strict --gpus=4xT4 --cpu ds.json"),
        (
            "ds.json --route trainer acc.yaml --json",
            "--route trainer --json",
            "--route trainer --json ds.json acc.yaml",
        ),
        ("ds.json --strict train.py --strict", "--strict", "--strict ds.json train.py --strict"),
        ("ds.json -- --strict", "--strict", "--strict ds.json"),
    ],
)
def test_flags_behind_files_are_named_in_a_line_that_runs(
    run_zerofit: RunZerofit, tmp_path: Path, line: str, flags: str, fixed: str
) -> None:
    acc = "distributed_type: NO\nmixed_precision: bf16\nnum_processes: 1\n"
    finished = _check(run_zerofit, tmp_path, line, script=_PARSES, ds=_DS, acc=acc)
    assert finished.returncode == 2
    assert finished.stderr == (
        "error[flag-behind-file]: flags of zerofit check come before the files\n"
        f"  found: {flags}\n"
        "  why:   arguments after a script or launcher belong to it\n"
        f"  fix:   zerofit check {fixed}\n"
    )
    assert _check(run_zerofit, tmp_path, fixed).returncode in (0, 1)


def test_gpus_here_and_elsewhere_are_alternatives(run_zerofit: RunZerofit, tmp_path: Path) -> None:
    finished = _check(run_zerofit, tmp_path, "--gpus 1xT4 --here ds.json", ds=_DS)
    assert (finished.returncode, "--gpus and --here are alternatives" in finished.stderr) == (2, True)


def test_more_ranks_than_the_named_gpus(run_zerofit: RunZerofit, tmp_path: Path) -> None:
    finished = _check(run_zerofit, tmp_path, "--gpus 2xA100-80G --num-processes 4 ds.json", ds=_DS)
    assert "error[more-ranks-than-gpus]" in finished.stdout


@pytest.mark.parametrize(
    ("text", "shown", "fix"),
    [
        ('"gradient_accumulation_steps": "8"', 'gradient_accumulation_steps="8"', "write 8 without quotes"),
        ('"gradient_accumulation_steps": 0', "gradient_accumulation_steps=0", "give a whole number of at"),
        ('"gradient_clipping": "0.5"', 'gradient_clipping="0.5"', "write 0.5 without quotes"),
        ('"wall_clock_breakdown": "True"', 'wall_clock_breakdown="True"', "write true without quotes"),
        ('"gradient_accumulation_steps": "many"', "gradient_accumulation_steps=many", "give a whole number"),
        ('"gradient_accumulation_steps": 1.5e0', "gradient_accumulation_steps=1.5e0", "give a whole number"),
        ('"gradient_clipping": ""', 'gradient_clipping=""', "give a number"),
    ],
)
def test_a_value_is_shown_as_it_is_written(
    run_zerofit: RunZerofit, tmp_path: Path, text: str, shown: str, fix: str
) -> None:
    ds = '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, ' + text + "}"
    finished = _check(run_zerofit, tmp_path, "--route native ds.json", ds=ds)
    assert f"  found: {shown}   (ds.json:1)\n" in finished.stdout
    assert f"  fix:   {fix}" in finished.stdout


_LAUNCH = "compute_environment: LOCAL_MACHINE\ndistributed_type: {}\nnum_processes: 2\n"


@pytest.mark.parametrize(
    ("kind", "lines", "fix"),
    [
        ("DEEPSPEED", "deepspeed_config:\nzero_stage: 3\n", "indent it below deepspeed_config:"),
        (
            "DEEPSPEED",
            "deepspeed_config: {}\noffload_param_device: cpu\nzero_stage: 3\nzero3_init_flag: true\n",
            "indent them below deepspeed_config:",
        ),
        (
            "DEEPSPEED",
            "gradient_clipping: 1.0\nzero_stage: 2\n",
            "indent them below a line deepspeed_config:, which is missing",
        ),
        ("FSDP", "fsdp_config:\nfsdp_version: 2\n", "indent it below fsdp_config:"),
        ("MULTI_GPU", "fp8_config:\nfp8_format: E4M3\n", "indent it below fp8_config:"),
        ("DEEPSPEED", "zero_optimization:\n  stage: 2\n", "write it in a DeepSpeed file, and name that with"),
        ("DEEPSPEED", "learning_rate: 0.1\n", "give it to the script: learning_rate is a field of"),
    ],
)
def test_a_key_of_a_section_is_sent_there(
    run_zerofit: RunZerofit, tmp_path: Path, kind: str, lines: str, fix: str
) -> None:
    finished = _check(run_zerofit, tmp_path, "acc.yaml", acc=_LAUNCH.format(kind) + lines)
    assert finished.stdout.count("error[accelerate-unknown-key]") == 1
    assert f"  fix:   {fix}" in finished.stdout
    assert "remove the key" not in finished.stdout


@pytest.mark.parametrize(
    ("ds", "fix"),
    [
        ({"stage": 3, "zero_optimization": {}}, "move it into zero_optimization"),
        ({"lr": 1e-4}, "move it into optimizer.params"),
        ({"warmup_num_steps": 10, "total_num_steps": 99}, "move them into scheduler.params"),
        ({"optimizer": {"type": "AdamW", "betas": [0.9, 0.95]}}, "move it into optimizer.params"),
        ({"zero_optimization": {"stage": 2, "loss_scale": 0}}, "move it into fp16"),
        ({"zero_optimization": {"stage": 2, "weight_decay": 0}}, "move it into optimizer.params"),
        ({"bf16": {"enabled": True, "gradient_clipping": 1}}, "move it to the top level"),
        ({"contiguous_memory_optimization": True}, "move it into activation_checkpointing"),
    ],
)
def test_a_deepspeed_key_is_sent_to_its_section(
    run_zerofit: RunZerofit, tmp_path: Path, ds: dict[str, Any], fix: str
) -> None:
    whole = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": _ZERO, **ds}
    finished = _check(run_zerofit, tmp_path, "--route native ds.json", ds=whole)
    assert f"  fix:   {fix}\n" in finished.stdout
    assert "remove it" not in finished.stdout


_STEPS = '"gradient_accumulation_steps": "2"'
_REFUSED = "deepspeed-value-refused (ds.json:3)"
_CLIPPING = '"gradient_clipping": "1"'


@pytest.mark.parametrize(
    ("entries", "end"),
    [
        ([_STEPS], "1 error; --fix fixes it"),
        ([_STEPS, _CLIPPING], "2 errors; --fix fixes all 2 of them"),
        ([_STEPS, '"mine": 1'], f"1 error, 1 warning; --fix fixes 1 of them: {_REFUSED}"),
        (
            [_STEPS, '"zero_allow_untested_optimizers": true', '"mine": 1'],
            f"2 errors, 1 warning; --fix fixes 2 of them: {_REFUSED}, deepspeed-key-misspelt (ds.json:4)",
        ),
        (['"mine": 1'], "1 warning"),
    ],
)  # fmt: skip
def test_the_last_line_says_what_fix_would_fix(
    run_zerofit: RunZerofit, tmp_path: Path, entries: list[str], end: str
) -> None:
    first = '"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}'
    ds = "{\n" + ",\n".join([first, *entries]) + "\n}\n"
    finished = _check(run_zerofit, tmp_path, "--route native ds.json", ds=ds)
    assert finished.stdout.splitlines()[-1] == f"ds.json: {end}"


_DICTIONARY = """\
import deepspeed
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig
sizes = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}
settings = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 4,
    "zero_optimization": {
        "stage": 3,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
kept = HfDeepSpeedConfig(settings)
model = AutoModelForCausalLM.from_pretrained("mine")
engine = deepspeed.initialize(model=model, config=settings)[0]
"""
_COUNTS_1 = "zero-init-counts-one-rank"


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("", "", (_COUNTS_1, 6)),
        ('"train_batch_size": 16,\n', '"train_batch_size": "auto",\n', ("zero-init-reads-auto", 6)),
        ('_gpu": 1,\n', '_gpu": "auto",\n', ("zero-init-reads-auto", 7)),
        ('"stage": 3,', '"stage": 3, "overlap_com": True,', ("deepspeed-key-rejected", 10)),
        ('"stage": 3', '"stage": 3 + 0', None),
        ("kept =", 'settings["train_batch_size"] = 4\nkept =', None),
        ("engine =", "settings.update(more)\nengine =", None),
        ("kept =", "fill(settings)\nkept =", None),
        ('    "train_batch_size": 16,\n', "", None),
        ("HfDeepSpeedConfig(settings)", "HfDeepSpeedConfig({**sizes, **settings})", None),
    ],
)
def test_a_dictionary_of_the_script_is_read_as_a_file(
    run_zerofit: RunZerofit, tmp_path: Path, old: str, new: str, found: tuple[str, int] | None
) -> None:
    script = _DICTIONARY.replace(old, new, 1) if old else _DICTIONARY
    finished = _check(run_zerofit, tmp_path, "--num-processes 4 --fix train.py", script=script)
    assert (tmp_path / "train.py").read_text() == script
    assert finished.returncode == (found is not None)
    if found is None:
        assert "error[" not in finished.stdout
    else:
        assert f"error[{found[0]}]" in finished.stdout
        assert f"(dictionary in train.py:{found[1]})" in finished.stdout


def test_a_review_shows_a_dictionary_in_its_script(run_zerofit: RunZerofit, tmp_path: Path) -> None:
    script = _DICTIONARY.replace('"stage": 3,', '"stage": 3, "overlap_com": True,')
    finished = _check(run_zerofit, tmp_path, "--sarif train.py", script=script)
    results = json.loads(finished.stdout)["runs"][0]["results"]
    assert [result["locations"][0]["physicalLocation"] for result in results][-1] == {
        "artifactLocation": {"uri": "train.py"},
        "region": {"startLine": 10},
    }
    assert not any("fixes" in result for result in results)


@pytest.mark.parametrize(
    ("sizes", "fix"),
    [
        ({"train_batch_size": 16}, "leave train_batch_size out"),
        ({"train_micro_batch_size_per_gpu": 4}, "set per_device_train_batch_size to its value"),
        ({"gradient_accumulation_steps": 4}, "set gradient_accumulation_steps to its value"),
        ({"train_batch_size": 16, "gradient_accumulation_steps": 4}, "leave train_batch_size out"),
        ({"gradient_clipping": 0.5}, 'write gradient_clipping: "auto"'),
    ],
)
def test_no_advice_for_a_trainer_fails_in_zero_init(
    run_zerofit: RunZerofit, tmp_path: Path, sizes: dict[str, int], fix: str
) -> None:
    script = (
        _DICTIONARY.partition("sizes =")[0]
        + 'kept = HfDeepSpeedConfig("ds.json")\nmodel = AutoModelForCausalLM.from_pretrained("mine")\n'
        + _CALLS.format("max_grad_norm=1.0")
    )
    ds = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 3}, **sizes}
    finished = _check(run_zerofit, tmp_path, "--num-processes 4 train.py", script=script, ds=ds)
    assert "error[trainer-values-differ]" in finished.stdout
    assert f"  fix:   {fix}" in finished.stdout
    assert ('batch_size: "auto"' in finished.stdout) is False


@pytest.mark.parametrize(
    ("line", "flag"),
    [
        ("accelerate launch --num_processes --multi_gpu 2 train.py", "--num_processes"),
        ("accelerate launch --main_process_port --cpu 29501 train.py", "--main_process_port"),
        ("torchrun --nnodes --standalone 1 train.py", "--nnodes"),
        ("torchrun --standalone --nproc_per_node --no-python 4", "--nproc_per_node"),
        ("deepspeed --num_gpus --no_ssh 8 train.py", "--num_gpus"),
    ],
)
def test_a_value_that_came_loose_from_its_flag_is_no_missing_script(
    run_zerofit: RunZerofit, tmp_path: Path, line: str, flag: str
) -> None:
    finished = _check(run_zerofit, tmp_path, line, script=_PARSES)
    assert f"error[launch-flag-without-value]: a flag of the launcher lacks its value\n  found: {flag}\n" in (
        finished.stdout
    )
    assert "script-missing" not in finished.stdout + finished.stderr
    assert finished.returncode == 1
