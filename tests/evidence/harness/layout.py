"""An Example as the files and the command of a run."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hjson
import yaml
from rule_examples.example import ACCELERATE_FILE, DEEPSPEED_FILE, SCRIPT_FILE, example_files

from harness.reference import ASKED, DEFAULT_CLIPPING, NUM_RANKS
from zerofit.configs.write.command import Rendezvous, accelerate_launch_arguments, launch_environment
from zerofit.core.command import Route
from zerofit.core.facts import Machine
from zerofit.core.plan import Plan, Topology
from zerofit.core.strategy import Engine, Strategy, ZeroStage
from zerofit.launching.run_folder import RunFolder
from zerofit.launching.start import PlannedLaunch, launch_files
from zerofit.machine.versions import probe_versions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rule_examples.example import Example

_SCRIPTS = Path(__file__).parent / "scripts"
_ACCELERATE_YAML = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "DEEPSPEED",
    "deepspeed_config": {"deepspeed_config_file": DEEPSPEED_FILE},
    "num_machines": 1,
    "machine_rank": 0,
    "num_processes": NUM_RANKS,
    "use_cpu": False,
}
"""Where an example has no YAML: one that names the example's DeepSpeed file, and nothing else."""
_FSDP = re.compile(r"distributed_type: FSDP|fsdp_version|fsdp=|fsdp_config=")
"""Words of files, flags and scripts that configure FSDP."""
_TWO_GPUS = ("--num_gpus", str(NUM_RANKS))
"""On the CPU too, the deepspeed launcher calls ranks so."""
_TRAINER_ARGUMENTS = {
    "--output_dir": "out",
    "--max_steps": "4",
    "--learning_rate": "1e-2",
    "--lr_scheduler_type": "constant",
    "--per_device_train_batch_size": "4",
    "--train_sampling_strategy": "sequential",
    "--save_strategy": "no",
    "--report_to": "none",
    "--disable_tqdm": "true",
}
"""What the standard Trainer script gets where the example's own arguments don't say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one run is made of; the ports and folders are the runner's."""

    files: Mapping[str, str]
    """Text of each file by its name."""
    launcher: str
    """accelerate, torchrun, deepspeed or python."""
    command: tuple[str, ...]
    """Behind `accelerate launch`; otherwise the script or module and its arguments."""
    num_ranks: int
    num_machines: int = 1
    """Machines on which the user starts the command; here all of them are this one."""
    is_reference: bool = False
    as_on_gpus: bool = True
    """True if CPU ranks get the process group that GPUs would have; not in examples of CPU ranks."""
    shards: bool = False
    """True if CPU ranks enter FSDP where GPUs would."""
    start: Path | None = None
    """Weights to start from, for a reference."""
    before: Run | None = None
    """What runs first in the same folder: it saves the checkpoint that this one resumes from."""


def route_of(example: Example) -> Route:
    """Return who reads the example's DeepSpeed configuration."""
    if example.route is not None:
        return example.route
    script = example.script or ""
    if "Trainer(" in script:
        return Route.TRAINER
    if "deepspeed.initialize" in script:
        return Route.NATIVE
    return Route.TRAINER if example.arguments and not script else Route.ACCELERATE


def run_of(example: Example) -> Run:
    """Return the run that a user of this example would start, on two CPU ranks."""
    example = _by_flags(example)
    words = shlex.split(example.command or "")
    if example.strategy is not None:
        return _zerofit_run(example)
    route = route_of(example)
    files = _files(example, route)
    target = [SCRIPT_FILE, *_arguments(example, route, files)]
    before, num_machines = None, 1
    if example.checkpoint is not None:
        before = _saving(example)
        target += ["--resume", example.checkpoint.folder]
    launcher, command = "python" if words == ["python"] else "torchrun", target
    if words[:1] == ["deepspeed"]:
        flags = _without(words[1:], "--num_gpus")
        launcher, command = "deepspeed", [*_TWO_GPUS, *flags, "--module", "harness.rank", *target]
    elif words[:2] == ["accelerate", "launch"] or (not words and _needs_accelerate(example, route)):
        if not words and ACCELERATE_FILE not in files:
            files[ACCELERATE_FILE] = yaml.safe_dump(_ACCELERATE_YAML, sort_keys=False)
        flags = _launch_flags(words[2:], files, (example.script or "", *target))
        num_machines, by_deepspeed = _machines(flags, files)
        if by_deepspeed:
            target = ["-m", "harness.rank", *target]
        launcher, command = "accelerate", [*flags, *target]
    ranks = example.topology or Topology()
    return Run(
        files=files,
        launcher=launcher,
        command=tuple(command),
        num_ranks=NUM_RANKS,
        num_machines=num_machines,
        as_on_gpus=not (ranks.on_cpu and ranks.world_size > 1),
        shards=shards_with_fsdp(example),
        before=before,
    )


def _by_flags(example: Example) -> Example:
    """Return an example of `zerofit launch` with the flags that say what its DeepSpeed file does."""
    if shlex.split(example.command or "")[:2] != ["zerofit", "launch"]:
        return example
    stage = hjson.loads(example_files(example)[DEEPSPEED_FILE])["zero_optimization"]["stage"]
    return replace(example, strategy=Strategy(engine=Engine.DEEPSPEED, zero_stage=ZeroStage(stage)))


def _saving(example: Example) -> Run:
    """Return the run that leaves the example's checkpoint behind."""
    checkpoint = example.checkpoint
    assert checkpoint is not None
    assert not isinstance(example.deepspeed, (str, type(None)))
    zero = dict(example.deepspeed["zero_optimization"])
    zero["stage"] = 3 if checkpoint.partitions_parameters else min(zero["stage"], 2)
    saves = replace(
        example, deepspeed={**example.deepspeed, "zero_optimization": zero}, checkpoint=None, topology=None
    )
    run = run_of(saves)
    ranks = run.command.index("--num_processes") + 1
    command = (*run.command[:ranks], str(checkpoint.num_ranks), *run.command[ranks + 1 :])
    return replace(run, command=(*command, "--save", checkpoint.folder))


def reference_of(example: Example, *, start: Path | None = None) -> Run:
    """Return the same script in one process, in fp32, without DeepSpeed or a launcher.

    Args:
        example: what it is the reference of.
        start: the weights that the example's own run started from.
    """
    example = _by_flags(example)
    route = route_of(example)
    files = _files(example, route)
    files[ASKED] = json.dumps(_asked(example, files))
    files.pop(ACCELERATE_FILE, None)
    arguments = _arguments(example, route, files)
    target = (SCRIPT_FILE, *_without(arguments, "--deepspeed", "--bf16", "--fp16"))
    return Run(files=files, launcher="python", command=target, num_ranks=1, is_reference=True, start=start)


def _asked(example: Example, files: Mapping[str, str]) -> dict[str, Any]:
    """Return what the layers together ask of the training step, with the defaults of what they leave out."""
    if example.strategy is not None:
        steps, norm = example.strategy.gradient_accumulation_steps, example.strategy.gradient_clipping
        return {"gradient_accumulation_steps": steps or 1, "gradient_clipping": norm or 0.0}
    asked = {"gradient_clipping": 0.0 if shards_with_fsdp(example) else DEFAULT_CLIPPING}
    words = shlex.split(example.command or "")
    flags = {word.lstrip("-").replace("-", "_"): value for word, value in pairwise(words)}
    section = _accelerate_settings(files).get("deepspeed_config", {})
    config = hjson.loads(files.get(DEEPSPEED_FILE, "{}"))
    for layer in (section, flags, config):  # the file wins over flags, and flags over the YAML
        for key, kind in (("gradient_accumulation_steps", int), ("gradient_clipping", float)):
            if layer.get(key, "auto") != "auto":
                asked[key] = kind(layer[key])
    return asked | ({"optimizer": config["optimizer"]} if "optimizer" in config else {})


def shards_with_fsdp(example: Example) -> bool:
    """Return True if an example's file, flags or script ask for FSDP, which clips nothing by itself."""
    text = "".join(example_files(example).values()) + (example.command or "")
    return _FSDP.search(text) is not None


def _accelerate_settings(files: Mapping[str, str]) -> dict[str, Any]:
    """Return what the accelerate YAML says; nothing where it is no YAML, as bad examples may be."""
    try:
        settings = yaml.safe_load(files.get(ACCELERATE_FILE, ""))
    except yaml.YAMLError:
        return {}
    return settings if isinstance(settings, dict) else {}


def _needs_accelerate(example: Example, route: Route) -> bool:
    return example.accelerate is not None or route is Route.ACCELERATE


def _files(example: Example, route: Route) -> dict[str, str]:
    script = (_SCRIPTS / f"{route}.py").read_text(encoding="utf-8")
    files = {SCRIPT_FILE: script, **example_files(example)}
    # The disk of the examples is a folder beside them.
    return {name: text.replace("/local_nvme", "nvme") for name, text in files.items()}


def _launch_flags(flags: list[str], files: Mapping[str, str], others: Sequence[str]) -> list[str]:
    """Return the flags with two ranks in place of what the user has, and the files that nobody names.

    Args:
        flags: the example's own.
        files: all that there are.
        others: what else may name a file: the script's source and its arguments.
    """
    says_ranks = any(flag.startswith(("--num_processes", "--num-processes")) for flag in flags)
    flags = _without(flags, "--num_processes", "--num-processes", "--main_process_port")
    if flags and flags[-1].endswith(".py"):
        flags = flags[:-1]
    names_file = any(flag.startswith(("--config_file", "--config-file")) for flag in flags)
    if ACCELERATE_FILE in files and not names_file:
        flags = ["--config_file", ACCELERATE_FILE, *flags]
    mentions = " ".join([*flags, *others, files.get(ACCELERATE_FILE, "")])
    names_deepspeed = DEEPSPEED_FILE in mentions or "deepspeed_config_file" in mentions
    if DEEPSPEED_FILE in files and not names_deepspeed:
        flags = ["--use_deepspeed", "--deepspeed_config_file", DEEPSPEED_FILE, *flags]
    is_text = isinstance(_accelerate_settings(files).get("num_processes"), str)
    by_user = ACCELERATE_FILE in files and (is_text or "num_processes" not in files[ACCELERATE_FILE])
    return flags if by_user and not says_ranks else ["--num_processes", str(NUM_RANKS), *flags]


def _machines(flags: Sequence[str], files: Mapping[str, str]) -> tuple[int, bool]:
    """Return on how many machines the command is started, and whether DeepSpeed starts the others."""
    section = _accelerate_settings(files)
    said = dict(pairwise(flags))
    num_machines = int(said.get("--num_machines", section.get("num_machines", 1)))
    launchers = section.get("deepspeed_config", {}).get("deepspeed_multinode_launcher", "pdsh")
    is_standard = said.get("--deepspeed_multinode_launcher", launchers) == "standard"
    return (num_machines, False) if is_standard or num_machines == 1 else (1, True)


def _arguments(example: Example, route: Route, files: Mapping[str, str]) -> list[str]:
    arguments = shlex.split(example.arguments)
    if route is not Route.TRAINER or example.script is not None:
        return arguments
    by_launcher = example.accelerate is not None or example.command is not None
    defaults = dict(_TRAINER_ARGUMENTS)
    if DEEPSPEED_FILE in files and not by_launcher:
        defaults["--deepspeed"] = DEEPSPEED_FILE
    for flag, value in defaults.items():
        if not any(argument.split("=")[0] == flag for argument in arguments):
            arguments += [flag, value]
    return arguments


def _without(words: list[str], *names: str) -> list[str]:
    kept, skip = [], False
    for index, word in enumerate(words):
        if skip:
            skip = False
        elif word.split("=")[0] in names:
            skip = "=" not in word and index + 1 < len(words) and not words[index + 1].startswith("-")
        else:
            kept.append(word)
    return kept


def _zerofit_run(example: Example) -> Run:
    """Return what `zerofit launch --cpu --num-processes 2` starts for these flags."""
    assert example.strategy is not None
    topology = replace(example.topology or Topology(), world_size=NUM_RANKS, num_nodes=1, on_cpu=True)
    machine = Machine(
        gpus=(), num_cpu_cores=NUM_RANKS, host_memory_bytes=1 << 34, host_memory_available_bytes=1 << 34
    )
    plan = Plan(strategy=example.strategy, topology=topology, machine=machine, versions=probe_versions())
    folder = RunFolder(path=Path("run"))
    rendezvous = Rendezvous(main_process_port=0)
    launch = PlannedLaunch(plan=plan, target=(SCRIPT_FILE,), rendezvous=rendezvous)
    files = {str(path): text for path, text in launch_files(launch, folder).items()}
    runner = ("-m", "zerofit.training.runner", str(folder.plan), SCRIPT_FILE)
    command = accelerate_launch_arguments(
        plan, config_file=str(folder.accelerate), rendezvous=rendezvous, target=runner
    )
    files |= _files(example, route_of(example))
    environment = json.dumps(launch_environment(plan, inherited={}))
    return Run(
        files={**files, "environment.json": environment},
        launcher="accelerate",
        command=command,
        num_ranks=NUM_RANKS,
    )
