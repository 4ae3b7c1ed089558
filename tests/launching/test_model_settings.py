"""A launch sets in the model and in torch what the plan says: checkpointing, attention, tf32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from runs import SCRIPTS, Run

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.slow

_FLAGS = ("--num-processes", "1", "--gradient-checkpointing", "--checkpoint-every", "2")


@pytest.mark.parametrize("kind", ["accelerate", pytest.param("trainer", marks=pytest.mark.evidence)])
def test_every_second_block_recomputes_with_the_attention_and_products_of_the_plan(
    launch: Callable[..., Run], kind: str
) -> None:
    flags = (*_FLAGS, "--attention", "eager", "--tf32")
    run = launch(*flags, str(SCRIPTS / "model_settings.py"), kind).check()
    lines = run.stdout.splitlines()
    for line in ("recompute 1 0 1 0", "attention eager", "fp32 products high"):
        assert line in lines
    assert "zerofit: attention of LlamaForCausalLM is eager; the script has sdpa\n" in run.stderr
    said = "zerofit: fp32 matrix products round their inputs to tf32, which changes nothing here: no GPU of"
    assert said in run.stderr


def test_an_attention_that_is_not_installed_ends_the_run_with_what_is(launch: Callable[..., Run]) -> None:
    run = launch(
        "--num-processes",
        "1",
        "--attention",
        "flash-attention-2",
        str(SCRIPTS / "model_settings.py"),
        "accelerate",
    )
    assert run.exit_code == 2
    assert "error[attention-not-available]" in run.stderr
    assert "  fix:   give eager or sdpa or flex_attention, or leave --attention out" in run.stderr
