"""What is said of DeepSpeed releases that were not compared."""

from __future__ import annotations

import pytest

from zerofit.planning.estimate.device_memory.memory import doubt_about


@pytest.mark.parametrize(
    ("deepspeed", "words"),
    [
        ("0.19.8", None),
        (None, "not known"),
        ("0.16.4", "flattens weights"),
        ("0.19.7", "only 0.19.8"),
        ("0.20.1+cu128", "only 0.19.8"),
        ("1.2.0", "only 0.19.8"),
    ],
)
def test_only_the_release_that_was_compared_is_without_doubt(
    deepspeed: str | None, words: str | None
) -> None:
    doubt = doubt_about(deepspeed)
    assert doubt is None if words is None else (doubt is not None and words in doubt.reason)
