"""The model of a generation job in this rank: whole on its device, or partitioned by ZeRO-3 as it is read."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.generation.generation_job import GenerationJob


@contextmanager
def joined_ranks(job: GenerationJob) -> Iterator[None]:
    """Take this rank's GPU, where there is one, and meet the other ranks, where there are any."""
    import torch

    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if job.deepspeed is not None:
        import deepspeed

        deepspeed.init_distributed(dist_backend="nccl" if has_gpu else "gloo")
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Nothing of the model goes between these ranks: results do, from the host's memory or the GPU's.
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo")
    yield
    # Not after an error: this would wait for ranks that wait elsewhere.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def load_model(job: GenerationJob) -> Any:
    """Load the job's model, ready to generate: a model of transformers, or a DeepSpeedEngine around it."""
    if job.deepspeed is None:
        import torch

        # To the GPU piece by piece: the host never holds the whole model.
        device_map = {"": torch.cuda.current_device()} if torch.cuda.is_available() else None
        return _from_pretrained(job, device_map=device_map).eval()
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    config = json.loads(Path(job.deepspeed).read_text(encoding="utf-8"))
    living = HfDeepSpeedConfig(config)  # while it lives, from_pretrained partitions each weight as it is read
    engine, *_ = deepspeed.initialize(model=_from_pretrained(job), config=config)
    engine.module.eval()
    engine.hf_deepspeed_config = living  # and generate() knows of ZeRO-3 as long as the engine lives
    return engine


def _from_pretrained(job: GenerationJob, **more: Any) -> Any:
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(job.model, trust_remote_code=job.trust_remote_code)
    auto_class = (
        transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    )
    return auto_class.from_pretrained(
        job.model,
        config=config,
        dtype=getattr(torch, job.dtype),
        trust_remote_code=job.trust_remote_code,
        **more,
    )
