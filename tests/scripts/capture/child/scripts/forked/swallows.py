"""Data that can't be counted, in a loop that goes on after any error."""

import torch
from accelerate import Accelerator


class Broken(torch.utils.data.Dataset):
    """A dataset whose length fails the second time that it is asked for, and thereafter."""

    is_reading = False

    def __len__(self):
        if self.is_reading:
            raise ValueError("the index\nis gone")
        return 4

    def __getitem__(self, index):
        Broken.is_reading = True
        return torch.rand(4)


accelerator = Accelerator()
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(Broken(), batch_size=2)
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
for batch in loader:
    try:
        accelerator.backward(net(batch).sum())
    except BaseException as error:
        print("the script went on after", error)
    optimizer.step()
    print("the script went on")
