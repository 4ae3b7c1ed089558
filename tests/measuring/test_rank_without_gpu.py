"""What only a GPU has, as far as a rank can be looked at without one; and builds that were killed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_specs import place_in, spec_in

from zerofit.core.errors import UserError
from zerofit.measuring.deepspeed_rank import RankTrainee, import_ahead, rank_config
from zerofit.measuring.parent import start_rung


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
    with pytest.raises(UserError) as raised:
        trainee.timed_step()
    assert raised.value.rule == "rank-skips-its-steps"


def test_the_lock_of_a_build_that_was_killed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    lock.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    told: list[str] = []
    with pytest.raises(UserError) as raised:
        import_ahead(spec_in(tmp_path, "zero-2"), tell=told.append)
    assert (raised.value.rule, raised.value.found) == ("deepspeed-build-locked", str(lock))
    assert raised.value.fix.startswith(f"rm {lock} ")
    assert told == ["building or loading DeepSpeed's deepspeed_shm_comm"]


def test_a_rung_gets_the_defaults_of_torch_and_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left_out = (
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "CUDA_MODULE_LOADING",
        "LOCAL_WORLD_SIZE",
        "ACCELERATE_MIXED_PRECISION",
    )
    for name in (*left_out, "KEPT"):
        monkeypatch.setenv(name, "1")
    program = tmp_path / "names.py"
    program.write_text("import os\nprint(sorted(os.environ))\n")
    spec, place = spec_in(tmp_path), place_in(tmp_path)
    with start_rung(spec, place, program=(str(program),)) as rung:
        rung.finish(limit_s=60)
    names = place.log.read_text()
    assert "'KEPT'" in names
    assert [name for name in left_out if f"'{name}'" in names] == []
