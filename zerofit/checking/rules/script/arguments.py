"""Rules on scripts: arguments that its parser refuses, or that the launcher should have got."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.checking.inputs.launcher_flags import flags_of, is_switch
from zerofit.checking.rule import DEEPSPEED, Hit, Rule, Severity, declared, fails, ignored
from zerofit.checking.rules.script.hits import hit, unguarded_calls
from zerofit.checking.situation import known
from zerofit.core.command import Launcher, is_literal
from zerofit.core.errors import nearest
from zerofit.scripts.facts import TRAINING_ARGUMENTS, Action

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from zerofit.checking.situation import Situation
    from zerofit.core.command import LaunchCommand


_LOCAL_RANK, _LOCAL_RANK_OF_TORCH = "--local_rank", "--local-rank"
_UNKNOWN = "**"


@Rule(
    id="script-must-take-local-rank",
    severity=Severity.ERROR,
    summary="the launcher passes the local rank to the script, which refuses it",
    why="parse_args() exits at an unknown argument",
    fix='add parser.add_argument("--local_rank", type=int), or launch with --no_local_rank',
    see=f"{DEEPSPEED}/launcher/launch.py",
    evidence=fails("unrecognized arguments: --local_rank"),
)
def _refuses_local_rank(situation: Situation) -> Iterator[Hit]:
    command, script = situation.command, situation.script
    given = _passed_rank(command) if command is not None and script is not None else None
    if command is None or given is None:
        return
    for call in unguarded_calls(situation, Action.PARSE_STRICTLY):
        # argparse accepts a prefix of a longer option.
        takes = any(option == "**" or option.startswith(given) for option in call.options)
        if not takes and given == _LOCAL_RANK:
            yield hit(call.seen, f" without {_LOCAL_RANK}")
        elif not takes:
            why = f"since torch 2.0 the launcher passes {given} with a hyphen, and parse_args() refuses it"
            fix = f"write torchrun in place of {command.program}, or add {given} to the parser"
            yield replace(hit(call.seen, f" without {given}"), why=why, fix=fix)


def _passed_rank(command: LaunchCommand) -> str | None:
    """Return the option by which a launcher hands the local rank to the script; None if it does not."""
    if command.launcher is Launcher.TORCHRUN:
        is_older = command.program.endswith("torch.distributed.launch")
        return _LOCAL_RANK_OF_TORCH if is_older and command.find("use_env", "no_python") is None else None
    by = command.find("launcher")
    # Other multi-node launchers start the script themselves, without the argument.
    is_without = command.find("no_local_rank", "no_python") or (by and by.value != "pdsh")
    return _LOCAL_RANK if command.launcher is Launcher.DEEPSPEED and not is_without else None


@Rule(
    id="script-argument-unknown",
    severity=Severity.ERROR,
    summary="the script's parser refuses an argument",
    why="its parse_args() exits at an unknown argument",
    fix="remove it, or add it to the script's parser",
    see="https://docs.python.org/3/library/argparse.html#argparse.ArgumentParser.parse_args",
    evidence=fails("unrecognized arguments: --num_processes"),
)
def _refused_arguments(situation: Situation) -> Iterator[Hit]:
    command, options = situation.command, _strict_options(situation)
    if command is None or options is None:
        return
    refused = [word for word in _flag_words(command.arguments) if not _is_option(word, options)]
    own = [word for word in refused if _is_of_launcher(situation, word)]
    if own:
        yield Hit(
            found=f"{' '.join(own)} behind {command.script}",
            why=f"words behind the script are its own: {command.program} gets none of them",
            fix=f"write {_before_script(situation, own)}",
        )
    for word in refused:
        if word not in own:
            near = nearest(word.lstrip("-"), [option.lstrip("-") for option in options])
            yield Hit(found=word, fix=f"write --{near}" if near else None)


def _is_option(word: str, options: Collection[str]) -> bool:
    """Return True if a word is an option, or the beginning of one."""
    return any(option.startswith(word) for option in options)


@Rule(
    id="launcher-flags-behind-script",
    severity=Severity.WARNING,
    summary="flags of the launcher are behind the script, so that the launcher gets none of them",
    why="all words behind the script are the script's own, and its source does not have these",
    fix="write them before the script",
    see="https://huggingface.co/docs/accelerate/basic_tutorials/launch",
    evidence=ignored(not_reproduced="the harness sets the number of ranks itself"),
)
def _launcher_flags(situation: Situation) -> Iterator[Hit]:
    command, names = situation.command, situation.script_names
    if command is None or command.script is None or _strict_options(situation) is not None:
        return
    if names is not None and names.takes_any:
        return
    own = [word for word in _flag_words(command.arguments) if _is_of_launcher(situation, word)]
    if names is None or not names.has_parser:
        own = [word for word in own if _plain(word) in _LAUNCHERS_ALONE]
    if names is not None:
        fields = _training_fields(situation) if names.takes_training_arguments else frozenset()
        own = [word for word in own if not names.has(word) and _plain(word) not in fields]
    if own:
        yield Hit(
            found=f"{' '.join(own)} behind {command.script}",
            why=None if names else "all words behind the script are its own; its source is not known here",
            fix=f"write {_before_script(situation, own)}",
        )


_ALONE_WORDS = """
    num_processes num_machines machine_rank main_process_ip main_process_port multi_gpu same_network
    nproc_per_node rdzv_backend rdzv_endpoint rdzv_id dynamo_backend zero3_init_flag use_fsdp
    deepspeed_multinode_launcher deepspeed_hostfile main_training_function num_cpu_threads_per_process
    """
_LAUNCHERS_ALONE = frozenset(_ALONE_WORDS.split())
"""Flags that no script has by the same name, as far as public ones show. ASSUMPTION."""


def _flag_words(arguments: Iterable[str]) -> Iterator[str]:
    """Yield each flag among a script's arguments, without =VALUE."""
    for word in arguments:
        if word == "--":
            return
        if word.startswith("--") and " " not in word and is_literal(word.partition("=")[0]):
            yield word.partition("=")[0]


def _is_of_launcher(situation: Situation, word: str) -> bool:
    """Return True if a word is a flag of the line's launcher."""
    command = situation.command
    if command is None or command.launcher is Launcher.PYTHON:
        return False
    schemas = known(situation.schemas, "the launcher's flags")
    return flags_of(command.launcher, schemas).key(_plain(word)) is not None


def _before_script(situation: Situation, flags: Collection[str]) -> str:
    """Return the flags that are behind the script as they are to be written, with the script behind them."""
    command = situation.command
    schemas = known(situation.schemas, "the launcher's flags")
    if command is None:
        return ""
    launcher = flags_of(command.launcher, schemas)
    words, rest = [command.program, *(word for flag in command.flags for word in flag.words)], []
    arguments = iter(command.arguments)
    for word in arguments:
        if word.partition("=")[0] not in flags:
            rest.append(word)
            continue
        words.append(word)
        key = launcher.key(_plain(word))
        if "=" not in word and key is not None and not is_switch(key):
            words.append(next(arguments, ""))
    return " ".join([*words, command.script or "", *rest])


def _strict_options(situation: Situation) -> frozenset[str] | None:
    """Return the options of a parser of the script that refuses all others; None if not known."""
    script = situation.script
    if script is None:
        return None
    for call in unguarded_calls(situation, Action.PARSE_STRICTLY):
        if not any(_UNKNOWN in option for option in call.options):
            return call.options | {"--help"}
    if script.parsed_fields is None:
        return None
    names = set(script.parsed_fields)
    if TRAINING_ARGUMENTS in names:
        schemas = known(situation.schemas, "the fields of TrainingArguments")
        schema = schemas.training_arguments
        former = [entry.path[0] for entry in schema.removed]
        former += [entry.path[0] for entry in schema.other_releases]
        names |= _training_fields(situation) | set(former)  # another rule reports these
    spelled = {name for field in names for name in (field, f"no_{field}")}
    dashed = {name.replace("_", "-") for name in spelled}
    return frozenset(f"--{name}" for name in {*spelled, *dashed, "help"})


def _training_fields(situation: Situation) -> frozenset[str]:
    """Return the fields of TrainingArguments."""
    schemas = known(situation.schemas, "the fields of TrainingArguments")
    return frozenset(key.name for key in schemas.training_arguments.root.keys)


def _plain(word: str) -> str:
    return word.lstrip("-").replace("-", "_")


RULES = declared(vars())
