"""The flags of torchrun, deepspeed and zerofit launch; those of accelerate launch stand in the catalog."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherFlags:
    """How a launcher reads its flags; names are without dashes before them, and with underscores."""

    switches: frozenset[str]
    """Long names of flags without a value."""
    valued: frozenset[str]
    """Long names of flags with a value."""
    short: Mapping[str, str]
    """Other names, and the long name of each."""
    abbreviates: bool = False
    """Whether the launcher takes the beginning of a long name that fits one flag alone."""
    takes_dashes: bool = True
    """Whether --num-gpus is --num_gpus to it."""

    def find(self, name: str) -> str | None:
        """Return the long name of the flag that the launcher takes a name for; None where it knows none."""
        name = self.short.get(name, name)
        if name in self.switches or name in self.valued:
            return name
        if not self.abbreviates or len(name) == 1:
            return None
        fitting = {self.short.get(other, other) for other in self.names if other.startswith(name)}
        return fitting.pop() if len(fitting) == 1 else None

    @property
    def names(self) -> tuple[str, ...]:
        """All names that stand behind two dashes, in the order of the alphabet."""
        return tuple(sorted(name for name in {*self.switches, *self.valued, *self.short} if len(name) > 1))


TORCHRUN = LauncherFlags(  # torch/distributed/run.py; use_env is of torch.distributed.launch
    switches=frozenset(
        {"help", "standalone", "module", "no_python", "run_path", "virtual_local_rank", "use_env"}
    ),
    valued=frozenset(
        [
            "nnodes",
            "nproc_per_node",
            "rdzv_backend",
            "rdzv_endpoint",
            "rdzv_id",
            "rdzv_conf",
            "max_restarts",
            "monitor_interval",
            "start_method",
            "event_log_handler",
            "role",
            "log_dir",
            "redirects",
            "tee",
            "local_ranks_filter",
            "duplicate_stdout_filters",
            "duplicate_stderr_filters",
            "node_rank",
            "master_addr",
            "master_port",
            "local_addr",
            "logs_specs",
            "numa_binding",
            "signals_to_handle",
            "shutdown_timeout",
        ]
    ),
    short={"h": "help", "m": "module", "r": "redirects", "t": "tee"},
    abbreviates=True,
)
DEEPSPEED = LauncherFlags(  # deepspeed/launcher/runner.py
    switches=frozenset(
        [
            "help",
            "module",
            "no_python",
            "no_local_rank",
            "no_ssh",
            "no_ssh_check",
            "force_multi",
            "save_pid",
            "bind_cores_to_rank",
            "quiet",
        ]
    ),
    valued=frozenset(
        [
            "hostfile",
            "include",
            "exclude",
            "num_nodes",
            "num_gpus",
            "master_port",
            "master_addr",
            "node_rank",
            "launcher",
            "launcher_args",
            "enable_each_rank_log",
            "autotuning",
            "bind_core_list",
            "ssh_port",
            "venv_script",
            "log_level",
        ]
    ),
    short={
        "h": "help",
        "H": "hostfile",
        "i": "include",
        "e": "exclude",
        "q": "quiet",
        "num_accelerators": "num_gpus",
    },
    abbreviates=True,
    takes_dashes=False,
)
ZEROFIT = LauncherFlags(  # zerofit/cli/launch.py
    switches=frozenset(
        [
            "help",
            "version",
            "debug",
            "gradient_checkpointing",
            "no_gradient_checkpointing",
            "compile",
            "cpu",
            "module",
            "dry_run",
            "no_check",
        ]
    ),
    valued=frozenset(
        [
            "preset",
            "plan",
            "engine",
            "zero_stage",
            "offload_optimizer",
            "offload_param",
            "nvme_path",
            "mixed_precision",
            "micro_batch_size",
            "gradient_accumulation_steps",
            "global_batch_size",
            "gradient_clipping",
            "optimizer",
            "num_processes",
            "num_machines",
            "machine_rank",
            "main_process_ip",
            "main_process_port",
            "nproc_per_node",
            "hostfile",
            "gpu_ids",
            "run_dir",
        ]
    ),
    short={
        "h": "help",
        "m": "module",
        "offload_optimizer_device": "offload_optimizer",
        "offload_param_device": "offload_param",
        "nnodes": "num_machines",
        "node_rank": "machine_rank",
        "master_addr": "main_process_ip",
        "master_port": "main_process_port",
    },
)
