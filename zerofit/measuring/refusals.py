"""What a rung needs that this machine may lack, said before anything is built."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from zerofit.core.errors import UserError
from zerofit.machine.compiler import find_cxx
from zerofit.models.task import Task

if TYPE_CHECKING:
    from zerofit.measuring.spec import Spec
    from zerofit.models.source import ModelSource

_AMPERE = (8, 0)
"""The first compute capability with tf32
(https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities)."""

_WITHOUT_TOKENS = {
    Task.IMAGE_CLASSIFICATION: "pixel_values, labels",
    Task.SPEECH_SEQ2SEQ: "input_features, labels",
}
"""Inputs of the models that read none (zerofit/models/trace/batches.py)."""


def check_reads_tokens(model: ModelSource, *, said: str) -> None:
    """Check that a model is one for `zerofit bench ladder`.

    Args:
        model: what the user named.
        said: how.

    Raises:
        UserError: it reads no tokens.
    """
    if model.task in _WITHOUT_TOKENS:
        raise UserError(
            "ladder-needs-tokens",
            "the ladder trains models that read tokens",
            found=f"--model {said}, whose inputs are {_WITHOUT_TOKENS[model.task]}",
            why="its rungs and its figures go by tokens",
            fix="name a text model",
        )


def check_can_run(spec: Spec) -> None:
    """Check that this machine has what a rung needs, beside what is checked where it is applied.

    Raises:
        UserError: it lacks something.
    """
    strategy = spec.strategy
    if not spec.on_cpu:
        _check_gpu()
    if strategy.compile and spec.on_cpu:
        name, path = find_cxx(environ=os.environ)
        if path is None:
            raise _refused("torch.compile needs a C++ compiler", f"PATH does not lead to {name}")
    if strategy.tf32 and (spec.on_cpu or _capability() < _AMPERE):
        raise _refused("tf32 needs a GPU that has it", "tensor cores have it from compute capability 8.0 on")
    if strategy.optimizer is not None and strategy.optimizer.startswith("paged") and spec.on_cpu:
        raise _refused(f"{strategy.optimizer} needs a GPU", "its states are paged between GPU and host")


def _check_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise _refused("torch sees no GPU", "the driver lists one, and this build of torch can't use it")


def _capability() -> tuple[int, int]:
    import torch

    major, minor = torch.cuda.get_device_capability()
    return int(major), int(minor)


def _refused(summary: str, why: str) -> UserError:
    return UserError(
        "rung-not-here", summary, found="a rung of zerofit bench ladder", why=why, fix="leave the rung out"
    )
