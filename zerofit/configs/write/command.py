"""The exact `accelerate launch` command line for a Plan, and its environment."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.core.secrets import shell_words
from zerofit.core.strategy import Engine, Precision, ZeroStage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zerofit.core.plan import Plan


MIXED_PRECISION = {Precision.FP32: "no", Precision.FP16: "fp16", Precision.BF16: "bf16"}
"""accelerate's name for each precision (accelerate/utils/dataclasses.py, PrecisionType)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The rendezvous of a run's ranks."""

    machine_rank: int = 0
    """This node's number, from 0."""
    main_process_ip: str | None = None
    """Address of node 0; None for a single node."""
    main_process_port: int
    """Port on node 0."""
    gpu_ids: str | None = None
    """GPUs of this node to use, in the syntax of CUDA_VISIBLE_DEVICES; None for all."""


def needs_one_gpu(plan: Plan) -> bool:
    """Return True if a single rank must see only one GPU.

    With several visible GPUs and no distributed launch, Trainer wraps the model in nn.DataParallel over all
    of them and multiplies the batch size by their number (transformers/training_args.py, n_gpu).
    """
    is_alone = plan.strategy.engine is Engine.NATIVE and plan.topology.world_size == 1
    return is_alone and not plan.topology.on_cpu


def is_on_one_of_many_gpus(plan: Plan) -> bool:
    """Return True if a single rank must be restricted to one of several GPUs of this node."""
    return needs_one_gpu(plan) and len(plan.machine.gpus) > 1


def first_gpu(*lists: str | None) -> str:
    """Return the first GPU of the first list that names any; "0" if none does.

    Args:
        lists: comma-separated ids, as in --gpu-ids and CUDA_VISIBLE_DEVICES; None or "all" name none.
    """
    named = (ids for ids in lists if ids not in (None, "", "all"))
    return str(next(named, "0")).split(",")[0].strip()


def accelerate_launch_arguments(
    plan: Plan, *, config_file: str, rendezvous: Rendezvous, target: Sequence[str]
) -> tuple[str, ...]:
    """Return the arguments of `accelerate launch`.

    Args:
        plan: the plan.
        config_file: path of the accelerate YAML.
        rendezvous: how the ranks meet.
        target: the script or `-m module`, and its arguments.
    """
    topology = plan.topology
    precision = MIXED_PRECISION[plan.strategy.precision or Precision.FP32]
    arguments = ["--config_file", config_file, "--mixed_precision", precision]
    arguments += ["--num_processes", str(topology.world_size), "--num_machines", str(topology.num_nodes)]
    arguments += ["--machine_rank", str(rendezvous.machine_rank)]
    if rendezvous.main_process_ip is not None:
        arguments += ["--main_process_ip", rendezvous.main_process_ip]
    arguments += ["--main_process_port", str(rendezvous.main_process_port)]
    if rendezvous.gpu_ids is not None and not topology.on_cpu:
        arguments += ["--gpu_ids", rendezvous.gpu_ids]
    if plan.strategy.compile:
        arguments += ["--dynamo_backend", "inductor"]
    return (*arguments, *target)


def launch_environment(plan: Plan, *, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that the launch sets in addition to the user's.

    Args:
        plan: the plan.
        inherited: the user's environment, whose preferences are not overridden.
    """
    environment = {}
    if "OMP_NUM_THREADS" not in inherited:
        # torchrun would set 1, and DeepSpeed's CPU Adam would run on a single core.
        threads = max(1, plan.machine.num_cpu_cores // plan.topology.ranks_per_node)
        environment["OMP_NUM_THREADS"] = str(threads)
    if plan.topology.on_cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
        if "OMP_WAIT_POLICY" not in inherited:
            # Threads that spin while waiting slow a step down many times if other work needs a core.
            environment["OMP_WAIT_POLICY"] = "PASSIVE"
        if plan.strategy.engine is Engine.DEEPSPEED:
            environment["DS_ACCELERATOR"] = "cpu"
        else:
            environment["ACCELERATE_USE_CPU"] = "true"
    return environment | compile_environment(plan)


def rank_environment(plan: Plan, *, deepspeed_file: str | None) -> dict[str, str]:
    """Return the variables that `accelerate launch` sets for the ranks of a plan, for other launchers.

    accelerate/utils/launch.py, prepare_simple_launcher_cmd_env and prepare_deepspeed_cmd_env (1.15).

    Args:
        plan: the plan.
        deepspeed_file: path of the DeepSpeed JSON; None for the native engine.
    """
    environment = {"ACCELERATE_MIXED_PRECISION": MIXED_PRECISION[plan.strategy.precision or Precision.FP32]}
    if plan.strategy.compile:
        environment["ACCELERATE_DYNAMO_BACKEND"] = "INDUCTOR"
    if deepspeed_file is not None:
        needs_init = plan.strategy.zero_stage is ZeroStage.PARAMETERS
        environment |= {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": deepspeed_file,
            "ACCELERATE_DEEPSPEED_ZERO3_INIT": str(needs_init).lower(),
            "ACCELERATE_USE_CPU": "false",  # which would switch DeepSpeed off, also on CPU ranks
        }
    return environment


def compile_environment(plan: Plan) -> dict[str, str]:
    """Return the variables that make DeepSpeed's ranks compile, on any machine.

    accelerate's own --dynamo_backend has no effect with DeepSpeed (accelerate/utils/launch.py,
    prepare_deepspeed_cmd_env, 1.15).
    """
    if plan.strategy.compile and plan.strategy.engine is Engine.DEEPSPEED:
        return {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}
    return {}


def shell_command(arguments: Sequence[str], *, environment: Mapping[str, str]) -> str:
    """Return the command as a line for a POSIX shell, environment first, secrets as variables."""
    settings = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    return " ".join([*settings, "accelerate", "launch", shell_words(arguments)])
