"""submit: captures and plans a script locally, and submits its run to a cluster's scheduler."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.configs.write.command import Rendezvous
from zerofit.core.command import Route
from zerofit.core.errors import UserError
from zerofit.core.observer import SILENT, Observer
from zerofit.core.plan import Plan, plan_to_json
from zerofit.core.secrets import masked, secret_variables
from zerofit.launching.clusters import slurm
from zerofit.launching.clusters.clients import (
    ENGINES,
    ClientError,
    ClusterEngine,
    check_client,
    run_client,
)
from zerofit.launching.clusters.job import (
    JOB_FILE,
    ClusterFlags,
    Job,
    Rendered,
    Submission,
    check_no_deepspeed_env,
    code_digest,
    job_to_json,
    resources_of,
    variables_to_pass,
)
from zerofit.launching.clusters.plan_for_cluster import plan_for_cluster
from zerofit.launching.clusters.run_time import RunTime, run_time, time_sentences
from zerofit.launching.clusters.submitted import (
    LOOK_LIMIT_S,
    SubmittedJob,
    looked_up,
    now,
    write_submitted,
)
from zerofit.launching.launch import check_rules
from zerofit.launching.run_folder import (
    RUNS,
    RunFolder,
    check_run_dir,
    fill_run_folder,
    new_run_folder,
    run_folder,
    typed_name,
    write_file,
)
from zerofit.launching.start import PlannedLaunch
from zerofit.machine.this_node import probe_machine
from zerofit.machine.versions import check_libraries
from zerofit.planning.plan_from_flags import rehearsed
from zerofit.planning.resolve import Verb, own_environment, resolve
from zerofit.planning.subject import facts_of_script
from zerofit.scripts.capture.limit import CAPTURE_LIMIT_S
from zerofit.scripts.resume import resume_way
from zerofit.scripts.target import script_arguments, script_name, script_of, source_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from zerofit.launching.clusters.job import Resources
    from zerofit.planning.run_spec import RunSpec
    from zerofit.planning.solve import Answer
    from zerofit.scripts.resume import ResumeWay

SUBMIT_SCRIPT = "submit.sh"
"""Submits a run that was only written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedRun:
    """A run submitted to a scheduler, or, after a dry run or with `write_only`, to be submitted."""

    plan: Plan
    folder: Path
    files: Mapping[Path, str] = field(repr=False)
    """Texts of the run folder's files, by path."""
    command: str
    """The command that submits it, for a shell."""
    job_id: str | None
    """The scheduler's job id; None if it was not submitted."""
    time: RunTime
    """Its predicted time, and the steps that this follows from."""
    wall_time_s: int | None
    """The job's time limit; None for the cluster's own."""
    is_written: bool = False
    """True if the files are in the folder; False after a dry run."""


@own_environment()
def submit(
    script: str,
    *arguments: str,
    on: ClusterEngine | str,
    gpus: str | None = None,
    num_nodes: int | None = None,
    module: bool = False,
    plan: Plan | Answer | str | Path | None = None,
    run_dir: str | Path = RUNS,
    capture_limit_s: float = CAPTURE_LIMIT_S,
    is_checked: bool = True,
    trusts_checkpoint: bool = False,
    dry_run: bool = False,
    write_only: bool = False,
    observer: Observer = SILENT,
    cluster: ClusterFlags | None = None,
    **settings: Any,
) -> SubmittedRun:
    """Capture and plan a script locally, where no GPU is needed, and submit its run to a cluster.

    `zerofit.submit("train.py", "--epochs", "3", on="slurm", num_nodes=4, gpus="8xH100")`.

    Args:
        script: the script, or with `module` the module, to train.
        arguments: the script's own.
        on: "slurm", "kubernetes" or "skypilot".
        gpus: the GPUs of one node, such as "8xH100"; not needed with a plan.
        num_nodes: number of nodes; by default 1, or the plan's.
        module: True to run a module, as with `python -m`.
        plan: a plan, or its file; by default it is made for the script, or for the `model` of the settings,
            without a capture.
        run_dir: folder of all run folders; for Slurm it must be shared by all nodes.
        capture_limit_s: time limit for the script to reach its training.
        is_checked: False to continue despite errors of compatibility rules.
        trusts_checkpoint: as for zerofit.launch.
        dry_run: True to only return what would be submitted; nothing is written.
        write_only: True to write the run folder, complete, and submit nothing; no client is needed.
        observer: receives progress, plans and findings; silent by default.
        cluster: partition, time limit and other settings of the scheduler.
        settings: of strategy and model, as for zerofit.plan.

    Returns:
        The run folder, and the job id.

    Raises:
        UserError: an argument is wrong, nothing fits, or the scheduler refuses the job.
        ExceptionGroup: of UserErrors, if compatibility rules forbid the run.
    """
    engine, flags = ClusterEngine(on), cluster or ClusterFlags()
    spec = resolve(
        (script, *arguments),
        verb=Verb.SUBMIT,
        module=module,
        gpus=gpus,
        num_nodes=num_nodes,
        plan=plan,
        capture_limit_s=capture_limit_s,
        observer=observer,
        **settings,
    )
    _check_before_planning(spec, engine, flags, Path(run_dir), submits=not (dry_run or write_only))
    check_libraries(observer)
    planned = plan_for_cluster(spec, observer)
    way = resume_way(planned.capture, target=spec.target or ())
    plan = _plan_for_nodes(planned, spec, way, is_checked=is_checked)
    plan = replace(plan, trusts_checkpoint=trusts_checkpoint)
    check_rules(_launch_on_nodes(plan, spec), observer, said=spec.overrides)
    flags = _flags_for(plan, way, engine, flags, spec, observer)
    time = run_time(plan, spec.target or ())
    resources = resources_of(planned, wall_time_s=time.wall_time_s, on_cpu=plan.topology.on_cpu)
    if flags.wall_time_s is None:
        _check_save_time(engine, flags.save_time_s, resources.wall_time_s)
    begins = run_folder if dry_run else new_run_folder
    folder = begins(Path(run_dir), target=script_name(spec.target or ()), at=datetime.now())
    sentences = time_sentences(
        time, said_s=flags.wall_time_s, default=_DEFAULT_LIMITS[engine], restarts=bool(flags.max_requeues)
    )
    submission = _submission(spec, plan, engine, flags, resources, folder, comments=sentences)
    _tell(submission, engine, sentences, observer)
    rendered = _rendered(submission, engine, folder, dry_run=dry_run, observer=observer)
    run = SubmittedRun(
        plan=plan,
        folder=folder.path,
        files={
            folder.plan: plan_to_json(plan),
            folder.path / JOB_FILE: job_to_json(submission.job),
            **rendered.files,
        },
        command=shlex.join(rendered.command),
        job_id=None,
        time=time,
        wall_time_s=flags.wall_time_s or resources.wall_time_s,
    )
    if dry_run:
        return run
    if write_only:
        return _write_job(run, folder, observer)
    return _submit_job(run, folder, rendered, engine, flags, observer)


def _check_before_planning(
    spec: RunSpec, engine: ClusterEngine, flags: ClusterFlags, run_dir: Path, *, submits: bool
) -> None:
    """Check the flags, folders and the client, which no plan could change."""
    _check_flags_of(engine, flags)
    _check_save_time(engine, flags.save_time_s, flags.wall_time_s)
    _check_no_secrets(spec.target or ())
    scheduler = ENGINES[engine]
    scheduler.check(flags)
    check_no_deepspeed_env(Path.cwd(), Path.home())
    _variables(engine, flags)
    check_run_dir(run_dir)
    if engine is ClusterEngine.SLURM:
        slurm.check_folders(Path.cwd(), run_dir.absolute())
    if submits:
        check_client(scheduler.CLIENT)


def _variables(engine: ClusterEngine, flags: ClusterFlags) -> dict[str, str]:
    """Return the variables of this process that the job gets."""
    names = variables_to_pass(os.environ, flags.env, shares_disks=engine is ClusterEngine.SLURM)
    return {name: os.environ[name] for name in names}


def _plan_for_nodes(planned: Plan, spec: RunSpec, way: ResumeWay, *, is_checked: bool) -> Plan:
    """Return a plan as the nodes get it."""
    plan = rehearsed(planned, probe_machine(may_be_unreadable=True)) if spec.on_cpu else planned
    return replace(plan, is_checked=is_checked, saves_when_told=way.is_known)


def _launch_on_nodes(plan: Plan, spec: RunSpec) -> PlannedLaunch:
    return PlannedLaunch(plan=plan, target=spec.target or (), rendezvous=Rendezvous(main_process_port=0))


def _flags_for(
    plan: Plan, way: ResumeWay, engine: ClusterEngine, flags: ClusterFlags, spec: RunSpec, observer: Observer
) -> ClusterFlags:
    """Return the flags without restarts that would lose the run's work, and say what would be lost."""
    target = spec.target or ()
    why_not = _why_not_restarted(engine, flags, script_of(target), way)
    if flags.max_requeues and why_not:
        observer.say(f"{why_not} is not restarted")
        flags = replace(flags, max_requeues=0)
    if (lost := _lost_output_folder(_output_folder(plan, target), engine, flags)) is not None:
        observer.say(lost)
    return flags


def _submission(
    spec: RunSpec,
    plan: Plan,
    engine: ClusterEngine,
    flags: ClusterFlags,
    resources: Resources,
    folder: RunFolder,
    *,
    comments: Iterable[str],
) -> Submission:
    """Return what a scheduler renders as its job."""
    scheduler, target = ENGINES[engine], spec.target or ()
    shares_disks = engine is ClusterEngine.SLURM
    job = Job(
        run=folder.path.name,
        target=target,
        work_dir=os.getcwd() if shares_disks else None,
        run_folder=scheduler.run_folder(folder.path, flags),
        engine=engine.value,
        num_nodes=plan.topology.num_nodes,
        code_digest=code_digest(target),
        max_requeues=flags.max_requeues,
        join_limit_s=scheduler.JOIN_LIMIT_S if flags.join_limit_s is None else flags.join_limit_s,
    )
    return Submission(
        job=job,
        plan=plan,
        resources=resources,
        flags=flags,
        folder=folder.path,
        environment=_variables(engine, flags),
        gpus=spec.gpus,
        python=sys.executable if shares_disks else "python",
        comments=tuple(" ".join(sentence.split()) for sentence in comments),
    )


def _tell(
    submission: Submission, engine: ClusterEngine, sentences: Iterable[str], observer: Observer
) -> None:
    """Say which GPUs the job may get, and how long it may take."""
    if submission.plan.topology.on_cpu:
        observer.say("--cpu: host memory is requested as for the plan on GPUs, but no GPU")
    elif (flag := _GPU_TYPE_FLAG.get(engine)) and not _names_gpu_type(submission.flags):
        observer.say(f"the job may get any type of GPU: {flag} names the one that the plan is for")
    for sentence in sentences:
        observer.say(sentence)


def _rendered(
    submission: Submission, engine: ClusterEngine, folder: RunFolder, *, dry_run: bool, observer: Observer
) -> Rendered:
    """Return a scheduler's files and command for a job, and say its warnings."""
    try:
        rendered: Rendered = ENGINES[engine].render(submission)
    except UserError:
        if not dry_run:
            shutil.rmtree(folder.path)
        raise
    for warning in rendered.warnings:
        observer.say(warning)
    return rendered


def _names_gpu_type(flags: ClusterFlags) -> bool:
    """Return True if the user names a type of GPU: by a label, a feature, or --gres=gpu:a100:8."""
    typed = any(re.match(r"-*(gres|gpus-per-node)=(gpu:)?[a-z]", option) for option in flags.options)
    return typed or bool(flags.constraint or flags.node_selector)


def _write_job(run: SubmittedRun, folder: RunFolder, observer: Observer) -> SubmittedRun:
    """Write a run's folder, with the script that submits it."""
    script = folder.path / SUBMIT_SCRIPT
    text = (
        "#!/bin/sh\n# Submits this run, written with --write-only.\n"
        f"cd {shlex.quote(os.getcwd())} && exec {run.command}\n"
    )
    fill_run_folder(folder, run.files)
    write_file(script, text, executable=True)
    observer.say(f"written to {folder.path}, and not submitted: run the command below, or {script}")
    return replace(run, files={**run.files, script: text}, is_written=True)


def _why_not_restarted(engine: ClusterEngine, flags: ClusterFlags, script: str, way: ResumeWay) -> str | None:
    """Return why a run is not restarted, as the start of a sentence; None if it is."""
    if way.is_unread:
        return (
            f"whether {script} can resume from a checkpoint is unknown: it was not run here, and its source "
            "does not show what trains; a plan of the script, without --model, would tell. Its run"
        )
    if not way.is_known:
        return f"{script} shows no way to resume from a checkpoint, so its run"
    if engine is not ClusterEngine.SLURM and flags.volume is None:
        ended = "a pod" if engine is ClusterEngine.KUBERNETES else "the machine"
        return f"no --volume keeps checkpoints after {ended} ends, so the run"
    return None


def _submit_job(
    run: SubmittedRun,
    folder: RunFolder,
    rendered: Rendered,
    engine: ClusterEngine,
    flags: ClusterFlags,
    observer: Observer,
) -> SubmittedRun:
    fill_run_folder(folder, run.files)
    try:
        for check in rendered.checks:
            run_client(check)
    except UserError:
        shutil.rmtree(folder.path)  # nothing was submitted
        raise
    # Recorded before the client runs: whatever ends zerofit now, `zerofit runs` finds the job by its name.
    job = SubmittedJob(
        engine=engine,
        job_id=None,
        namespace=flags.namespace,
        name=rendered.job_name,
        submitted_at=now(),
    )
    write_submitted(folder.path, job)
    job = replace(job, job_id=_handed_over(job, folder, rendered))
    observer.say(f"submitted as {engine.value} job {job.job_id}; run folder {folder.path}")
    write_submitted(folder.path, job)
    observer.say(f"follow it: zerofit runs logs -f {typed_name(folder.path)}")
    return replace(run, job_id=job.job_id, is_written=True)


def _handed_over(job: SubmittedJob, folder: RunFolder, rendered: Rendered) -> str:
    """Return the id of a job that a scheduler's client submits; it is looked up if the client can't tell.

    Raises:
        UserError: it was refused, and its folder is removed; or it is unknown whether it is queued.
    """
    refusal: ClientError | None = None
    try:
        printed = run_client(rendered.command, limit_s=rendered.limit_s)
    except ClientError as error:  # which a site's wrapper may be after the job is queued
        refusal, printed = error, error.printed
    if (job_id := ENGINES[job.engine].job_id_of(printed)) is not None:
        return str(job_id)
    try:
        found = looked_up(job, folder.path, limit_s=LOOK_LIMIT_S).job_id
    except UserError:
        found = None
    if found is not None:
        return found
    if refusal is not None and not refusal.may_have_arrived:
        shutil.rmtree(folder.path)  # nothing of it has run
        raise refusal
    raise _unknown_submission(job, folder, rendered.command, refusal, printed)


def _unknown_submission(
    job: SubmittedJob, folder: RunFolder, command: tuple[str, ...], refusal: ClientError | None, printed: str
) -> UserError:
    name = typed_name(folder.path)
    said = repr(printed.strip()[:_LONGEST_QUOTE]) if printed.strip() else "nothing"
    return UserError(
        "submission-unknown",
        f"{command[0]} did not tell the id of the job, which may be queued",
        found=refusal.found if refusal else f"`{shlex.join(command)}`: exit code 0, printed {said}",
        why=f"no job of the name {job.name} was found yet; the run folder is kept: {folder.path}",
        fix=f"`zerofit runs status {name}` looks for the job again by its name; submit again once it tells "
        "that there is none",
        exit_code=1,
    )


_LONGEST_QUOTE = 200
"""Characters of a client's output in an error."""
_SCHEDULERS_OF = {
    "partition": ("slurm",),
    "account": ("slurm",),
    "constraint": ("slurm",),
    "image": ("kubernetes", "skypilot"),
    "volume": ("kubernetes", "skypilot"),
    "namespace": ("kubernetes",),
    "node_selector": ("kubernetes",),
    "has_trainer": ("kubernetes",),
    "wall_time_s": ("slurm", "kubernetes"),
    "save_time_s": ("slurm", "kubernetes"),
}
"""The schedulers that support a field of ClusterFlags; all do if it is not listed."""
_DEFAULT_LIMITS = {
    ClusterEngine.SLURM: "the cluster's default limit applies",
    ClusterEngine.KUBERNETES: "the job has no time limit",
    ClusterEngine.SKYPILOT: None,
}
"""What applies to a job without a time limit; None for a scheduler without limits."""
_GPU_TYPE_FLAG = {ClusterEngine.SLURM: "--constraint", ClusterEngine.KUBERNETES: "--node-selector"}
"""The flag that names a type of GPU, for schedulers whose clusters name the types themselves."""
_FLAG_OF = {"has_trainer": "--job-set", "wall_time_s": "--time", "save_time_s": "--save-time"}


def _check_flags_of(engine: ClusterEngine, flags: ClusterFlags) -> None:
    """Check that no flag is given that the scheduler would ignore, and none is missing."""
    nothing = ClusterFlags()
    for name, engines in _SCHEDULERS_OF.items():
        if engine.value not in engines and getattr(flags, name) != getattr(nothing, name):
            flag = _FLAG_OF.get(name, f"--{name.replace('_', '-')}")
            raise UserError(
                "flag-of-another-scheduler",
                f"{engine.value} does not support {flag}",
                found=f"{flag} with --on {engine.value}",
                why=f"it is for {' and '.join(engines)}",
                fix=f"leave out {flag}, or submit to {engines[0]}",
            )
    if engine is ClusterEngine.KUBERNETES and flags.image is None:
        raise UserError(
            "image-missing",
            "pods need an image",
            found="--on kubernetes without --image",
            why="the container must have zerofit, the script and its imports",
            fix="name it: --image registry.example/train:1",
        )


def _check_save_time(engine: ClusterEngine, save_time_s: int, wall_time_s: int | None) -> None:
    """Check that a run is not told to save before it starts; not all schedulers signal earlier."""
    if engine is ClusterEngine.SLURM and wall_time_s is not None and save_time_s >= wall_time_s:
        raise UserError(
            "save-time-too-long",
            "the ranks would be told to save before they start",
            found=f"--save-time {save_time_s} (seconds), of a time limit of {wall_time_s} seconds",
            why="--save-time, 300 by default, counts back from the end of the time limit",
            fix=f"set a shorter one, such as --save-time {max(1, wall_time_s // 4)}, or a longer --time, "
            "such as --time 90 (minutes) or --time 12:00:00",
        )


def _output_folder(plan: Plan, target: tuple[str, ...]) -> object:
    """Return Trainer's output folder, as captured or as the source shows it; None if unknown."""
    if plan.capture is not None:
        return plan.capture.trainer_arguments.get("output_dir")
    file = source_file(target)
    facts = None if file is None else facts_of_script(file)
    if facts is None or facts.route is not Route.TRAINER:
        return None
    return facts.training_argument("output_dir", script_arguments(target))


def _lost_output_folder(output: object, engine: ClusterEngine, flags: ClusterFlags) -> str | None:
    """Return a warning if Trainer's output folder is not on the volume; None if unknown."""
    if engine is ClusterEngine.SLURM or flags.volume is None or not isinstance(output, str):
        return None
    kept = flags.volume.rpartition(":")[2].rstrip("/")
    if os.path.normpath(output).startswith(f"{kept}/"):
        return None
    return (
        f"checkpoints go to {output}, which is lost with its node: --volume only keeps {kept}; make the "
        f"script write to {kept}/{Path(output).name}"
    )


def _check_no_secrets(target: tuple[str, ...]) -> None:
    """Check that no argument of the script is a secret, which would be written into the job's files."""
    names = secret_variables(target)
    if names:
        raise UserError(
            "secret-in-arguments",
            "an argument of the script is a secret",
            found=shlex.join(masked(target)),
            why="arguments of a submitted run are written into its job and shown by the scheduler",
            fix=f"make the script read it from a variable, and pass that: --env {names[0]}",
        )
