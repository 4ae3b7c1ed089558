"""zerofit.apply: a script applies its plan itself, with the hooks, checks and record of `zerofit launch`."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import replace
from datetime import datetime
from multiprocessing.process import current_process
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from zerofit.checking.check_plan import check_plan
from zerofit.configs.write.deepspeed import run_deepspeed_json
from zerofit.core.atomic_file import write_whole
from zerofit.core.bounded_read import read_bounded_text
from zerofit.core.errors import UserError
from zerofit.core.plan import LARGEST_PLAN, Plan, head_lines, plan_from_json, plan_to_json
from zerofit.core.run_name import RUNS_NAME, run_name
from zerofit.core.strategy import Engine
from zerofit.core.upstream.accelerate import has_state
from zerofit.machine.versions import probe_versions
from zerofit.training.changes import Changes
from zerofit.training.hooks import MODULE_HOOKS, hooked_plan, install
from zerofit.training.late_imports import imported_functions, replace_imported_copies
from zerofit.training.launcher_settings import check_launcher, check_ranks, set_environment
from zerofit.training.rank_end import RankEnd, print_errors_without_traceback
from zerofit.training.reporting import observe
from zerofit.training.saving import stop_signal

if TYPE_CHECKING:
    from types import ModuleType

_CAPTURE = "zerofit.scripts.capture.child"
"""The program that runs a script up to its first step, to learn what a plan has to be for."""

_applied: Plan | None = None
"""The plan that this process has applied by itself, as it was given."""


def apply(plan: Plan | str | os.PathLike[str], *, run_dir: str | os.PathLike[str] = RUNS_NAME) -> None:
    """Train under a plan, in a script that is started without `zerofit launch`.

    Call it on every rank before the script makes its Accelerator or TrainingArguments. The ranks may be
    started by `accelerate launch`, torchrun, or `python` for a single one. Hooks, checks and records are
    those of `zerofit launch`; under `zerofit launch` itself its own plan stays, and a line says so.

    Args:
        plan: a plan, or the path of a plan file.
        run_dir: the folder of all run folders. This run's holds the plan, the DeepSpeed configuration and
            each rank's record.

    Raises:
        UserError: the plan can't be read, is for other ranks, contradicts the launcher's own settings, or
            comes too late; or another plan is applied already.
        ExceptionGroup: of one UserError for each compatibility rule that forbids the plan.
    """
    if _CAPTURE in sys.orig_argv or getattr(current_process(), "_inheriting", False):
        return  # captured as it is; or a worker, which imports the script and does not train
    name = f"zerofit.apply({'plan' if isinstance(plan, Plan) else repr(os.fspath(plan))})"
    print_errors_without_traceback()
    if (running := hooked_plan()) is not None:
        _keep_running_plan(plan, name, *running)
        return
    given = plan if isinstance(plan, Plan) else _read(Path(plan))
    _check_in_time(name)
    check_ranks(given)
    check_launcher(given)
    found = replace(given, versions=probe_versions())
    changes = Changes(announce=os.environ.get("RANK", "0") == "0")
    script = _script()
    check_plan(found, script=script, arguments=sys.argv[1:] if script else (), say=changes.warn)
    folder = _make_run_folder(Path(run_dir), found, script)
    _start(found, folder, changes)
    global _applied
    _applied = given


def _keep_running_plan(
    plan: Plan | str | os.PathLike[str], name: str, running: Plan, changes: Changes
) -> None:
    """Leave the plan whose hooks are installed, and say so.

    Raises:
        UserError: the script has applied another plan before.
    """
    if _applied is None:
        own = plan if isinstance(plan, Plan) else _read_or_none(Path(plan))
        differs = own is not None and (own.strategy, own.topology) != (running.strategy, running.topology)
        changes.add(
            f"{name} changes nothing: `zerofit launch` has applied its own plan"
            + (f", {_in_words(running)}, in place of {_in_words(own)}" if own and differs else "")
        )
        return
    if (plan if isinstance(plan, Plan) else _read(Path(plan))) == _applied:
        return
    raise UserError(
        "plan-applied-already",
        "the script applies two plans",
        found=f"{name}, after another plan: {_in_words(running)}",
        why="its hooks are in accelerate and transformers, once for the whole process",
        fix="apply one plan, in a process of its own",
    )


def _read(path: Path) -> Plan:
    try:
        text = read_bounded_text(path, most_bytes=LARGEST_PLAN)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            "plan-file-missing",
            "the plan file can't be read",
            found=f"zerofit.apply({str(path)!r}): {getattr(error, 'strerror', None) or 'it is no text'}",
            why="the script is to train as that plan says",
            fix="write it with `zerofit plan --output FILE SCRIPT`",
        ) from None
    return plan_from_json(text, name=str(path))


def _read_or_none(path: Path) -> Plan | None:
    with contextlib.suppress(UserError):
        return _read(path)
    return None


def _in_words(plan: Plan) -> str:
    """Return the strategy and ranks of a plan."""
    return head_lines(plan)[1].removeprefix("strategy: ")


def _check_in_time(name: str) -> None:
    if not has_state():
        return
    raise UserError(
        "apply-too-late",
        "the plan comes after the script's Accelerator or TrainingArguments",
        found=f"{name}, and accelerate has set up its ranks already",
        why="engine, ranks and precision are fixed when the first of them is made",
        fix=f"call {name} first in the script, before Accelerator() and TrainingArguments()",
    )


def _script() -> str | None:
    """Return the path of the script; None for a module or an interactive session."""
    main: ModuleType | None = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    return file if file is not None and getattr(main, "__spec__", None) is None else None


def _make_run_folder(run_dir: Path, plan: Plan, script: str | None) -> Path:
    """Create the run's folder, the same for all ranks of a node, and return it."""
    # Ranks of a node have one parent, which started them; a single rank may have the user's shell.
    pid = (os.getppid() or os.getpid()) if "RANK" in os.environ else os.getpid()
    started_at = datetime.fromtimestamp(psutil.Process(pid).create_time())
    folder = (run_dir / run_name(script or sys.argv[0] or "notebook", started_at)).absolute()
    files = {"plan.json": plan_to_json(plan)}
    if plan.strategy.engine is Engine.DEEPSPEED:
        files["ds_config.json"] = run_deepspeed_json(plan)
    try:
        is_first = not run_dir.exists()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_first:  # so that git ignores runs
            write_whole(run_dir / ".gitignore", "*\n")
        for name, text in files.items():  # by each rank, so that none has to wait for another
            write_whole(folder / name, text, mode=0o600)
    except OSError as error:
        raise UserError(
            "run-folder-not-writable",
            "the run's folder is not writable",
            found=f"{error.strerror}: {error.filename}",
            why="each run writes its plan, configuration and records into its own folder",
            fix="name a writable folder: zerofit.apply(..., run_dir=DIR)",
        ) from None
    return folder


def _start(plan: Plan, folder: Path, changes: Changes) -> None:
    """Do what zerofit.training.runner does before it starts a script."""
    rank = int(os.environ.get("RANK", "0"))
    file = folder / "ds_config.json" if plan.strategy.engine is Engine.DEEPSPEED else None
    set_environment(plan, deepspeed_file=file, changes=changes)
    if plan.saves_when_told:
        stop_signal.start(folder)
    observe.start(folder / "ranks", rank, on_cpu=plan.topology.on_cpu)
    before = imported_functions(hook.module for hook in MODULE_HOOKS)
    install(plan, changes, run_folder=folder)
    replace_imported_copies(before)
    RankEnd(folder / "ranks", rank, changes)
    changes.warn(f"zerofit: the plan is {_in_words(plan)}; its record is in {folder}")
