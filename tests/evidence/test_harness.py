"""The evidence harness: right ranks, runs as the stock launcher starts them, and wrong rows are caught."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy
import pytest
from harness.judge import FP32, distance
from harness.layout import reference_of, run_of
from harness.prove import MismatchError, prove
from harness.table import fingerprint, stale_rows
from rule_examples.example import Example, Examples

from zerofit.checking.rule import Effect, Reproduction, Rule, Severity
from zerofit.core.command import Route

if TYPE_CHECKING:
    from harness.runner import Runner

_MICRO = {"train_micro_batch_size_per_gpu": 4}
_ZERO1 = Example(deepspeed={**_MICRO, "zero_optimization": {"stage": 1}})
_ZERO2 = Example(deepspeed={**_MICRO, "zero_optimization": {"stage": 2}})
_ACCUMULATING = Example(
    deepspeed={**_MICRO, "zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 4}
)
_AMP = Example(deepspeed={**_MICRO, "zero_optimization": {"stage": 1}, "amp": {"enabled": True}})
"""DeepSpeed has removed it, and refuses it on every machine."""
# accelerate puts CPUAdam in the place of SGD: it runs, and it is not the reference.
_SWAPPED = Example(
    deepspeed={
        **_MICRO,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    },
    script=(Path(__file__).parent / "harness" / "scripts" / "accelerate.py")
    .read_text(encoding="utf-8")
    .replace("AdamW", "SGD"),
)
_SHARDS = """\
import json
import os
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

accelerator = Accelerator()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(torch.arange(32.0).unsqueeze(1) / 32, batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
read = []
for batch in loader:
    read += (batch.flatten() * 32).int().tolist()
    accelerator.backward(model(batch).mean())
    optimizer.step()
Path(f"read{accelerator.process_index}of{accelerator.num_processes}.json").write_text(json.dumps(read))
"""
_HANG = """\
import torch.distributed
from accelerate import Accelerator

if Accelerator().is_main_process:
    torch.distributed.barrier()
"""


def _rule(outcome: Effect, **evidence: object) -> Rule:
    return Rule(
        id="planted-rule",
        severity=Severity.ERROR,
        summary="planted",
        why="planted",
        fix="planted",
        see="https://example.org",
        find=lambda situation: (),
        evidence=Reproduction(outcome=outcome, **evidence),  # type: ignore[arg-type]
    )


_PLANTED = {
    "fails, but ends well": (
        Examples(bad=_ZERO2, good=_ZERO1),
        _rule(Effect.FAILS, says="boom"),
        ["the bad example ends well, and should have been one that fails"],
    ),
    "fails with other words": (
        Examples(bad=_AMP, good=_ZERO1),
        _rule(Effect.FAILS, says="boom"),
        ["'boom' is not in the error: exit 1: deepspeed.runtime.config.DeepSpeedConfigError: NVIDIA Apex"],
    ),
    "hangs, but ends well": (
        Examples(bad=_ZERO2, good=_ZERO1),
        _rule(Effect.HANGS),
        ["the bad example ends well, and should have been one that hangs"],
    ),
    "differs, but is the same": (
        Examples(bad=_ZERO2, good=_ZERO1),
        _rule(Effect.DIFFERS),
        ["the bad example's weights are off by "],
    ),
    "ignored, but done": (
        Examples(bad=_ZERO2, good=_ZERO1),
        _rule(Effect.IGNORED, observed=(("zero_stage", 0),)),
        ["zero_stage is 2, not 0"],
    ),
    "ignored, but in the good example too": (
        Examples(bad=_ZERO2, good=_ZERO1),
        _rule(Effect.IGNORED, observed=(("world_size", 2),)),
        ["the good example shows the same: world_size=2"],
    ),
    "costs, but differs": (
        Examples(bad=_ACCUMULATING, good=_ZERO1),
        _rule(Effect.COSTS),
        ["the bad example's weights are off by "],
    ),
    "the good example is wrong": (
        Examples(bad=_AMP, good=_SWAPPED),
        _rule(Effect.FAILS, says="Apex"),
        ["the good example's weights are off by "],
    ),
    "the good example fails": (
        Examples(bad=_AMP, good=_AMP),
        _rule(Effect.FAILS, says="Apex"),
        [
            "the good example does not end well: exit 1: deepspeed.runtime.config.DeepSpeedConfigError: "
            "NVIDIA Apex"
        ],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", _PLANTED)
def test_a_planted_wrong_row_is_found(name: str, runner: Runner) -> None:
    examples, rule, expected = _PLANTED[name]
    with pytest.raises(MismatchError) as caught:
        prove(rule, examples, runner)
    said = [line.strip() for line in str(caught.value).splitlines()[1:-2]]
    assert len(said) == len(expected)
    for line, beginning in zip(said, expected, strict=True):
        assert line.startswith(beginning)


@pytest.mark.slow
def test_a_hang_is_seen_and_ended(runner: Runner) -> None:
    ended = runner.run(run_of(Example(deepspeed=_ZERO1.deepspeed, script=_HANG)), limit_s=6)
    assert ended.exit_code is None
    assert 6 <= ended.seconds < 12
    assert (ended.folder / "rank1.ended").exists()


@pytest.mark.slow
@pytest.mark.parametrize("route", Route)
def test_two_ranks_train_as_one_process_with_twice_the_batch(route: Route, runner: Runner) -> None:
    config = {**_MICRO, "zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 2}
    config |= {"gradient_clipping": 0.1}
    arguments = "--gradient_accumulation_steps 2 --max_grad_norm 0.1" if route is Route.TRAINER else ""
    example = Example(deepspeed=config, route=route, arguments=arguments)
    two, one = runner.run(run_of(example)), runner.run(reference_of(example))
    assert (two.exit_code, one.exit_code) == (0, 0), two.text + one.text
    assert two.observed["world_size"] == 2
    assert two.observed["optimizer_steps"] == one.observed["optimizer_steps"] == 4
    assert distance(two, one) <= FP32.same


@pytest.mark.slow
def test_each_rank_reads_its_own_shard(runner: Runner) -> None:
    ended = runner.run(run_of(Example(deepspeed=_ZERO1.deepspeed, script=_SHARDS)))
    assert ended.exit_code == 0, ended.text
    first, second = (json.loads((ended.folder / f"read{rank}of2.json").read_text()) for rank in (0, 1))
    assert len(first) == len(second) == 16
    assert sorted(first + second) == list(range(32))


@pytest.mark.slow
@pytest.mark.evidence
@pytest.mark.parametrize("example", [_ACCUMULATING, _SWAPPED, _AMP], ids=["fp32", "swapped", "fails"])
def test_a_fork_does_what_the_stock_launcher_does(example: Example, runner: Runner, tmp_path: Path) -> None:
    forked = runner.run(run_of(example))
    for name in ("ds_config.json", "accelerate.yaml", "train.py"):
        shutil.copy(forked.folder / name, tmp_path)
    flags = ("--config_file", "accelerate.yaml", "--num_processes", "2", "-m", "harness.rank", "train.py")
    folders = (str(Path(sys.executable).parent), os.environ["PATH"])
    stock = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", *flags],
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": os.pathsep.join(folders),
            "PYTHONPATH": str(Path(__file__).parent),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert stock.returncode == forked.exit_code
    seen = json.loads((tmp_path / "rank0.json").read_text())
    if forked.exit_code:
        assert seen == json.loads((forked.folder / "rank0.json").read_text())
        return
    observed = {name: value for name, value in forked.observed.items() if not name.startswith("left ")}
    assert seen["observed"] == observed
    with numpy.load(tmp_path / "weights.npz") as weights:
        own = {name.removeprefix("last/"): weights[name] for name in weights}
    for name, weight in forked.weights().items():
        numpy.testing.assert_array_equal(weight, own[name])


def test_a_changed_example_makes_the_table_stale() -> None:
    rule = _rule(Effect.FAILS, says="boom")
    measured, changed = Examples(bad=_ZERO2, good=_ZERO1), Examples(bad=_ZERO1, good=_ZERO2)
    table = {"rules": [{"rule": "planted-rule", "of": fingerprint(rule, measured)}]}
    assert stale_rows([rule], {"planted-rule": measured}, table) == []
    assert stale_rows([rule], {"planted-rule": changed}, table) == [
        "planted-rule: its examples or evidence have changed"
    ]
    assert stale_rows([], {}, table) == ["planted-rule: no such rule"]
    assert stale_rows([rule], {"planted-rule": measured}, {"rules": []}) == ["planted-rule: not measured"]
