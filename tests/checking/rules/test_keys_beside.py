"""A misspelt key of ds_config.json beside the one that is meant: a rename would double that key."""

from __future__ import annotations

from typing import Any

import pytest
from rule_examples.example import Example, one_step
from rule_situations import situation_of_example

from zerofit.checking.engine import check
from zerofit.checking.rules.deepspeed import keys
from zerofit.configs.document import RemoveKey, RenameKey


def _fixes(**zero: Any) -> list[tuple[str, list[type]]]:
    situation = situation_of_example(Example(deepspeed=one_step(2, **zero)))
    findings = check(situation, rules=keys.RULES).findings
    return [(finding.fix, [type(edit) for edit in finding.edits]) for finding in findings]


_CPU = {"device": "cpu"}
_PINNED = {**_CPU, "pin_memory": True}


@pytest.mark.parametrize(
    ("zero", "meant", "is_same"),
    [
        ({"offload_optimiser": _CPU, "offload_optimizer": _CPU}, "offload_optimizer", True),
        (
            {"offload_optimiser": _CPU, "offload_optimizer": _PINNED},
            "offload_optimizer",
            False,
        ),
        ({"overlap_com": True, "overlap_comm": True}, "overlap_comm", True),
        ({"overlap_com": True, "overlap_comm": False}, "overlap_comm", False),
        ({"contiguous_gradient": True, "contiguous_gradients": True}, "contiguous_gradients", True),
        ({"reduce_bucket_sise": 5, "reduce_bucket_size": 7}, "reduce_bucket_size", False),
    ],
)
def test_a_misspelt_key_beside_the_right_one_is_removed(
    zero: dict[str, Any], meant: str, is_same: bool
) -> None:
    expected = f"remove it: zero_optimization.{meant} is set too"
    assert _fixes(**zero) == [(expected, [RemoveKey] if is_same else [])]
    alone = {name: value for name, value in zero.items() if name != meant}
    assert _fixes(**alone) == [(f"write {meant}", [RenameKey])]
