"""Arguments of Accelerator(): which precision runs where the script and the plan say one each."""

from __future__ import annotations

from typing import Any

import pytest
from accelerators import quiet, settings

from zerofit.core.strategy import Precision
from zerofit.training.setup import accelerator_arguments


@pytest.mark.parametrize(
    ("own", "wanted", "is_default", "runs", "line"),
    [
        ("bf16", Precision.BF16, False, "bf16", None),
        ("no", Precision.FP32, False, "no", None),
        (
            "bf16",
            Precision.FP16,
            False,
            "fp16",
            "mixed precision is fp16, as the plan says; the script says bf16",
        ),
        (
            "no",
            Precision.BF16,
            False,
            "bf16",
            "mixed precision is bf16, as the plan says; the script says no",
        ),
        (
            *("fp16", Precision.BF16, True, "fp16"),
            "mixed precision is fp16, as the script says; bf16 would have been the default",
        ),
        ("bf16", None, False, "bf16", None),
        (None, Precision.BF16, False, None, None),  # accelerate launch says it
    ],
)
def test_precision(
    own: str | None, wanted: Precision | None, is_default: bool, runs: str | None, line: str | None
) -> None:
    arguments: dict[str, Any] = {} if own is None else {"mixed_precision": own}
    changes = quiet()
    accelerator_arguments._set_precision(
        arguments, settings(precision=wanted, precision_is_default=is_default), changes
    )
    assert arguments.get("mixed_precision") == runs
    assert changes.lines == (() if line is None else (line,))
