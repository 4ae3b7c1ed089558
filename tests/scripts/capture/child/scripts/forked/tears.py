"""Data of which the fourth batch can't be read."""

import torch
from accelerate import Accelerator


class Torn(torch.utils.data.Dataset):
    """Eight samples, of which six can be read."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index > 5:
            raise OSError(f"no sample {index}")
        return torch.rand(4)


accelerator = Accelerator()
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(Torn(), batch_size=2)
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
for batch in loader:
    accelerator.backward(net(batch).sum())
    optimizer.step()
