"""Step times under FSDP beside published ones."""

from __future__ import annotations

import json
from typing import Any

import pytest
from published_fsdp_steps import CASES, OUT, estimated, results

_EXPERTS = "automodel qwen3-30b-a3b, 8 H100"


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(OUT.read_text("utf-8"))
    return found


def test_the_recorded_steps_under_fsdp_are_todays(recorded: dict[str, Any]) -> None:
    assert results() == recorded


def test_published_steps_under_fsdp_are_predicted_within_what_is_stated(recorded: dict[str, Any]) -> None:
    missed = {
        case["id"] for case in recorded["cases"] if abs(1 / (1 + case["error"]) - 1) > case["uncertainty"]
    }
    assert missed == {_EXPERTS}  # 128 experts, each a product of its own
    assert recorded["summary"]["all"]["median"] < 0.1


def test_more_nodes_a_slower_card_and_recomputation_take_longer_as_measured() -> None:
    seconds = {case.name: (case.seconds, estimated(case).seconds) for case in CASES}
    for fast, slow in [
        ("torchtitan llama-3-8b, 8 H100, compiled", "torchtitan llama-3-8b, 8 H100"),
        ("torchtitan llama-3-8b, 128 H100, compiled", "torchtitan llama-3-8b, 128 H100"),
        ("torchtitan llama-2-13b, 64 A100", "torchtitan llama-2-13b, 64 A100, every second layer"),
        ("answer.ai llama-2-7b lora batch 6, 2 RTX4090", "answer.ai llama-2-7b lora batch 6, 2 RTX3090"),
    ]:
        assert all(quick < long for quick, long in zip(seconds[fast], seconds[slow], strict=True)), (
            fast,
            slow,
        )
