"""What the engine was measured to hold agrees with its closed forms, and with what it holds now."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from memory.cases import CASES, batch_bytes
from memory.results import RESULTS, load_measured, write_measured
from memory.run_memory import run_memory

if TYPE_CHECKING:
    from memory.cases import Case

MEASURED = load_measured()
_SMALL = 4096
"""Bytes of scalars and of padding."""


def _phase(key: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(
        phase for phase in MEASURED.cases[key]["phases"] if phase["phase"] == name
    )  # fmt: skip
    return found


def _last_step(key: str) -> dict[str, Any]:
    case: Case = MEASURED.cases[key]["case"]
    return _phase(key, f"step 2.{case.accumulation}")


def _states_at_end(phase: dict[str, Any], memory: str) -> list[int]:
    return [
        sum(nbytes for kind, nbytes in kinds.items() if kind not in ("model", "backward"))
        for kinds in phase[memory]["kinds_at_end"]
    ]


def _trained(key: str) -> int:
    return sum(math.prod(shape) for _, shape, trains in MEASURED.cases[key]["params"] if trains)


def test_every_case_is_measured() -> None:
    assert list(MEASURED.cases) == [case.key for case in CASES]


def test_nothing_waits_for_the_garbage_collector() -> None:
    assert [
        (key, phase["phase"])
        for key, kept in MEASURED.cases.items()
        for phase in kept["phases"]
        if phase.get("cyclic_bytes", 0) > _SMALL
    ] == []


def test_the_models_own_tensors_are_on_the_device() -> None:
    """The labels of what a forward and its backward make: nothing but scalars may seem to be the host's."""
    assert [
        (key, phase["phase"])
        for key, kept in MEASURED.cases.items()
        for phase in kept["phases"]
        for kinds in (*phase["host"]["kinds_at_peak"], *phase["host"]["kinds_at_end"])
        if max(kinds.get("model", 0), kinds.get("backward", 0)) > max(_SMALL, batch_bytes(kept["case"]))
    ] == []


def test_only_a_model_made_after_its_accelerator_is_sharded_as_it_is_made() -> None:
    loaded = {
        key: max(_phase(key, "load")["device"]["peak"]) > 0 for key in MEASURED.cases if key[:4] == "zero"
    }
    assert loaded == {case.key: case.zero_init for case in CASES if case.stage is not None}


@pytest.mark.parametrize(
    ("stage", "precision", "size", "num_ranks"),
    [
        (1, "bf16", 2, 2),
        (1, "fp32", 4, 2),
        (2, "bf16", 2, 2),
        (2, "fp32", 4, 2),
        (1, "bf16", 2, 4),
        (2, "bf16", 2, 4),
        (1, "fp32", 4, 4),
        (2, "fp32", 4, 4),
    ],
)
def test_stages_1_and_2_keep_weights_and_a_share_of_the_states(
    stage: int, precision: str, size: int, num_ranks: int
) -> None:
    key = f"zero{stage}-{precision}-x1-n{num_ranks}"
    expected = _trained(key) * (size + 12 / num_ranks)
    assert _states_at_end(_last_step(key), "device") == pytest.approx([expected] * num_ranks, abs=_SMALL)


@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeed_casts_adapters_to_16_bit_beside_fp32_masters(stage: int) -> None:
    key = f"zero{stage}-lora"
    everything = sum(math.prod(shape) for _, shape, _ in MEASURED.cases[key]["params"])
    expected = 2 * everything + 4 * _trained(key) / 2
    held = _states_at_end(_phase(key, "initialise"), "device")
    assert held == pytest.approx([expected] * 2, abs=_SMALL)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("offload", "bytes_per_parameter"), [("+optimizer", 18), ("+optimizer+param", 20)])
def test_stage_3_offload_keeps_its_shares_on_the_host(
    offload: str, bytes_per_parameter: int, num_ranks: int
) -> None:
    key = f"zero3{offload}-bf16-x1-n{num_ranks}"
    expected = _trained(key) * bytes_per_parameter / num_ranks
    assert _states_at_end(_last_step(key), "host") == pytest.approx([expected] * num_ranks, abs=_SMALL)


def test_a_planted_error_fails() -> None:
    phase = {"device": {"kinds_at_end": [{"engine": 10, "model": 5}, {"gradient": 7}]}}
    assert _states_at_end(phase, "device") == [10, 7]


@pytest.mark.evidence
@pytest.mark.timeout(3600)
def test_all_cases_hold_what_is_written(request: pytest.FixtureRequest) -> None:
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    problems: list[str] = []
    measured = run_memory(
        CASES,
        caches / "zerofit-evidence" / "memory",
        anew=request.config.getoption("--anew"),
        tell=problems.append,
    )
    assert problems == []
    write_measured(measured, RESULTS)
