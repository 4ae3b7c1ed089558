"""zerofit check --fix: what it writes, what it leaves alone, and that a backup of each file stays."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest
from runs import RunZerofit

from zerofit.checking.engine import Finding, Verdict
from zerofit.checking.fix_files import Fix, diff_of, find_fixes, write_fixes
from zerofit.checking.report import Report
from zerofit.checking.rule import Severity
from zerofit.checking.targets import TargetFile, Targets, fixable_together
from zerofit.configs.document import Edit, FileKind, RemoveKey, RenameKey, SetValue
from zerofit.configs.text.read import read_document
from zerofit.core.errors import UserError
from zerofit.core.setting import Confidence

# The key below the misspelt one is misspelt too, which shows only when the first is mended.
_BEFORE = (
    '{\r\n  "train_micro_batch_size_per_gpu": 4,\r\n'
    '  "zero_optimisation": {"stage": 3, "ofload_param": {"device": "cpu"}},\r\n'
    '  "gradient_cliping" : 1.0\r\n}'
)
_AFTER = (
    _BEFORE.replace("optimisation", "optimization")
    .replace("ofload", "offload")
    .replace("cliping", "clipping")
)
_DIFF = """\
--- {name}
+++ {name}
@@ -1,5 +1,5 @@
 {{\r
   "train_micro_batch_size_per_gpu": 4,\r
-  "zero_optimisation": {{"stage": 3, "ofload_param": {{"device": "cpu"}}}},\r
-  "gradient_cliping" : 1.0\r
+  "zero_optimization": {{"stage": 3, "offload_param": {{"device": "cpu"}}}},\r
+  "gradient_clipping" : 1.0\r
 }}
\\ No newline at end of file
"""


def _write(path: Path, text: str = _BEFORE) -> Path:
    path.write_bytes(text.encode())
    return path


def _fix(run: RunZerofit, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run("check", "--route", "accelerate", "--fix", *words, cwd=folder)


def _texts(folder: Path) -> dict[str, str]:
    return {path.name: path.read_bytes().decode() for path in folder.iterdir()}


def test_a_fix_keeps_everything_else_and_a_backup(run_zerofit: RunZerofit, tmp_path: Path) -> None:
    _write(tmp_path / "ds.json").chmod(0o640)
    finished = _fix(run_zerofit, tmp_path, "ds.json")
    assert _texts(tmp_path) == {"ds.json": _AFTER, "ds.json.bak": _BEFORE}
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o640}
    diff = _DIFF.format(name="ds.json").replace("\r\n", "\n")  # as Python reads a pipe
    assert finished.stderr == f"{diff}zerofit: fixed ds.json; original: ds.json.bak\n"
    assert "deepspeed-key-misspelt" not in finished.stdout


def test_dry_run_prints_the_diff_and_writes_nothing(run_zerofit: RunZerofit, tmp_path: Path) -> None:
    _write(tmp_path / "ds.json")
    finished = _fix(run_zerofit, tmp_path, "--dry-run", "ds.json")
    assert (finished.stdout, finished.stderr) == (_DIFF.format(name="ds.json").replace("\r\n", "\n"), "")
    assert finished.returncode == 0
    assert _texts(tmp_path) == {"ds.json": _BEFORE}


def test_the_diff_is_one_that_patch_takes(run_zerofit: RunZerofit, tmp_path: Path) -> None:
    text = _BEFORE.replace("\r\n", "\n")
    _write(tmp_path / "ds.json", text)
    diff = _fix(run_zerofit, tmp_path, "--dry-run", "ds.json").stdout
    subprocess.run(["patch", "-s", "-p0"], cwd=tmp_path, input=diff, text=True, check=True)
    assert (tmp_path / "ds.json").read_text() == _AFTER.replace("\r\n", "\n")


@pytest.mark.parametrize(("enabled", "is_left"), [("true", False), ('"auto"', True), ("false", True)])
def test_a_precision_is_taken_out_where_the_deepspeed_file_has_it(
    run_zerofit: RunZerofit, tmp_path: Path, enabled: str, is_left: bool
) -> None:
    ranks = "distributed_type: DEEPSPEED\nnum_processes: 2\n"
    file = f"{ranks}deepspeed_config:\n  deepspeed_config_file: ds.json  # ours\n  zero_stage: 2\n"
    _write(tmp_path / "ds.json", f'{{"zero_optimization": {{"stage": 2}}, "bf16": {{"enabled": {enabled}}}}}')
    _write(tmp_path / "acc.yaml", f"{file}mixed_precison: bf16\n")
    _fix(run_zerofit, tmp_path, "acc.yaml")
    left = "mixed_precision: bf16\n" if is_left else ""
    assert (tmp_path / "acc.yaml").read_text() == file.replace("  zero_stage: 2\n", "") + left


def test_nothing_to_fix(run_zerofit: RunZerofit, tmp_path: Path) -> None:
    _write(tmp_path / "ds.json", _AFTER)
    finished = _fix(run_zerofit, tmp_path, "ds.json")
    assert finished.stderr == "zerofit: nothing to fix: no finding has exactly one right answer\n"
    assert _texts(tmp_path) == {"ds.json": _AFTER}


_CONTRADICTING = (
    '{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "fp16": {"enabled": true}%s}'
)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (_CONTRADICTING % "", 1),
        (_CONTRADICTING % ', "zero_optimization": {"offload_param": {"device": "cpu"}}', 1),
        (_AFTER, 0),
    ],
)
def test_a_dry_run_without_a_fix_is_a_check(
    run_zerofit: RunZerofit, tmp_path: Path, text: str, code: int
) -> None:
    _write(tmp_path / "ds.json", text)
    finished, checked = (_fix(run_zerofit, tmp_path, *words, "ds.json") for words in (["--dry-run"], []))
    assert finished.stderr == "zerofit: nothing to fix: no finding has exactly one right answer\n"
    assert (finished.returncode, finished.stdout) == (code, checked.stdout)
    assert ("error[deepspeed-fp16-and-bf16]" in finished.stdout) == bool(code)


def test_a_dry_run_tells_the_errors_that_its_fix_leaves(run_zerofit: RunZerofit, tmp_path: Path) -> None:
    text = _CONTRADICTING % ', "gradient_cliping": 1.0'
    _write(tmp_path / "ds.json", text)
    finished = _fix(run_zerofit, tmp_path, "--dry-run", "ds.json")
    assert finished.stdout.startswith("--- ds.json\n+++ ds.json\n")
    assert finished.stderr.startswith("zerofit: this would be left:\n\n")
    assert "error[deepspeed-fp16-and-bf16]" in finished.stderr
    assert "deepspeed-key-misspelt" not in finished.stderr
    assert finished.returncode == 1
    assert (tmp_path / "ds.json").read_text() == text


def test_no_backup_is_ever_overwritten(run_zerofit: RunZerofit, tmp_path: Path) -> None:
    for name in ("ds.json.bak", "ds.json.bak1"):
        _write(tmp_path / name, "mine")
    _write(tmp_path / "ds.json")
    _fix(run_zerofit, tmp_path, "ds.json")
    assert _texts(tmp_path) == {
        "ds.json": _AFTER,
        "ds.json.bak": "mine",
        "ds.json.bak1": "mine",
        "ds.json.bak2": _BEFORE,
    }


def test_a_link_stays_a_link_and_its_target_is_fixed(run_zerofit: RunZerofit, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    _write(tmp_path / "real/ds.json")
    (tmp_path / "link.json").symlink_to("real/ds.json")
    finished = _fix(run_zerofit, tmp_path, "link.json")
    assert finished.stderr.endswith("zerofit: fixed link.json; original: real/ds.json.bak\n")
    assert (tmp_path / "link.json").is_symlink()
    assert _texts(tmp_path / "real") == {"ds.json": _AFTER, "ds.json.bak": _BEFORE}


def test_a_read_only_file_is_refused_and_no_other_is_written(run_zerofit: RunZerofit, tmp_path: Path) -> None:
    _write(tmp_path / "a.json")
    _write(tmp_path / "b.json").chmod(0o440)
    finished = _fix(run_zerofit, tmp_path, "a.json", "b.json")
    assert finished.stderr.endswith(
        "error[fix-not-written]: a file can't be fixed\n"
        "  found: b.json: it is read-only\n"
        "  why:   someone protected it from changes\n"
        "  fix:   make it writable, or see the change with check --fix --dry-run\n"
    )
    assert finished.returncode == 2
    assert _texts(tmp_path) == {"a.json": _BEFORE, "b.json": _BEFORE}


def test_a_file_that_changed_meanwhile_is_left_alone(tmp_path: Path) -> None:
    path = _write(tmp_path / "ds.json", "{}")
    with pytest.raises(UserError, match="a file can't be fixed") as error:
        write_fixes((Fix(name=str(path), before='{"a": 1}', after='{"b": 1}'),))
    assert error.value.found == f"{path}: it has changed since the check"
    assert _texts(tmp_path) == {"ds.json": "{}"}


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_stop_at_any_time_leaves_the_file_whole_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: BaseException
) -> None:
    path = _write(tmp_path / "ds.json", "{}")

    def stop(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, call, stop)
    with pytest.raises((KeyboardInterrupt, UserError)):
        write_fixes((Fix(name=str(path), before="{}", after='{"b": 1}'),))
    assert _texts(tmp_path) == {"ds.json": "{}"}


def _looking_at(path: Path, *edits: Edit) -> Callable[[Mapping[str, str]], Report]:
    """Return what checks one file, with a finding of these edits until they are made."""

    def look(overlay: Mapping[str, str]) -> Report:
        document = read_document(overlay.get(os.path.realpath(path), path.read_text()), name=str(path))
        finding = _finding("made-up", *edits)
        file = TargetFile(name=str(path), kind=FileKind.DEEPSPEED, document=document)
        return Report(targets=Targets(files=(file,)), verdict=Verdict(findings=(finding,) * (not overlay)))

    return look


def test_edits_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    path = _write(tmp_path / "ds.json", '{"bf16": {"enabled": true}}')
    edits = [SetValue(document=str(path), path=("bf16", "enabled"), value=value) for value in (1, True)]
    with pytest.raises(UserError) as error:
        find_fixes(_looking_at(path, *edits))
    assert str(error.value) == (
        "error[fix-not-possible]: the file can't be fixed\n"
        f"  found: {path}: two different changes of bf16.enabled are requested\n"
        "  why:   --fix only makes changes with exactly one right answer\n"
        "  fix:   change it manually, as described in the findings of zerofit check"
    )


_TRAINS = (
    "from transformers import HfArgumentParser, Trainer, TrainingArguments\n"
    "(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()\n"
    "Trainer(args=args).train()\n"
)
_STEPS = "gradient_accumulation_steps"
_ONE_RANK = "--per_device_train_batch_size 8"


@pytest.mark.parametrize(
    ("written", "arguments", "fixed", "rules"),
    [
        (f'"{_STEPS}": "4"', f"--{_STEPS} 4", f'"{_STEPS}": 4', ["deepspeed-value-refused"]),
        (f'"{_STEPS}": "4"', f"--{_STEPS} 2", f'"{_STEPS}": "auto"', ["deepspeed-value-refused"]),
        (f'"{_STEPS}": 4', f"--{_STEPS} 2", f'"{_STEPS}": "auto"', ["trainer-values-differ"]),
        (
            '"gradient_clipping": "0.5"',
            "--max_grad_norm 0.5",
            '"gradient_clipping": 0.5',
            ["deepspeed-value-refused"],
        ),
        (
            f'"gradient_clipping": " 1e0 ", "{_STEPS}": "2"',
            f"--{_STEPS} 2",
            f'"gradient_clipping": 1, "{_STEPS}": 2',
            ["deepspeed-value-refused", "deepspeed-value-refused"],
        ),
        ('"bf16": {"enabled": "true"}', "--bf16", '"bf16": {"enabled": true}', ["trainer-values-differ"]),
        ('"fp16": {"enabled": "True"}', "--fp16", '"fp16": {"enabled": true}', ["trainer-values-differ"]),
        ('"bf16": {"enabled": "true"}', "", '"bf16": {"enabled": "true"}', []),  # auto, false or --bf16
    ],
)
def test_a_key_has_one_fix_and_the_count_is_what_fix_does(
    written: str, arguments: str, fixed: str, rules: list[str], run_zerofit: RunZerofit, tmp_path: Path
) -> None:
    text = '{"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 2}, @}\n'
    _write(tmp_path / "ds.json", text.replace("@", written))
    _write(tmp_path / "sft.py", _TRAINS)
    line = [
        "ds.json",
        "sft.py",
        "--deepspeed",
        "ds.json",
        "--output_dir",
        "o",
        *_ONE_RANK.split(),
        *arguments.split(),
    ]
    found = json.loads(run_zerofit("check", "--json", *line, cwd=tmp_path).stdout)["findings"]
    keys = [finding["found"].partition("=")[0] for finding in found]
    assert len(keys) == len(set(keys))
    last = run_zerofit("check", *line, cwd=tmp_path).stdout.splitlines()[-1]
    run_zerofit("check", "--fix", *line, cwd=tmp_path)
    assert (tmp_path / "ds.json").read_text() == text.replace("@", fixed)
    left = json.loads(run_zerofit("check", "--json", *line, cwd=tmp_path).stdout)["findings"]
    assert [finding["rule"] for finding in found if finding not in left] == rules
    assert len(rules) in (0, len(found))
    assert last.partition("; ")[2] == {0: "", 1: "--fix fixes it", 2: "--fix fixes all 2 of them"}[len(rules)]


@pytest.mark.parametrize(
    ("line", "fixed"),
    [
        ("num_processes: '8'", "num_processes: '8'"),  # accelerate converts it
        ('num_processes: "8"', 'num_processes: "8"'),
        ("machine_rank: '0'", "machine_rank: '0'"),
        ("num_machines: '1'", "num_machines: 1"),
        ("main_process_port: '29500'", "main_process_port: 29500"),
        ("gpu_ids: 0", "gpu_ids: '0'"),
    ],
)
def test_what_accelerate_converts_keeps_its_quotes(
    line: str, fixed: str, run_zerofit: RunZerofit, tmp_path: Path
) -> None:
    rest = "" if "num_processes" in line else "num_processes: 8\n"
    text = f"compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: bf16\n{rest}"
    _write(tmp_path / "acc.yaml", f"{text}{line}\n")
    run_zerofit("check", "--fix", "acc.yaml", cwd=tmp_path)
    assert (tmp_path / "acc.yaml").read_text() == f"{text}{fixed}\n"


def _finding(rule: str, *edits: Edit, confidence: Confidence = Confidence.CERTAIN) -> Finding:
    return Finding(
        rule=rule,
        severity=Severity.ERROR,
        confidence=confidence,
        summary="",
        found="",
        why="",
        fix="",
        see="",
        place=None,
        edits=edits,
    )


@pytest.mark.parametrize(
    ("text", "wanted", "fixed", "after"),
    [
        (  # each a key, a value (None removes it), and whether it is certain
            '{"a": 1}',
            [("a", 2, True), ("a", 3, False)],
            [0],
            '{"a": 2}',
        ),
        ('{"a": 1}', [("a", 2, False), ("a", 3, True)], [1], '{"a": 3}'),
        ('{"a": 1}', [("a", 2, True), ("a", 3, True)], [0], '{"a": 2}'),
        ('{"a": 1}', [("a", 2, False), ("a", 2, True)], [0, 1], '{"a": 2}'),
        ('{"a": 1, "b": 1}', [("a", 2, False), ("b", 2, True), ("a", None, True)], [1, 2], '{"b": 2}'),
        ('{"a": 1, "b": 1}', [("a", 2, True), ("b", None, True)], [0, 1], '{"a": 2}'),
        ('{"a": {/* c */}, "b": 1}', [("a.x", 1, True), ("b", 2, True)], [1], '{"a": {/* c */}, "b": 2}'),
    ],
)
def test_of_two_changes_of_a_key_the_certain_one_is_made(
    text: str, wanted: list[tuple[str, int | None, bool]], fixed: list[int], after: str, tmp_path: Path
) -> None:
    path = _write(tmp_path / "ds.json", text)
    findings = []
    for number, (name, value, is_certain) in enumerate(wanted):
        key = tuple(name.split("."))
        edit = (
            RemoveKey(document=str(path), path=key)
            if value is None
            else SetValue(document=str(path), path=key, value=value)
        )
        confidence = Confidence.CERTAIN if is_certain else Confidence.LIKELY
        findings.append(_finding(f"rule-{number}", edit, confidence=confidence))

    def look(overlay: Mapping[str, str]) -> Report:
        document = read_document(overlay.get(os.path.realpath(path), text), name=str(path))
        file = TargetFile(name=str(path), kind=FileKind.DEEPSPEED, document=document)
        verdict = Verdict(findings=() if overlay else tuple(findings))
        return Report(targets=Targets(files=(file,)), verdict=verdict)

    kept = fixable_together(findings, look({}).targets.files)
    assert [findings.index(finding) for finding in kept] == fixed
    (fix,) = find_fixes(look)
    assert fix.after == after
    said = (
        f"all {len(fixed)} of them"
        if len(fixed) == len(wanted)
        else f"{len(fixed)} of them: rule-{fixed[0]} "
    )
    assert f"--fix fixes {said}" in str(look({})).splitlines()[-1]


def test_edits_of_several_kinds_make_one_diff(tmp_path: Path) -> None:
    path = _write(tmp_path / "ds.json", '{\n  "amp": {},\n  "bf17": {"enabled": false}\n}\n')
    edits = (
        RemoveKey(document=str(path), path=("amp",)),
        RenameKey(document=str(path), path=("bf17",), key="bf16"),
        SetValue(document=str(path), path=("bf17", "enabled"), value=True),
    )
    (fix,) = find_fixes(_looking_at(path, *edits))
    assert diff_of(fix) == (
        f"--- {path}\n+++ {path}\n@@ -1,4 +1,3 @@\n"
        ' {\n-  "amp": {},\n-  "bf17": {"enabled": false}\n+  "bf16": {"enabled": true}\n }\n'
    )


def test_a_file_that_only_another_one_names_is_left_alone(run_zerofit: RunZerofit, tmp_path: Path) -> None:
    wrong = '{"train_batch_size": 8, "zero_optimisation": {"stage": 2}}\n'
    shared = _write(tmp_path / "ds.json", wrong)
    _write(
        tmp_path / "acc.yaml",
        "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config: {deepspeed_config_file: ds.json}\n",
    )
    left = run_zerofit("check", "--fix", "acc.yaml", cwd=tmp_path)
    assert "zerofit: nothing to fix" in left.stderr
    assert shared.read_text() == wrong
    assert "error[deepspeed-key-misspelt]" in left.stdout
    assert "--fix mends" not in left.stdout
    run_zerofit("check", "--fix", "acc.yaml", "ds.json", cwd=tmp_path)
    assert shared.read_text() == wrong.replace("zero_optimisation", "zero_optimization")


def test_edits_of_what_is_no_file_are_left_out(tmp_path: Path) -> None:
    document = read_document("{}", name="--deepspeed")
    file = TargetFile(name="--deepspeed", kind=FileKind.DEEPSPEED, document=document)
    edit = SetValue(document="--deepspeed", path=("a",), value=1)
    looked = _looking_at(_write(tmp_path / "ds.json", "{}"), edit)({})
    checked = Report(targets=Targets(files=(file,)), verdict=looked.verdict)
    assert find_fixes(lambda _: checked) == ()


def _wait_until_asleep(pid: int) -> None:
    process, last = psutil.Process(pid), None
    while last != (last := (process.status(), process.cpu_times()[:2])) or last[0] != psutil.STATUS_SLEEPING:
        time.sleep(0.1)


def test_the_signal_of_ctrl_c_ends_the_command_with_130(tmp_path: Path) -> None:
    fifo = tmp_path / "ds.json"
    os.mkfifo(fifo)
    process = subprocess.Popen([sys.executable, "-m", "zerofit", "check", str(fifo)], stderr=subprocess.PIPE)
    writer = os.open(fifo, os.O_WRONLY)  # returns when the command has opened the file
    _wait_until_asleep(process.pid)  # a signal before the reading waits for its end
    process.send_signal(signal.SIGINT)
    said = b"\nzerofit: stopped by Ctrl-C; no training was started\n"
    assert (process.wait(timeout=60), process.stderr.read() if process.stderr else b"") == (130, said)
    os.close(writer)
