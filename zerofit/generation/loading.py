"""Loads a generation job's model in this rank: whole, or partitioned by ZeRO-3 while loading."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError, first_line
from zerofit.core.upstream.checkpoint_pickles import loading_data_only

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.generation.generation_job import GenerationJob

_CPU_OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory"
"""c10/core/impl/alloc_cpu.cpp: torch raises a plain RuntimeError."""


def is_out_of_memory(error: Exception) -> bool:
    """Return True if the GPU's or the host's memory was too small."""
    import torch

    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or _CPU_OUT_OF_MEMORY in str(error)


@contextmanager
def joined_ranks(job: GenerationJob) -> Iterator[None]:
    """Select this rank's GPU, if any, and join the process group, if there are several ranks."""
    import torch

    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if job.deepspeed is not None:
        import deepspeed

        deepspeed.init_distributed(dist_backend="nccl" if has_gpu else "gloo")
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Only results are sent between these ranks, no weights: from host memory or the GPU.
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo")
    yield
    # Not after an error: this would wait for ranks that are waiting elsewhere.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def load_model(job: GenerationJob) -> Any:
    """Return the job's model, ready to generate: a transformers model, or a DeepSpeedEngine around it."""
    if job.deepspeed is None:
        import torch

        # Loaded to the GPU piece by piece: the host never holds the whole model.
        device_map = {"": torch.cuda.current_device()} if torch.cuda.is_available() else None
        return _from_pretrained(job, device_map=device_map).eval()
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    config = json.loads(Path(job.deepspeed).read_text(encoding="utf-8"))
    living = HfDeepSpeedConfig(
        config
    )  # while it exists, from_pretrained partitions each weight as it is loaded
    engine, *_ = deepspeed.initialize(model=_from_pretrained(job), config=config)
    engine.module.eval()
    engine.hf_deepspeed_config = living  # and generate() uses ZeRO-3 as long as the engine exists
    return engine


def _from_pretrained(job: GenerationJob, **more: Any) -> Any:
    """Return transformers' model. Its files are data, unless its own code, which may load more, is trusted.

    Raises:
        UserError: a file has code in it or is damaged, or the weights don't belong to the config.
    """
    import torch
    import transformers

    with nullcontext() if job.trust_remote_code else loading_data_only():
        try:
            config = transformers.AutoConfig.from_pretrained(
                job.model, trust_remote_code=job.trust_remote_code
            )
            auto_class = (
                transformers.AutoModelForSeq2SeqLM
                if config.is_encoder_decoder
                else transformers.AutoModelForCausalLM
            )
            return auto_class.from_pretrained(
                job.model,
                config=config,
                dtype=getattr(torch, job.dtype),
                trust_remote_code=job.trust_remote_code,
                **more,
            )
        except Exception as error:  # the libraries may raise anything
            if isinstance(error, UserError) or is_out_of_memory(error):
                raise
            raise _not_loaded(job, error) from None


def _not_loaded(job: GenerationJob, error: Exception) -> UserError:
    return UserError(
        "model-not-loaded",
        "transformers can't load the model",
        found=f"{job.model}: {type(error).__name__}: {first_line(error)}",
        why="a file in the folder is damaged, or its weights don't belong to its config.json",
        fix="download or copy the folder again, and try AutoModelForCausalLM.from_pretrained() on it",
        exit_code=1,
    )
