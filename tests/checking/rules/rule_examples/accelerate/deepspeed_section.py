"""Examples of the rules of zerofit/checking/rules/accelerate/deepspeed_section.py."""

from __future__ import annotations

from dataclasses import replace

from rule_examples.example import (
    NAMING_LAUNCH,
    NVME,
    SMALL,
    ZERO2_LAUNCH,
    Example,
    Examples,
    config,
    launching,
)

_STEPS = "gradient_accumulation_steps"
_ACCUMULATES_FOUR = """\
import torch
from accelerate import Accelerator

accelerator = Accelerator(gradient_accumulation_steps=4)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.utils.data.DataLoader(torch.randn(32, 8), batch_size=2)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for batch in data:
    with accelerator.accumulate(model):
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
"""
_TWO_SAMPLES = {**config(2), "train_micro_batch_size_per_gpu": 2}


EXAMPLES = {
    "accelerate-keys-beside-deepspeed-file": Examples(
        bad=Example(deepspeed=config(2), accelerate={**NAMING_LAUNCH, "mixed_precision": "no"}),
        good=Example(deepspeed=config(2), accelerate=NAMING_LAUNCH),
    ),
    "deepspeed-section-without-deepspeed": Examples(
        bad=launching(distributed_type="MULTI_GPU"),
        good=launching(),
    ),
    "use-cpu-with-deepspeed": Examples(
        bad=launching(use_cpu=True),
        good=launching(use_cpu=False),
    ),
    "accelerate-loses-nvme-path": Examples(
        bad=launching({"zero_stage": 3, **{f"offload_optimizer_{key}": NVME[key] for key in NVME}}),
        good=Example(accelerate=NAMING_LAUNCH, deepspeed=config(3, offload_optimizer=NVME)),
    ),
    "accelerate-loses-zero-clipping": Examples(
        bad=launching({"zero_stage": 2, "gradient_clipping": 0}),
        good=Example(accelerate=NAMING_LAUNCH, deepspeed={**config(2), "gradient_clipping": 0.0}),
    ),
    "dynamo-ignored-with-deepspeed": Examples(
        bad=Example(accelerate={**ZERO2_LAUNCH, "dynamo_config": {"dynamo_backend": "EAGER"}}),
        good=launching(),
    ),
    "accumulation-not-in-deepspeed-file": Examples(
        bad=Example(deepspeed=_TWO_SAMPLES, script=_ACCUMULATES_FOUR),
        good=Example(deepspeed={**_TWO_SAMPLES, _STEPS: "auto"}, script=_ACCUMULATES_FOUR),
    ),
    "accumulation-differs": Examples(
        bad=Example(deepspeed={**_TWO_SAMPLES, _STEPS: 8}, script=_ACCUMULATES_FOUR),
        good=Example(deepspeed={**_TWO_SAMPLES, _STEPS: 4}, script=_ACCUMULATES_FOUR),
    ),
    "accumulation-differs-in-accelerate-file": Examples(
        bad=replace(launching({"zero_stage": 2, _STEPS: 2}), script=_ACCUMULATES_FOUR),
        good=replace(launching({"zero_stage": 2, _STEPS: 4}), script=_ACCUMULATES_FOUR),
    ),
    "zero3-weights-need-gather-in-accelerate-file": Examples(
        bad=replace(launching({"zero_stage": 3}), script=SMALL),
        good=replace(launching({"zero_stage": 3, "zero3_save_16bit_model": True}), script=SMALL),
    ),
}
