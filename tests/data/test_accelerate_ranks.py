"""Batches of like length on real ranks of accelerate: its sharding, skipping, saving and gathering hold."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from runs import run_command

from zerofit.data.sampler import LengthGroupedBatches

SCRIPT = Path(__file__).parent / "accelerate_ranks.py"
NUM_SAMPLES, BATCH_SIZE, STOPPED_AFTER = 203, 4, 5
"""As in the script."""


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.evidence)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Run the script on 2 ranks, or on 4, and return what each one found."""
    folder = tmp_path_factory.mktemp("ranks")
    run_command((sys.executable, str(SCRIPT), str(request.param), str(folder)), folder).check()
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(request.param)]


def samples_of(found: list[dict[str, Any]], epoch: int) -> list[int]:
    """Return all samples that all ranks read in an epoch."""
    return sorted(sample for one in found for batch in one["epochs"][epoch] for sample in batch)


@pytest.mark.parametrize("kind", ["samples", "tokens"])
def test_accelerate_deals_every_sample_once_in_equal_steps(ranks: list[dict[str, Any]], kind: str) -> None:
    found = [one[kind] for one in ranks]
    assert {len(epoch) for one in found for epoch in one["epochs"]} == {found[0]["len"]}
    for epoch in range(3):
        assert samples_of(found, epoch) == list(range(NUM_SAMPLES))
    assert found[0]["epochs"][0] != found[0]["epochs"][1] != found[0]["epochs"][2]


@pytest.mark.parametrize("kind", ["samples", "tokens"])
def test_a_loaded_state_holds_under_accelerate_which_counts_epochs_from_0(
    ranks: list[dict[str, Any]], kind: str
) -> None:
    for one in (found[kind] for found in ranks):
        assert one["resumed"] == [one["epochs"][1][STOPPED_AFTER:], one["epochs"][2]]


def test_accelerate_gives_each_rank_what_the_sampler_has_for_it(ranks: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(ranks):
        lengths = one["lengths"]
        sampler = LengthGroupedBatches(lengths, batch_size=BATCH_SIZE, num_ranks=len(ranks), rank=rank)
        assert one["samples"]["epochs"] == [list(sampler) for _ in range(3)]
        sampler.set_epoch(3)
        assert one["samples"]["skipped"] == list(sampler)[3:]


@pytest.mark.parametrize("kind", ["script", "workers"])
def test_a_scripts_own_loader_keeps_its_length_and_its_samples(
    ranks: list[dict[str, Any]], kind: str
) -> None:
    found = [one[kind] for one in ranks]
    for one in found:
        assert one["len"] == one["plain_len"]
        assert {len(batch) for epoch in one["epochs"] for batch in epoch} == {BATCH_SIZE}
        assert sum(len(batch) for batch in one["epochs"][0]) == one["plain_total"]
    for epoch in range(3):
        seen = samples_of(found, epoch)
        assert set(seen) == set(range(NUM_SAMPLES))
        assert len(seen) == BATCH_SIZE * found[0]["len"] * len(ranks)
    # What accelerate fills the last batches up with is taken away again.
    assert sorted(found[0]["gathered"]) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize("kind", ["script", "workers"])
def test_a_script_that_resumes_reads_on_where_it_stopped(ranks: list[dict[str, Any]], kind: str) -> None:
    for one in (found[kind] for found in ranks):
        rest = one["epochs"][1][one["stopped_after"] :]
        assert one["resumed"] == [rest, one["epochs"][2]]
        assert one["told"] == rest  # by set_epoch() alone, as Trainer does
        assert one["fourth"][0] == one["fourth"][1]
        assert one["fourth"][0] not in one["epochs"]
