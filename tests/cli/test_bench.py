"""zerofit bench ladder, run as a user runs it: each rung is a launch of one plain script."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from refusals import refusal
from running_launches import assert_all_gone
from runs import Run, RunZerofit, environment, run_command

from zerofit.cli.bench import ladder
from zerofit.launching.rungs import ON_ONE_RANK

_TINY = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "vocab_size": 200,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
_SIZES = ("--model=tiny", "--batch-size=2", "--seq-len=8", "--cpu", "--warm-up=1", "--steps=1")
_DRY = ("bench", "ladder", "--dry-run", "--cpu")
_LADDER = (sys.executable, "-m", "zerofit", "bench", "ladder")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the config of a tiny model."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(_TINY))
    return tmp_path


def _ladder(folder: Path, *words: str) -> Run:
    return run_command([*_LADDER, *_SIZES, *words], folder)


def _ends(document: dict[str, Any]) -> list[str | None]:
    return [rung["result"] and rung["result"]["end"] for rung in document["rungs"]]


def test_dry_run_prints_the_launch_of_each_rung(run_zerofit: RunZerofit, tmp_path: Path) -> None:
    line = "bench ladder --dry-run --cpu --batch-size 4 --num-processes 2 --rungs baseline,zero-2,length-16"
    finished = run_zerofit(*line.split(), cwd=tmp_path)
    launch = "zerofit launch --cpu --num-processes 2"
    batch = "--mixed-precision fp32 --micro-batch-size 4 --gradient-accumulation-steps 1"
    rest = f"{batch} --no-gradient-checkpointing --attention eager"
    script = "-m zerofit.launching.ladder_script --model all-minilm-l6-v2 --task sequence-classification"
    zero = "--zero-stage 2 --offload-optimizer none --offload-param none"
    assert finished.stdout.splitlines()[2:] == [
        "# baseline",
        f"{launch} --engine native {rest} {script} --batch-size 4 --seq-len 128 --steps 3",
        "# + ZeRO-2",
        f"{launch} {zero} {rest} {script} --batch-size 4 --seq-len 128 --steps 3",
        "# + length 16",
        f"{launch} {zero} {rest} {script} --batch-size 4 --seq-len 16 --steps 3",
    ]
    assert finished.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_of_other_gpus_is_for_as_many_ranks(run_zerofit: RunZerofit, tmp_path: Path) -> None:
    line = "bench ladder --dry-run --gpus 8xA100-80G --model llama-3-8b"
    commands = run_zerofit(*line.split(), cwd=tmp_path).stdout.splitlines()
    assert commands[1].startswith("# on 8 x NVIDIA A100-SXM4-80GB, ")
    assert [line for line in commands if line.startswith("# +")][:2] == ["# + ZeRO-1", "# + ZeRO-2"]
    assert commands[3].startswith("zerofit launch --no-capture --num-processes 8 --engine native ")


@pytest.mark.parametrize(
    ("rungs", "refused"),
    [
        ("zero-1,bf16,zero-2,offload-optimizer,zero-3,offload-param,checkpointing", []),
        ("zero-2,offload-param", ["parameter offload needs ZeRO-3 [param-offload-needs-zero3]"]),
        (
            "zero-3,adamw-8bit,offload-optimizer",
            ["with offload another optimizer trains than the script's [offload-needs-adam]"],
        ),
        (
            "offload-optimizer,sgd",
            [
                "optimizer offload needs ZeRO-1 or higher [optimizer-offload-needs-zero]; "
                "ZeRO and offload need DeepSpeed [zero-needs-deepspeed]"
            ],
        ),
        ("zero-1,fp16", ["fp16 training needs a GPU [fp16-needs-gpu]"]),
    ],
)
def test_a_rung_that_breaks_a_rule_is_not_run(
    rungs: str, refused: list[str], run_zerofit: RunZerofit, tmp_path: Path
) -> None:
    lines = run_zerofit(*_DRY, "--rungs", rungs, cwd=tmp_path).stdout.splitlines()
    said = [line.removeprefix("# not run: ") for line in lines if line.startswith("# not run: ")]
    assert said == refused


def test_what_breaks_a_rule_is_left_out_below(run_zerofit: RunZerofit, tmp_path: Path) -> None:
    rungs = "--rungs=offload-optimizer,sgd"
    *_, refused, _, last = run_zerofit(*_DRY, rungs, cwd=tmp_path).stdout.splitlines()
    assert refused.startswith("# not run: optimizer offload needs ZeRO-1 or higher")
    assert "--optimizer sgd" in last
    assert "--offload-optimizer" not in last


@pytest.mark.slow
@pytest.mark.usefixtures("built_ops")
def test_rungs_run_beside_their_prediction_and_one_that_cannot_is_left_out(folder: Path) -> None:
    rungs = "--rungs=baseline,flash,length-4,zero-2,offload-optimizer"
    ranks = ("--num-processes=2", "--gpus=2xRTX4090")
    first = _ladder(folder, *ranks, "--json", rungs).check()
    document = json.loads(first.stdout)
    assert _ends(document) == ["measured", "failed", "measured", "measured", "measured"], first.stderr
    base, flash, short, zero, offload = document["rungs"]
    assert zero["strategy"]["attention"] == "eager"  # flash is left out
    assert flash["result"]["cause"].startswith("rank ")
    for rung in (base, short, zero, offload):
        assert rung["result"]["step_time_s"] > 0
        assert rung["samples_per_s"] == pytest.approx(4 / rung["result"]["step_time_s"])
        assert rung["result"]["host_bytes"] > 2**26
        assert rung["predicted_bytes"] > 0
    record = Path(document["folder"]) / "trial-4"
    plan = json.loads((record / "plan.json").read_text())
    assert (plan["strategy"]["zero_stage"], plan["workload"]["sequence_length"]) == (2, 4)
    assert plan["estimate"]["device"]["phases"]
    ranks_of_run = json.loads((record / "run.json").read_text())["ranks"]
    assert max(rank["step_time_s"] for rank in ranks_of_run) == zero["result"]["step_time_s"]

    again = _ladder(folder, *ranks, rungs).check()
    assert "4 trials of an earlier start are reused" in again.stderr
    assert "+ flash attention 2: " in again.stdout
    assert "measured on CPU ranks; predicted for 2 x NVIDIA GeForce RTX 4090" in again.stdout


@pytest.mark.slow
def test_the_command_of_a_rung_runs_to_its_end(folder: Path) -> None:
    words = ("--rungs=micro-batch-1", "--dry-run")
    *_, command = _ladder(folder, *words).check().stdout.splitlines()
    run = run_command([sys.executable, "-m", *shlex.split(command)], folder).check()
    assert "step 2: loss " in run.stdout


@pytest.mark.slow
def test_ctrl_c_ends_the_rung_and_the_same_command_continues(folder: Path) -> None:
    command = [*_LADDER, *_SIZES, "--rungs=baseline,bf16"]
    process = subprocess.Popen(
        command, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 240
    while not list(folder.glob("zerofit-runs/ladder-tiny-*/trial-2/ranks/rank0.live")):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    ranks = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert stderr.endswith("zerofit: stopped by SIGINT; the same command continues\n")
    assert any(line.startswith("+ bf16 ") and line.endswith("not run") for line in stdout.splitlines())
    assert_all_gone(ranks)
    again = run_command(command, folder).check()
    assert "1 trial of an earlier start is reused" in again.stderr


def test_a_plot_is_not_overwritten(run_zerofit: RunZerofit, folder: Path) -> None:
    pytest.importorskip("matplotlib")
    (folder / "ladder.png").write_bytes(b"mine")
    finished = run_zerofit("bench", "ladder", *_SIZES, "--plot", "ladder.png", "--dry-run", cwd=folder)
    assert finished.stderr.startswith("error[file-exists]: the file exists and differs\n")
    assert (finished.returncode, finished.stdout) == (2, "")


@pytest.mark.parametrize(
    ("said", "rule", "found"),
    [
        (("--rungs", "baseline,length-65"), "sequence-too-long", "--rungs with length-65 and the model tiny"),
        (
            ("--gpus", "1xRTX4090", "--num-processes", "2"),
            "more-ranks-than-gpus",
            "--num-processes 2 on 1 x 1 GPU",
        ),
    ],
)
def test_settings_that_no_rung_supports_are_refused(
    folder: Path, said: tuple[str, ...], rule: str, found: str
) -> None:
    arguments = ["--model", str(folder / "tiny"), "--seq-len", "8", "--cpu", "--dry-run", *said]
    raised = refusal(ladder.main, arguments, standalone_mode=False)
    assert (raised.rule, raised.found.replace(str(folder / "tiny"), "tiny")) == (rule, found)


@pytest.mark.parametrize(
    ("config", "inputs"),
    [
        ({"model_type": "vit", "architectures": ["ViTForImageClassification"]}, "pixel_values, labels"),
        (
            {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]},
            "input_features, labels",
        ),
    ],
)
def test_the_ladder_goes_by_tokens(tmp_path: Path, config: dict[str, object], inputs: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert str(
        refusal(ladder.main, ["--model", str(tmp_path), "--cpu", "--dry-run"], standalone_mode=False)
    ) == (
        "error[ladder-needs-tokens]: the ladder only supports models with tokens\n"
        f"  found: --model {tmp_path}, whose inputs are {inputs}\n"
        "  why:   its rungs and results are based on tokens\n"
        "  fix:   name a text model"
    )


@pytest.mark.evidence
@pytest.mark.timeout(3600)
def test_every_rung_of_the_default_ladder_does_its_work(zerofit_process: RunZerofit, tmp_path: Path) -> None:
    line = "bench ladder --cpu --json --batch-size 32"
    document = json.loads(zerofit_process(*line.split(), cwd=tmp_path, timeout_s=3500).stdout)
    assert [rung["name"] for rung in document["rungs"]] == ON_ONE_RANK.split(",")
    assert set(_ends(document)) == {"measured"}
    results = [rung["result"] for rung in document["rungs"]]
    base, accumulated, checkpointed, adafactor, frozen, short = (one["host_bytes"] for one in results)
    assert accumulated < 0.7 * base
    assert checkpointed <= 1.05 * accumulated
    assert adafactor < checkpointed
    assert frozen < adafactor
    assert short <= 1.05 * frozen
    assert results[5]["step_time_s"] < results[4]["step_time_s"]
