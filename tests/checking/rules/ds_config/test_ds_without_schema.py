"""Without a schema the rules of keys are unknown."""

from __future__ import annotations

from collections.abc import Callable

from zerofit.checking.engine import Verdict


def test_rules_are_unknown_without_the_schema(verdict: Callable[..., Verdict]) -> None:
    said = verdict({"zero_optimisation": {}, "train_batch_size": 8}, is_schema_known=False)
    assert "deepspeed-key-misspelt" in {unknown.rule for unknown in said.unknown}
    assert {unknown.fact for unknown in said.unknown if unknown.rule == "deepspeed-key-misspelt"} == {
        "which keys DeepSpeed has"
    }
