"""What zerofit says of a launcher's flags is what the launcher's own parser says."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.schemas.launcher_schemas import parser_of
from zerofit.checking.engine import check
from zerofit.checking.inputs.command_line import read_command
from zerofit.checking.inputs.launcher_flags import flags_of
from zerofit.checking.rules.launch import flags as flag_rules
from zerofit.checking.situation import Situation
from zerofit.configs.schema import Key
from zerofit.configs.schemas.catalog import load_schemas
from zerofit.core.command import Launcher

_REFUSED = ("launch-unknown-flag", "launch-flag-without-value", "launch-flag-value", "launch-without-script")


def _accelerate() -> argparse.ArgumentParser:
    from accelerate.commands.launch import launch_command_parser

    return launch_command_parser()


def _torchrun() -> argparse.ArgumentParser:
    from torch.distributed.run import get_args_parser

    return get_args_parser()


def _torch_launch() -> argparse.ArgumentParser:
    from torch.distributed.launch import parse_args

    return parser_of(parse_args)


def _deepspeed() -> argparse.ArgumentParser:
    from deepspeed.launcher.runner import parse_args

    return parser_of(parse_args)


_LAUNCHERS: dict[str, tuple[Launcher, Callable[[], argparse.ArgumentParser]]] = {
    "accelerate launch": (Launcher.ACCELERATE, cache(_accelerate)),
    "torchrun": (Launcher.TORCHRUN, cache(_torchrun)),
    "python -m torch.distributed.launch": (Launcher.TORCHRUN, cache(_torch_launch)),
    "deepspeed": (Launcher.DEEPSPEED, cache(_deepspeed)),
}


def _is_taken(parser: argparse.ArgumentParser, words: list[str]) -> bool:
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            parser.parse_args(words)
        except SystemExit:
            return False
    return True


def _found(program: str, words: list[str]) -> list[str]:
    """Return which rules refuse a line, and what they found."""
    schemas = load_schemas()
    command = read_command([*program.split(), *words], schemas=schemas)
    findings = check(Situation(command=command, schemas=schemas), rules=flag_rules.RULES).findings
    return [f"{finding.rule}: {finding.found}" for finding in findings if finding.rule in _REFUSED]


def _keys(program: str) -> tuple[Key, ...]:
    module = program.removeprefix("python -m ")
    return flags_of(_LAUNCHERS[program][0], load_schemas(), module=module).keys


def _valid(key: Key) -> str:
    """Return a value that is valid now and later."""
    numbers = {"integer": "1", "number": "0.5"}
    return (
        str(key.choices[0])
        if key.choices
        else numbers.get(key.kinds[0], key.example.split(" or ")[0].split(", ")[0] or "x")
    )


@pytest.mark.parametrize("program", _LAUNCHERS)
def test_a_flag_without_its_value_is_refused(program: str) -> None:
    parser = _LAUNCHERS[program][1]()
    for key in _keys(program):
        if key.converts:
            words = [f"--{key.name}", "--module", "train"]
            assert not _is_taken(parser, words), key.name
            assert _found(program, words) == [f"launch-flag-without-value: --{key.name}"]


@pytest.mark.parametrize("program", _LAUNCHERS)
def test_a_flag_with_a_valid_value_is_taken(program: str) -> None:
    parser = _LAUNCHERS[program][1]()
    for key in _keys(program):
        if key.name != "help":
            words = [f"--{key.name}", *([_valid(key)] if key.converts else []), "train.py"]
            assert _is_taken(parser, words), key.name
            assert _found(program, words) == [], key.name


@pytest.mark.parametrize("program", _LAUNCHERS)
def test_a_switch_with_a_value_is_refused(program: str) -> None:
    parser = _LAUNCHERS[program][1]()
    for key in _keys(program):
        if not key.converts:
            words = [f"--{key.name}=true", "train.py"]
            assert not _is_taken(parser, words), key.name
            assert _found(program, words) == [f"launch-flag-value: --{key.name}=true"]


@pytest.mark.parametrize("program", _LAUNCHERS)
def test_a_number_is_no_word(program: str) -> None:
    parser = _LAUNCHERS[program][1]()
    for key in _keys(program):
        if key.kinds[0] in ("integer", "number"):
            for text in ("two", "1.5x", "", "4,"):
                words = [f"--{key.name}={text}", "train.py"]
                assert not _is_taken(parser, words), key.name
                assert _found(program, words) == [f"launch-flag-value: --{key.name}={text}"]


@st.composite
def _lines(draw: st.DrawFn) -> tuple[str, list[str]]:
    """Draw a launcher and a line of its flags, spelt and misspelt in each way that argparse knows."""
    program = draw(st.sampled_from(sorted(_LAUNCHERS)))
    keys = [key for key in _keys(program) if key.name != "help"]
    words: list[str] = []
    for key in draw(st.lists(st.sampled_from(keys), max_size=4)):
        name = draw(st.sampled_from([key.name, *(alias for alias in key.aliases if len(alias) > 1)]))
        if draw(st.booleans()):
            name = name.replace("_", "-")
        if draw(st.integers(0, 3)) == 0:
            name = name[: draw(st.integers(2, len(name)))]
        short = [f"-{alias}" for alias in key.aliases if len(alias) == 1]
        flag = draw(st.sampled_from([f"--{name}", f"--{name}", *short]))
        values = [_valid(key), _valid(key), "-1" if key.kinds[0] == "integer" else _valid(key)]
        how = draw(
            st.sampled_from(["apart", "apart", "joined", "none"] if key.converts else ["none", "none"])
        )
        if key.kinds[0] in ("integer", "number"):
            values += ["two", "1.5"]
        value = draw(st.sampled_from(values))
        if key.at_least is not None and value == "-1":
            value = "1"
        words += {"apart": [flag, value], "joined": [f"{flag}={value}"], "none": [flag]}[how]
    words += draw(st.sampled_from([["train.py"], ["train.py", "--lr", "1"], ["--", "train.py"], []]))
    return program, words


@settings(max_examples=400, deadline=None)
@given(_lines())
def test_the_verdict_is_that_of_the_launchers_parser(line: tuple[str, list[str]]) -> None:
    program, words = line
    is_taken = _is_taken(_LAUNCHERS[program][1](), words)
    found = _found(program, words)
    assert (found == []) == is_taken, (program, words, found)


_ZEROFIT = [
    ("--num-processes --cpu train.py", ["launch-flag-without-value: --num-processes"]),
    ("--zero-stage 4 train.py", ["launch-flag-value: --zero-stage 4"]),
    ("--optimizer adamw_8bit --mixed_precision BF16 train.py", []),
    ("--nproc-per-node gpu train.py", []),
    ("--nproc-per-node all train.py", ["launch-flag-value: --nproc-per-node all"]),
    ("--zero-stag 3 train.py", ["launch-unknown-flag: --zero-stag 3"]),
    ("--cpu=yes train.py", ["launch-flag-value: --cpu=yes"]),
    ("--lora --lora-rank 8", ["launch-without-script: zerofit launch --lora --lora-rank 8"]),
]


@pytest.mark.parametrize(("words", "expected"), _ZEROFIT)
def test_zerofit_launch(words: str, expected: list[str]) -> None:
    assert _found("zerofit launch", words.split()) == expected


_VALUES = [
    ("accelerate launch --use_deepspeed --deepspeed_multinode_launcher none", False),
    ("accelerate launch --use_deepspeed --zero3_init_flag maybe", False),
    ("accelerate launch --use_deepspeed --zero3_init_flag True", True),
    ("accelerate launch --use_deepspeed --zero_stage 4", False),
    ("accelerate launch --use_fsdp --fsdp_auto_wrap_policy transformer_based_wrap", True),
    ("accelerate launch --use_fsdp --fsdp_state_dict_type FULL", False),
    ("accelerate launch --rdzv_backend nccl", False),
    ("accelerate launch --mixed_precision $MP", True),
    ("accelerate launch --num_processes $((GPUS * NODES))", True),
    ("torchrun --nproc_per_node cuda", False),
    ("torchrun --nproc_per_node ${GPUS:-8}", True),
    ("torchrun --nnodes 1:4 --rdzv_backend c10d", True),
    ("torchrun --nnodes two", False),
    ("torchrun --tee 0:3,1:1", True),
    ("torchrun --tee all", False),
    ("deepspeed --launcher OpenMPI", True),
    ("deepspeed --launcher ssh", False),
]


@pytest.mark.parametrize(("line", "is_valid"), _VALUES)
def test_values_that_the_launcher_checks_later(line: str, is_valid: bool) -> None:
    program, *flags = line.split(" --")
    words = [word for flag in flags for word in f"--{flag}".split(" ", 1)]
    found = [entry for entry in _found(program, [*words, "train.py"]) if "value" in entry]
    assert (found == []) == is_valid, found
