"""The tables of launchers' flags are those of the installed launchers."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import pytest

from zerofit.checking.inputs.command_line import DEEPSPEED, TORCHRUN, LauncherFlags


def _torchrun() -> None:
    from torch.distributed.launch import parse_args

    parse_args(["x.py"])


def _deepspeed() -> None:
    from deepspeed.launcher.runner import parse_args

    parse_args(["x.py"])


def _parser_of(parse: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """Return the parser that a launcher makes for itself."""
    made: list[argparse.ArgumentParser] = []
    as_it_is = argparse.ArgumentParser.parse_args

    def parse_args(self: argparse.ArgumentParser, *args: Any, **more: Any) -> Any:
        made.append(self)
        return as_it_is(self, *args, **more)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    parse()
    return made[0]


@pytest.mark.parametrize(("table", "parse"), [(TORCHRUN, _torchrun), (DEEPSPEED, _deepspeed)])
def test_tables_are_those_of_the_installed_launchers(
    table: LauncherFlags, parse: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = _parser_of(parse, monkeypatch)
    switches, valued, short = set(), set(), {}
    for action in parser._actions:
        names = [name.lstrip("-").replace("-", "_") for name in action.option_strings]
        if not names:
            continue
        (switches if action.nargs == 0 else valued).add(action.dest)
        short.update({name: action.dest for name in names if name != action.dest})
    assert table == LauncherFlags(
        switches=frozenset(switches),
        valued=frozenset(valued),
        short=short,
        abbreviates=parser.allow_abbrev,
        takes_dashes="--node-rank" in parser._option_string_actions,
    )


@pytest.mark.parametrize(
    ("table", "name", "found"),
    [
        (TORCHRUN, "nproc_per_node", "nproc_per_node"),
        (TORCHRUN, "m", "module"),
        (TORCHRUN, "nproc", "nproc_per_node"),
        (TORCHRUN, "log", None),  # --log_dir or --logs_specs
        (TORCHRUN, "nproc_pre_node", None),
        (DEEPSPEED, "num_acc", "num_gpus"),
        (DEEPSPEED, "num", None),
        (DEEPSPEED, "a", None),
    ],
)
def test_a_name_is_a_flag_or_the_beginning_of_one(table: LauncherFlags, name: str, found: str | None) -> None:
    assert table.find(name) == found
