"""A user's loop over pairs: a model with a learnt scale without dimensions, and frozen encoders beside it.

Call: scaled_pairs.py FOLDER ROWS [copies]: the folder has two of the models, a batch so many rows. With
"copies" the trained one looks at its weights while it is made, as DETR's class does.
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from transformers import AutoModelForSequenceClassification, BertConfig, BertModel, BertPreTrainedModel


class Scaled(BertPreTrainedModel):  # type: ignore[misc]
    """Tells how alike a text is to what another encoder says of it."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config)
        self.scale = torch.nn.Parameter(torch.tensor(0.5))
        if "copies" in sys.argv:
            with torch.no_grad():
                torch.empty(config.hidden_size, config.hidden_size).copy_(self.bert.pooler.dense.weight)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Return the loss of tokens of (rows, tokens) against vectors of (rows, width)."""
        found = self.bert(input_ids).pooler_output * self.scale.exp()
        return torch.nn.functional.mse_loss(found, wanted)


if __name__ == "__main__":
    accelerator = Accelerator()
    model = Scaled.from_pretrained(f"{sys.argv[1]}/scaled")
    teacher = BertModel.from_pretrained(f"{sys.argv[1]}/teacher").eval().requires_grad_(False)
    torch.manual_seed(1)
    judge = AutoModelForSequenceClassification.from_config(teacher.config).eval().requires_grad_(False)
    assert teacher.embeddings.word_embeddings.weight.shape[0] == teacher.config.vocab_size
    model.eval()  # no dropout: ranks would draw other masks than one process
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(0, 64, (32, 8), generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(list(tokens), batch_size=int(sys.argv[2]))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with torch.no_grad():
            wanted = teacher(batch).pooler_output * judge(batch).logits.mean(1, keepdim=True)
        loss = model(batch, wanted)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean").item()
        accelerator.print(f"loss {mean:.6f}")
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        print(f"scale {tuple(weights['scale'].shape)} {weights['scale'].item():.6f}")
