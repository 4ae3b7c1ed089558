"""What zerofit does, once each, on whatever versions are installed: `make test-versions`."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
from example_runs import (
    GLOBAL_BATCH_SIZE,
    NUM_STEPS,
    Losses,
    accelerate_example,
    accelerate_losses,
    plain_accelerate_launch,
    trainer_example,
    trainer_losses,
)
from generate_runs import generate_run, make_model, write_prompts
from gpu_truth.cases import ACCURACY_ON_CPU
from gpu_truth.results import results_from_json
from kept_cases import keep_as_done
from measuring.results import TrialState
from runs import ROOT, Run, run_command, run_process

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.versions

TOLERANCE = 2e-5
"""Relative. Sums over two ranks are rounded in another order; eight AdamW steps carry that on."""


@pytest.fixture(scope="session", autouse=True)
def _comm(built_comm: None) -> None:
    """Build the op that two ranks need first."""


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples' cache of tokenized text and untrained models, made once a session."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def one_process(
    data_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Callable[..., list[str]], Callable[[Path], Losses]], Losses]:
    """Return a function that gives an example's losses in one process under the stock launcher."""
    known: dict[str, Losses] = {}

    def losses(example: Callable[..., list[str]], read: Callable[[Path], Losses]) -> Losses:
        if example.__name__ not in known:
            folder = tmp_path_factory.mktemp("plain")
            plain_accelerate_launch(example(data_dir, micro_batch_size=GLOBAL_BATCH_SIZE), folder)
            known[example.__name__] = read(folder)
        return known[example.__name__]

    return losses


def _zerofit(folder: Path, *arguments: str) -> Run:
    # A fork has imported the libraries before the hooks: between releases, that is what differs.
    return run_process([sys.executable, "-m", "zerofit", *arguments], folder)


def _assert_same(losses: Losses, expected: Losses) -> None:
    assert [step for step, _, _ in losses] == list(range(1, NUM_STEPS + 1))
    assert [rate for _, _, rate in losses] == pytest.approx([rate for _, _, rate in expected], rel=1e-9)
    assert [loss for _, loss, _ in losses] == pytest.approx([loss for _, loss, _ in expected], rel=TOLERANCE)
    assert losses[-1][1] < losses[0][1]


_ACCELERATE = pytest.param(accelerate_example, accelerate_losses, id="Accelerator")
_TRAINER = pytest.param(trainer_example, trainer_losses, id="Trainer")


@pytest.mark.parametrize(("example", "read"), [_ACCELERATE, _TRAINER])
def test_example_in_one_process(
    example: Callable[..., list[str]], read: Callable[[Path], Losses], one_process: Callable[..., Losses]
) -> None:
    losses = one_process(example, read)
    assert [step for step, _, _ in losses] == list(range(1, NUM_STEPS + 1))
    assert losses[-1][1] < losses[0][1]


@pytest.mark.parametrize("stage", ["2", "3"], ids=["ZeRO-2", "ZeRO-3"])
@pytest.mark.parametrize(("example", "read"), [_ACCELERATE, _TRAINER])
def test_example_on_two_ranks(
    example: Callable[..., list[str]],
    read: Callable[[Path], Losses],
    stage: str,
    one_process: Callable[..., Losses],
    data_dir: Path,
    tmp_path: Path,
) -> None:
    target = example(data_dir, micro_batch_size=GLOBAL_BATCH_SIZE // 2)
    run = _zerofit(
        tmp_path, "launch", "--cpu", "--num-processes", "2", "--zero-stage", stage, *target
    ).check()
    _assert_same(read(tmp_path), one_process(example, read))
    written = json.loads((run.run_folder / "ds_config.json").read_text())
    assert written["zero_optimization"]["stage"] == int(stage)
    ranks = [json.loads(path.read_text()) for path in sorted(run.run_folder.rglob("rank*.json"))]
    assert len(ranks) == 2


@pytest.mark.parametrize("units", ["resharded", "kept"])
@pytest.mark.parametrize(("example", "read"), [_ACCELERATE, _TRAINER])
def test_example_under_fsdp2_on_two_ranks(
    example: Callable[..., list[str]],
    read: Callable[[Path], Losses],
    units: str,
    one_process: Callable[..., Losses],
    data_dir: Path,
    tmp_path: Path,
) -> None:
    target = example(data_dir, micro_batch_size=GLOBAL_BATCH_SIZE // 2)
    flags = ("--cpu", "--num-processes", "2", "--engine", "fsdp2", "--mixed-precision", "no")
    kept = () if units == "resharded" else ("--no-reshard-after-forward",)
    _zerofit(tmp_path, "launch", *flags, *kept, *target).check()
    _assert_same(read(tmp_path), one_process(example, read))
    assert list((tmp_path / "out").rglob("model.safetensors"))


def test_a_checkpoint_of_fsdp2_is_resumed_on_one_rank(
    one_process: Callable[..., Losses], data_dir: Path, tmp_path: Path
) -> None:
    half = NUM_STEPS // 2
    for ranks, more in ((2, ()), (1, ("--resume-from-checkpoint", f"out/checkpoint-{half}"))):
        target = accelerate_example(data_dir, micro_batch_size=GLOBAL_BATCH_SIZE // ranks)
        flags = ("--cpu", "--num-processes", str(ranks), "--engine", "fsdp2", "--mixed-precision", "no")
        saving = ("--checkpointing-steps", str(half))
        _zerofit(tmp_path, "launch", *flags, *target, *saving, *more).check()
    _assert_same(accelerate_losses(tmp_path), one_process(accelerate_example, accelerate_losses))


def test_plan_of_a_captured_script(data_dir: Path, tmp_path: Path) -> None:
    target = accelerate_example(data_dir, micro_batch_size=GLOBAL_BATCH_SIZE)
    run = _zerofit(tmp_path, "plan", "--json", "--gpus", "2xRTX4090", *target).check()
    assert "LlamaForCausalLM" in run.stdout
    assert json.loads(run.stdout)["plans"][0]["chosen"]
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


_SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def test_plan_of_a_model_with_flash_attention(tmp_path: Path) -> None:
    config = {**_SIZES, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = "--seq-len 64 --global-batch-size 4 --gpus 1xA100-40G --attention flash_attention_2 --json"
    run = _zerofit(tmp_path, "plan", "--model", str(tmp_path), *flags.split()).check()
    chosen = json.loads(run.stdout)["plans"][0]["chosen"]
    assert chosen["strategy"]["attention"] == "flash_attention_2"


def test_generation_of_uneven_prompts_on_two_ranks(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    write_prompts(
        tmp_path / "prompts.jsonl",
        [{"prompt": "the cat sat on a mat"}, {"prompt": "a"}, {"prompt": "the mat slept on the cat"}],
    )
    common = ("--model", str(model), "--prompts", "prompts.jsonl", "--max-new-tokens", "8", "--greedy")
    on_one = generate_run(tmp_path, *common, "--num-processes", "1", "--out", "one.jsonl").check()
    assert on_one.folder == tmp_path
    generate_run(tmp_path, *common, "--num-processes", "2", "--zero-stage", "3", "--out", "two.jsonl").check()
    assert (tmp_path / "two.jsonl").read_text() == (tmp_path / "one.jsonl").read_text()
    assert len((tmp_path / "two.jsonl").read_text().splitlines()) == 3


def test_check_of_a_good_and_a_bad_file(tmp_path: Path) -> None:
    zero3 = {"stage": 3, "offload_param": {"device": "cpu"}}
    for name, section in (("good.json", zero3), ("bad.json", {**zero3, "stage": 2})):
        file = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": section}
        (tmp_path / name).write_text(json.dumps(file))
    good, bad = (_zerofit(tmp_path, "check", name) for name in ("good.json", "bad.json"))
    assert (good.exit_code, bad.exit_code) == (0, 1), f"{good.stdout}{good.stderr}{bad.stdout}{bad.stderr}"
    assert "error[param-offload-needs-zero3]" in bad.stdout


def test_measurement_of_a_case_beside_its_prediction(tmp_path: Path) -> None:
    left = ACCURACY_ON_CPU[1].key
    keep_as_done(tmp_path, {case.key for case in ACCURACY_ON_CPU} - {left})
    program = str(ROOT / "benchmarks" / "measure_gpu.py")
    flags = ("--cpu", "--out", str(tmp_path), "--sections", "accuracy", "--budget", "4m")
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    run_command([sys.executable, program, *flags], tmp_path, **cache).check()
    results = results_from_json((tmp_path / "cpu.json").read_text())
    (one,) = (one for one in results.accuracy if one.case.key == left)
    assert one.outcome.state is TrialState.DONE, one.outcome
    assert one.predicted is not None
    assert one.outcome.measured is not None
    assert one.outcome.measured.counted is not None
    assert one.predicted.parts.weights == one.outcome.measured.counted.weights
