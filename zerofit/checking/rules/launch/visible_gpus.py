"""Rules on the GPUs that a machine's ranks see: gpu_ids and CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from zerofit.checking.inputs.accelerate import launch_count, launch_of, launch_value, whole_number
from zerofit.checking.inputs.visible_gpus import ranks_on_gpus, starts_multi_gpu, visible_gpus
from zerofit.checking.rule import ACCELERATE, DEEPSPEED, Hit, Rule, Severity, declared, fails, ignored
from zerofit.core.command import Launcher
from zerofit.core.setting import Confidence

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.inputs.visible_gpus import RanksOnGpus
    from zerofit.checking.situation import Situation


_GPU_IDS = re.compile(r"\d+(,\d+)*")
_TAKES_OTHERS = "vllm"
"""Part of arguments with which TRL generates on a GPU beside those of the ranks."""


@Rule(
    id="gpu-ids-too-few",
    severity=Severity.ERROR,
    summary="fewer GPUs are named than a machine has ranks",
    why="the ranks see no other GPUs, and those without one fail with an invalid device ordinal",
    fix="name a GPU for each rank of the machine, or lower num_processes",
    see=f"{ACCELERATE}/utils/launch.py",
    evidence=fails(not_reproduced="needs GPUs"),
)
def _too_few_gpus(situation: Situation) -> Iterator[Hit]:
    found = ranks_on_gpus(situation)
    if found is None or found.ranks_per_machine <= found.num_gpus or any(_refused(situation)):
        return
    why = None
    if found.num_machines > 1:
        why = (
            f"accelerate starts num_processes / num_machines = {found.ranks_per_machine} ranks on each "
            "machine, and those without a GPU fail with an invalid device ordinal"
        )
    yield Hit(found=found.text, place=found.place, why=why, confidence=found.confidence)


@Rule(
    id="num-processes-of-one-machine",
    severity=Severity.WARNING,
    summary="num_processes is as many as one machine has GPUs, and counts the ranks of all machines",
    why="accelerate divides it by num_machines, so that each machine uses a part of its GPUs",
    fix="set num_processes to the GPUs of a machine times the machines",
    see=f"{ACCELERATE}/utils/launch.py",
    evidence=ignored(not_reproduced="needs two machines"),
)
def _of_one_machine(situation: Situation) -> Iterator[Hit]:
    found = ranks_on_gpus(situation)
    if found is not None and _counts_one_machine(found):
        total = found.num_gpus * found.num_machines
        fix = f"set num_processes to {total}"
        yield Hit(found=found.text, place=found.place, fix=fix, confidence=Confidence.LIKELY)


def _counts_one_machine(found: RanksOnGpus) -> bool:
    is_even = found.num_ranks % found.num_machines == 0
    return is_even and found.num_machines > 1 and found.num_ranks == found.num_gpus


@Rule(
    id="gpu-ids-unused",
    severity=Severity.ADVICE,
    summary="more GPUs are named than a machine has ranks",
    why="each rank uses one GPU, and the last ones stay idle",
    fix="name as many GPUs as a machine has ranks, or raise num_processes",
    see=f"{ACCELERATE}/utils/launch.py",
    evidence=ignored(not_reproduced="needs GPUs"),
)
def _unused_gpus(situation: Situation) -> Iterator[Hit]:
    found = ranks_on_gpus(situation)
    if found is None or not 0 < found.ranks_per_machine < found.num_gpus:
        return
    if _counts_one_machine(found) or found.num_ranks % found.num_machines:
        return
    arguments = situation.command.arguments if situation.command else ()
    if not any(_TAKES_OTHERS in word for word in arguments):
        yield Hit(found=found.text, place=found.place, confidence=found.confidence)


@Rule(
    id="multi-gpu-needs-two-ids",
    severity=Severity.ERROR,
    summary="accelerate refuses multi-GPU training with one GPU id",
    why="with a configuration file that asks for several GPUs it wants at least two of them in gpu_ids",
    fix="name several GPUs in gpu_ids, or set distributed_type to 'NO' and num_processes to 1",
    see=f"{ACCELERATE}/commands/launch.py",
    evidence=fails("Less than two GPU ids were configured"),
)
def _one_id(situation: Situation) -> Iterator[Hit]:
    yield from _refused(situation)


def _refused(situation: Situation) -> Iterator[Hit]:
    """Find one GPU id where accelerate wants several: _validate_launch_command."""
    launch = launch_of(situation)
    kind = starts_multi_gpu(launch) if launch and launch.file else None
    if launch is None or kind is None:
        return
    ids = launch_value(launch, "gpu_ids")
    gpus, machines = visible_gpus(situation), launch_count(launch, "num_machines")
    is_one = ids is not None and gpus is not None and ids.text == gpus.text and len(gpus.value) == 1
    if ids is not None and is_one and (machines is None or machines.value <= 1):
        yield Hit(found=f"{kind.text} with {ids.text}", place=ids.place)


@Rule(
    id="visible-devices-ignored",
    severity=Severity.WARNING,
    summary="DeepSpeed's launcher ignores CUDA_VISIBLE_DEVICES beside flags that choose GPUs",
    why="with one of these flags the launcher removes the variable, and counts all GPUs of the machine",
    fix="name the GPUs in --include localhost:IDS, or leave the flag out",
    see=f"{DEEPSPEED}/launcher/runner.py",
    evidence=ignored(not_reproduced="needs GPUs"),
)
def _ignored_devices(situation: Situation) -> Iterator[Hit]:
    command = situation.command
    if command is None or command.launcher is not Launcher.DEEPSPEED or command.find("hostfile"):
        return
    ids = dict(command.environment).get("CUDA_VISIBLE_DEVICES", "")
    chosen = command.find("include", "exclude", "num_gpus")
    if chosen is None or not _GPU_IDS.fullmatch(ids):
        return
    named, taken = ids.split(","), str(chosen.value).rpartition(":")[2].split(",")
    if chosen.name == "num_gpus":
        number = whole_number(chosen.value)
        if number is None or number < 1:
            return  # unknown, or as without the flag
        named, taken = named[:number], [str(gpu) for gpu in range(min(number, len(named) + 1))]
    if chosen.name == "exclude" or sorted(named) != sorted(taken):
        yield Hit(found=f"CUDA_VISIBLE_DEVICES={ids} with {chosen.text}")


RULES = declared(vars())
