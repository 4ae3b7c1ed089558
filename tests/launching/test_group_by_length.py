"""`zerofit launch --group-by-length`: other batches; as many steps and samples, the same learning rates."""

from __future__ import annotations

import json
import math

import pytest
from runs import SCRIPTS, Launch

pytestmark = pytest.mark.slow

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS, LEARNING_RATE = 390, 8, 2, 1e-3
"""As in the script."""
CHANGED = "zerofit: batches are made of samples of like length, in a new order in each epoch\n"
_ON_EVIDENCE = pytest.mark.evidence


@pytest.mark.parametrize(
    ("loop", "num_ranks", "flags"),
    [
        # What several ranks read is shown by tests/data/test_accelerate_ranks.py, too.
        ("accelerate", 1, ("--engine", "native")),
        pytest.param("accelerate", 2, ("--engine", "native"), marks=_ON_EVIDENCE),
        pytest.param("accelerate", 2, ("--preset", "z2"), marks=_ON_EVIDENCE),
        pytest.param("trainer", 1, ("--engine", "native"), marks=_ON_EVIDENCE),
        pytest.param("trainer", 2, ("--engine", "native"), marks=_ON_EVIDENCE),
    ],
)
def test_samples_come_in_other_batches_and_nothing_else_changes(
    launch: Launch, loop: str, num_ranks: int, flags: tuple[str, ...]
) -> None:
    script = str(SCRIPTS / "ragged_loop.py")
    run = launch("--num-processes", str(num_ranks), *flags, "--group-by-length", script, loop, "out").check()
    assert CHANGED in run.stderr
    ranks = [json.loads((run.folder / f"out{rank}.json").read_text()) for rank in range(num_ranks)]
    steps = math.ceil(NUM_SAMPLES / BATCH_SIZE / num_ranks)
    lengths = ranks[0]["lengths"]
    for epoch in range(NUM_EPOCHS):
        batches = [one["read"][epoch * steps : (epoch + 1) * steps] for one in ranks]
        seen = [sample for ours in batches for batch in ours for sample in batch]
        # accelerate fills up the last batches of several ranks, as it does without zerofit.
        filled = NUM_SAMPLES if num_ranks == 1 else steps * BATCH_SIZE * num_ranks
        assert (set(seen), len(seen)) == (set(range(NUM_SAMPLES)), filled)
        padded = sum(len(batch) * max(lengths[one] for one in batch) for ours in batches for batch in ours)
        assert sum(lengths[one] for one in seen) / padded > 0.75
    assert [len(one["read"]) for one in ranks] == [NUM_EPOCHS * steps] * num_ranks
    for one in ranks:
        assert all(math.isfinite(loss) for loss in one["losses"])
    total = NUM_EPOCHS * steps
    expected = [LEARNING_RATE * (total - step) / total for step in range(total)]
    assert ranks[0]["rates"] == pytest.approx(expected)
