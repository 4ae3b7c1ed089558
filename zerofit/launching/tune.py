"""tune: finds the fastest memory strategy of a script by measurement on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zerofit.core.observer import SILENT, Observer
from zerofit.core.plan import GENERATE_LIMIT_S, plan_to_json
from zerofit.launching.launch import check_launch
from zerofit.launching.nodes import on_this_node
from zerofit.launching.run_folder import RUNS, write_file
from zerofit.launching.trials import TrialPolicy, Tuning, run_trials
from zerofit.machine.versions import check_libraries
from zerofit.planning.resolve import Verb, own_environment, resolve
from zerofit.scripts.capture.limit import CAPTURE_LIMIT_S

_DEFAULT = TrialPolicy()
PLAN = "plan.json"
"""The winner's plan file, in the folder of the trials."""


@own_environment()
def tune(
    script: str,
    *arguments: str,
    module: bool = False,
    gpus: str | None = None,
    num_trials: int = _DEFAULT.num_trials,
    num_warm_up: int = _DEFAULT.num_warm_up,
    num_timed: int = _DEFAULT.num_timed,
    budget_s: float | None = None,
    is_anew: bool = False,
    capture_limit_s: float = CAPTURE_LIMIT_S,
    is_checked: bool = True,
    hang_limit_s: float | None = None,
    run_dir: str | Path = RUNS,
    dry_run: bool = False,
    observer: Observer = SILENT,
    **settings: Any,
) -> Tuning:
    """Measure the strategies that a plan expects to be fastest, and return the fastest.

    `zerofit.tune("train.py", "--epochs", "3").launch.plan` is a plan for `zerofit.launch(..., plan=...)`.
    Each trial is a complete launch of the unmodified script that ends after some optimizer steps. It saves no
    weights, sends nothing to trackers and the hub, and leaves the user's files unchanged. Its measurements
    are stored in this machine's observations, which later plans use.

    Args:
        script: the script, or with `module` the module, to train.
        arguments: the script's own.
        module: True to run a module, as with `python -m`.
        gpus: with `on_cpu=True`: GPUs to plan for, while trials run on the CPU.
        num_trials: maximum number of trials, including those of an earlier start.
        num_warm_up: untimed optimizer steps of each trial.
        num_timed: timed optimizer steps of each trial.
        budget_s: no trial starts later than this after the first.
        is_anew: True to repeat measurements of earlier starts.
        capture_limit_s: time limit for the script to reach its training.
        is_checked: False to continue despite errors of compatibility rules.
        hang_limit_s: as for `zerofit.launch`.
        run_dir: folder of all run folders.
        dry_run: True to only return the candidates.
        observer: receives each trial; silent by default.
        settings: as for `zerofit.launch`.

    Returns:
        All trials; `.best` is the fastest, `.launch` is None if none was measured.

    Raises:
        UserError: an argument is wrong, nothing fits, or it can't run here.
        ExceptionGroup: of UserErrors, if configuration files can't be read or compatibility rules forbid the
            planner's choice.
    """
    check_libraries(observer)
    spec = resolve(
        (script, *arguments),
        verb=Verb.TUNE,
        module=module,
        gpus=gpus,
        capture_limit_s=capture_limit_s,
        dry_run=dry_run,
        observer=observer,
        **settings,
    )
    policy = TrialPolicy(
        num_trials=num_trials,
        num_warm_up=num_warm_up,
        num_timed=num_timed,
        budget_s=budget_s,
        is_anew=is_anew,
    )
    tuning = run_trials(
        on_this_node(spec),
        policy,
        run_dir=Path(run_dir),
        settings={"is_checked": is_checked, "generate_limit_s": GENERATE_LIMIT_S},
        hang_limit_s=hang_limit_s,
        check=check_launch,
        dry_run=dry_run,
        observer=observer,
    )
    if tuning.launch is not None:
        write_file(tuning.folder / PLAN, plan_to_json(tuning.launch.plan))
    return tuning
