"""A model whose containers have None in them: where a block has no skip connection, norm or projection."""

import torch
from accelerate import Accelerator


class Block(torch.nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        skip = torch.nn.Linear(4, 4) if index else None
        self.parts = torch.nn.ModuleList([skip, torch.nn.Linear(4, 4)])
        self.norms = torch.nn.ModuleDict({"before": torch.nn.LayerNorm(4), "after": None})
        self.heads = torch.nn.ModuleList([None, None])
        self.gate = torch.nn.Sequential(torch.nn.Tanh())
        self.gate.append(None)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        skip, linear = self.parts
        outputs = self.gate[0](linear(self.norms["before"](inputs)))
        return outputs if skip is None else outputs + skip(inputs)


accelerator = Accelerator()
blocks = torch.nn.ModuleList([Block(0), None, Block(2), None, Block(4)])
net = torch.nn.ModuleDict({"blocks": blocks, "head": torch.nn.Linear(4, 1)})


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = net

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.parts["blocks"]:
            inputs = inputs if block is None else block(inputs)
        return self.parts["head"](inputs)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.rand(6, 4), batch_size=3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    accelerator.backward(model(batch).sum())
    optimizer.step()
