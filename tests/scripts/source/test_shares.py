"""What each rank has a part of its own of: which loops run more often on one rank than on another."""

from __future__ import annotations

import pytest

from zerofit.scripts.facts import Action
from zerofit.scripts.source.read_script import read_script

_START = """\
from accelerate import Accelerator, PartialState
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
accelerator = Accelerator()
model = accelerator.prepare(AutoModelForCausalLM.from_pretrained("gpt2"))
state = PartialState()
rank, world = state.process_index, state.num_processes
"""
_CALL = "model.generate(x)"


def _shares(lines: str) -> list[str | None]:
    """Return what says how often each rank generates, call by call; None where all do as often."""
    calls = read_script(f"{_START}{lines.format(call=_CALL)}\n", name="train.py").find(Action.GENERATE)
    return [call.share.text if call.share else None for call in calls]


@pytest.mark.parametrize(
    ("lines", "share"),
    [
        ("with state.split_between_processes(prompts) as own:\n    for x in own:\n        {call}", "own"),
        ("with accelerator.split_between_processes(p) as own:\n    [{call} for x in own]", "own"),
        (
            "with state.split_between_processes(p) as own:\n"
            "    for x in tqdm(enumerate(own)):\n        {call}",
            "tqdm(enumerate(own))",
        ),
        (
            "with state.split_between_processes(p) as own:\n"
            "    for start in range(0, len(own), 8):\n        {call}",
            "range(0, len(own), 8)",
        ),
        (
            "with state.split_between_processes(p) as own:\n"
            "    batches = [own[i : i + 8] for i in range(0, len(own), 8)]\n"
            "    for x in batches:\n        {call}",
            "batches",
        ),
        ("for x in prompts[rank::world]:\n    {call}", "prompts[rank::world]"),
        ("own = prompts[rank::world]\nfor x in DataLoader(own):\n    {call}", "DataLoader(own)"),
        ("own = DataLoader(dataset=prompts[rank::world])\nfor x in tqdm(own):\n    {call}", "tqdm(own)"),
        ("for i in range(rank, len(prompts), world):\n    {call}", "range(rank, len(prompts), world)"),
        ("for x in islice(prompts, rank, None, world):\n    {call}", "islice(prompts, rank, None, world)"),
        (
            "for x in prompts[rank::world]:\n    {call}\n    for token in x:\n"
            "        if token:\n            break",
            "prompts[rank::world]",
        ),
        ("data = data.shard(num_shards=world, index=rank)\nfor x in data:\n    {call}", "data"),
        ("def mine(p):\n    return p[rank::world]\nfor x in mine(prompts):\n    {call}", "mine(prompts)"),
        ("def run(own):\n    for x in own:\n        {call}\nrun(prompts[rank::world])", "own"),
        ("def run(x):\n    {call}\nfor x in prompts[rank::world]:\n    run(x)", "prompts[rank::world]"),
        ("for i, x in enumerate(prompts):\n    if i % world == rank:\n        {call}", "i % world == rank"),
        ("for i in numbers:\n    if i % world != rank:\n        continue\n    {call}", "i % world != rank"),
        ("own = prompts[rank::world]\nwhile own:\n    {call}", "own"),
    ],
)  # fmt: skip
def test_a_loop_over_a_rank_s_own_part(lines: str, share: str) -> None:
    assert _shares(lines) == [share]


@pytest.mark.parametrize(
    "lines",
    [
        "for x in prompts:\n    {call}",
        "for x in accelerator.prepare(loader):\n    {call}",
        "own = prompts[rank::world]\n{call}",
        "own = prompts[rank::world]\nfor x in own:\n    print(x)\n{call}",
        "with state.split_between_processes(p, apply_padding=True) as own:\n"
        "    for x in own:\n        {call}",
        "with state.split_between_processes(p) as own:\n    {call}",
        "with state.split_between_processes(p) as own:\n"
        "    found = gather_object(own)\nfor x in found:\n    {call}",
        "own = DataLoader(prompts[rank::world])\nown = accelerator.prepare(own)\nfor x in own:\n    {call}",
        "for x in DataLoader(prompts):\n    {call}",
        "size = len(p) // world\nfor x in p[rank * size : (rank + 1) * size]:\n    {call}",
        "most = -(-len(p) // world)\nfor i in range(rank, most * world, world):\n    {call}",
        "p = p[: len(p) // world * world]\nfor x in p[rank::world]:\n    {call}",
        "for x in prompts[rank::world][:8]:\n    {call}",
        "own = prompts[rank::world]\nfor x in own[:8]:\n    {call}",
        "for x in DataLoader(data.shard(world, rank)):\n    {call}\n    if step >= 9:\n        break",
        "own = accelerator.prepare(DataLoader(prompts[rank::world]))\nfor x in own:\n    {call}",
        "own = pad_to_longest(prompts[rank::world])\nfor x in own:\n    {call}",
        "for x in data.view(4, world, -1)[:, rank]:\n    {call}",
        "for x in data[:rank]:\n    {call}",
        "for x in weights[rank]:\n    {call}",
        "for i in range(rank):\n    {call}",
        "for i in range(0, len(prompts), world):\n    {call}",
        "for i, x in enumerate(prompts):\n    if i % 4 == 0:\n        {call}",
        "if n % world == rank:\n    {call}",
    ],
)
def test_a_loop_that_is_the_same_on_every_rank(lines: str) -> None:
    assert _shares(lines) == [None]
