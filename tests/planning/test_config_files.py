"""Configuration files: plan and launch read and refuse them as accelerate and DeepSpeed do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from zerofit.checking.check_run import check
from zerofit.core.errors import UserError
from zerofit.core.observer import Observer
from zerofit.planning.resolve import Verb, resolve
from zerofit.planning.sources.config_files import ConfigFiles, read_config_files

_TOP = "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_machines: 1\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "none"))
    Path("train.py").write_text("")
    return tmp_path


def _read(name: str) -> ConfigFiles:
    is_yaml = name.endswith("yaml")
    files = read_config_files(
        config_file=name if is_yaml else None,
        deepspeed_file=None if is_yaml else name,
        takes_default=False,
    )
    assert files is not None
    return files


def _refused(name: str) -> list[str]:
    """Return the rules by which a file is refused; empty if it is read."""
    try:
        _read(name)
    except ExceptionGroup as group:
        return [error.rule for error in group.exceptions if isinstance(error, UserError)]
    return []


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("gradient_accumulation_steps", "'16'", 16),
        ("gradient_accumulation_steps", '"2"', 2),
        ("gradient_accumulation_steps", "16", 16),
        ("gradient_accumulation_steps", "'auto'", None),
        ("gradient_accumulation_steps", "", None),
        ("gradient_clipping", "'0.5'", 0.5),
        ("gradient_clipping", '"1"', 1),
        ("gradient_clipping", "1e-1", 0.1),  # text in YAML 1.1
        ("gradient_clipping", "0.3", 0.3),
        ("gradient_clipping", "auto", None),
        ("zero_stage", "'3'", 3),
    ],
)
def test_numbers_in_quotes_are_read_as_accelerate_converts_them(name: str, text: str, value: Any) -> None:
    section = {"zero_stage": "2", name: text}
    lines = "".join(f"  {key}: {said}\n" for key, said in section.items())
    Path("acc.yaml").write_text(f"{_TOP}num_processes: '8'\ndeepspeed_config:\n{lines}")
    files = _read("acc.yaml")
    assert files.overrides.get(name) == value
    assert files.nodes["num_processes"].value == 8


_ACCELERATE: dict[str, list[str]] = {
    "zero_stage: 3\ngradient_accumulation_steps: 2\noffload_param_device: cpu\n": ["accelerate-unknown-key"],
    "deepspeed_config: {}\nzero3_init_flag: true\n": ["accelerate-unknown-key"],
    "num_proceses: 4\n": ["accelerate-unknown-key"],
    "per_device_train_batch_size: 4\n": ["accelerate-unknown-key"],
    "fsdp_version: 2\nlearning_rate: 1.0e-4\n": ["accelerate-unknown-key"] * 2,
    "mixed_precision: no\n": ["accelerate-value-type"],
    "mixed_precision: float16\n": ["accelerate-value-choice"],
    "deepspeed_config:\n  gradient_accumulation_steps: 'four'\n": ["accelerate-value-choice"],
    "deepspeed_config:\n  gradient_accumulation_steps: '4.0'\n": ["accelerate-value-choice"],
    "deepspeed_config:\n  gradient_clipping: 'none'\n": ["accelerate-value-choice"],
    "deepspeed_config:\n  gradient_clipping: '1,0'\n": ["accelerate-value-choice"],
    "deepspeed_config:\n  gradient_clipping: true\n": ["accelerate-value-type"],
    "deepspeed_config:\n  offload_optimizer_device: disk\n": ["accelerate-value-choice"],
    "mixed_precision: 'no'\nmain_training_function: main\nsame_network: true\ntpu_zone: null\n": [],
    "deepspeed_config:\n  gradient_clipping: AUTO\n  zero3_init_flag: 'True'\n": [],
    "deepspeed_config:\n  offload_param_device: CPU\n  zero_stage: '3'\n  some_day: 1\n": [],
    "fsdp_config: {}\ndowncast_bf16: 'no'\nrdzv_backend: static\nuse_cpu: false\nmachine_rank: 0\n": [],
}


@pytest.mark.parametrize("text", _ACCELERATE)
def test_a_file_that_accelerate_refuses_is_refused_by_plan_and_check_alike(text: str) -> None:
    Path("acc.yaml").write_text(f"{_TOP}num_processes: 2\n{text}")
    errors = [finding for finding in check("acc.yaml").findings if finding.severity == "error"]
    assert _refused("acc.yaml") == [error.rule for error in errors] == _ACCELERATE[text]


_DEEPSPEED: tuple[tuple[dict[str, Any], list[str]], ...] = (
    ({"gradient_accumulation_steps": "2"}, ["deepspeed-value-refused"]),
    ({"gradient_clipping": "0.5"}, ["deepspeed-value-refused"]),
    ({"train_micro_batch_size_per_gpu": "8"}, ["deepspeed-value-refused"]),
    ({"zero_optimization": {"stage": 5}}, ["deepspeed-value-refused"]),
    ({"zero_optimization": {"offload_param": {"device": "gpu"}}}, ["deepspeed-value-refused"]),
    ({"train_batch_size": "4", "gradient_clipping": "1"}, ["deepspeed-value-refused"] * 2),
    ({"gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}, []),
    ({"gradient_clipping": 1, "steps_per_print": 10, "train_batch_size": 16}, []),
    ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "bf16": {"enabled": "auto"}}, []),
)


@pytest.mark.parametrize(("document", "rules"), _DEEPSPEED)
def test_a_file_that_deepspeed_refuses_is_refused(document: dict[str, Any], rules: list[str]) -> None:
    Path("ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, **document}))
    assert _refused("ds.json") == rules


@pytest.mark.parametrize("verb", [Verb.PLAN, Verb.LAUNCH, Verb.TUNE])
@pytest.mark.parametrize("captures", [True, False])
@pytest.mark.parametrize(
    "line",
    [
        "deepspeed --num_gpus 4 train.py --deepspeed ds.json",
        "torchrun --nproc_per_node 4 train.py --deepspeed=ds.json --bf16",
        "accelerate launch --num_processes 4 train.py --deepspeed_config ds.json",
        "python train.py --deepspeed ds.json",
        "train.py --deepspeed ds.json",
    ],
)
def test_the_file_in_a_script_s_arguments_speaks_as_any_other(line: str, captures: bool, verb: Verb) -> None:
    document = {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 4}
    Path("ds.json").write_text(json.dumps(document))
    spec = resolve(tuple(line.split()), verb=verb, captures=captures, gpus=None)
    assert spec.files is not None
    assert re.fullmatch(r"ds.json sets .*gradient_accumulation_steps 4", spec.files.line)
    assert spec.overrides.where("gradient_accumulation_steps") == "ds.json:1"
    Path("ds.json").write_text(json.dumps({**document, "gradient_accumulation_steps": "4"}))
    with pytest.raises(ExceptionGroup) as caught:
        resolve(tuple(line.split()), verb=verb, captures=captures, gpus=None)
    assert [str(error).splitlines()[1] for error in caught.value.exceptions] == [
        '  found: gradient_accumulation_steps="4"   (ds.json:1)'
    ]


_PREPARES = """\
import torch
from accelerate import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
"""
_ADAM = {"type": "AdamW", "params": {"lr": 0.1}}
_WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}}
_AUTO = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}
_SECOND = "deepspeed-auto-unresolved (ds.json:1)"


class _Heard(Observer):
    def __init__(self, said: list[str]) -> None:
        self._said = said

    def say(self, sentence: str) -> None:
        self._said.append(sentence)


@pytest.mark.parametrize(
    ("sections", "rules"),
    [
        ({"scheduler": _WARMUP}, "two-schedulers (ds.json:1)"),
        ({"optimizer": _ADAM}, "two-optimizers (ds.json:1)"),
        ({"scheduler": _AUTO}, f"two-schedulers (ds.json:1), {_SECOND}"),
        (
            {"optimizer": _ADAM, "scheduler": _WARMUP},
            "two-optimizers (ds.json:1), two-schedulers (ds.json:1)",
        ),
        ({}, None),
        ({"gradient_clipping": 1.0}, None),
    ],
)
@pytest.mark.parametrize("verb", [Verb.PLAN, Verb.LAUNCH])
def test_a_launch_says_that_accelerate_would_refuse_the_file_that_it_replaces(
    sections: dict[str, Any], rules: str | None, verb: Verb
) -> None:
    Path("train.py").write_text(_PREPARES)
    Path("ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, **sections}))
    Path("acc.yaml").write_text(
        f"{_TOP}num_processes: 2\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n"
    )
    said: list[str] = []
    line = ("accelerate", "launch", "--config_file", "acc.yaml", "train.py")
    resolve(line, verb=verb, captures=True, gpus=None, observer=_Heard(said))
    expected = f"plain accelerate would end this run: {rules}; zerofit's own file replaces it"
    assert [text for text in said if text.startswith("plain")] == ([] if rules is None else [expected])
