"""Examples of the rules of zerofit/checking/rules/script/arguments.py."""

from __future__ import annotations

from rule_examples.example import Example, Examples, at_zero, changed

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
_TAKES_NONE = """\
import torch
from accelerate import Accelerator

accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
for inputs in torch.randn(8, 4, 8):
    accelerator.backward((model(inputs) - inputs.sum(1, keepdim=True)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
print("ranks", accelerator.num_processes)
"""


EXAMPLES = {
    "script-must-take-local-rank": Examples(
        bad=at_zero(1, _PARSES, command="deepspeed --num_gpus 2"),
        good=at_zero(1, _TAKES, command="deepspeed --num_gpus 2"),
    ),
    "script-argument-unknown": Examples(
        bad=at_zero(1, _TAKES, command="deepspeed", arguments="--num_processes 2"),
        good=at_zero(1, _TAKES, command="deepspeed", arguments="--lr 0.01"),
    ),
    "launcher-flags-behind-script": Examples(
        bad=Example(command="accelerate launch", script=_TAKES_NONE, arguments="--num_processes 2"),
        good=Example(command="accelerate launch --num_processes 2", script=_TAKES_NONE),
    ),
}
