"""Laws of DeepSpeed's stages over random models: what more ranks, a higher stage and offload never do."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_logs import layered_log, random_logs
from zero_plays import at_end, peaks, played, setup_of, state_bytes

from zerofit.core.allocation_log import AllocationLog
from zerofit.core.strategy import Buckets, OptimizerName
from zerofit.planning.estimate.device_memory.memory import fullest_ranks
from zerofit.planning.estimate.engines.engine import Setup

_LAWS = settings(max_examples=30, deadline=None)
_RANKS = st.integers(1, 9)
_BUCKETS = st.builds(
    Buckets,
    reduce_bucket_size=st.integers(1, 1 << 21),
    stage3_prefetch_bucket_size=st.integers(0, 1 << 21),
    stage3_param_persistence_threshold=st.integers(0, 1 << 18),
    stage3_max_live_parameters=st.integers(0, 1 << 22),
    stage3_max_reuse_distance=st.integers(0, 1 << 22),
    sub_group_size=st.integers(1, 1 << 21),
)
_STAGES = st.integers(0, 3)


def _padding(log: AllocationLog, ranks: int) -> int:
    """Return the bytes that padding may add: 16 for each element, of each parameter or of the flat buffer."""
    return 16 * 2 * ranks * (len(log.parameters) + 1)


@_LAWS
@given(log=random_logs(), ranks=_RANKS, offload=st.sampled_from(("", "o")))
def test_a_higher_stage_never_needs_more_for_model_states(
    log: AllocationLog, ranks: int, offload: str
) -> None:
    """In fp32 stages 1 and 3 hold 4 P / N of masters beside the weights, which the stage below does not."""
    stages = (1, 2, 3) if offload else (0, 1, 2, 3)
    held = [state_bytes(setup_of(log, stage, ranks=ranks, offload=offload)) for stage in stages]
    trained = [one for one in log.parameters if one.trains]
    is_fp32 = trained[0].bytes_per_element == 4
    grant = 4 * sum(one.num_elements for one in trained) / ranks if is_fp32 and not offload else 0
    assert all(later <= earlier + grant + _padding(log, ranks) for earlier, later in pairwise(held))


@_LAWS
@given(log=random_logs(), ranks=_RANKS, stage=_STAGES, offload=st.sampled_from(("", "o", "op")))
def test_more_ranks_never_need_more_each_for_model_states(
    log: AllocationLog, ranks: int, stage: int, offload: str
) -> None:
    offload = "" if stage == 0 else offload if stage == 3 else offload[:1]
    held = [state_bytes(setup_of(log, stage, ranks=count, offload=offload)) for count in (ranks, ranks + 1)]
    assert held[1] <= held[0] + _padding(log, ranks + 1)


@_LAWS
@given(log=random_logs(), ranks=_RANKS, stage=st.integers(1, 3))
def test_offload_never_needs_more_on_the_device_for_model_states(
    log: AllocationLog, ranks: int, stage: int
) -> None:
    offloads = ("", "o", "op") if stage == 3 else ("", "o")
    held = [state_bytes(setup_of(log, stage, ranks=ranks, offload=offload)) for offload in offloads]
    assert held == sorted(held, reverse=True)


@_LAWS
@given(log=random_logs(), ranks=_RANKS, stage=_STAGES, buckets=_BUCKETS, samples=st.integers(1, 4))
def test_twice_the_micro_batch_never_needs_less(
    log: AllocationLog, ranks: int, stage: int, buckets: Buckets, samples: int
) -> None:
    one, two = (
        peaks(played(setup_of(log, stage, ranks=ranks, buckets=buckets, num_samples=count)))
        for count in (samples, 2 * samples)
    )
    assert all(two[phase] >= one[phase] for phase in one)


@_LAWS
@given(
    log=random_logs(),
    ranks=_RANKS,
    stage=_STAGES,
    buckets=_BUCKETS,
    offload=st.sampled_from(("", "o", "op")),
    accumulation=st.integers(1, 4),
    optimizer=st.sampled_from((None, *OptimizerName)),
)
def test_every_block_dies_once_and_nothing_piles_up(
    log: AllocationLog,
    ranks: int,
    stage: int,
    buckets: Buckets,
    offload: str,
    accumulation: int,
    optimizer: OptimizerName | None,
) -> None:
    offload = "" if stage == 0 else offload if stage == 3 else offload[:1]
    setup = setup_of(
        log,
        stage,
        ranks=ranks,
        offload=offload,
        buckets=buckets,
        gradient_accumulation_steps=accumulation,
        optimizer=optimizer,
    )
    tape = played(setup)
    alive: set[int] = set()
    for entry in tape.entries:
        block = abs(entry) - 1
        assert (block in alive) is (entry < 0)
        alive ^= {block}
    assert min(tape.sizes) >= 0
    gone = {"gradients", "gradient copy", "optimizer temporaries", "all-gather buffer", "gathered weights"}
    assert gone.isdisjoint(at_end(tape))


@_LAWS
@given(log=random_logs(), ranks=st.integers(1, 5), stage=st.integers(1, 2), buckets=_BUCKETS)
def test_the_rank_that_is_played_first_needs_most_gradients(
    log: AllocationLog, ranks: int, stage: int, buckets: Buckets
) -> None:
    setup = setup_of(log, stage, ranks=ranks, buckets=buckets)
    first, *others = (
        max(peaks(played(replace(setup, rank=rank)), "gradient partition").values())
        for rank in (None, *range(ranks))
    )
    assert first >= max(others) - _padding(log, ranks)


@_LAWS
@given(
    log=random_logs(),
    ranks=st.integers(1, 9),
    stage=st.integers(1, 2),
    offload=st.sampled_from(("", "o")),
    buckets=_BUCKETS,
)
def test_no_rank_needs_much_more_than_those_that_are_estimated(
    log: AllocationLog, ranks: int, stage: int, offload: str, buckets: Buckets
) -> None:
    """At most a tenth: of 673 models whose layers differ as no real ones do, the worst was 5 % low."""
    setup = setup_of(log, stage, ranks=ranks, offload=offload, buckets=buckets)
    every = [_most(replace(setup, rank=rank)) for rank in range(ranks)]
    assert max(map(_most, fullest_ranks(setup))) >= 0.9 * max(every)


def _most(setup: Setup) -> int:
    return max(peaks(played(setup)).values())


@pytest.mark.parametrize("stage", [0, 3])
def test_inference_holds_no_states(stage: int) -> None:
    log = layered_log(bytes_per_element=2)
    tape = played(replace(setup_of(log, stage), trains=False))
    states = {"master weights", "optimizer states", "gradient bucket", "gradient partition", "gradients"}
    assert states.isdisjoint(tape.terms)
