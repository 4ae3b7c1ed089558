"""resolve: what the user said, from all sources, as one RunSpec; every verb begins with it.

Sources, each of which overrides those after it: zerofit's own flags or keyword arguments; the flags of
another launcher's line; the files that these name, or accelerate's default file; a preset or a plan, which
`choose` starts from.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.checking.inputs.accelerate import LaunchLayers, ineffective_flags
from zerofit.checking.launch_line import ineffective_settings, names_beside, read_line
from zerofit.core.command import RANK_FOR_EACH_GPU, Launcher
from zerofit.core.observer import SILENT, Observer
from zerofit.core.overrides import Overrides, flag_of, with_engine_of
from zerofit.core.plan import Plan
from zerofit.core.setting import Place, Said
from zerofit.core.strategy import Engine
from zerofit.planning.options import MachineFlags
from zerofit.planning.run_spec import RunSpec
from zerofit.planning.sources.config_files import nodes_with_files, read_config_files, with_files
from zerofit.planning.sources.nodes import Nodes, with_hostfile
from zerofit.planning.sources.script_settings import refused_by_prepare, with_settings_of_script
from zerofit.planning.sources.settings import by_field, settings_of
from zerofit.planning.sources.typed_line import TypedFlag, TypedLine
from zerofit.scripts.capture.limit import CAPTURE_LIMIT_S
from zerofit.scripts.target import check_script, script_target

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from zerofit.checking.launch_line import ReadLine
    from zerofit.core.command import Flag, LaunchCommand
    from zerofit.planning.solve import Answer
    from zerofit.planning.sources.config_files import ConfigFiles


class Verb(StrEnum):
    """A verb that runs or plans a training."""

    PLAN = "plan"
    LAUNCH = "launch"
    TUNE = "tune"
    SUBMIT = "submit"
    CONFIG = "config"
    GENERATE = "generate"


_RUNS_HERE = (Verb.LAUNCH, Verb.TUNE)
"""Verbs that start ranks on this node."""
_FILES = ("config_file", "deepspeed_file", "hostfile")
_OF_THE_RUN = ("machine_rank", "main_process_ip", "main_process_port", "gpu_ids", "hostfile")
"""Settings of a line that only a verb that starts ranks here uses."""


@contextmanager
def own_environment() -> Iterator[None]:
    """Restore the process's environment afterwards; decorates functions that begin with `resolve`."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def resolve(
    target: tuple[str, ...] | None,
    *,
    verb: Verb,
    module: bool = False,
    plan: Plan | Answer | str | Path | None = None,
    captures: bool = True,
    capture_limit_s: float = CAPTURE_LIMIT_S,
    hostfile: str | Path | None = None,
    config_file: str | None = None,
    deepspeed_file: str | None = None,
    dry_run: bool = False,
    observer: Observer = SILENT,
    **settings: Any,
) -> RunSpec:
    """Return what the user asked for; the variables that a line sets are set until `own_environment` ends.

    Args:
        target: the script, or with `module` the module, and its arguments; or a whole line of accelerate,
            torchrun, DeepSpeed's launcher or python. None for a model given by `model` alone.
        verb: who asks.
        module: True if the target is a module, as with `python -m`.
        plan: a plan or an answer to start from, or its file.
        captures: True if the script may be captured.
        capture_limit_s: time limit for the script to reach its training.
        hostfile: DeepSpeed's list of nodes.
        config_file: of `accelerate config`; by default that in accelerate's cache, if the machine to plan for
            is this one and no plan is given.
        deepspeed_file: DeepSpeed's JSON.
        dry_run: True to start nothing.
        observer: told what was read from a line and from files.
        settings: the other flags, as keyword arguments of `zerofit.plan`.

    Raises:
        UserError: a setting, a line or a file is wrong.
        ExceptionGroup: of UserErrors for files that can't be read.
    """
    settings = by_field(settings)
    line = None if module or target is None else read_line(target)
    if line is not None:
        os.environ.update(line.environment)
        target, module = line.target, line.is_module
        of_line = _settings_of_line(line, settings, verb)
        names_files = config_file is None and deepspeed_file is None
        config_file = config_file or of_line.get("config_file")
        deepspeed_file = deepspeed_file or of_line.get("deepspeed_file")
        hostfile = hostfile or of_line.get("hostfile")
    if target is not None:
        target = script_target(target[0], target[1:], module=module)
        check_script(target)
    both = settings if line is None else _with_line(settings, line, of_line)
    said = settings_of({**both, "plan": plan})
    nodes = said.nodes
    takes_default = (
        target is not None
        and said.plan is None
        and said.described == MachineFlags()
        and verb in (Verb.PLAN, *_RUNS_HERE)
    )
    of_accelerate = None if line is None or line.command.launcher is not Launcher.ACCELERATE else line.command
    files = read_config_files(
        config_file=config_file,
        deepspeed_file=deepspeed_file,
        takes_default=takes_default,
        line=of_accelerate,
        is_of_line=line is not None and names_files,
        num_nodes=nodes.num_nodes,
    )
    if line is not None:
        ignored = _ignored_by_accelerate(of_accelerate, files)
        unused = [name for name in ineffective_settings(line, ignored) if settings.get(name) is None]
        said = said.without(unused)
        _tell_of_line(line, [name for name in of_line if name not in unused], settings, verb, observer)
        _tell_of_ignored(ignored, files, observer)
    on_cpu = said.on_cpu or (files is not None and files.on_cpu and verb is not Verb.PLAN)
    if files is not None:
        nodes = nodes_with_files(nodes, files, on_cpu=said.on_cpu)
    if hostfile is not None:
        nodes = with_hostfile(nodes, Path(hostfile))
    spec = RunSpec(
        target=target,
        overrides=said.overrides,
        preset=said.preset,
        plan=said.plan,
        plan_file=Path(plan) if isinstance(plan, str | Path) else None,
        options=said.options,
        described=said.described,
        nodes=nodes,
        on_cpu=on_cpu and verb is not Verb.PLAN,
        captures=captures,
        capture_limit_s=capture_limit_s,
        dry_run=dry_run,
        typed=said.typed,
    )
    is_planned = verb is not Verb.CONFIG and (spec.makes_a_plan or spec.has_given_strategy)
    is_planned = is_planned or said.options.model is not None or spec.has_given_strategy
    if target is not None and not spec.has_given_strategy and verb is not Verb.GENERATE:
        files = with_settings_of_script(files, target, num_nodes=nodes.num_nodes or 1)
    if files is not None and verb is Verb.CONFIG and not spec.overrides.has("global_batch_size"):
        files = files.with_batch()
    if files is not None:
        observer.say(files.line)
        if files.detail:
            observer.detail(f"zerofit: {files.detail}")
        merged, notes = with_files(
            spec.overrides, files, is_planned=is_planned, has_strategy=spec.has_given_strategy
        )
        refused: tuple[str, ...] = ()
        if target is not None and not spec.has_given_strategy:
            refused = refused_by_prepare(target, config_file=config_file, deepspeed_file=deepspeed_file)
        for note in (*files.notes, *refused, *notes):
            observer.say(note)
        spec = replace(spec, files=files, overrides=merged)
    if not spec.has_given_strategy:
        spec = replace(spec, overrides=with_engine_of(spec.overrides))
    return replace(spec, overrides=_with_ranks(spec.overrides, said.nodes, spec.nodes, files, hostfile))


def _ignored_by_accelerate(command: LaunchCommand | None, files: ConfigFiles | None) -> tuple[Flag, ...]:
    """Return the flags of a line of `accelerate launch` that have no effect in it."""
    if command is None:
        return ()
    return (
        ineffective_flags(LaunchLayers(file=None, command=command), None) if files is None else files.ignored
    )


def _tell_of_ignored(ignored: Sequence[Flag], files: ConfigFiles | None, observer: Observer) -> None:
    """Say which flags of a line are left out because accelerate ignores them."""
    if ignored:
        runs_deepspeed = files is not None and files.overrides.get("engine") is Engine.DEEPSPEED
        why = "beside a DeepSpeed file" if runs_deepspeed else "without DeepSpeed"
        words = ", ".join(flag.text for flag in ignored)
        observer.say(f"without {words}, which accelerate launch ignores {why}")


def _settings_of_line(line: ReadLine, own: Mapping[str, Any], verb: Verb) -> dict[str, Any]:
    """Return the settings of a line that count: own flags and files replace the line's."""
    own_names = [name for name, value in own.items() if value is not None and value is not False]
    kept = names_beside(line, own_names)
    found = {name: value for name, value in line.settings.items() if name in kept}
    for name in _unused_by(verb):
        found.pop(name, None)
    return found


def _unused_by(verb: Verb) -> tuple[str, ...]:
    """Return the settings of a line that a verb does not use."""
    if verb in _RUNS_HERE:
        return ()
    return _OF_THE_RUN if verb is Verb.SUBMIT else (*_OF_THE_RUN, "on_cpu")


def _with_line(own: Mapping[str, Any], line: ReadLine, of_line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of both, where the user's own flags take precedence; files are left out."""
    settings = dict(own)
    for name, value in of_line.items():
        if name not in _FILES and (own.get(name) is None or (name == "on_cpu" and not own[name])):
            settings[name] = value
    if typed := own.get("typed"):  # the line as flags of the verb, so that it can be changed and typed again
        settings["typed"] = _in_front(line, of_line, typed)
    return settings


def _in_front(line: ReadLine, of_line: Iterable[str], typed: TypedLine) -> TypedLine:
    """Return a verb's line with another launcher's line as its flags and its script."""
    flags = [TypedFlag(name=name, words=line.words_of([name])) for name in of_line]
    module = (TypedFlag(name="module", words=("-m",)),) if line.is_module else ()
    kept = tuple(flag for flag in flags if flag.words)
    return replace(typed, flags=(*kept, *typed.flags, *module), script=line.target)


def _tell_of_line(
    line: ReadLine, of_line: Sequence[str], own: Mapping[str, Any], verb: Verb, observer: Observer
) -> None:
    """Say which command of zerofit a line is, and what is left out of it."""
    same = _in_front(line, of_line, own.get("typed") or TypedLine())
    observer.say(f"the command is equivalent to: {replace(same, verb=('zerofit', verb))}")
    if line.left_out:
        observer.say(f"without {', '.join(line.left_out)}, which zerofit handles itself")
    for note in line.notes:
        observer.say(note)
    unused = [word for word in line.words_of(_unused_by(verb)) if word.startswith("--")]
    if unused:
        observer.say(f"without {', '.join(unused)}, which zerofit {verb} does not use")


def _with_ranks(
    said: Overrides, own: Nodes, nodes: Nodes, files: ConfigFiles | None, hostfile: str | Path | None
) -> Overrides:
    """Return the overrides with the numbers of ranks and nodes, each with its place."""
    of_files = {} if files is None else files.nodes
    found: dict[str, Said[int]] = {}
    is_per_gpu = nodes.ranks_per_node == RANK_FOR_EACH_GPU
    if (world_size := nodes.num_processes if is_per_gpu else nodes.world_size) is not None:
        is_total = own.ranks_per_node is None or is_per_gpu
        flag = flag_of("world_size") if is_total else "--nproc-per-node"
        is_own = own.ranks_per_node is not None or own.num_processes is not None
        place = None if is_own else of_files.get("num_processes")
        found["world_size"] = _rank_count(world_size, flag, place, None if is_own else hostfile)
    if nodes.num_nodes is not None:
        is_own = own.num_nodes is not None
        place = None if is_own else of_files.get("num_nodes")
        flag = flag_of("num_nodes")
        found["num_nodes"] = _rank_count(nodes.num_nodes, flag, place, None if is_own else hostfile)
    return replace(said, said={**said.said, **found})


def _rank_count(value: int, flag: str, in_file: Said[Any] | None, hostfile: str | Path | None) -> Said[int]:
    """Return a number of ranks or nodes with its place: a file's line, the hostfile, or its flag."""
    if in_file is not None:
        return replace(in_file, value=value)
    if hostfile is not None:
        return Said(value=value, text=f"--hostfile {hostfile}", place=Place(file=str(hostfile), line=0))
    return Said(value=value, text=flag)
