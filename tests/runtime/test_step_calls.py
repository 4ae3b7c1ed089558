"""Whether a script steps its optimizer under DeepSpeed is seen in its source."""

import pytest

from zerofit.runtime.step_calls import steps_optimizer

MAKES = "import torch\noptimizer = torch.optim.AdamW(model.parameters())\n"


@pytest.mark.parametrize(
    ("source", "steps"),
    [
        (MAKES + "optimizer.step()\n", True),
        (MAKES + "if step % 4 == 0:\n    optimizer.step()\n", True),
        (MAKES + "optimizer.zero_grad()\n", False),
        (MAKES + "scheduler.step()\nlr_sched.step()\n", False),
        ("def train(self):\n    self.opt.step()\n", True),
        ("def train(self):\n    self.lr_scheduler.step()\n", False),
        ("not python (\n", True),
    ],
)
def test_source(source: str, steps: bool) -> None:
    assert steps_optimizer(source) is steps


def test_a_step_without_deepspeed_only_is_none() -> None:
    source = (
        "import torch\nfrom accelerate import Accelerator\naccelerator = Accelerator()\n"
        "model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))\n"
        "for batch in data:\n"
        "    accelerator.backward(model(batch))\n"
        "    if accelerator.state.deepspeed_plugin is None:\n"
        "        optimizer.step()\n"
    )
    assert not steps_optimizer(source)
