"""check(): what `zerofit check` says, as a value for programs and notebooks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zerofit.checking.check_run import check
from zerofit.core.facts import GpuSpec, Machine

_NAMING = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n"
_ZERO2 = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}


def _file(folder: Path, **more: object) -> Path:
    path = folder / "ds.json"
    path.write_text(json.dumps({**_ZERO2, **more}))
    return path


def test_a_report_has_findings_an_exit_code_and_the_text_of_the_command(tmp_path: Path) -> None:
    path = _file(tmp_path, zero_optimization={"stage": 2, "offload_param": {"device": "cpu"}})
    report = check(path, route="accelerate")
    assert [finding.rule for finding in report.findings] == ["param-offload-needs-zero3"]
    assert (report.ok, report.exit_code) == (False, 1)
    assert str(report).startswith("error[param-offload-needs-zero3]: parameter offload needs ZeRO-3\n")
    assert str(report).endswith(f"\n{path}: 1 error")


def test_strict_fails_for_a_warning(tmp_path: Path) -> None:
    path = _file(tmp_path, bfloat16={"enabled": True})
    assert check(path, route="trainer").exit_code == 0
    assert not check(path, route="trainer", strict=True).ok


def test_what_the_user_says_of_the_run_counts(tmp_path: Path) -> None:
    path = _file(tmp_path, train_batch_size=16, gradient_accumulation_steps=2, fp16={"enabled": True})
    (batch,) = check(path, num_processes=4).findings
    assert batch.rule == "deepspeed-batch-sizes-disagree"
    assert [one.rule for one in check(path, on_cpu=True, num_processes=2).findings] == ["fp16-needs-gpu"]
    volta = GpuSpec(name="V100", memory_bytes=1, compute_capability=(7, 0))
    machine = Machine(gpus=(volta,), num_cpu_cores=1, host_memory_bytes=1, host_memory_available_bytes=1)
    path = _file(tmp_path, bf16={"enabled": True})
    assert [one.rule for one in check(path, machine=machine).findings] == ["bf16-needs-ampere"]
    with pytest.raises(ValueError, match="somebody"):
        check(path, route="somebody")


_LOADS = """
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
{}
args = TrainingArguments("out", {})
Trainer(model=model, args=args, train_dataset=data).train()
"""


def _on(name: str, capability: tuple[int, int]) -> Machine:
    gpu = GpuSpec(name=name, memory_bytes=1, compute_capability=capability)
    return Machine(gpus=(gpu,), num_cpu_cores=1, host_memory_bytes=1, host_memory_available_bytes=1)


@pytest.mark.parametrize(
    ("load", "arguments", "found"),
    [
        ("AutoModelForCausalLM.from_pretrained('m', torch_dtype=torch.bfloat16)", "fp16=True", True),
        ("AutoModelForCausalLM.from_config(config, dtype='bfloat16')", "", True),
        ("AutoModelForCausalLM.from_pretrained('m').to(torch.bfloat16)", "fp16=True", True),
        ("AutoModelForCausalLM.from_pretrained('m').bfloat16()", "fp16=True", True),
        ("AutoModelForCausalLM.from_pretrained('m', dtype=torch.float32)", "fp16=True", False),
        ("AutoModelForCausalLM.from_pretrained('m', dtype=torch.bfloat16).float()", "fp16=True", False),
        (
            "AutoModelForCausalLM.from_pretrained('m', dtype=torch.bfloat16).to(torch.float32)",
            "fp16=True",
            False,
        ),
        ("AutoModelForCausalLM.from_pretrained('m', dtype=torch.bfloat16)", "deepspeed='ds.json'", False),
        (
            "AutoModelForCausalLM.from_pretrained('m')\nif torch.cuda.is_bf16_supported():\n"
            "    model.to(torch.bfloat16)",
            "fp16=True",
            False,
        ),
        (
            "AutoModelForCausalLM.from_pretrained('m')\n"
            "judge = AutoModelForCausalLM.from_pretrained('m', dtype=torch.bfloat16)",
            "fp16=True",
            False,
        ),
    ],
)
def test_weights_loaded_in_bf16_train_in_it(tmp_path: Path, load: str, arguments: str, found: bool) -> None:
    script = tmp_path / "train.py"
    script.write_text(_LOADS.format(f"model = {load}", arguments))
    report = check(script, machine=_on("T4", (7, 5)))
    hits = [hit.found for hit in report.findings if hit.rule == "bf16-needs-ampere"]
    assert hits == ([f"{load} on T4 (compute capability 7.5)"] if found else [])
    assert "whether the ranks run on GPUs" not in str(report)
    newer = check(script, machine=_on("A100", (8, 0))).findings
    assert "bf16-needs-ampere" not in [hit.rule for hit in newer]


@pytest.mark.parametrize(("passes", "is_ignored"), [(["autosp"], False), ("no_autosp", True), (3, True)])
def test_only_a_list_of_passes_creates_sequence_groups(
    passes: object, is_ignored: bool, tmp_path: Path
) -> None:
    path = _file(tmp_path, sequence_parallel_size=2, compile={"passes": passes})
    found = [one.rule for one in check(path).findings]
    assert ("deepspeed-sequence-parallel-size-ignored" in found) is is_ignored


def test_a_command_and_a_script_are_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _file(tmp_path)
    Path("train.py").write_text("from accelerate import Accelerator\nAccelerator()\n")
    read = check("train.py", "--deepspeed", "ds.json").targets
    assert ([file.name for file in read.files], read.arguments) == (
        ["train.py", "ds.json"],
        ("--deepspeed", "ds.json"),
    )
    command = check("torchrun", "--nproc_pre_node", "2", "train.py")
    assert [finding.rule for finding in command.findings] == ["launch-unknown-flag"]


def test_trainer_reads_a_file_named_by_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _file(tmp_path, train_micro_batch_size_per_gpu="auto")
    Path("train.py").write_text("from package import train\ntrain()\n")
    line = "deepspeed train.py --evaluation_strategy no"
    assert [one.rule for one in check(*line.split(), "--deepspeed", "ds.json").findings] == [
        "training-argument-unknown"
    ]
    switch = check(*line.split(), "--deepspeed", "--deepspeed_config", "ds.json")
    assert switch.findings == ()


_TAKES_ALL = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--deepspeed")
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--fp16", action="store_true")
args = parser.parse_args()
"""


@pytest.mark.parametrize(
    ("source", "severities"),
    [
        ("from package import train\ntrain()\n", ["warning"]),
        (_TAKES_ALL, []),
        ("def parse():\n    import argparse\n    return argparse.ArgumentParser()\n", []),
    ],
)
def test_a_parser_of_the_script_may_take_the_file(
    source: str, severities: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _file(tmp_path)
    Path("train.py").write_text(source)
    report = check(*["torchrun", "train.py", "--deepspeed", "ds.json", "--bf16", "--fp16"])
    assert [one.severity.value for one in report.findings] == severities


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", _NAMING),
        ("a.py", "from transformers import TrainingArguments\nTrainingArguments(deepspeed='ds.json')\n"),
    ],
)
def test_a_folder_above_a_file_may_have_the_file_it_names(name: str, text: str, tmp_path: Path) -> None:
    _file(tmp_path)
    (folder := tmp_path / "configs").mkdir()
    file = folder / name
    file.write_text(text)
    assert [one.name for one in check(file).targets.files] == [str(file), str(tmp_path / "ds.json")]


@pytest.mark.parametrize(
    ("folder", "boundary", "is_found"),
    [
        ("a/b/c", None, True),
        ("a/b/c/d", None, False),
        ("a/b", ".git", True),
        ("a/b", "a/.git", False),
        ("a/b", "a/b/ds.json", True),  # a folder of that name
    ],
)
def test_how_far_above_a_file_the_one_that_it_names_is_looked_up(
    folder: str, boundary: str | None, is_found: bool, tmp_path: Path
) -> None:
    named = _file(tmp_path)
    (tmp_path / folder).mkdir(parents=True)
    if boundary is not None:
        (tmp_path / boundary).mkdir()
    (file := tmp_path / folder / "a.yaml").write_text(_NAMING)
    assert (str(named) in [one.name for one in check(file).targets.files]) is is_found


def test_what_lies_in_the_home_folder_is_not_a_projects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    named = _file(tmp_path)
    (tmp_path / "project").mkdir()
    for folder, is_found in ((tmp_path / "project", False), (tmp_path, True)):
        (file := folder / "a.yaml").write_text(_NAMING)
        assert (str(named) in [one.name for one in check(file).targets.files]) is is_found


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("from transformers import Trainer\nTrainer(model, tokenizer=t).train()\n", True),
        ("import trl\ntrl.SFTTrainer(model, tokenizer=t).train()\n", False),
        ("import transformers as t\nclass Trainer(t.Trainer): ...\nTrainer(tokenizer=t).train()\n", False),
    ],
)
def test_a_trainer_takes_no_tokenizer(source: str, is_found: bool, tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text(source)
    assert [(one.rule, one.fix) for one in check(script).findings] == [
        ("training-argument-unknown", "write processing_class=tokenizer")
    ] * is_found


def test_deepspeed_prefers_the_optimizer_that_it_is_given(tmp_path: Path) -> None:
    section = {"type": "Adam", "params": {"weight_decay": 0.1}}
    file, script = _file(tmp_path, optimizer=section), tmp_path / "train.py"
    for arguments, found in (
        ("model_parameters=model.parameters()", ["adam-section-decays-as-adamw"]),
        ("optimizer=torch.optim.Adam(model.parameters())", []),
        ("torch.optim.Adam(model.parameters())", []),
        ("make_optimizer(model)", []),
        ("optimizer=None", ["adam-section-decays-as-adamw"]),
        ("None, model.parameters()", ["adam-section-decays-as-adamw"]),
    ):
        source = f"import deepspeed, torch\ndeepspeed.initialize(args, model, {arguments})\n"
        script.write_text(source)
        assert [one.rule for one in check(file, script).findings] == found


def test_a_notebook_shows_the_text_with_its_brackets_escaped(tmp_path: Path) -> None:
    report = check("-", stdin=lambda: b'{"mine<b>": 1, "train_batch_size": 8, "zero_optimization": {}}')
    assert report._repr_html_().startswith("<pre>warning[deepspeed-key-ignored]")
    assert "mine&lt;b&gt;=1   (standard input:1)" in report._repr_html_()
