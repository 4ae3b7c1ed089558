"""Trains with an optimizer of its own, which keeps two states and a third of one row."""

import torch
from accelerate import Accelerator


class TwoMoments(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["first"], state["second"] = (torch.zeros_like(parameter) for _ in range(2))
                    state["row"] = torch.zeros(parameter.shape[-1])
                state["first"].lerp_(parameter.grad, 0.1)
                state["second"].lerp_(parameter.grad.square(), 0.01)
                parameter.sub_(state["first"] / (state["second"].sqrt() + 1e-8) * group["lr"])


model = torch.nn.Linear(64, 32, bias=False)
accelerator = Accelerator()
model, optimizer, data = accelerator.prepare(
    model,
    TwoMoments(model.parameters(), lr=0.1),
    torch.utils.data.DataLoader(torch.randn(8, 64), batch_size=4),
)
for batch in data:
    accelerator.backward(model(batch).sum())
    optimizer.step()
