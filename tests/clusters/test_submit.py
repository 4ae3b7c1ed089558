"""`zerofit submit` before anything is handed over: what it refuses, what reaches the job, what nodes hear."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from clients import path_with
from runs import Run, run_command
from typed_flags import check_flags_were_typed
from zerofit_in_process import run_in_process

from zerofit.core.errors import UserError
from zerofit.launching.clusters import kubernetes, skypilot
from zerofit.launching.clusters.job import ClusterFlags, code_digest, variables_to_pass
from zerofit.planning.sources.nodes import is_host

_SCRIPTS = Path(__file__).parent / "scripts"
_SUBMIT = (sys.executable, "-m", "zerofit", "submit")
_NO_CAPTURE = ("--model", "gpt2", "--sequence-length", "64", "--global-batch-size", "8", "--fast")
"""Flags that tell all that a plan needs."""


def _submit(place: Path, *words: str, **more: str) -> Run:
    """Submit by a fork, which captures the script without importing anything."""
    shutil.copy(_SCRIPTS / "loop.py", place)
    return run_command((*_SUBMIT, *words), place, **more)


def _submit_here(place: Path, *words: str, **more: str) -> Run:
    """Submit in this process, where no script is captured."""
    shutil.copy(_SCRIPTS / "loop.py", place)
    words = ("submit", *words)
    done = run_in_process(words, cwd=place, environment=more)
    check_flags_were_typed(words, done.stderr)
    return Run(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr, folder=place)


def test_the_scripts_of_slurm_and_skypilot_hold_names_of_secrets_and_no_values(same_folder: Path) -> None:
    # A secret by its name, one that nobody named, and a setting that every job takes along.
    secrets = {"HF_TOKEN": "hf_not_for_files", "WANDB_API_KEY": "not-for-files", "NCCL_DEBUG": "INFO"}
    words = ("--dry-run", "--num-machines", "2", "--gpus", "2xA100-80G", "--fast", "--env", "HF_TOKEN")
    slurm = (
        _submit(
            same_folder, "--on", "slurm", "--constraint", "a100&ib", *words, "loop.py", "8", "0", **secrets
        )
        .check()
        .stdout
    )
    assert "not-for-files" not in slurm
    assert "not_for_files" not in slurm
    (export,) = (line for line in slurm.splitlines() if line.startswith("#SBATCH --export="))
    assert {"HF_TOKEN", "NCCL_DEBUG", "PATH"} <= set(export.partition("--export=")[2].split(","))
    assert "WANDB_API_KEY" not in export
    document = json.loads(
        _submit(same_folder, "--json", "--on", "slurm", *words, "loop.py", "8", "0", **secrets).check().stdout
    )
    assert (document["job_id"], document["is_written"]) == (None, False)
    (job,) = document["files"]
    assert document["command"] == f"sbatch --parsable {job}"
    assert Path(job).parent == Path(document["folder"])
    for line in (
        "--nodes=2",
        "--gpus-per-node=2",
        "--cpus-per-task=12",
        "--signal=B:USR1@300",
        "--requeue",
        '--constraint="a100&ib"',
    ):
        assert f"#SBATCH {line}" in slurm.splitlines()
    assert not (same_folder / "zerofit-runs").exists()

    sky = _submit(same_folder, "--on", "skypilot", *words, "loop.py", "8", "0", **secrets).check().stdout
    assert "  accelerators: A100-80GB:2" in sky.splitlines()
    assert "  HF_TOKEN: null" in sky.splitlines()
    assert "not_for_files" not in sky


def test_a_model_that_is_named_is_planned_without_running_the_script(same_folder: Path) -> None:
    (same_folder / "never.py").write_text("raise SystemExit('it ran')\n")
    words = (
        "--on",
        "slurm",
        "--dry-run",
        "--gpus",
        "8xH100",
        "--fast",
        "--model",
        "gpt2",
        "--seq-len",
        "512",
    )
    run = _submit_here(same_folder, *words, "--global-batch-size", "64", "never.py").check()
    assert run.stderr.splitlines() == [
        "what fits: DDP, fused AdamW, batch 8 x 1: 10.3 GiB ±20%, 21 ms ±50% a step; trains all weights",
        "chosen by closed forms, and a trace may choose another: leave out --fast for that",
        "zerofit: whether never.py can resume from a checkpoint is unknown: it was not run here, and its "
        "source does not show what trains; a plan of the script, without --model, would tell. Its run is not "
        "restarted",
        "zerofit: the job may get any type of GPU: --constraint names the one that the plan is for",
        "zerofit: the number of steps is unknown: the script was not run here, and none of its arguments "
        "sets it; the cluster's default limit applies, and --time sets one",
    ]


@pytest.mark.parametrize(
    ("words", "files", "error"),
    [
        (("loop.py", "8", "0"), (), "error[gpus-missing]: a plan for a cluster needs its GPUs"),
        (
            ("--gpus", "1xH100", "loop.py", "--hub_token", "hf_abcdefghijklmnopqrst"),
            (),
            "error[secret-in-arguments]: an argument of the script is a secret",
        ),
        (
            ("--gpus", "1xH100", "loop.py"),
            (".deepspeed_env",),
            "error[deepspeed-env-file]: a file sets variables on every node",
        ),
        (
            ("--gpus", "1xH100", "--env", "NOT_SET_HERE", "loop.py"),
            (),
            "error[env-not-set]: the variable to pass on is not set",
        ),
        (("--gpus", "1xH100", "--time", "soon", "loop.py"), (), "error[bad-value]: --time can't be 'soon'"),
        (("--gpus", "1xH100", "--time", "12:00", "loop.py"), (), "error[bad-value]: --time can't be '12:00'"),
        (
            ("--gpus", "1xH100", "--time", "5", "--save-time", "3600", "loop.py"),
            (),
            "error[save-time-too-long]: the ranks would be told to save before they start",
        ),
        (
            ("--gpus", "1xH100", "--node-selector", "a=b", "loop.py"),
            (),
            "error[flag-of-another-scheduler]: slurm does not support --node-selector",
        ),
        (
            ("--gpus", "1xH100", "--image", "i:1", "loop.py"),
            (),
            "error[flag-of-another-scheduler]: slurm does not support --image",
        ),
        (
            ("--gpus", "1xH100", "--model", "gpt2", "--capture-limit", "9", "loop.py"),
            (),
            "error[capture-limit-without-capture]: a capture limit without a capture",
        ),
        (
            ("--gpus", "2xH100", "--tensor-parallel-size", "3", "loop.py"),
            (),
            "error[tensor-parallel-groups-not-whole]: the ranks make no whole tensor-parallel groups",
        ),
        (
            ("--gpus", "1xH100", "--run-dir", "a-file", "loop.py"),
            ("a-file",),
            "error[run-folder-not-writable]: the run's folder is not writable",
        ),
        (("--gpus", "1xH100", "nowhere.py"), (), "error[script-missing]: there is no such script"),
    ],
)
def test_what_can_not_be_submitted_is_said_before_anything_is_planned(
    same_folder: Path, words: tuple[str, ...], files: tuple[str, ...], error: str
) -> None:
    for name in files:
        (same_folder / name).write_text("PATH=/tmp\n")
    run = _submit_here(same_folder, "--on", "slurm", "--dry-run", *words)
    assert (run.exit_code, run.stderr.splitlines()[0]) == (2, error)
    assert "hf_abcdefghij" not in run.stderr
    assert not (same_folder / "zerofit-runs").exists()


def test_a_missing_client_is_named_and_nothing_is_left(same_folder: Path) -> None:
    plan = ("--gpus", "1xA100-80G", "--fast")
    run = _submit_here(same_folder, "--on", "skypilot", *plan, "loop.py", "8", "0", PATH="/nowhere")
    assert run.exit_code == 2
    assert "error[client-missing]: sky is not installed here" in run.stderr
    assert list((same_folder / "zerofit-runs").glob("2*")) == []


def test_a_plan_file_is_followed_for_its_own_run_alone(same_folder: Path) -> None:
    shutil.copy(_SCRIPTS / "loop.py", same_folder)
    flags = ("--fast", "--gpus", "2xA100-80G", "--num-machines", "2", "--output", "plan.json")
    run_command((*_SUBMIT[:-1], "plan", *flags, "loop.py", "8", "0"), same_folder).check()
    submit = ("--on", "slurm", "--dry-run", "--plan", "plan.json")
    assert "#SBATCH --nodes=2" in _submit(same_folder, *submit, "loop.py", "8", "0").check().stdout
    for words, rule in (
        (("loop.py", "9", "0"), "plan-of-another-run"),
        (("--num-machines", "4", "loop.py", "8", "0"), "plan-for-other-nodes"),
        (("--zero-stage", "3", "loop.py", "8", "0"), "plan-and-strategy"),
        (("--pipeline-stages-per-rank", "2", "loop.py", "8", "0"), "plan-and-strategy"),
    ):
        run = _submit(same_folder, *submit, *words)
        assert (run.exit_code, run.stderr.partition("]")[0]) == (2, f"error[{rule}")


def test_only_listed_and_named_variables_are_passed_on() -> None:
    environ = dict.fromkeys(
        ("PATH", "HF_HOME", "HF_TOKEN", "NCCL_DEBUG", "AWS_SECRET_ACCESS_KEY", "HTTPS_PROXY", "MINE"), "x"
    )
    assert variables_to_pass(environ, ("MINE",), shares_disks=True) == (
        "HF_HOME",
        "NCCL_DEBUG",
        "PATH",
        "MINE",
    )
    assert variables_to_pass(environ, ("HF_TOKEN",), shares_disks=False) == ("NCCL_DEBUG", "HF_TOKEN")
    with pytest.raises(UserError, match="the variable to pass on is not set") as error:
        variables_to_pass(environ, ("MINE=secret",), shares_disks=True)
    assert "secret" not in error.value.found


@pytest.mark.parametrize("host", ["-oProxyCommand=touch", "a b", "$(id)", "", "a;b", "a/b"])
def test_what_is_no_hosts_name_is_refused(host: str) -> None:
    assert not is_host(host)


def test_the_digest_sees_the_script_and_what_stands_beside_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import model\n")
    (tmp_path / "model.py").write_text("x = 1\n")
    (tmp_path / "zerofit-runs").mkdir()
    target = (str(tmp_path / "train.py"), "--lr", "1")
    before = code_digest(target)
    (tmp_path / "zerofit-runs" / "other.py").write_text("x = 1\n")
    (tmp_path / "notes.txt").write_text("x\n")
    (tmp_path / ".#train.py").symlink_to("me@host.4711:1")  # Emacs' lock
    (tmp_path / "loop.py").symlink_to("loop.py")
    (tmp_path / "zeros.py").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe.py")
    assert code_digest(target) == before
    (tmp_path / "model.py").write_text("x = 2\n")
    assert code_digest(target) != before


def test_a_node_with_a_broken_job_says_so_in_one_message(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps({"run": "x"}))
    run = run_command((sys.executable, "-m", "zerofit.launching.clusters.node", str(tmp_path)), tmp_path)
    assert run.exit_code == 2
    assert "error[job-file-broken]: the job file can't be read" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("name", ["c d", "p$(touch INJECTED)", "q;touch INJECTED;", "it's", 'a"b', "50%"])
def test_a_folder_with_any_name_is_one_word_of_the_job(tmp_path: Path, name: str) -> None:
    place = tmp_path / name
    place.mkdir()
    words = ("--on", "slurm", "--dry-run", "--gpus", "1xA100-80G", *_NO_CAPTURE, "loop.py", "8", "0")
    shown = _submit_here(place, *words).check().stdout
    job = shown[shown.index("#!/bin/bash") : shown.index("\nsbatch ")]
    (trap,) = [line for line in job.splitlines() if line.startswith("trap ")]
    ran = subprocess.run(
        ["bash", "-c", f'set -u; touch() {{ printf "%s" "$*"; }}; {trap}; kill -USR1 $$'],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ran.stderr == ""
    assert ran.stdout.startswith(f"{place}/zerofit-runs/")
    assert ran.stdout.endswith("/stop")
    assert [one.name for one in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    "name", ["a;touch X", "$(touch X)", "`touch X`", "it's", "a b\ntouch X", "a && touch X"]
)
def test_a_script_with_any_name_runs_nothing_else_in_a_pod(tmp_path: Path, name: str) -> None:
    job = SimpleNamespace(run_folder=str(tmp_path / name))
    *shell, lines = kubernetes._command(SimpleNamespace(job=job, python="true"))
    for_bash = lines.replace("$$(", "$(")  # as the kubelet does
    assert lines.count("$$(") == lines.count("$(")
    ran = subprocess.run([*shell, for_bash, "0", "host", "1"], cwd=tmp_path, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("scheduler", "volume"),
    [
        (skypilot, "s3://b:/d\nrun: id"),
        (skypilot, "s3://b\n:/d"),
        (skypilot, "s3://b:/d\u202e"),
        (skypilot, "s3://b:d"),
        (kubernetes, "c:/d\n"),
        (kubernetes, "c:/$(id)"),
        (kubernetes, "--all:/d"),
    ],
)
def test_a_volume_is_a_name_and_a_folder(scheduler: Any, volume: str) -> None:
    with pytest.raises(UserError) as caught:
        scheduler.check(ClusterFlags(volume=volume, image="i:1"))
    assert caught.value.rule == "bad-value"


_SRUN = """case " $0 $* " in
*scontrol*requeue*) touch {place}/requeued; exit;;
*scontrol*) echo node0; exit;;
esac
# srun: the launchers end with 75 once they see the file, which is when all ranks have saved.
for tenth in $(seq 100)
do
  [ -f {place}/job-folder/stop ] && exit 75
  [ -f {place}/ends ] && exit "$(cat {place}/ends)"
  sleep 0.1
done
"""


@pytest.mark.parametrize(
    ("signals", "ends", "restarts", "is_requeued"),
    [
        (("USR1",), None, 0, True),  # before a time limit, or a preemption with send_user_signal
        (("USR1",), None, 2, True),
        (("USR1",), None, 3, False),
        (("TERM",), None, 0, False),  # scancel
        (("USR1", "TERM"), None, 0, False),  # scancel while the ranks save
        ((), 75, 0, True),  # a lost node
        ((), 0, 0, False),
        ((), 1, 0, False),
        ((), 143, 0, False),  # the launchers got SIGTERM: Slurm requeues what it preempts
    ],
)
def test_a_job_requeues_itself_only_after_it_was_told_to_save(
    signals: tuple[str, ...], ends: int | None, restarts: int, is_requeued: bool, same_folder: Path
) -> None:
    words = ("--on", "slurm", "--dry-run", "--gpus", "1xA100-80G", *_NO_CAPTURE, "loop.py", "8", "0")
    shown = _submit_here(same_folder, *words).check().stdout
    job = shown[shown.index("#!/bin/bash") : shown.index("\nsbatch ")]
    folder = same_folder / "job-folder"
    folder.mkdir()
    (trap,) = [line for line in job.splitlines() if line.startswith("trap ")]
    is_saving_long = len(signals) > 1
    job = job.replace(trap, "trap : USR1" if is_saving_long else f"trap 'touch {folder}/stop' USR1")
    (same_folder / "job.sh").write_text(job)
    if ends is not None:
        (same_folder / "ends").write_text(f"{ends}\n")
    path = path_with(same_folder, "srun", "scontrol", script=_SRUN.replace("{place}", str(same_folder)))
    variables = {
        "PATH": path,
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node0",
        "SLURM_RESTART_COUNT": str(restarts),
    }
    ran = subprocess.Popen(["bash", "job.sh"], cwd=same_folder, env=variables)
    for name in signals:
        time.sleep(0.4)
        ran.send_signal(signal.Signals[f"SIG{name}"])
    ran.wait(timeout=60)
    assert (same_folder / "requeued").exists() is is_requeued


def test_a_folder_that_would_end_its_line_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "a\nrm b"
    place.mkdir()
    run = _submit_here(place, "--on", "slurm", "--gpus", "1xA100-80G", "--fast", "loop.py", "8", "0")
    assert run.exit_code == 2
    assert not (place / "zerofit-runs").exists()
    assert "error[folder-unprintable]: a job's folder has a character that sbatch can't read" in run.stderr


def test_a_variable_whose_value_has_a_password_is_a_secret(same_folder: Path) -> None:
    variables = {"DATABASE_URL": "postgres://u:not4files@h/db", "HTTPS_PROXY": "http://proxy:3128"}
    words = ("--on", "kubernetes", "--dry-run", "--gpus", "1xA100-80G", "--fast", "--image", "a/b:1")
    named = [word for name in variables for word in ("--env", name)]
    shown = _submit(same_folder, *words, *named, "loop.py", "8", "0", **variables).check().stdout
    assert "not4files" not in shown
    assert "http://proxy:3128" in shown


_TRAINS = "from transformers import Trainer, TrainingArguments\n"
_PARSER = """import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=float, default=1)
parser.add_argument("--save-to", default="runs/7b")
flags = parser.parse_args()
"""
_SOURCES = {
    "a Trainer": f"{_TRAINS}Trainer(model=m, args=TrainingArguments(output_dir='out')).train()\n",
    "a Trainer in main()": f"""{_TRAINS}
def main():
    Trainer(model=m, args=TrainingArguments('out'), train_dataset=d).train()

if __name__ == "__main__":
    main()
""",
    "TRL": "from trl import SFTConfig, SFTTrainer\nSFTTrainer(m, args=SFTConfig(output_dir='out')).train()\n",
    "a subclass": f"""{_TRAINS}
class Weighted(Trainer):
    def compute_loss(self, model, inputs, **more): ...

Weighted(model=m, args=TrainingArguments("out")).train()
""",
    "a loop that loads states": """from accelerate import Accelerator
accelerator = Accelerator()
accelerator.load_state("last")
""",
    "a loop": "from accelerate import Accelerator\naccelerator = Accelerator()\naccelerator.backward(loss)\n",
    "another file's": "from library.cli import main\nmain()\n",
    "a registry's": "import runners, sys\nrunners.get(sys.argv[1]).fit()\n",
}


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("a Trainer", None),
        ("a Trainer in main()", None),
        ("TRL", None),
        ("a subclass", None),
        ("a loop that loads states", None),
        ("a loop", "shows no way to resume from a checkpoint, so its run is not restarted"),
        ("another file's", "can resume from a checkpoint is unknown: it was not run here"),
        ("a registry's", "can resume from a checkpoint is unknown: it was not run here"),
    ],
)
def test_whether_a_script_resumes_is_read_from_its_source(
    kind: str, says: str | None, same_folder: Path
) -> None:
    (same_folder / "own.py").write_text(_SOURCES[kind])
    words = ("--on", "slurm", "--dry-run", "--gpus", "1xA100-80G", *_NO_CAPTURE)
    run = _submit_here(same_folder, *words, "own.py").check()
    job = run.stdout.splitlines()
    assert ("#SBATCH --requeue" in job) is (says is None)
    assert ("#SBATCH --no-requeue" in job) is (says is not None)
    assert (says or "") in run.stderr
    assert ("to resume from" in run.stderr or "can resume" in run.stderr) is (says is not None)


def test_a_module_is_read_for_its_way_to_resume_too(same_folder: Path) -> None:
    (same_folder / "package").mkdir()
    (same_folder / "package" / "train.py").write_text(_SOURCES["a Trainer"])
    words = ("--on", "slurm", "--dry-run", "--gpus", "1xA100-80G", *_NO_CAPTURE, "-m", "package.train")
    assert "#SBATCH --requeue" in _submit_here(same_folder, *words).check().stdout


@pytest.mark.parametrize(
    ("source", "given", "lost"),
    [
        (f"{_TRAINS}Trainer(args=TrainingArguments(output_dir='out'))", "", "out"),
        (f"{_TRAINS}Trainer(args=TrainingArguments(output_dir='/scratch/out'))", "", "/scratch/out"),
        (f"{_TRAINS}{_PARSER}Trainer(args=TrainingArguments(output_dir=flags.save_to))", "", "runs/7b"),
        (
            f"{_TRAINS}{_PARSER}Trainer(args=TrainingArguments(output_dir=flags.save_to))",
            "--save-to else",
            "else",
        ),
        ("from trl import DPOConfig, DPOTrainer\nDPOTrainer(args=DPOConfig(output_dir='dpo'))", "", "dpo"),
        (
            "from transformers import HfArgumentParser, Trainer, TrainingArguments\n"
            "(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()\nTrainer(args=args)",
            "--output_dir=hf",
            "hf",
        ),
        (f"{_TRAINS}Trainer(args=TrainingArguments(output_dir='/data/out'))", "", None),
        (
            f"{_TRAINS}{_PARSER}Trainer(args=TrainingArguments(output_dir=flags.save_to))",
            "--save-to=/data/a",
            None,
        ),
        (f"{_TRAINS}import os\nTrainer(args=TrainingArguments(output_dir=os.environ['OUT']))", "", None),
        (f"{_TRAINS}Trainer(args=TrainingArguments())", "", None),
        ("from accelerate import Accelerator\nAccelerator(project_dir='out')", "", None),
    ],
)
def test_an_output_folder_beside_the_volume_is_read_from_the_source(
    source: str, given: str, lost: str | None, same_folder: Path
) -> None:
    (same_folder / "own.py").write_text(f"{source}\n")
    words = ("--on", "kubernetes", "--image", "i:1", "--volume", "checkpoints:/data", "--dry-run")
    run = _submit_here(
        same_folder, *words, "--gpus", "1xA100-80G", *_NO_CAPTURE, "own.py", *given.split()
    ).check()
    said = [line for line in run.stderr.splitlines() if "which is lost with its node" in line]
    assert len(said) == (lost is not None)
    assert all(line.startswith(f"zerofit: checkpoints go to {lost}, ") for line in said)


def test_a_script_that_was_not_captured_is_read_for_its_way_to_resume(same_folder: Path) -> None:
    words = ("--on", "slurm", "--dry-run", "--gpus", "1xA100-80G", *_NO_CAPTURE)
    assert "#SBATCH --requeue" in _submit_here(same_folder, *words, "loop.py", "8", "0").check().stdout
