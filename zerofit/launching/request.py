"""LaunchRequest: a script, the settings for its run, and this node; made from flags and files."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.checking.inputs.named_files import named_by_arguments
from zerofit.core.observer import SILENT, Observer
from zerofit.core.plan import Plan
from zerofit.core.secrets import masked
from zerofit.launching.config_files import ConfigFiles, read_config_files, with_config_files
from zerofit.launching.nodes import RANK_FOR_EACH_GPU, Nodes, specified_machine, with_hostfile
from zerofit.machine.this_node import probe_machine
from zerofit.machine.versions import check_libraries
from zerofit.planning.inputs import CAPTURE_LIMIT_S, MachineFlags, ModelFlags, settings_of
from zerofit.planning.plan_from_flags import asks_for_cpu
from zerofit.planning.problem import MemoryLimits
from zerofit.scripts.target import check_script

if TYPE_CHECKING:
    from zerofit.core.facts import Machine
    from zerofit.core.request import Request


_NO_LIMITS = MemoryLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """A script, the settings for its run, and this node."""

    target: tuple[str, ...]
    request: Request
    model: ModelFlags
    machine: Machine
    """This node; in a dry run the one to plan for."""
    elsewhere: MachineFlags
    """Flags of another machine to plan for, in a test on the CPU or a dry run."""
    captures: bool
    """True if the script may be captured."""
    capture_limit_s: float
    """Time limit for the script to reach its training."""
    plan_file: Path | None
    """File of the plan in `request`."""
    nodes: Nodes
    """The nodes of the run, and the GPUs of this one."""
    dry_run: bool
    """True to start nothing."""
    limits: MemoryLimits = _NO_LIMITS
    """Memory limits from earlier attempts of the run."""
    own_folders: tuple[Path, ...] = ()
    """Possible output folders that did not exist before the run; they don't invalidate a cached capture."""
    num_fastest: int = 0
    """Number of the fastest alternative strategies to plan, for trials."""
    config_files: ConfigFiles | None = None
    """The settings in the launch line's configuration files; None without files."""

    @property
    def on_cpu(self) -> bool:
        """True if the ranks run on the CPU."""
        return asks_for_cpu(self.request)

    @property
    def gpus(self) -> str | None:
        """GPUs of another machine to plan for."""
        return self.elsewhere.gpus

    @property
    def is_elsewhere(self) -> bool:
        """True if a dry run shows what would run on another machine."""
        is_planned = self.request.plan is not None and self.machine == self.request.plan.machine
        return self.dry_run and not self.on_cpu and (self.gpus is not None or is_planned)

    @property
    def has_given_strategy(self) -> bool:
        """True if a preset or plan file gives the strategy."""
        return self.request.preset is not None or self.request.plan is not None

    @property
    def plans_for_script(self) -> bool:
        """True if a plan is made from a capture of the script."""
        is_open = self.model.model is None and self.captures and not self.has_given_strategy
        return is_open and (not self.on_cpu or self.gpus is not None)

    @property
    def makes_a_plan(self) -> bool:
        """True if a plan is made: from the script, or from --model."""
        return self.model.model is not None or self.plans_for_script

    @property
    def why_unplanned(self) -> str:
        """The flag that prevents planning."""
        if self.has_given_strategy:
            return f"--preset {self.request.preset}" if self.request.preset else f"--plan {self.plan_file}"
        return "--cpu" if self.captures else "--no-capture"

    @property
    def lacks_micro_batch(self) -> bool:
        """True if a global batch is given, but no micro-batch."""
        request = self.request
        planned = request.plan.strategy.micro_batch_size if request.plan else None
        return request.global_batch_size is not None and not (request.micro_batch_size or planned)

    @property
    def has_plan_of_other_run(self) -> bool:
        """True if the plan file was made for another script, or for other arguments."""
        capture = self.request.plan.capture if self.request.plan is not None else None
        return capture is not None and masked(capture.target) != masked(self.target)

    @property
    def may_capture(self) -> bool:
        """True if the script is captured."""
        needs = self.plans_for_script or self.lacks_micro_batch or self.has_plan_of_other_run
        return self.captures and self.model.model is None and needs


def launch_request(
    target: tuple[str, ...],
    *,
    plan: Plan | str | Path | None = None,
    gpus: str | None = None,
    captures: bool = True,
    capture_limit_s: float = CAPTURE_LIMIT_S,
    hostfile: str | Path | None = None,
    config_file: str | None = None,
    deepspeed_file: str | None = None,
    dry_run: bool = False,
    observer: Observer = SILENT,
    **settings: Any,
) -> LaunchRequest:
    """Return the launch request of this node, with the number of ranks from nodes, hostfile and GPUs.

    Args:
        target: the script or `-m module`, and its arguments.
        settings: other arguments are those of `launch`; a dry run uses the GPUs of `gpus`, or the plan's if
            there is no GPU here.
    """
    nodes = Nodes(**{one.name: settings.pop(one.name) for one in fields(Nodes) if one.name in settings})
    model, elsewhere, request = settings_of({**settings, "gpus": gpus, "plan": plan})
    check_script(target)
    check_libraries(observer)
    files = read_config_files(
        config_file=config_file, deepspeed_file=deepspeed_file, takes_default=request.plan is None
    )
    if files is not None:
        # The nodes are needed first: whether a strategy is planned is only known after counting GPUs.
        _, nodes = with_config_files(files, request, nodes, is_planned=True)
        request = replace(request, on_cpu=request.on_cpu or files.on_cpu)
    on_cpu = asks_for_cpu(request)
    plans_elsewhere = dry_run and not on_cpu
    if plans_elsewhere and elsewhere != MachineFlags():
        machine = specified_machine(elsewhere, nodes=nodes).machine
    else:
        machine = probe_machine(gpu_ids=nodes.gpu_indices, may_be_unreadable=on_cpu)
    if plans_elsewhere and request.plan is not None and not machine.gpus:
        machine = request.plan.machine
    if nodes.ranks_per_node == RANK_FOR_EACH_GPU:
        nodes = replace(nodes, ranks_per_node=1 if on_cpu else max(1, len(machine.gpus)))
    if hostfile is not None:
        nodes = with_hostfile(nodes, Path(hostfile))
    launch = LaunchRequest(
        target=target,
        request=replace(request, num_processes=nodes.world_size, num_nodes=nodes.num_nodes),
        model=model,
        machine=machine,
        elsewhere=elsewhere,
        captures=captures,
        capture_limit_s=capture_limit_s,
        plan_file=None if plan is None or isinstance(plan, Plan) else Path(plan),
        nodes=nodes,
        dry_run=dry_run,
        config_files=files,
    )
    has_strategy = launch.makes_a_plan or launch.has_given_strategy
    if files is None and not has_strategy:
        files = _files_of_script(target)
        launch = replace(launch, config_files=files)
    if files is None:
        return launch
    observer.say(files.line)
    request, _ = with_config_files(files, launch.request, nodes, is_planned=has_strategy)
    return replace(launch, request=request)


def _files_of_script(target: tuple[str, ...]) -> ConfigFiles | None:
    """Return the settings of the DeepSpeed file in a script's arguments; None without one."""
    named = (said.value for said in named_by_arguments(target) if Path(said.value).is_file())
    if (file := next(named, None)) is None:
        return None
    files = read_config_files(config_file=None, deepspeed_file=file, takes_default=False)
    if files is None:
        return None
    # These two stay the script's, which reads the file itself (training/setup/trainer_arguments.py).
    left_out = tuple(name for name in files.left_out if name not in ("optimizer", "scheduler"))
    return replace(files, left_out=left_out)
