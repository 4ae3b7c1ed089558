"""A loop without accumulate(): two groups, a scheduler of its own, clipping, evaluation in between."""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from results import end_training
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

PADDING = 0


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--num-epochs", type=int, default=2)
    parser.add_argument("--num-samples", type=int, default=29)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser.parse_args()


def make_samples(number, seed):
    """Texts of different lengths: the batches' padding is uneven, and so are their tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, 25, (number,), generator=generator).tolist()
    return [torch.randint(1, 64, (length,), generator=generator) for length in lengths]


def collate(samples):
    ids = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=PADDING)
    mask = (ids != PADDING).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def main():
    args = parse_args()
    accelerator = Accelerator()
    set_seed(11)
    rate = args.dropout
    config = GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=rate, embd_pdrop=rate, attn_pdrop=rate,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    loader = DataLoader(
        make_samples(args.num_samples, 1), batch_size=args.batch_size, shuffle=True, collate_fn=collate
    )
    eval_loader = DataLoader(make_samples(10, 2), batch_size=args.batch_size, collate_fn=collate)
    decays = [p for n, p in model.named_parameters() if "bias" not in n]
    others = [p for n, p in model.named_parameters() if "bias" in n]
    groups = [
        {"params": decays, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0, "lr": args.lr / 2},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    model, optimizer, loader, eval_loader = accelerator.prepare(model, optimizer, loader, eval_loader)

    completed, losses, evaluations = 0, [], []
    for _ in range(args.num_epochs):
        model.train()
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            completed += 1
            losses.append(loss.item())
        model.eval()
        seen = []
        for batch in eval_loader:
            with torch.no_grad():
                logits = model(**batch).logits
            guesses, answers = logits[:, :-1].argmax(-1), batch["labels"][:, 1:]
            right = ((guesses == answers) & (answers != -100)).float().sum(-1)
            seen.append(accelerator.gather_for_metrics(right))
        evaluations.append(torch.cat(seen).sum().item())
    end_training(
        accelerator,
        args.output_dir,
        steps=completed,
        length=len(loader),
        losses=losses,
        evaluations=evaluations,
    )


if __name__ == "__main__":
    main()
