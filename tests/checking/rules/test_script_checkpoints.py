"""save_state() and load_state() of an Accelerator that only one rank calls."""

from __future__ import annotations

from typing import Any

import pytest
from rule_examples.example import LAUNCH_FILE, ZERO2_LAUNCH, Example
from rule_situations import situation_of_example

from zerofit.checking.engine import check
from zerofit.checking.rules.script import checkpoints

_HANGS, _LOSES, _LOADS = [rule.id for rule in checkpoints.RULES]
_SCRIPT = """\
import argparse
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

parser = argparse.ArgumentParser()
parser.add_argument("--resume")
args = parser.parse_args()
{makes}
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
{before}
for step, batch in enumerate(loader):
    accelerator.backward(model(batch).mean())
    optimizer.step()
    optimizer.zero_grad()
{during}
"""
_MAKES = "accelerator = Accelerator()"
_RESUMES = "if args.resume:\n    accelerator.load_state(args.resume)"
_NAMES = (
    'project = ProjectConfiguration("out", automatic_checkpoint_naming=True)\n'
    "accelerator = Accelerator(project_config=project)"
)
_ON_MAIN = {
    "is_main_process": '    if accelerator.is_main_process:\n        accelerator.save_state("out")\n',
    "with a period": (
        "    if step % 100 == 0:\n        if accelerator.is_main_process:\n"
        "            accelerator.save_state(f'out/{step}')\n"
    ),
    "and": (
        "    if step % 100 == 0 and accelerator.is_local_main_process:\n"
        "        accelerator.save_state('out')\n"
    ),
    "a rank": "    if dist.get_rank() == 0:\n        accelerator.save_state(output_dir='out')\n",
    "process_index": "    if accelerator.process_index == 0:\n        accelerator.save_state('out')\n",
    "others go on": (
        "    if not accelerator.is_main_process:\n        continue\n    accelerator.save_state('out')\n"
    ),
}


def _script(during: str, *, makes: str = _MAKES, before: str = _RESUMES) -> str:
    return _SCRIPT.format(makes=makes, before=before, during=during)


def _found(script: str, **more: Any) -> list[str]:
    more = {"command": "torchrun --nproc_per_node 4"} | more
    verdict = check(situation_of_example(Example(script=script, **more)), rules=checkpoints.RULES)
    return [finding.rule for finding in verdict.findings]


def _launched(**keys: Any) -> dict[str, Any]:
    return {"command": None, "accelerate": {**LAUNCH_FILE, "num_processes": 4, **keys}}


@pytest.mark.parametrize("saves", _ON_MAIN.values(), ids=_ON_MAIN)
def test_one_rank_saves(saves: str) -> None:
    assert _found(_script(saves)) == [_LOSES]
    assert _found(_script(saves), **_launched(distributed_type="MULTI_GPU")) == [_LOSES]
    assert _found(_script(saves), **_launched(distributed_type="MEGATRON_LM")) == [_HANGS]
    line = "accelerate launch --use_megatron_lm --num_processes 2"
    assert _found(_script(saves), command=line) == [_HANGS]
    assert _found(_script(saves, makes=_NAMES)) == [_HANGS]
    # DeepSpeed's checkpoints have a rule of their own.
    assert _found(_script(saves), **_launched(deepspeed_config=ZERO2_LAUNCH["deepspeed_config"])) == []


@pytest.mark.parametrize("saves", _ON_MAIN.values(), ids=_ON_MAIN)
def test_random_states_of_one_rank_do_for_a_script_that_never_loads_them(saves: str) -> None:
    assert _found(_script(saves, before="")) == []
    assert _found(_script(saves), command="torchrun --nproc_per_node 1") == []
    assert _found(_script(saves), command="python") == []
    assert _found(_script(saves), command="accelerate launch") == [_LOSES]  # on as many GPUs as there are


@pytest.mark.parametrize(
    "saves",
    [
        "    accelerator.save_state('out')\n",
        "    if step % 100 == 0:\n        accelerator.save_state('out')\n",
        "    if accelerator.is_main_process:\n        print(step)\n    accelerator.save_state('out')\n",
        "    if accelerator.is_main_process or accelerator.distributed_type == 'DEEPSPEED':\n"
        "        accelerator.save_state('out')\n",
        "    if accelerator.is_main_process:\n        torch.save(model, 'out')\n",
        "    if accelerator.is_main_process:\n        trainer.save_state('out')\n",
    ],
)
def test_every_rank_saves(saves: str) -> None:
    for makes in (_MAKES, _NAMES):
        assert _found(_script(saves, makes=makes)) == []
        assert _found(_script(saves, makes=makes), **_launched(distributed_type="FSDP")) == []


@pytest.mark.parametrize(
    "loads",
    [
        "if accelerator.is_main_process:\n    accelerator.load_state(args.resume)",
        "if args.resume and accelerator.is_main_process:\n    accelerator.load_state(args.resume)",
        "if args.resume:\n    if accelerator.is_local_main_process:\n        accelerator.load_state('out')",
        "if dist.get_rank() == 0:\n    accelerator.load_state(input_dir='out')",
        "is_first = accelerator.process_index == 0\nif is_first:\n    accelerator.load_state('out')",
    ],
)
def test_one_rank_loads(loads: str) -> None:
    script = _script("    accelerator.save_state('out')\n", before=loads)
    for launch in (
        {},
        _launched(distributed_type="FSDP"),
        _launched(deepspeed_config=ZERO2_LAUNCH["deepspeed_config"]),
    ):
        assert _found(script, arguments="--resume out", **launch) == [_LOADS]


@pytest.mark.parametrize(
    "loads",
    [
        _RESUMES,
        "accelerator.load_state('out')",
        "if accelerator.is_main_process:\n    print('resumes')\naccelerator.load_state('out')",
        "if accelerator.is_main_process:\n    model.load_state_dict(torch.load('out'))",
        "",
    ],
)
def test_every_rank_loads(loads: str) -> None:
    assert _found(_script("    accelerator.save_state('out')\n", before=loads)) == []
