"""Examples of the rules of zerofit/checking/rules/script/schedules.py."""

from __future__ import annotations

from rule_examples.example import SMALL, Example, Examples, changed

_RANKS = "torchrun --nproc_per_node 2"
_ON_CPU = changed(SMALL, "Accelerator()", "Accelerator(cpu=True)")
_GENTLE = changed(_ON_CPU, ".square().mean()", ".square().mean() / 100")
"""Gradients that the harness's reference does not clip."""
_PREPARES = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"
_SCHEDULED = changed(
    _GENTLE,
    _PREPARES,
    """\
num_steps = 8
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=num_steps)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
""",
)
_SCHEDULED = changed(
    _SCHEDULED,
    "for batch in loader:\n",
    "for number, batch in enumerate(loader):\n    if number >= num_steps:\n        break\n",
)
_SCHEDULED = changed(_SCHEDULED, "    optimizer.step()\n", "    optimizer.step()\n    scheduler.step()\n")
_OF_ALL_RANKS = changed(
    _SCHEDULED, "total_iters=num_steps", "total_iters=num_steps * accelerator.num_processes"
)


EXAMPLES = {
    "prepared-scheduler-steps-per-rank": Examples(
        bad=Example(command=_RANKS, script=_SCHEDULED),
        good=Example(command=_RANKS, script=_OF_ALL_RANKS),
    ),
}
