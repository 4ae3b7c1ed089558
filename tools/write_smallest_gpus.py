"""python -m tools.write_smallest_gpus: plans README's table of the smallest GPU for each model and method.

Plans take minutes. README in the current folder is written anew between the marks.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import zerofit
from zerofit.configs.write.write_files import write_files
from zerofit.core.strategy import Lora, Quantization
from zerofit.machine.gpu_catalog import find_gpu
from zerofit.planning.plan_labels import memory_label

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zerofit.core.estimates import MemoryEstimate

MODELS = ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "qwen2.5-14b")
METHODS: Mapping[str, Mapping[str, Any]] = {
    "full": {},
    "LoRA": {"lora": Lora()},
    "QLoRA": {"lora": Lora(), "quantization": Quantization.NF4},
}
"""Each with the settings of zerofit.plan that ask for it."""
GPUS = ("RTX3060-12G", "RTX4080-16G", "RTX4090-24G", "RTX5090-32G", "L40S-48G", "A100-80G", "H200-141G")
"""One of each size, the smallest first."""
BEGIN, END = "<!-- Written by `python -m tools.write_smallest_gpus`. -->", "<!-- Its end. -->"
_WORKLOAD = {
    "sequence_length": 2048,
    "global_batch_size": 8,
    "micro_batch_size": 1,
    "gradient_checkpointing": True,
    "engine": "native",
    "host_ram": "64G",
}


def smallest_gpu(model: str, method: str) -> str:
    """Return the table's cell: the smallest GPU that surely holds the training, and its memory."""
    needed = _memory(model, method, GPUS[-1]).upper_bytes  # the largest GPU frees no cache for lack of room
    gpu = next(gpu for gpu in GPUS if find_gpu(gpu).usable_bytes >= needed)
    estimate = _memory(model, method, gpu)
    assert estimate.upper_bytes <= find_gpu(gpu).usable_bytes
    return f"{gpu}: {memory_label(estimate)}"


def row(model: str) -> str:
    """Return a model's row of the table."""
    return f"| {' | '.join((model, *(smallest_gpu(model, method) for method in METHODS)))} |"


def with_table(readme: str, rows: list[str]) -> str:
    """Return README's text with these rows in place of those that it has."""
    head, rest = readme.split(BEGIN)
    tail = rest.split(END)[1]
    table = [f"| model | {' | '.join(METHODS)} |", "|---" * (len(METHODS) + 1) + "|", *rows]
    return head + BEGIN + "\n" + "\n".join(table) + "\n" + END + tail


def _memory(model: str, method: str, gpu: str) -> MemoryEstimate:
    answer = zerofit.plan(model=model, gpus=f"1x{gpu}", **_WORKLOAD, **METHODS[method])
    assert answer.fits, (model, method, gpu)
    estimate: MemoryEstimate = answer.plan.estimate.device
    return estimate


if __name__ == "__main__":
    path = Path("README.md")
    write_files({path: with_table(path.read_text("utf-8"), [row(model) for model in MODELS])}, force=True)
