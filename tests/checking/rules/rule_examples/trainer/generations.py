"""Examples of the rules of zerofit/checking/rules/trainer/generations.py."""

from __future__ import annotations

from rule_examples.example import Example, Examples, changed
from zerofit.core.command import Route
from zerofit.core.facts import GpuSpec, Machine
from zerofit.core.units import GIB

_RANKS = "torchrun --nproc_per_node 2"
_CONFIG = """\
from trl import GRPOConfig

arguments = GRPOConfig(
    "out", use_cpu=True, bf16=False, per_device_train_batch_size=4, gradient_accumulation_steps=2,
    num_generations=8, report_to="none",
)
print("generation batch", arguments.generation_batch_size)
"""
_GPU = GpuSpec(name="A100", memory_bytes=80 * GIB, compute_capability=(8, 0))
_FOUR_GPUS = Machine(
    gpus=(_GPU,) * 4,
    num_cpu_cores=8,
    host_memory_bytes=256 * GIB,
    host_memory_available_bytes=250 * GIB,
)


def _all_gpus(num_ranks: int) -> Example:
    """Return an example of ranks beside a vLLM server, on a node with four GPUs."""
    return Example(
        command=f"torchrun --nproc_per_node {num_ranks}",
        route=Route.TRAINER,
        arguments="--use_vllm true --vllm_mode server",
        machine=_FOUR_GPUS,
    )


EXAMPLES = {
    "generation-batch-holds-whole-groups": Examples(
        bad=Example(
            command=_RANKS,
            route=Route.TRAINER,
            script=changed(_CONFIG, "num_generations=8", "num_generations=6"),
        ),
        good=Example(command=_RANKS, route=Route.TRAINER, script=_CONFIG),
    ),
    "vllm-needs-a-gpu-of-its-own": Examples(bad=_all_gpus(4), good=_all_gpus(3)),
}
