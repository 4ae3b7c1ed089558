"""A model of its own around a body of transformers; "cuda" outright; only the model is prepared."""

import torch
from accelerate import Accelerator
from torch import nn
from transformers import AutoModel


class Net(nn.Module):
    """An encoder, a BatchNorm and a head."""

    def __init__(self):
        super().__init__()
        self.encoder = AutoModel.from_pretrained("bert")
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, 2)

    def forward(self, ids):
        return self.head(self.norm(self.encoder(ids).last_hidden_state.mean(1)))


accelerator = Accelerator()
torch.cuda.set_device(0)
net = accelerator.prepare(Net().to("cuda").train())
assert net.encoder.embeddings.word_embeddings.weight.is_meta
assert not net.head.weight.is_meta
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
data = torch.utils.data.TensorDataset(torch.ones(10, 6).long(), torch.zeros(10, device="cuda").long())
for ids, labels in torch.utils.data.DataLoader(data, batch_size=5):
    loss = nn.functional.cross_entropy(net(ids.cuda()), labels.to("cuda:0"))
    accelerator.backward(loss)
    optimizer.step()
