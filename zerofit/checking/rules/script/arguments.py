"""Rules on scripts: arguments passed by a launcher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checking.rule import Hit, Rule, Severity, declared, fails
from zerofit.checking.rules.examples import DEEPSPEED, at_zero, changed
from zerofit.checking.rules.script.hits import hit, unguarded_calls
from zerofit.core.command import Launcher
from zerofit.scripts.facts import Action

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.situation import Situation


_LOCAL_RANK = "--local_rank"
_PARSES = """\
import argparse

import deepspeed
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.01)
arguments = parser.parse_args()
deepspeed.init_distributed()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config="ds_config.json")
size = engine.train_micro_batch_size_per_gpu()
for inputs in torch.randn(32, 8).view(8, -1, size, 8)[:, torch.distributed.get_rank()]:
    engine.backward((engine(inputs) - inputs.sum(1, keepdim=True)).square().mean())
    engine.step()
total = sum(parameter.double().abs().sum().item() for parameter in engine.parameters())
print("weights", f"{total:.6f}")
"""
_TAKES = changed(
    _PARSES, "arguments = parser", 'parser.add_argument("--local_rank", type=int)\narguments = parser'
)


@Rule(
    id="script-must-take-local-rank",
    severity=Severity.ERROR,
    summary="the deepspeed launcher passes --local_rank to the script, which refuses it",
    why="parse_args() exits at an unknown argument",
    fix='add parser.add_argument("--local_rank", type=int), or launch with --no_local_rank',
    see=f"{DEEPSPEED}/launcher/launch.py",
    bad=at_zero(1, _PARSES, command="deepspeed --num_gpus 2"),
    good=at_zero(1, _TAKES, command="deepspeed --num_gpus 2"),
    evidence=fails("unrecognized arguments: --local_rank"),
)
def _refuses_local_rank(situation: Situation) -> Iterator[Hit]:
    command, script = situation.command, situation.script
    if command is None or script is None or command.launcher is not Launcher.DEEPSPEED:
        return
    by = command.find("launcher")
    # Other multi-node launchers start the script themselves, without the argument.
    if command.find("no_local_rank", "no_python") or (by and by.value != "pdsh"):
        return
    for call in unguarded_calls(situation, Action.PARSE_STRICTLY):
        # argparse accepts a prefix of a longer option.
        takes = any(option == "**" or option.startswith(_LOCAL_RANK) for option in call.options)
        if not takes:
            yield hit(call.seen, f" without {_LOCAL_RANK}")


RULES = declared(vars())
