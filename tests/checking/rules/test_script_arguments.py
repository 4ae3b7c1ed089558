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


_HF = """\
import sys
from dataclasses import dataclass
from transformers import HfArgumentParser, Trainer, TrainingArguments

@dataclass
class Base:
    model_name: str = "gpt2"

@dataclass
class Own(Base):
    use_fast: bool = True

def main():
    parser = HfArgumentParser((Own, TrainingArguments))
    if len(sys.argv) == 2:
        own, arguments = parser.parse_json_file(sys.argv[1])
    else:
        own, arguments = parser.parse_args_into_dataclasses()
    Trainer(args=arguments).train()

if __name__ == "__main__":
    main()
"""
_TRL = _HF.replace("class Own(Base)", "class Own(SFTConfig)")
_BARE = "from accelerate import Accelerator\nprint(Accelerator().num_processes)\n"
_CLICK = "import click\n@click.command()\n@click.option('--num-processes')\ndef main(**more): ...\n"
_HYDRA = "import hydra\n@hydra.main()\ndef main(config): ...\n"
_ELSEWHERE = "from lab.arguments import get_arguments\nprint(get_arguments().lr)\n"
_REFUSED, _LOST = "script-argument-unknown", "launcher-flags-behind-script"
_BEHIND = f"{_REFUSED}: --num_machines behind train.py"
_MISPLACED = [f"{_REFUSED}: --num_processes behind train.py"]
_LOOSE = _SCRIPT.replace("parse_args", "parse_known_args")
_DEEPSPEEDS = _SCRIPT.replace("args =", "deepspeed.add_config_arguments(parser)\nargs =")


@pytest.mark.parametrize(
    ("script", "command", "arguments", "expected"),
    [
        (_SCRIPT, "accelerate launch", "--lr 1 --num_processes 4", _MISPLACED),
        (_SCRIPT, "accelerate launch", "--lr=1 --help", []),
        (_SCRIPT, "torchrun", "--nproc-per-node=4", [f"{_REFUSED}: --nproc-per-node behind train.py"]),
        (_SCRIPT, "python", "--learning_rate 1", [f"{_REFUSED}: --learning_rate"]),
        (_SCRIPT, "python", "--l 1 -- --what", []),
        (_SCRIPT, "python", "--lr 1 $MORE", []),
        (_DEEPSPEEDS, "python", "--deepspeed --deepspeed_config ds.json", []),
        (_LOOSE, "torchrun", "--nnodes 2", [f"{_LOST}: --nnodes behind train.py"]),
        (_HF, "accelerate launch", "--output_dir x --num_machines 2", [_BEHIND]),
        (_HF, "torchrun", "--output_dir x --model_nam y --no_use_fast --learning-rate 1 --bf16", []),
        (_HF, "torchrun", "--output_dir x --epochs 3", [f"{_REFUSED}: --epochs"]),
        (_HF, "torchrun", "train.json", []),
        (_HF, "deepspeed", "--evaluation_strategy no", []),  # another rule's
        (_TRL, "accelerate launch", "--packing --max_length 8", []),
        (_BARE, "accelerate launch", "--num_processes 2", [f"{_LOST}: --num_processes behind train.py"]),
        (_BARE, "accelerate launch", "--mixed_precision bf16 --epochs 2", []),
        (_BARE, "python", "--num_processes 2", []),
        (_CLICK, "accelerate launch", "--num_processes 2", []),
        (_HYDRA, "accelerate launch", "--num_processes 2", []),
        (_ELSEWHERE, "torchrun", "--log_dir x", []),
        (_ELSEWHERE, "torchrun", "--nproc_per_node 2", [f"{_LOST}: --nproc_per_node behind train.py"]),
    ],
)  # fmt: skip
def test_flags_behind_the_script(script: str, command: str, arguments: str, expected: list[str]) -> None:
    situation = situation_of_example(Example(script=script, command=command, arguments=arguments))
    findings = check(situation, rules=script_arguments.RULES).findings
    found = [f"{finding.rule}: {finding.found}" for finding in findings if finding.rule in (_REFUSED, _LOST)]
    assert found == expected


def test_the_fix_is_the_whole_line() -> None:
    example = Example(
        script=_SCRIPT,
        command="accelerate launch --num_machines 2",
        arguments="--lr 1 --multi_gpu --config_file acc.yaml",
    )
    findings = check(situation_of_example(example), rules=script_arguments.RULES).findings
    fix = "write accelerate launch --num_machines 2 --multi_gpu --config_file acc.yaml train.py --lr 1"
    assert [finding.fix for finding in findings] == [fix]
