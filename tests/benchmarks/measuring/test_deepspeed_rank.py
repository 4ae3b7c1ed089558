"""Rank 0 of N under the real DeepSpeed engine on the CPU: what it holds, and how it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from measuring.deepspeed_rank import RankTrainee, import_ahead, rank_config
from measuring.results import TrialSpec, spec_to_json
from measuring.trial import trial_environment
from refusals import refusal
from runs import ROOT
from small_specs import spec_in

from zerofit.core.strategy import Engine, OffloadDevice, Precision, Strategy, ZeroStage

_TINY = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "vocab_size": 1001,  # so that nothing divides by the ranks
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
_OFFLOADS = {
    "none": (OffloadDevice.NONE, OffloadDevice.NONE),
    "optimizer": (OffloadDevice.CPU, OffloadDevice.NONE),
    "param": (OffloadDevice.CPU, OffloadDevice.CPU),
}


def _spec(
    folder: Path,
    stage: int,
    num_ranks: int,
    offload: str = "none",
    *,
    precision: Precision = Precision.BF16,
    windows: int = 1,
) -> TrialSpec:
    (folder / "config.json").write_text(json.dumps(_TINY))
    optimizer_offload, param_offload = _OFFLOADS[offload]
    strategy = Strategy(
        engine=Engine.DEEPSPEED,
        zero_stage=ZeroStage(stage),
        optimizer_offload=optimizer_offload,
        param_offload=param_offload,
        precision=precision,
        micro_batch_size=2,
        gradient_accumulation_steps=windows,
    )
    return TrialSpec(
        model=str(folder),
        task="sequence-classification",
        strategy=strategy,
        sequence_length=8,
        full_length=8,
        num_steps=1,
        on_cpu=True,
        num_ranks=num_ranks,
    )


def _held(folder: Path, spec: TrialSpec) -> dict[str, Any]:
    """Return what rank_program.py prints of a spec, run in a process of its own."""
    (folder / "spec.json").write_text(spec_to_json(spec))
    program = ROOT / "tests" / "support" / "rank_program.py"
    finished = subprocess.run(
        [sys.executable, str(program), str(folder / "spec.json")],
        env=trial_environment(on_cpu=True),
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    held: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return held


def _part(sizes: list[int], stage: int, num_ranks: int) -> int:
    """Return the elements of one rank's part, as DeepSpeed 0.19.8 pads.

    Stage 3 cuts each parameter by itself (runtime/zero/partition_parameters.py, _aligned_size); below it all
    of them lie in one buffer, which is padded to a multiple of two elements a rank
    (runtime/zero/stage_1_and_2.py, nccl_start_alignment_factor).
    """
    if stage == 3:
        return sum(-(-size // num_ranks) for size in sizes)
    return 2 * -(-sum(sizes) // (2 * num_ranks))


_OFFLOADS_OF_STAGE = {1: ("none", "optimizer"), 2: ("none", "optimizer"), 3: ("none", "optimizer", "param")}
_REST = [
    *(
        (stage, num_ranks, offload, {})
        for stage, offloads in _OFFLOADS_OF_STAGE.items()
        for offload in offloads
        for num_ranks in (1, 2, 8, 64)
    ),
    *((stage, 8, "none", {"precision": Precision.FP32, "windows": 2}) for stage in _OFFLOADS_OF_STAGE),
]


@pytest.mark.parametrize(
    ("stage", "num_ranks", "offload", "more"),
    [
        pytest.param(2, 2, "optimizer", {}, marks=pytest.mark.slow),
        pytest.param(3, 64, "param", {}, marks=pytest.mark.slow),
        *(pytest.param(*case, marks=pytest.mark.evidence) for case in _REST),
    ],
)
@pytest.mark.usefixtures("built_ops")
def test_rank_0_holds_its_part_of_the_model_and_takes_all_steps(
    tmp_path: Path, stage: int, num_ranks: int, offload: str, more: dict[str, Any]
) -> None:
    spec = _spec(tmp_path, stage, num_ranks, offload, **more)
    held, strategy = _held(tmp_path, spec), spec.strategy
    whole = held["whole"]
    offloads = strategy.optimizer_offload is OffloadDevice.CPU
    part = _part(whole, stage, spec.num_ranks)
    assert (held["ranks"], held["steps"], held["skipped"]) == (spec.num_ranks, 2, 0)
    assert held["first_moments"] == part
    assert held["weights"] == (part if stage == 3 else sum(whole))
    assert held["optimizer"] == ("DeepSpeedCPUAdam" if offloads else "AdamW")
    is_fp32 = strategy.precision is Precision.FP32
    assert held["weight_formats"] == ["torch.float32" if is_fp32 else "torch.bfloat16"]


def test_nothing_of_the_configuration_is_left_to_a_script(tmp_path: Path) -> None:
    config = rank_config(_spec(tmp_path, 3, 8, "param", windows=4))
    assert "auto" not in json.dumps(config)
    assert config["train_batch_size"] == 2 * 4 * 8
    assert config["gradient_clipping"] == 1.0
    assert not config["zero_optimization"]["offload_optimizer"]["pin_memory"]  # on the CPU


@pytest.mark.slow
def test_a_part_of_deepspeed_that_cannot_be_built_is_said(tmp_path: Path) -> None:
    spec = _spec(tmp_path, 2, 8, "optimizer")
    finished = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys\n"
            "from zerofit.core.errors import UserError\n"
            "from measuring.deepspeed_rank import import_ahead\n"
            "from measuring.results import spec_from_json\n"
            "try:\n    import_ahead(spec_from_json(sys.argv[1]), tell=print)\n"
            "except UserError as error:\n    print(error.rule)\n",
            spec_to_json(spec),
        ],
        env={
            **trial_environment(on_cpu=True),
            "CXX": "/nowhere/c++",
            "TORCH_EXTENSIONS_DIR": str(tmp_path / "empty"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.stdout.splitlines()[-1:] == ["deepspeed-op-not-built"], finished.stderr[-2000:]


class _Engine:
    """An engine whose loss scale is too large for some of its steps."""

    def __init__(self, skips: list[bool]) -> None:
        self._skips = skips
        self.skipped_steps = 0

    def __call__(self, **_batch: Any) -> SimpleNamespace:
        return SimpleNamespace(loss=torch.ones(()))

    def set_gradient_accumulation_boundary(self, *, is_boundary: bool) -> None:
        pass

    def backward(self, _loss: Any) -> None:
        pass

    def step(self) -> None:
        self.skipped_steps += self._skips.pop(0)


def test_on_a_gpu_memory_is_pinned_and_the_loss_scale_begins_low(tmp_path: Path) -> None:
    rungs = "zero-3,fp16,offload-optimizer,offload-param"
    config = rank_config(spec_in(tmp_path, rungs, on_cpu=False, num_ranks=8))
    zero = config["zero_optimization"]
    assert [zero[name]["pin_memory"] for name in ("offload_optimizer", "offload_param")] == [True, True]
    assert config["fp16"]["enabled"]
    assert config["fp16"]["initial_scale_power"] == 4


def test_a_timed_step_that_the_engine_skips_ends_the_rung_and_one_of_the_warm_up_does_not(
    tmp_path: Path,
) -> None:
    trainee = RankTrainee(
        model=None,
        optimizer=None,
        samples={"input_ids": torch.ones(4, 16)},
        spec=spec_in(tmp_path, "zero-2,fp16"),
        device="cpu",
        engine=_Engine([True, False, True]),
    )
    trainee.step()
    assert trainee.timed_step() > 0
    assert refusal(trainee.timed_step).rule == "rank-skips-its-steps"


def test_the_lock_of_a_build_that_was_killed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    lock.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    told: list[str] = []
    raised = refusal(import_ahead, spec_in(tmp_path, "zero-2"), tell=told.append)
    assert (raised.rule, raised.found) == ("deepspeed-build-locked", str(lock))
    assert raised.fix.startswith(f"rm {lock} ")
    assert told == ["building or loading DeepSpeed's deepspeed_shm_comm"]
