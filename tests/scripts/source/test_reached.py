"""Calls under conditions on the script's arguments count only if a run with these arguments may make them."""

from __future__ import annotations

import pytest

from zerofit.scripts.facts import Action
from zerofit.scripts.source.read_script import read_script

_SCRIPT = """
import argparse
import torch
from accelerate import Accelerator

def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", "-s", action="store_true")
    parser.add_argument("--merge", action="store_true")
    parser.add_argument("--skip-eval", action="store_true")
    parser.add_argument("--keep", action="store_false")
    parser.add_argument("--mode", default="train")
    parser.add_argument("--out", type=str)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--on", action="store_true", default=True)
    parser.add_argument("--later", action="store_true")
    parser.add_argument("--words", nargs="*", default=None)
    parser.set_defaults(later=True)
    return parser.parse_args()

def main():
    args = parse()
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    BODY

main()
"""


def _is_reached(body: str, *arguments: str) -> bool:
    lines = body.replace("\n", "\n    ")
    facts = read_script(_SCRIPT.replace("BODY", lines), name="train.py")
    return bool(facts.reached_with(arguments).find(Action.SAVE_STATE))


_SAVES = "accelerator.save_state()"


@pytest.mark.parametrize(
    ("body", "arguments", "is_reached"),
    [
        (f"if args.merge: {_SAVES}", "", False),
        (f"if args.merge: {_SAVES}", "--merge", True),
        (f"if args.merge: {_SAVES}", "--mer", True),
        (f"if args.merge: {_SAVES}", "-- --merge", False),
        (f"if args.save: {_SAVES}", "-s", True),
        (f"if not args.merge: {_SAVES}", "", True),
        (f"if not args.merge: {_SAVES}", "--merge", False),
        (f"if not args.merge:\n    return\n{_SAVES}", "", False),
        (f"if args.skip_eval: {_SAVES}", "--skip-eval", True),
        (f"if args.skip_eval: {_SAVES}", "--mode eval", False),
        (f"if args.keep: {_SAVES}", "", True),
        (f"if args.keep: {_SAVES}", "--keep", False),
        (f"if args.on: {_SAVES}", "", True),
        (f"if args.mode == 'eval': {_SAVES}", "", False),
        (f"if args.mode == 'eval': {_SAVES}", "--mode eval", True),
        (f"if args.mode == 'eval': {_SAVES}", "--mode=eval", True),
        (f"if args.mode == 'eval': {_SAVES}", "--mode test", False),
        (f"if args.out is not None: {_SAVES}", "", False),
        (f"if args.out is not None: {_SAVES}", "--out a", True),
        (f"if args.out is None: {_SAVES}", "--out a", False),
        (f"if args.merge and args.out: {_SAVES}", "--merge", False),
        (f"if args.merge or args.out: {_SAVES}", "--merge", True),
        (f"if args.merge or args.out: {_SAVES}", "", True),  # not decided
        (f"for _ in range(3):\n    if args.merge:\n        {_SAVES}", "", False),
        # The value does not follow from the command line.
        (f"if args.steps: {_SAVES}", "", True),
        (f"if args.later: {_SAVES}", "", True),
        (f"if args.words: {_SAVES}", "", True),
        (f"args.merge = True\nif args.merge: {_SAVES}", "", True),
        (f"args = load(args)\nif args.merge: {_SAVES}", "", True),
        (f"load(args)\nif args.merge: {_SAVES}", "", True),
        (f"setattr(args, 'merge', True)\nif args.merge: {_SAVES}", "", True),
        (f"print(args, vars(args))\nif args.merge: {_SAVES}", "", False),
    ],
)
def test_a_call_under_a_condition_on_arguments(body: str, arguments: str, is_reached: bool) -> None:
    assert _is_reached(body, *arguments.split()) == is_reached
