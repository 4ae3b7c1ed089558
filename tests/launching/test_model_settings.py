"""A launch sets in model and torch what the plan says: checkpointing, attention, tf32, torch.compile."""

from __future__ import annotations

import json

import pytest
from runs import SCRIPTS, Launch, Run

pytestmark = pytest.mark.slow

_COMPILED = str(SCRIPTS / "compiled.py")
_FLAGS = ("--num-processes", "1", "--gradient-checkpointing", "--checkpoint-every", "2")


@pytest.mark.parametrize("kind", ["accelerate", pytest.param("trainer", marks=pytest.mark.evidence)])
def test_every_second_block_recomputes_with_the_attention_and_products_of_the_plan(
    launch: Launch, kind: str
) -> None:
    flags = (*_FLAGS, "--attention", "eager", "--tf32")
    run = launch(*flags, str(SCRIPTS / "model_settings.py"), kind).check()
    lines = run.stdout.splitlines()
    for line in ("recompute 1 0 1 0", "attention eager", "fp32 products high"):
        assert line in lines
    assert "zerofit: attention of LlamaForCausalLM is eager; the script has sdpa\n" in run.stderr
    said = "zerofit: fp32 matrix products use tf32, without effect here: no GPU of"
    assert said in run.stderr


def test_an_attention_that_is_not_installed_ends_the_run_with_what_is(launch: Launch) -> None:
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
    assert "  fix:   use eager or sdpa or flex_attention, or keep the model's own" in run.stderr


def _losses(run: Run) -> list[float]:
    lines = [line.split() for line in run.stdout.splitlines()]
    return [float(words[1]) for words in lines if words and words[0] == "loss"]


def _graphs(run: Run) -> tuple[int, int]:
    """Return how many graphs were compiled, and how often one was broken."""
    (line,) = [line.split() for line in run.stdout.splitlines() if line.startswith("graphs ")]
    return int(line[1]), int(line[3])


def test_a_compiled_model_in_micro_batches_is_two_graphs_and_keeps_its_names(
    launch: Launch,
) -> None:
    flags = ("--num-processes", "1", "--compile", "--micro-batch-size", "2")
    run = launch(*flags, _COMPILED, "small", "out").check()
    assert _graphs(run) == (2, 0)  # with gradients, and without for the first pass of each piece
    plain = [float(word) for word in run.stdout.partition("plain ")[2].splitlines()[0].split()]
    assert len(plain) == 3
    assert _losses(run) == pytest.approx(plain, rel=1e-5)
    names = json.loads((run.folder / "out" / "names.json").read_text())
    assert names == ["inner.bias", "inner.weight", "outer.bias", "outer.weight"]
    assert "kind Small\n" in run.stdout


@pytest.mark.evidence
@pytest.mark.parametrize("more", [(), ("--micro-batch-size", "2"), ("--gradient-checkpointing",)])
@pytest.mark.parametrize(
    "ranks",
    [
        ("--num-processes", "1"),
        ("--num-processes", "2", "--engine", "native"),
        ("--num-processes", "2", "--engine", "deepspeed", "--zero-stage", "2"),
        ("--num-processes", "2", "--engine", "deepspeed", "--zero-stage", "3"),
    ],
    ids=["one", "ddp", "zero2", "zero3"],
)
def test_a_transformer_trains_to_the_same_losses_compiled(
    launch: Launch, ranks: tuple[str, ...], more: tuple[str, ...]
) -> None:
    plain = launch(*ranks, *more, _COMPILED, "bert").check()
    run = launch(*ranks, *more, "--compile", _COMPILED, "bert").check()
    num_graphs, num_broken = _graphs(run)
    assert num_graphs > 0
    assert _losses(run) == pytest.approx(_losses(plain), rel=1e-5)
    if ranks in (("--num-processes", "1"),):
        assert (num_graphs, num_broken) == (2, 0)
