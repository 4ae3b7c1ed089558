"""A loop with accumulate() on sentences of unlike lengths; writes its weights. ragged_windows.py OUTPUT

Its batches make windows of 4, and at the end of the epoch one of fewer.
"""

import sys

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

SAMPLES, BATCH_SIZE, RATE, CLIP = 20, 2, 0.5, 0.5


def make_model():
    set_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))


def make_samples():
    random = torch.Generator().manual_seed(1)
    return [torch.randint(1, 64, (2 + index * 5 % 11,), generator=random) for index in range(SAMPLES)]


def collate(samples):
    tokens = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return {
        "input_ids": tokens,
        "attention_mask": (tokens > 0).long(),
        "labels": tokens.masked_fill(tokens == 0, -100),
    }


def main():
    accelerator = Accelerator()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loader = torch.utils.data.DataLoader(make_samples(), batch_size=BATCH_SIZE, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        torch.save(weights, sys.argv[1])


if __name__ == "__main__":
    main()
