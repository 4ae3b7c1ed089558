"""Which scripts refuse the --local_rank that the deepspeed launcher hands to them."""

from __future__ import annotations

import pytest
from rule_examples.example import Example, changed
from rule_situations import situation_of_example

from zerofit.checking.engine import check
from zerofit.checking.rules.script import arguments as script_arguments

_SCRIPT = """\
import argparse
import deepspeed
import transformers
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
args = parser.parse_args()
"""
_FOUND = "parser.parse_args() without --local_rank"


def _found(script: str, command: str = "deepspeed") -> list[str]:
    situation = situation_of_example(Example(script=script, command=command))
    return [finding.found for finding in check(situation, rules=script_arguments.RULES).findings]


def _adds(line: str) -> str:
    return changed(_SCRIPT, "args = ", f"{line}\nargs = ")


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (_SCRIPT, [_FOUND]),
        (_adds("parser = deepspeed.add_config_arguments(parser)"), [_FOUND]),
        (_adds("deepspeed.add_config_arguments(parser)"), [_FOUND]),
        (_adds("parser.add_argument('--local-rank', type=int)"), [_FOUND]),
        (_adds("parser.add_argument_group('model').add_argument('--depth')"), [_FOUND]),
        (_adds("parser.set_defaults(lr=1)"), [_FOUND]),
        (_adds("parser.add_argument('files', nargs='*')"), [_FOUND]),
        (
            changed(_SCRIPT, "args = parser.parse_args()", "def main():\n    args = parser.parse_args()")
            + "if __name__ == '__main__':\n    main()\n",
            [_FOUND],
        ),
        (_adds("parser.add_argument('--local_rank', type=int)"), []),
        (_adds("parser.add_argument('-r', '--local_rank', type=int)"), []),
        (_adds("group = parser.add_argument_group('x')\ngroup.add_argument('--local_rank')"), []),
        (_adds("for name in NAMES:\n    parser.add_argument(name)"), []),
        (_adds("parser.add_argument(*NAMES)"), []),
        (_adds("parser.add_argument('rest', nargs=argparse.REMAINDER)"), []),
        (_adds("parser.add_argument('rest', nargs='...')"), []),
        (_adds("add_options(parser)"), []),
        (_adds("transformers.add_options(parser)"), []),
        (_adds("def more(p):\n    p.add_argument('--local_rank')\nmore(parser)"), []),
        (changed(_SCRIPT, "ArgumentParser()", "ArgumentParser(parents=[base])"), []),
        (changed(_SCRIPT, "argparse.ArgumentParser()", "transformers.HfArgumentParser(Own)"), []),
        (changed(_SCRIPT, "parse_args()", "parse_known_args()"), []),
        (changed(_SCRIPT, "parse_args()", "parse_args([])"), []),
        (changed(_SCRIPT, "args = parser.parse_args()", "if x:\n    parser.parse_args()"), []),
        (changed(_SCRIPT, "args = parser.parse_args()", "def unused():\n    parser.parse_args()"), []),
    ],
)  # fmt: skip
def test_what_the_parser_takes(script: str, expected: list[str]) -> None:
    assert _found(script) == expected


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("deepspeed --num_gpus 2", [_FOUND]),
        ("deepspeed --launcher pdsh", [_FOUND]),
        ("deepspeed --no_local_rank", []),
        ("deepspeed --launcher openmpi", []),
        ("torchrun --nproc_per_node 2", []),
        ("accelerate launch --use_deepspeed", []),
        ("python", []),
    ],
)
def test_which_launchers_hand_it_over(command: str, expected: list[str]) -> None:
    assert _found(_SCRIPT, command) == expected
