"""What a rank of `zerofit generate` says where memory runs out, in place of a traceback."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.core.errors import UserError
from zerofit.generation.results.folder import parts_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.generation.generation_job import GenerationJob

_CPU_OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory"
"""c10/core/impl/alloc_cpu.cpp: torch raises a bare RuntimeError."""
_GOES_ON = "it goes on where it stopped"


@contextmanager
def memory_explained(job: GenerationJob, *, is_loading: bool = False) -> Iterator[None]:
    """Say what to do where memory runs out.

    Args:
        job: what is generated.
        is_loading: whether the weights are being loaded, and no prompt has been seen.

    Raises:
        UserError: it did.
    """
    import torch

    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        is_of_gpu = isinstance(error, torch.OutOfMemoryError)
        if not (is_of_gpu or isinstance(error, MemoryError)) and _CPU_OUT_OF_MEMORY not in str(error):
            raise
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise _out_of_memory(job, first, is_of_gpu=is_of_gpu, is_loading=is_loading) from None


def _out_of_memory(job: GenerationJob, first: str, *, is_of_gpu: bool, is_loading: bool) -> UserError:
    why = "the weights, the cache of all prompts of a call and what is computed did not fit together"
    place = "the GPU's" if is_of_gpu else "the host's"
    if is_loading:
        why = f"{place} memory does not hold this rank's weights beside what else is in it"
    prompts = f"{job.batch_size} prompt{'s' if job.batch_size > 1 else ''} in a call"
    return UserError(
        "generate-out-of-memory",
        "the memory has run out",
        found=f"{'loading the weights' if is_loading else prompts}: {first}",
        why=why,
        fix=_fix(job, is_of_gpu=is_of_gpu, is_loading=is_loading),
        exit_code=1,
    )


def _fix(job: GenerationJob, *, is_of_gpu: bool, is_loading: bool) -> str:
    if job.batch_size > 1 and not is_loading:
        again = f"start it again with --batch-size {job.batch_size // 2}"
        if not job.generation.get("do_sample"):
            return f"{again}: {_GOES_ON}"
        # Each batch has its own seed: other batches draw tokens that don't go with those that are there.
        return f"{again}, having removed {parts_folder(Path(job.out))}: other batches draw other tokens"
    offload = _param_offload(job)
    if is_of_gpu and offload == "none":
        return f"start it again with --param-offload cpu: {_GOES_ON}"
    if offload == "cpu":
        return f"start it again with --param-offload nvme and --nvme-path DIR: {_GOES_ON}"
    if is_loading:
        return "end what else runs there, or take fewer ranks with --num-processes, or a smaller --dtype"
    return "start it again with a smaller --max-new-tokens, or with shorter prompts"


def _param_offload(job: GenerationJob) -> str:
    """Return where the job's parameters rest: "none", "cpu" or "nvme"."""
    if job.deepspeed is None:
        return "none"
    config = json.loads(Path(job.deepspeed).read_text(encoding="utf-8"))
    return str(config["zero_optimization"].get("offload_param", {}).get("device", "none"))
