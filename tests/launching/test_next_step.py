"""The next command of `zerofit explain`: the log's GPUs and script, and where a log stops."""

from __future__ import annotations

import io
import json
import shlex
from pathlib import Path

import pytest

from zerofit.cli.explain import explained
from zerofit.cli.output.explanation import explanation_json, explanation_text
from zerofit.launching.explain import explain_bytes
from zerofit.launching.explain_run import RunExplanation
from zerofit.launching.failures import failures
from zerofit.launching.next_step import restart_words
from zerofit.launching.run_folder import RunFolder, note_launcher

_FRAMES = """\
Traceback (most recent call last):
  File "/data/kim/sft/tune.py", line 88, in <module>
    run(args)
  File "/data/kim/sft/tune.py", line 61, in run
    loss = model(**batch).loss
  File "/opt/venv/lib/python3.12/site-packages/torch/nn/functional.py", line 2380, in silu
    return torch._C._nn.silu(input)
"""


def _full(gib: str, index: int = 0) -> str:
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU {index} has a total "
        f"capacity of {gib} GiB of which 31.88 MiB is free. Including non-PyTorch memory, this process has "
        "21.30 GiB memory in use. Of the allocated memory 20.61 GiB is allocated by PyTorch.\n"
    )


def _full_before(gib: str, index: int = 0) -> str:
    """Return the message of PyTorch before 2.1."""
    return (
        f"RuntimeError: CUDA out of memory. Tried to allocate 90.00 MiB (GPU {index}; {gib} GiB total "
        "capacity; 9.11 GiB already allocated; 41.56 MiB free; 9.31 GiB reserved in total by PyTorch)\n"
    )


def _text(log: str) -> str:
    return explanation_text(RunExplanation(explanation=explain_bytes(io.BytesIO(log.encode()), "log")))


def _row(log: str, name: str) -> str:
    return (
        next(row for row in _text(log).splitlines() if row.startswith(f"{name}:")).partition(": ")[2].strip()
    )


@pytest.mark.parametrize(
    ("log", "command"),
    [
        (_FRAMES + _full("23.64"), "zerofit plan --gpus 1xRTX4090 tune.py names"),
        (_FRAMES + _full("39.50"), "zerofit plan --gpus 1xA100-40G tune.py, with your GPU's name"),
        (_FRAMES + _full("39.39"), "zerofit plan --gpus 1xA100-40G tune.py, with your GPU's name"),
        (_full("139.80"), "zerofit plan --gpus 1xH200-141G SCRIPT names"),
        (_FRAMES + _full("9.22"), "zerofit plan --gpus 1xGPU tune.py, with the name of your GPU of 9.22 GiB"),
        (
            "".join(f"[rank3]: {line}\n" for line in (_FRAMES + _full("22.03", 3)).splitlines()),
            "zerofit plan --gpus 4xL4 tune.py, with your GPU's name, as A10G",
        ),
        (
            _full("23.64", 1) + "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n",
            "zerofit plan --gpus 2xRTX4090 SCRIPT, with the number of GPUs that the run had, names",
        ),
        ("RuntimeError: CUDA out of memory.\n", "zerofit plan --gpus 8xA100-80G SCRIPT, with the GPUs"),
        (_FRAMES + _full_before("23.65"), "zerofit plan --gpus 1xRTX4090 tune.py"),
        (_FRAMES + _full_before("79.15"), "zerofit plan --gpus 1xH100-80G tune.py, with your GPU's name"),
        (
            _full_before("23.65", 3) + "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n",
            "zerofit plan --gpus 4xRTX4090 SCRIPT, with the number of GPUs that the run had",
        ),
    ],
)
def test_a_full_gpu_is_planned_for_with_the_cards_of_the_log(log: str, command: str) -> None:
    fix = _row(log, "next")
    assert fix.startswith(command)
    assert ("raise the ZeRO stage" in fix) == ("--gpus 1x" not in fix)


@pytest.mark.parametrize(
    "bar",
    [
        "",
        "  0%|          | 0/64 [00:00<?, ?it/s]",
        " 12%|█▎        | 8/64 [00:31<03:41,  3.96s/it]",
        "Training:   1%|▏ | 1/99 [00:02<03:16,  2.01s/it, loss=2.31]",
        "Map: 100%|██████████| 10/10 [00:00<00:00, 812.11 examples/s, 4.1MB/s]",
        "\r  3%|▎         | 2/64 [00:01<00:40,  1.52it/s] ",
    ],
)
def test_the_frame_of_the_users_script_is_shown_behind_a_progress_bar_too(bar: str) -> None:
    assert _row(bar + _FRAMES + _full("23.64"), "in") == "/data/kim/sft/tune.py:61"


@pytest.mark.parametrize(
    "said",
    [
        _full("23.64"),
        "ValueError: " + "a reason. " * 60,
        "RuntimeError: " + "word " * 100,
        "OSError: [Errno 28] No space left on device: '" + "folder name, " * 40,
        "TypeError: one; " + "two; " * 90,
    ],
)
def test_a_long_line_is_cut_behind_a_sentence_or_a_word(said: str) -> None:
    line = _row(said, "line").partition(": ")[2]
    shown = line.removesuffix(" ...")
    assert len(shown) <= 240 < len(said)
    assert line.endswith(" ...")
    assert said[len(shown)] == " "


@pytest.mark.parametrize(
    "last",
    [
        "writing shard 3 of 8 ...",
        "step 410 loss 2.31",
        "[INFO] initializing process group with backend nccl",
        " 31%|███▏      | 20/64 [00:31<01:09,  1.58s/it]",
        "Loading checkpoint shards:  50%|█████     | 1/2 [00:03<00:03,  3.2s/it]",
    ],
)
def test_a_log_that_stops_in_the_middle_is_shown_with_its_last_line(last: str) -> None:
    rows = _text(f"epoch 0\n{last}\n").splitlines()
    assert rows[:2] == ["no failure in log", f"stops:  log:2: {last.strip()}"]
    assert rows[2].startswith("next:   if the run is still there")
    assert "py-spy dump --pid PID" in rows[2]
    found = RunExplanation(explanation=explain_bytes(io.BytesIO(f"epoch 0\n{last}\n".encode()), "log"))
    document = json.loads(explanation_json(found))
    assert (document["failed"], document["stops"][0]["line"]) == (False, 2)


@pytest.mark.parametrize(
    "last",
    [
        "{'train_runtime': 8.1, 'train_loss': 2.2, 'epoch': 1.0}",
        "Training completed.",
        "100%|██████████| 64/64 [00:31<00:00,  1.58s/it]",
        "wandb: Find logs at: ./wandb/run-1/logs",
        "model saved to out/final",
        "Done!",
    ],
)
def test_a_log_that_says_that_it_is_done_has_no_more_to_say(last: str) -> None:
    assert _text(f"step 1\n{last}\n") == "no failure in log"


_OPTIONS = "import argparse\np = argparse.ArgumentParser()\np.add_argument('{}')\n"


@pytest.mark.parametrize(
    ("source", "arguments", "expected"),
    [
        (_OPTIONS.format("--resume"), "--lr 1", "train.py --lr 1   (from the start: no complete checkpoint"),
        (_OPTIONS.format("--resume_from_checkpoint"), "", "train.py   (from the start"),
        ("accelerator.load_state()\n", "--out 'a b'", "train.py --out 'a b'   (from the start"),
        ("print()\n", "", "train.py   (from the start"),
        ("", "-x", "train.py -x   (from the start"),
    ],
)
def test_a_killed_run_names_the_command_that_starts_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, arguments: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(source)
    run = tmp_path / "zerofit-runs" / "2026-10-01_10-00-00-train"
    (run / "logs").mkdir(parents=True)
    (run / "plan.json").write_text("{}")
    (run / "command.sh").write_text(
        f"#!/bin/sh\ncd {shlex.quote(str(tmp_path))} || exit\nA=1 accelerate launch -m "
        f"zerofit.training.runner {run / 'plan.json'} train.py {arguments}\n"
    )
    assert str(restart_words(run)).startswith(f"zerofit launch --plan {run / 'plan.json'} {expected}")
    monkeypatch.chdir("/")
    assert str(restart_words(run)).startswith(f"cd {tmp_path} && zerofit launch --plan ")
    note_launcher(RunFolder(path=run))
    assert explained(str(run)).restart is None  # its launcher, this process, is alive
    (run / "command.sh").unlink()
    assert restart_words(run) is None


@pytest.mark.parametrize(
    "log",
    [
        "slurmstepd: error: *** JOB 71 ON n1 CANCELLED AT 2026-10-01T08:00:14 DUE TO TIME LIMIT ***\n",
        "slurmstepd: error: *** STEP 71.0 ON n1 CANCELLED AT 2026-10-01T08:00:14 DUE TO TIME LIMIT ***\n",
    ],
)
def test_the_hint_of_a_time_limit_ends_no_job_early(log: str) -> None:
    assert "[time-limit, confidence high]" in _text(log)
    fix = _row(log, "next")
    assert "zerofit submit" in fix
    assert "trap" in fix


@pytest.mark.parametrize(
    ("log", "failure", "option"),
    [
        (
            "=>> PBS: job killed: walltime 3601 exceeded limit 3600\n",
            "time-limit-pbs",
            "qsub -l walltime=HH:MM:SS",
        ),
        ("PBS: job 7 killed: walltime 90s exceeded limit 60s\n", "time-limit-pbs", "qsub -l walltime"),
        ("TERM_RUNLIMIT: job killed after reaching LSF run time limit.\n", "time-limit-lsf", "bsub -W HH:MM"),
        ("TERM_RUNLIMIT: job killed.\nExited with exit code 140.\n", "time-limit-lsf", "bsub -W HH:MM"),
        (
            "step 9\nJob was active longer than specified deadline: DeadlineExceeded\n",
            "time-limit-kubernetes",
            "activeDeadlineSeconds",
        ),
        ("  Reason:  DeadlineExceeded\n", "time-limit-kubernetes", "activeDeadlineSeconds"),
        ("=>> PBS: job killed: mem 900kb exceeded limit 800kb\n", "memory-limit-pbs", "qsub -l select="),
        ("=>> PBS: job killed: vmem 900kb exceeded limit 800kb\n", "memory-limit-pbs", "qsub -l select="),
        (
            "TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.\n",
            "memory-limit-lsf",
            "bsub -M SIZE",
        ),
        (
            "    Last State:  Terminated\n      Reason:    OOMKilled\n      Exit Code: 137\n",
            "memory-limit-kubernetes",
            "resources.limits.memory",
        ),
    ],
)
def test_the_hint_of_a_limit_is_that_of_its_scheduler(log: str, failure: str, option: str) -> None:
    assert f"[{failure}, confidence high]" in _text(log)
    fix = _row(log, "next")
    assert option in fix
    assert [word for word in ("sbatch", "srun", "--signal", "slurm") if word in fix] == []


def test_no_hint_names_a_signal_without_its_trap() -> None:
    hints = [failure.fix for failure in failures().values() if "--signal" in failure.fix]
    assert [hint for hint in hints if "trap" not in hint] == []
