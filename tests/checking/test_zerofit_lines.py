"""`zerofit check zerofit launch ...`: its flags, the launch line behind them, and the files of both."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerofit.checking.check_run import check
from zerofit.core.errors import UserError

_FILES = {
    "train.py": "",
    "zero2.yaml": "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  zero_stage: 2\n",
    "unknown.yaml": "distributed_type: MULTI_GPU\nnum_proceses: 2\n",
    "cpu.yaml": "distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 2\nmixed_precision: fp16\n",
    "ds.json": '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}',
    "broken.json": '{"zero_optimization": {"stage": 3}',
    "refused.json": '{"zero_optimization": {"stage": 7}}',
}
_OFFLOAD = "--offload-param cpu"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "none"))
    for name, text in _FILES.items():
        (tmp_path / name).write_text(text)


@pytest.mark.parametrize(
    ("line", "rules"),
    [
        ("accelerate launch --config_file zero2.yaml train.py", ()),
        ("--deepspeed ds.json train.py", ()),  # zerofit gives the batch size, and saves whole weights
        ("--config-file zero2.yaml torchrun --nproc_per_node 2 train.py", ()),
        ("accelerate launch --use_deepspeed --deepspeed_config_file ds.json train.py", ()),
        ("--deepspeed gone.json train.py", ("named-file-missing",)),
        ("accelerate launch --config_file gone.yaml train.py", ("named-file-missing",)),
        ("accelerate launch --config_file unknown.yaml train.py", ("accelerate-unknown-key",)),
        ("--deepspeed broken.json python train.py", ("deepspeed-syntax",)),
        ("--deepspeed-config-file refused.json train.py", ("deepspeed-value-refused",)),
        ("--cpu accelerate launch --mixed_precision fp16 --num_processes 2 train.py", ("fp16-needs-gpu",)),
        ("accelerate launch --config_file cpu.yaml train.py", ("fp16-needs-gpu",)),
        (f"--no-capture {_OFFLOAD} --config-file zero2.yaml train.py", ("param-offload-needs-zero3",)),
        (f"{_OFFLOAD} --config-file zero2.yaml train.py", ()),  # the planner chooses the stage
        (
            f"{_OFFLOAD} accelerate launch --use_deepspeed --zero_stage 2 train.py",
            ("param-offload-needs-zero3",),
        ),
        (f"{_OFFLOAD} --zero-stage 3 accelerate launch --use_deepspeed --zero_stage 2 train.py", ()),
        ("--engine deepspeed --zero-stage 3 torchrun --nproc_per_node 2 train.py", ()),
        ("--zero-stag 3 accelerate launch train.py", ("launch-unknown-flag",)),
        ("--bogus accelerate launch train.py", ("launch-unknown-flag",)),
        ("torchrun --nproc_per_node 2 nothing.py", ("launched-script-missing",)),
    ],
)
def test_a_line_of_zerofit_is_read_as_launch_reads_it(line: str, rules: tuple[str, ...]) -> None:
    report = check("zerofit", "launch", *line.split())
    assert tuple(finding.rule for finding in report.findings) == rules


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("accelerate launch --use_megatron_lm train.py", "launcher-flag-not-taken"),
        ("accelerate launch --num_processes two train.py", "launch-flag-value"),
        ("srun accelerate launch train.py", "runner-behind-zerofit"),
        ("deepspeed --include node-0@node-1 train.py", "launcher-flag-not-taken"),
    ],
)
def test_what_launch_can_not_run_check_refuses_alike(line: str, rule: str) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        check("zerofit", "launch", *line.split())
    assert [error.rule for error in caught.value.exceptions if isinstance(error, UserError)] == [rule]


def test_variables_of_a_shell_script_stay_open(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        "#!/bin/bash\n"
        "zerofit launch --micro-batch-size 2 \\\n"
        "  accelerate launch --config_file unknown.yaml --num_processes $N train.py --lr 1\n"
        "zerofit launch torchrun --nproc_per_node $GPUS train.py\n"
    )
    report = check("run.sh")
    assert [finding.rule for finding in report.findings] == ["accelerate-unknown-key"]
    assert report.verdict.notes == ()
