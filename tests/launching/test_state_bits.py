"""8-bit optimizers keep embeddings in 32 bits, under ZeRO's flat tensors too."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from runs import SCRIPTS, Run

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.slow

EMBEDDING = 128 * 64
OTHERS = 128 * 64 + 4 * 64 * 64 + 3 * 64 * 64 + 3 * 64
"""The head, attention, the MLP, and three norms."""


@pytest.mark.parametrize(
    ("optimizer", "preset", "route"),
    [
        ("paged-lion-8bit", "z2", "accelerate"),
        *(
            pytest.param(*case, marks=pytest.mark.evidence)
            for case in (
                ("adamw-8bit", "z1", "accelerate"),
                ("adamw-8bit", "z3", "accelerate"),
                ("adamw-8bit", "z2", "trainer"),
                ("lion-8bit", "z3", "trainer"),
            )
        ),
    ],
)
def test_embeddings_keep_32_bits_under_zero(
    optimizer: str, preset: str, route: str, launch: Callable[..., Run]
) -> None:
    flags = ("--num-processes", "1", "--preset", preset, "--mixed-precision", "no", "--optimizer", optimizer)
    run = launch(*flags, str(SCRIPTS / "state_bits.py"), route).check()
    elements: Counter[str] = Counter()
    for _, dtype, number in (line.split() for line in run.stdout.splitlines() if line.startswith("state ")):
        # Trainer has a group of biases and norms, which is too small for 8 bits.
        elements[dtype] += int(number) if int(number) >= 4096 else 0
    assert elements["float32"] == EMBEDDING
    assert elements["uint8"] == pytest.approx(OTHERS, abs=3 * 64)
