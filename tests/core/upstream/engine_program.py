"""Steps a DeepSpeedEngine once: its weight's change after two backward passes of which none was the last.

Takes the ZeRO stage, and whether the engine's own way of ending such a window is to be used.
"""

import sys

import deepspeed
import torch

from zerofit.core.upstream.deepspeed import after_each_step, hook_own_backward, reduce_gradients

stage, is_own_way = int(sys.argv[1]), sys.argv[2] == "own"
deepspeed.init_distributed("gloo", verbose=False)
model = torch.nn.Linear(4, 4, bias=False)
before = model.weight.detach().clone()
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
    config={
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    },
)
if not is_own_way and hasattr(type(engine.optimizer), "finalize_gradient_accumulation_boundary"):
    del type(engine.optimizer).finalize_gradient_accumulation_boundary
begun, skipped = [], []
hook_own_backward(engine, lambda: begun.append(True))
after_each_step(engine, skipped.append)
for value in (1.0, 10.0):
    engine.set_gradient_accumulation_boundary(is_boundary=False)
    engine(torch.full((1, 4), value)).sum().backward()
reduce_gradients(engine)
engine.step()
change = (before - engine.module.weight.detach()).unique().tolist()
print(len(begun), skipped, change)
