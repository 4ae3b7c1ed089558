"""The environment of a captured script: a single process without GPU, trackers and launcher variables."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from zerofit.core.module_path import safe_path_variables

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MARK = "ZEROFIT_CAPTURE"
"""Names the capture's folder; all child processes inherit it, and are found and ended by it."""
_LAUNCHER_PREFIXES = (
    "ACCELERATE_",
    "FSDP_",
    "MEGATRON_LM_",
    "MV2_",
    "OMPI_",
    "PARALLELISM_CONFIG_",
    "PMI_",
    "TORCHELASTIC_",
)
"""Prefixes of the variables that launchers set for ranks. Source: accelerate/utils/launch.py;
accelerate/state.py, which uses MPI's world size;
torch/distributed/elastic/agent/server/local_elastic_agent.py."""
_LAUNCHER_NAMES = {
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_NAME",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "FP8_OVERRIDE_FPROP",
    "FP8_OVERRIDE_DGRAD",
    "FP8_OVERRIDE_WGRAD",
}
"""Launcher variables whose prefixes user variables may share. Source: as above."""
_GPUS = tuple(f"{kind}_VISIBLE_DEVICES" for kind in ("CUDA", "HIP", "ROCR", "ASCEND_RT"))
_NO_TRACKERS = {
    "WANDB_MODE": "disabled",  # https://docs.wandb.ai/models/track/environment-variables
    "COMET_MODE": "disabled",  # transformers/integrations/integration_utils.py, CometCallback.setup
    "COMET_START_ONLINE": "0",  # ibid.
    "SWANLAB_MODE": "disabled",  # https://docs.swanlab.cn/en/api/environment-variable.html
    "CLEARML_OFFLINE_MODE": "1",  # https://clear.ml/docs/latest/docs/guides/set_offline
    "NEPTUNE_MODE": "offline",  # https://docs.neptune.ai/environment_variables/neptune_scale
    "DVCLIVE_TEST": "true",  # dvclive/live.py: creates no DVC experiment
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",  # transformers/integrations/integration_utils.py, MLflowCallback
}
_TRACKER_FOLDERS = (
    "CLEARML_CACHE_DIR",
    "COMET_OFFLINE_DIRECTORY",
    "NEPTUNE_DATA_DIRECTORY",
    "NEPTUNE_LOG_DIRECTORY",
    "TRACKIO_DIR",
    "WANDB_DIR",
)
"""Where trackers write when offline."""
_RESUMED_RUNS = {
    "MLFLOW_RUN_ID",
    "WANDB_RUN_ID",
    "COMET_EXPERIMENT_KEY",
    "SWANLAB_RUN_ID",
    "TRACKIO_SPACE_ID",
}


def script_environment(
    environment: Mapping[str, str],
    *,
    folder: Path,
    temporary: Path,
    port: int,
    is_offline: bool,
    tools: Path | None = None,
) -> dict[str, str]:
    """Return the environment variables of a captured script's process.

    Args:
        environment: the user's.
        folder: the capture's own; trackers write there.
        temporary: the folder for temporary files.
        port: a free one: scripts may create a process group of one rank.
        is_offline: whether nothing is downloaded from the hub.
        tools: a folder of programs that precedes PATH.
    """
    kept = {
        name: value
        for name, value in environment.items()
        if not name.startswith(_LAUNCHER_PREFIXES) and name not in _LAUNCHER_NAMES | _RESUMED_RUNS
    }
    own = [] if tools is None else [str(tools)]
    path = os.pathsep.join((*own, os.path.dirname(sys.executable), environment.get("PATH", os.defpath)))
    offline = {"HF_HUB_OFFLINE": "1"} if is_offline else {}
    return {
        **kept,
        **safe_path_variables(environment),
        **offline,
        **quiet_variables(folder, temporary=temporary),
        **dict.fromkeys(_GPUS, ""),
        "PATH": path,
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        **dict.fromkeys(("RANK", "LOCAL_RANK"), "0"),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def quiet_variables(folder: Path, *, temporary: Path) -> dict[str, str]:
    """Return variables that silence trackers, separate temporary files and mark all processes.

    Args:
        folder: the capture's or the trial's own; trackers write there.
        temporary: the folder for temporary files.
    """
    trackers = folder / "trackers"
    return {
        **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary)),
        **_NO_TRACKERS,
        **dict.fromkeys(_TRACKER_FOLDERS, str(trackers)),
        "MLFLOW_TRACKING_URI": trackers.as_uri(),
        MARK: str(folder),
    }
