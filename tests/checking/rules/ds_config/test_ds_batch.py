"""The three batch sizes in ds_config.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from zerofit.checking.engine import Verdict
from zerofit.core.command import Route
from zerofit.core.plan import Topology

_RULE = "deepspeed-batch-sizes-disagree"
_RANKS = "how many ranks will run it"
_ROUTE = "who reads the file"


def _sizes(train: object = None, micro: object = None, steps: object = None, **more: Any) -> dict[str, Any]:
    sizes = {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
    }
    return {
        **{name: size for name, size in sizes.items() if size is not None},
        "zero_optimization": {},
        **more,
    }


@pytest.mark.parametrize(
    ("config", "num_ranks", "route", "found", "unknown"),
    [
        # All three: exactly the product.
        (_sizes(16, 4, 2), 2, None, None, None),
        (
            _sizes(16, 4, 2),
            4,
            None,
            "train_batch_size=16 with train_micro_batch_size_per_gpu=4 and gradient_accumulation_steps=2 "
            "on 4 ranks",
            None,
        ),
        (
            _sizes(10, 4, 2),  # wrong for any number of ranks
            None,
            None,
            "train_batch_size=10 with train_micro_batch_size_per_gpu=4 and gradient_accumulation_steps=2",
            None,
        ),
        (_sizes(16, 4, 2), None, None, None, _RANKS),
        # Two: DeepSpeed computes the third; accelerate takes one step of accumulation where none is given.
        (_sizes(32, 4), 2, Route.NATIVE, None, None),
        (
            _sizes(32, 4),
            2,
            Route.ACCELERATE,
            "train_batch_size=32 with train_micro_batch_size_per_gpu=4 on 2 ranks",
            None,
        ),
        (_sizes(32, 4), 2, None, None, _ROUTE),
        (_sizes(8, 4), 2, None, None, None),
        (
            _sizes(20, 4),
            2,
            Route.NATIVE,
            "train_batch_size=20 with train_micro_batch_size_per_gpu=4 on 2 ranks",
            None,
        ),
        (_sizes(16, None, 2), 4, None, None, None),
        (
            _sizes(16, None, 2),
            3,
            None,
            "train_batch_size=16 with gradient_accumulation_steps=2 on 3 ranks",
            None,
        ),
        # One.
        (_sizes(16), 4, None, None, None),
        (_sizes(16), 3, None, "train_batch_size=16 on 3 ranks", None),
        (_sizes(16), 1, None, None, None),
        (_sizes(None, 4), None, None, None, None),
        # What is filled in later, and what is no size, is for others to say.
        (_sizes("auto", 4, 2), None, None, None, None),
        (_sizes(10, "auto", 4), None, None, None, None),
        (_sizes(10, "4", 4), None, None, None, None),
        # Ranks that share samples.
        (_sizes(16, 4, 2, sequence_parallel_size=2), 4, None, None, "how many ranks take different samples"),
        (
            _sizes(16, 4, 2, tensor_parallel={"autotp_size": 2}),
            4,
            None,
            None,
            "how many ranks take different samples",
        ),
    ],
)
def test_sizes(
    config: dict[str, Any],
    num_ranks: int | None,
    route: Route | None,
    found: str | None,
    unknown: str | None,
    verdict: Callable[..., Verdict],
) -> None:
    topology = Topology(world_size=num_ranks) if num_ranks else None
    said = verdict(config, route=route, topology=topology)
    assert [f.found for f in said.findings if f.rule == _RULE] == ([found] if found else [])
    assert [u.fact for u in said.unknown if u.rule == _RULE] == ([unknown] if unknown else [])


def test_a_missing_batch_size_is_certain_where_nobody_can_add_it(verdict: Callable[..., Verdict]) -> None:
    config = _sizes(None, None, 2)
    said = "ds_config.json with no train_batch_size and no train_micro_batch_size_per_gpu"
    for route, severity in ((Route.TRAINER, "error"), (Route.NATIVE, "warning"), (None, "warning")):
        findings = [f for f in verdict(config, route=route).findings if "batch" in f.rule]
        assert [(f.rule, f.severity, f.found) for f in findings] == [
            ("deepspeed-batch-size-missing", severity, said)
        ]
