"""What --freeze names does not train, has no gradient and no state, and is partitioned all the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from changed_runs import facts_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from runs import Run

pytestmark = pytest.mark.slow

FREEZE = ("--freeze", "embeddings+1")
_FROZEN_IN_BERT = ("embeddings", ".layer.0.")


def trains(name: str) -> bool:
    return not any(part in name for part in _FROZEN_IN_BERT)


def test_under_zero_3_frozen_parameters_are_partitioned_and_have_no_state(
    launch: Callable[..., Run], tmp_path: Path
) -> None:
    flags = ("--num-processes", "2", "--engine", "deepspeed", "--zero-stage", "3", *FREEZE)
    run, ranks = facts_of(launch, tmp_path, "accelerate", *flags)
    assert "parameters of BertForSequenceClassification are frozen (embeddings+1)" in run.stderr
    assert len(ranks) == 2
    for facts in ranks:
        names = [*facts["shards"]]
        assert facts["trains"] == facts["moved"] == [name for name in names if trains(name)]
        assert all(shard == -(-whole // 2) for whole, shard in facts["shards"].values())
        trained = sum(shard for name, (_, shard) in facts["shards"].items() if trains(name))
        assert facts["num_in_states"] == trained


@pytest.mark.evidence
@pytest.mark.parametrize("route", ["accelerate", "late", "trainer"])
@pytest.mark.parametrize("stage", [None, "2", "3"])
def test_frozen_parameters_stay_as_they_are(
    stage: str | None, route: str, launch: Callable[..., Run], tmp_path: Path
) -> None:
    if (route, stage) == ("late", "3"):
        pytest.skip("ZeRO-3 needs the optimizer before prepare()")
    engine = ("--engine", "deepspeed", "--zero-stage", stage) if stage else ("--engine", "native")
    _, ranks = facts_of(launch, tmp_path, route, "--num-processes", "2", *engine, *FREEZE)
    for facts in ranks:
        assert facts["moved"] == facts["trains"]
        assert facts["trains"]
        assert all(trains(name) for name in facts["trains"])
        assert all(trains(name) for name in facts["gradients"])
        if stage is None:
            assert facts["num_held"] == facts["num_in_states"]
