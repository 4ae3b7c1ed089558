"""A launch line whose script is not here: its files and flags are checked against each other all the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zerofit.checking.check_run import check
from zerofit.core.errors import UserError

_ZERO2 = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}
_FP16 = json.dumps({**_ZERO2, "fp16": {"enabled": True}})
_BF16 = json.dumps({**_ZERO2, "bf16": {"enabled": True}})
_AUTO = json.dumps({**_ZERO2, "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}})
_ACCELERATE = (
    "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_machines: 1\nnum_processes: 8\n"
    "deepspeed_config:\n  deepspeed_config_file: {}\n"
)
_SFT = "--output_dir out --per_device_train_batch_size 4 --do_train --logging_steps 5 --save_strategy no"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder with configurations and no script, in which the test runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    for name, text in (("fp16.json", _FP16), ("bf16.json", _BF16), ("auto.json", _AUTO)):
        Path(name).write_text(text)
    Path("acc.yaml").write_text(_ACCELERATE.format("fp16.json"))
    Path("hosts").write_text("# two nodes\nnode1 slots=4\nnode2 slots=8\n")
    return tmp_path


def _found(line: str) -> list[str]:
    report = check(*line.split())
    told = [f"{finding.rule}: {finding.found}" for finding in report.findings]
    assert "launched-script-missing: gone.py" in told
    return [text for text in told if "launched-script-missing" not in text]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("torchrun gone.py --bf16 --deepspeed fp16.json", "fp16.enabled=true with --bf16"),
        ("deepspeed gone.py --bf16 True --deepspeed fp16.json", "fp16.enabled=true with --bf16 True"),
        ("torchrun gone.py --fp16 --deepspeed bf16.json", "bf16.enabled=true with --fp16"),
        ("torchrun gone.py --training_arguments.fp16 true --training_arguments.deepspeed bf16.json", "bf16"),
        (f"accelerate launch --config_file acc.yaml gone.py --bf16 {_SFT}", "fp16.enabled=true with --bf16"),
        (
            "deepspeed gone.py --per_device_train_batch_size 2 --deepspeed fp16.json --fp16",
            "",
        ),
        ("torchrun gone.py --bf16 --deepspeed auto.json", ""),
        ("torchrun gone.py --bf16 --deepspeed bf16.json", ""),
        ("torchrun gone.py --deepspeed bf16.json", ""),
        ("accelerate launch --config_file acc.yaml gone_no_trainer.py --bf16", None),
    ],
)
def test_training_arguments_are_held_against_the_file(line: str, expected: str | None) -> None:
    if expected is None:
        assert "trainer-values-differ" not in {finding.rule for finding in check(*line.split()).findings}
        return
    told = [text for text in _found(line) if "trainer-values-differ" in text]
    assert len(told) == bool(expected)
    assert all(expected in text for text in told)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--include node1:4", ["hostfile-lacks-slot: --include node1:4 with node1 slots=4 in hosts"]),
        ("--include=node2:0,7,9", ["hostfile-lacks-slot: --include=node2:0,7,9 with node2 slots=8 in hosts"]),
        ("--exclude node3", ["hostfile-lacks-slot: --exclude node3 with no node3 in hosts"]),
        (
            "--include node1:0@node2:8",
            ["hostfile-lacks-slot: --include node1:0@node2:8 with node2 slots=8 in hosts"],
        ),
        ("--num_gpus 8", ["hostfile-smaller-than-flags: --num_gpus 8 with node1 slots=4 in hosts"]),
        ("--num_nodes 3", ["hostfile-smaller-than-flags: --num_nodes 3 with 2 nodes in hosts"]),
        ("--include node1:0,3@node2:7", []),
        ("--exclude node2:0@node1", []),
        ("--num_nodes 2 --num_gpus 4", []),
        ("--include $WHERE", []),
    ],
)
def test_a_hostfile_is_held_against_the_flags(flags: str, expected: list[str]) -> None:
    assert _found(f"deepspeed --hostfile hosts {flags} gone.py") == expected


@pytest.mark.parametrize(
    ("hostfile", "found", "fix"),
    [
        ("node1 slots=8\nnode2 slot=8\n", "node2 slot=8 (bad:2)", "write node2 slots=8"),
        ("node1\nnode2\n", "node1 (bad:1)", "write node1 slots=GPUS"),
        ("# two nodes\n\nnode1:4\nnode2:4\n", "node1:4 (bad:3)", "write node1 slots=4"),
        ("node1 slots = 8\n", "node1 slots = 8 (bad:1)", "write node1 slots=8"),
        ("10.0.0.4 slots=2\n10.0.0.5, slots 2\n", "10.0.0.5, slots 2 (bad:2)", "write 10.0.0.5, slots=2"),
        (
            "node1 slots=4\nnode1 slots=4\n",
            "node1 slots=4, the second line of node1 (bad:2)",
            "keep one line for node1, with the number of its GPUs as slots",
        ),
        ("# node1 slots=4\n", "no nodes in bad (bad:1)", 'write a line "NODE slots=GPUS" for each node'),
        ("node1 slots=$GPUS\n", None, ""),
        ("{{ host }} slots=8\n", None, ""),
        ("node1  slots=8 max_slots=8\n", None, ""),
    ],
)
def test_a_hostfile_that_the_launcher_refuses_is_said(hostfile: str, found: str | None, fix: str) -> None:
    Path("bad").write_text(hostfile)
    findings = check("deepspeed", "--hostfile", "bad", "gone.py").findings
    told = [finding for finding in findings if finding.rule == "hostfile-refused"]
    assert [f"{finding.found} ({finding.place})" for finding in told] == ([found] if found else [])
    assert all(finding.fix.startswith(fix) for finding in told)
    # What the flags name is not held against a file that nobody can read.
    assert not {finding.rule for finding in findings} & {"hostfile-lacks-slot", "hostfile-smaller-than-flags"}


def test_a_hostfile_that_does_not_exist_is_said() -> None:
    found = _found("deepspeed --hostfile host --num_gpus 8 gone.py")
    assert found == ["hostfile-missing: --hostfile host"]


@pytest.mark.parametrize(
    "line",
    [
        "accelerate launch --config_file acc.yaml gone.py",
        "accelerate launch --num_processes 2 gone.py",
        "torchrun --nproc_per_node 2 gone.py --lr 1",
        "deepspeed gone.py --deepspeed auto.json",
        "zerofit launch --zero-stage 2 gone.py",
    ],
)
def test_a_missing_script_is_one_finding(line: str) -> None:
    report = check(*line.split())
    assert report.exit_code == 1
    assert [finding.rule for finding in report.findings].count("launched-script-missing") == 1


@pytest.mark.parametrize("line", ["accelerate launch gone.py", "torchrun gone.py", "gone.py"])
def test_a_line_that_is_nothing_but_a_missing_script_is_refused(line: str) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        check(*line.split())
    assert all(isinstance(error, UserError) for error in caught.value.exceptions)


@pytest.mark.parametrize(
    "words", [("run.sh", "out"), ("bash", "run.sh", "out"), ("run.sh", "32", "data", "x1")]
)
def test_words_behind_a_shell_script_are_its_arguments(words: tuple[str, ...]) -> None:
    Path("run.sh").write_text("torchrun gone.py --bf16 --deepspeed fp16.json --output_dir $1\n")
    assert {finding.rule for finding in check(*words).findings} == {"trainer-values-differ"}


def test_a_misspelt_file_behind_a_shell_script_is_still_refused() -> None:
    Path("run.sh").write_text("torchrun gone.py\n")
    with pytest.raises(ExceptionGroup):
        check("run.sh", "auto.jsn")
