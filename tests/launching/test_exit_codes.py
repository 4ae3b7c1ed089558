"""The script's end is zerofit's end: exit codes, signals, errors, and what the run folder says of them."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from runs import SCRIPTS, Launch, environment, run_process

END = str(SCRIPTS / "end.py")
RANKS = {"one rank": ("--num-processes", "1"), "two ranks": ("--num-processes", "2", "--engine", "native")}
_SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("how", "exit_code", "cause", "ranks"),
    [
        pytest.param("0 0", 0, None, "one rank", marks=_SLOW),
        ("7 0", 7, "rank 0 exited with 7", "one rank"),
        pytest.param("7 0", 7, "rank 0 exited with 7", "two ranks", marks=_SLOW),
        pytest.param("text 0", 1, "rank 0 exited with 1", "one rank", marks=_SLOW),
        pytest.param("raise 0", 1, "rank 0 exited with 1: RuntimeError", "two ranks", marks=_SLOW),
        pytest.param("kill 0", 137, "rank 0 was killed by signal 9 (SIGKILL)", "one rank", marks=_SLOW),
        # At each change with real processes, in test_end_to_end.py.
        pytest.param("kill 0", 137, "rank 0 was killed by signal 9 (SIGKILL)", "two ranks", marks=_SLOW),
        # Not rank 0, which the launcher ends then.
        pytest.param("kill 1", 137, "rank 1 was killed by signal 9 (SIGKILL)", "two ranks", marks=_SLOW),
    ],
)
def test_the_exit_code_is_the_scripts(
    how: str, exit_code: int, cause: str | None, ranks: str, launch: Launch
) -> None:
    run = launch(*RANKS[ranks], END, *how.split())
    assert run.exit_code == exit_code, run.stderr
    assert run.record()["exit_code"] == exit_code
    said = run.record()["cause"]
    assert said == cause or str(said).startswith(f"{cause}; the kernel's out-of-memory counter has not moved")
    last_line = run.stderr.splitlines()[-1]
    if cause is None:
        assert re.sub(r"\d+ s", "N s", last_line) == (
            f"zerofit: ended well after N s; no optimizer step was seen; its record is in {run.run_folder}"
        )
    else:
        assert last_line == f"zerofit: {said}; its log and record are in {run.run_folder}"


@pytest.mark.slow
def test_a_rank_that_lost_its_peer_is_not_the_cause(launch: Launch) -> None:
    run = launch("--num-processes", "2", "--preset", "z2", str(SCRIPTS / "lose_peer.py"))
    assert run.exit_code == 137, run.stderr
    assert str(run.record()["cause"]).startswith("rank 1 was killed by signal 9 (SIGKILL)")
    assert run.record()["exit_code_of_rank"]["1"] == -9


@pytest.mark.slow
def test_the_log_holds_what_a_rank_printed_before_it_was_killed(launch: Launch) -> None:
    run = launch(END, "kill", "0")
    assert run.stdout == "last words of rank 0\n"
    assert (run.run_folder / "logs" / "rank0.log").read_text() == "last words of rank 0\n"


def test_a_traceback_begins_in_the_script(launch: Launch) -> None:
    run = launch(END, "raise", "0")
    traceback = run.stderr[run.stderr.index("Traceback") :].splitlines()
    assert traceback[1] == f'  File "{END}", line 14, in <module>'
    assert traceback[3] == "RuntimeError: the script's own error"


def test_the_run_folder_records_everything_but_secrets(launch: Launch, tmp_path: Path) -> None:
    (temporary := tmp_path / "tmp").mkdir()
    secrets = ("--hub_token", "secret0", "--api-key=secret1")
    run = launch(
        *("--num-processes", "2", END, "0", "0", *secrets),
        HF_TOKEN="hf_secret",
        MY_KEY="key_secret",
        TMPDIR=str(temporary),
    ).check()
    assert list(temporary.glob("torchelastic_*")) == []
    assert "secret" not in run.stdout + run.stderr
    files = sorted(
        str(path.relative_to(run.run_folder)) for path in run.run_folder.rglob("*") if path.is_file()
    )
    assert files == [
        "accelerate.yaml",
        "command.sh",
        "ds_config.json",
        "launcher.json",
        "logs/rank0.log",
        "logs/rank1.log",
        "plan.json",
        "ranks/rank0.json",
        "ranks/rank0.live",
        "ranks/rank1.json",
        "ranks/rank1.live",
        "run.json",
    ]
    for path in run.run_folder.rglob("*"):
        assert not path.is_file() or b"secret" not in path.read_bytes()
    modes = {path: path.stat().st_mode & 0o777 for path in (run.run_folder, *run.run_folder.rglob("*"))}
    executable = run.run_folder / "command.sh"
    assert [modes[run.run_folder], modes.pop(executable)] == [0o700, 0o700]
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}
    record = json.loads((run.run_folder / "run.json").read_text())
    assert [rank["rank"] for rank in record["ranks"]] == [0, 1]
    assert all(rank["peak_host_bytes"] > 0 for rank in record["ranks"])


@pytest.mark.slow
def test_the_scripts_own_flags_stay_the_scripts(launch: Launch, tmp_path: object) -> None:
    run = launch(
        "--num_processes", "1", str(SCRIPTS / "arguments.py"), "--num_processes", "9", "-m", "--cpu"
    ).check()
    assert json.loads(run.stdout) == ["--num_processes", "9", "-m", "--cpu"]


def test_the_command_file_has_the_command_and_its_folder(launch: Launch, tmp_path: Path) -> None:
    run = launch("--num-processes", "1", str(SCRIPTS / "arguments.py"), "a b").check()
    command = run.run_folder / "command.sh"
    shebang, comment, folder, *rest = command.read_text().splitlines()
    assert shebang == "#!/bin/sh"
    assert comment.startswith("# The `accelerate launch` command of zerofit.")
    assert folder == f"cd {shlex.quote(str(tmp_path))} || exit"
    path = f'export PATH={os.path.dirname(sys.executable)}:"$PATH"'
    safe = ["export PYTHONSAFEPATH=1", "export ZEROFIT_SAFE_PATH=1"]
    assert rest == [path, *safe, run.record()["command"]]


@pytest.mark.slow
def test_the_command_file_repeats_the_run(launch: Launch) -> None:
    run = launch("--num-processes", "1", str(SCRIPTS / "arguments.py"), "a b").check()
    command = run.run_folder / "command.sh"
    again = subprocess.run([command], cwd="/", env=environment(), capture_output=True, text=True, timeout=120)
    assert (again.returncode, again.stdout) == (0, run.stdout), again.stderr


def test_a_record_that_cannot_be_written_does_not_change_the_exit_code(
    launch: Launch, tmp_path: Path
) -> None:
    script = tmp_path / "take_the_place.py"
    script.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "(folder,) = Path('zerofit-runs').glob('2*')\n"
        "(folder / 'run.json').mkdir()\n"
        "(folder / 'ranks' / 'rank0.json').mkdir()\n"
        "sys.exit(7)\n"
    )
    run = launch("--num-processes", "1", str(script))
    assert run.exit_code == 7, run.stderr
    of_rank, of_run = (line for line in run.stderr.splitlines() if "can't be written" in line)
    assert of_rank.startswith("zerofit: the record of rank 0 can't be written: [Errno 21] Is a directory: ")
    assert of_rank.endswith(f" -> '{run.run_folder}/ranks/rank0.json'")
    assert of_run == (
        f"zerofit: the record of the run can't be written: Is a directory: {run.run_folder}/run.json"
    )
    assert run.stderr.splitlines()[-1].startswith("zerofit: rank 0 exited with 7;")


def test_a_torch_that_cannot_use_the_gpus_starts_no_rank(tmp_path: Path) -> None:
    agent = [sys.executable, "-m", "zerofit.launching.agent", str(os.getpid()), "1", "gpu", END]
    run = run_process(agent, tmp_path, CUDA_VISIBLE_DEVICES="")
    assert (run.exit_code, run.stdout) == (2, "")
    assert "error[torch-without-gpus]: torch can't use the GPUs of this node\n  found: torch " in run.stderr
