"""A checkpoint's folder to a Checkpoint, by the names of its files alone."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from zerofit.checking.inputs.named_files import resumed_from
from zerofit.core.facts import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Sequence

# deepspeed/runtime/engine.py, _get_rank_zero_ckpt_name and _get_ckpt_name.
_OPTIMIZER_STATES = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_\d+_optim_states\.pt")
_PARAMETER_SHARD = re.compile(r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt")


def probe_resumed(arguments: Sequence[str]) -> Checkpoint | None:
    """Return the checkpoint that a script's arguments say to resume from; None where they name none."""
    folder = resumed_from(arguments)
    return probe_checkpoint(folder) if folder else None


def probe_checkpoint(folder: str) -> Checkpoint | None:
    """Return what a folder that a run is to resume from shows; None where DeepSpeed did not write it.

    The folder is the one that is given to Trainer's --resume_from_checkpoint or accelerate's load_state: the
    file `latest` in it names the folder of the shards.
    """
    try:
        with open(os.path.join(folder, "latest"), encoding="utf-8") as file:
            names = os.listdir(os.path.join(folder, file.read().strip()))
    except (OSError, UnicodeDecodeError, ValueError):
        return None
    ranks = {match[1] for name in names if (match := _OPTIMIZER_STATES.fullmatch(name))}
    return Checkpoint(
        folder=folder,
        num_ranks=len(ranks),
        partitions_parameters=any(_PARAMETER_SHARD.fullmatch(name) for name in names),
        is_universal="zero" in names,  # deepspeed/checkpoint/ds_to_universal.py: one folder a parameter
    )
