"""Examples of the rule of zerofit/checking/rules/trainer/generations.py."""

from __future__ import annotations

from rule_examples.example import Example, Examples, changed
from zerofit.core.command import Route

_RANKS = "torchrun --nproc_per_node 2"
_CONFIG = """\
from trl import GRPOConfig

arguments = GRPOConfig(
    "out", use_cpu=True, bf16=False, per_device_train_batch_size=4, gradient_accumulation_steps=2,
    num_generations=8, report_to="none",
)
print("generation batch", arguments.generation_batch_size)
"""


EXAMPLES = {
    "generation-batch-holds-whole-groups": Examples(
        bad=Example(
            command=_RANKS,
            route=Route.TRAINER,
            script=changed(_CONFIG, "num_generations=8", "num_generations=6"),
        ),
        good=Example(command=_RANKS, route=Route.TRAINER, script=_CONFIG),
    ),
}
