"""Which ranks get to a call."""

from __future__ import annotations

import pytest

from zerofit.scripts.facts import Action
from zerofit.scripts.source.read_script import read_script

_PREPARED = """\
import torch
import torch.distributed as dist
from accelerate import Accelerator
from transformers import AutoModelForCausalLM
accelerator = Accelerator()
model = accelerator.prepare(AutoModelForCausalLM.from_pretrained("gpt2"))
"""
_SAVE = "accelerator.save_state('out')"


def _shown(source: str, action: Action) -> list[str]:
    """Return the calls of an action, with the condition on ranks that they stand under."""
    calls = read_script(source, name="train.py").find(action)
    return [call.seen.text + (f" if {call.one_rank.text}" if call.one_rank else "") for call in calls]


@pytest.mark.parametrize(
    "condition",
    [
        "accelerator.is_main_process",
        "accelerator.process_index == 0",
        "rank == 0",
        "args.local_rank in (-1, 0)",
        "args.local_rank <= 0",
        "dist.get_rank() == 0",
        "int(os.environ['RANK']) == 0",
        "trainer.is_world_process_zero()",
        "epoch > 2 and accelerator.is_main_process",
        "not dist.is_initialized() or dist.get_rank() == 0",
        "not rank != 0",
        "is_main",
        "not number",
        "not dist.get_rank()",
        "torch.distributed.get_rank() < 1",
        "not accelerator.process_index >= 1",
    ],
)
def test_a_condition_of_one_rank(condition: str) -> None:
    names = "is_main = accelerator.is_main_process\nnumber = accelerator.process_index\n"
    source = f"{_PREPARED}{names}if {condition}:\n    {_SAVE}\n"
    assert _shown(source, Action.SAVE_STATE) == [f"{_SAVE} if {condition}"]


@pytest.mark.parametrize(
    "condition",
    [
        "epoch == 0",
        "args.save or accelerator.is_main_process",
        "not accelerator.is_main_process",
        "rank >= 0",
        "args.local_rank != -1",
        "args.local_rank == -1",
        "accelerator.process_index",
        "dist.get_rank() < 2",
        "not rank",  # LoRA has one too
        "not args.local_rank",
        "not os.environ['RANK']",
    ],
)
def test_a_condition_of_every_rank_or_of_the_others(condition: str) -> None:
    source = f"{_PREPARED}if {condition}:\n    {_SAVE}\n"
    assert _shown(source, Action.SAVE_STATE) == [_SAVE]


@pytest.mark.parametrize(
    "lines",
    [
        "if accelerator.is_main_process:\n    {save}\nelse:\n    {save}",
        "if not accelerator.is_main_process:\n    {save}\n{save}",
        "def f():\n    if accelerator.is_main_process:\n        return\nf()\n{save}",
        "for step in steps:\n    if not accelerator.is_main_process:\n        continue\n    print()\n{save}",
        "with accelerator.main_process_first():\n    {save}",
    ],
)
def test_every_rank_saves(lines: str) -> None:
    found = _shown(_PREPARED + lines.format(save=_SAVE), Action.SAVE_STATE)
    assert set(found) == {_SAVE}


@pytest.mark.parametrize(
    ("lines", "condition"),
    [
        ("def f():\n    if not is_main:\n        return\n    {save}\nf()", "not is_main"),
        ("if rank != 0:\n    sys.exit()\n{save}", "rank != 0"),
        ("def f():\n    {save}\nif rank == 0:\n    f()", "rank == 0"),
        ("@accelerator.on_main_process\ndef f():\n    {save}\nf()", "accelerator.on_main_process"),
        ("number = dist.get_rank()\nif number:\n    sys.exit()\n{save}", "number"),
        ("if rank > 0:\n    pass\nelse:\n    {save}", "rank > 0"),
        ("{save} if rank == 0 else None", "rank == 0"),
        ("class A:\n    def f(self):\n        if rank == 0:\n            {save}\nA().f()", "rank == 0"),
    ],
)  # fmt: skip
def test_one_rank_saves(lines: str, condition: str) -> None:
    source = _PREPARED + "import sys\n" + lines.format(save=_SAVE)
    assert _shown(source, Action.SAVE_STATE) == [f"{_SAVE} if {condition}"]


def test_a_barrier_that_the_other_ranks_meet_elsewhere_is_none_of_one_rank() -> None:
    source = f"{_PREPARED}if rank != 0:\n    dist.barrier()\nload()\nif rank == 0:\n    dist.barrier()\n"
    assert _shown(source, Action.WAIT) == ["dist.barrier()", "dist.barrier()"]
