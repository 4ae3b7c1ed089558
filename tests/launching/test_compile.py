"""torch.compile by a plan: it compiles, trains to the same losses, and saves under the script's own names."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from runs import SCRIPTS, Run

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.slow

_SCRIPT = str(SCRIPTS / "compiled.py")


def _losses(run: Run) -> list[float]:
    lines = [line.split() for line in run.stdout.splitlines()]
    return [float(words[1]) for words in lines if words and words[0] == "loss"]


def _graphs(run: Run) -> tuple[int, int]:
    """Return how many graphs were compiled, and how often one was broken."""
    (line,) = [line.split() for line in run.stdout.splitlines() if line.startswith("graphs ")]
    return int(line[1]), int(line[3])


def test_a_compiled_model_in_micro_batches_is_two_graphs_and_keeps_its_names(
    launch: Callable[..., Run],
) -> None:
    flags = ("--num-processes", "1", "--compile", "--micro-batch-size", "2")
    run = launch(*flags, _SCRIPT, "small", "out").check()
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
    launch: Callable[..., Run], ranks: tuple[str, ...], more: tuple[str, ...]
) -> None:
    plain = launch(*ranks, *more, _SCRIPT, "bert").check()
    run = launch(*ranks, *more, "--compile", _SCRIPT, "bert").check()
    num_graphs, num_broken = _graphs(run)
    assert num_graphs > 0
    assert _losses(run) == pytest.approx(_losses(plain), rel=1e-5)
    if ranks in (("--num-processes", "1"),):
        assert (num_graphs, num_broken) == (2, 0)
