"""One training with whatever the covering array asks for: a loop on accelerate, or a Trainer.

SGD, whose steps are as long as the gradients, unless AdamW is asked for. Samples are of many lengths and
label counts, so that a loss weighted wrongly goes another way.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

NUM_SAMPLES, LONGEST, VOCAB, PADDING = 96, 16, 128, 0
LEARNING_RATE = 0.2
MAX_NORM, MAX_NORM_OF_ADAPTERS = 1.2, 0.55
"""Some steps' gradients are longer, others are not: a clipped step is the same for gradients of any scale."""


class StoredOnHost(torch.autograd.graph.save_on_cpu):
    """Counts what is stored in host memory until the backward pass."""

    num_stored = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        pack = self.pack_hook

        def counted(tensor: torch.Tensor) -> Any:
            StoredOnHost.num_stored += 1
            return pack(tensor)

        self.pack_hook = counted


torch.autograd.graph.save_on_cpu = StoredOnHost


class Samples(Dataset):
    """Tokens of 6 to 16 places, the same in every process; the first of their labels are masked."""

    def __init__(self, is_even: bool = False, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(1 + seed)
        shortest = LONGEST if is_even else 6
        self.most_masked = 1 if is_even else 4
        lengths = torch.randint(shortest, LONGEST + 1, (NUM_SAMPLES,), generator=generator).tolist()
        self.tokens = [torch.randint(3, VOCAB, (length,), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, object]:
        tokens = self.tokens[index]
        labels = tokens.clone()
        labels[: index % self.most_masked] = -100
        return {"input_ids": tokens, "labels": labels, "length": len(tokens)}


class Collator:
    """Pads a batch, and notes which samples are in it."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        self.seen.append([int(sample["input_ids"].sum()) for sample in samples])
        rows = [sample["input_ids"] for sample in samples]
        labels = [sample["labels"] for sample in samples]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING)
        return {
            "input_ids": ids,
            "attention_mask": (ids != PADDING).long(),
            "labels": torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100),
        }


def by_length(dataset: Samples, batch_size: int) -> list[list[int]]:
    """Return batches of samples of like length, in a mixed order."""
    order = sorted(range(len(dataset)), key=lambda index: len(dataset.tokens[index]))
    batches = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
    return [batches[number] for number in torch.randperm(len(batches), generator=torch.manual_seed(2))]


def quantized(args: argparse.Namespace) -> dict[str, object]:
    """Return what from_pretrained() takes for a base in nf4, in elements that FSDP2 shards."""
    if not args.quantized:
        return {}
    from transformers import BitsAndBytesConfig

    dtype = getattr(torch, args.quantized)
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype,
    )
    return {"quantization_config": config, "device_map": {"": "cpu"}, "dtype": dtype}


def make_model(args: argparse.Namespace) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(args.model, **quantized(args)).train()
    if args.frozen:
        model.get_input_embeddings().weight.requires_grad_(False)
    if args.lora:
        from peft import LoraConfig, get_peft_model

        targets = ["q_proj", "v_proj", "down_proj"]
        model = get_peft_model(model, LoraConfig(r=64, lora_alpha=64, target_modules=targets))
    return model


def max_norm(args: argparse.Namespace) -> float:
    return MAX_NORM_OF_ADAPTERS if args.lora else MAX_NORM


def optimizer_of(args: argparse.Namespace, model: torch.nn.Module) -> tuple[type, dict[str, float]]:
    if args.optimizer == "adamw":
        return torch.optim.AdamW, {"lr": 5e-3}
    if args.optimizer == "adamw-8bit":
        from bitsandbytes.optim import AdamW8bit, GlobalOptimManager

        # As Trainer does it: embeddings keep states of 32 bits.
        embeddings = model.get_input_embeddings()
        GlobalOptimManager.get_instance().register_module_override(embeddings, "weight", {"optim_bits": 32})
        return AdamW8bit, {"lr": 5e-3}
    return torch.optim.SGD, {"lr": LEARNING_RATE, "momentum": 0.9}


def loop(args: argparse.Namespace) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(
        gradient_accumulation_steps=args.accumulation,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0),
    )
    set_seed(args.seed)
    model, dataset, collate = make_model(args), Samples(args.even, args.seed), Collator()
    keep_start(args, model, accelerator.is_main_process)
    optimizer_class, settings = optimizer_of(args, model)
    optimizer = optimizer_class([p for p in model.parameters() if p.requires_grad], **settings)
    if args.bucketed:
        loader = DataLoader(dataset, batch_sampler=by_length(dataset, args.batch_size), collate_fn=collate)
    else:
        loader = DataLoader(dataset, args.batch_size, shuffle=True, drop_last=True, collate_fn=collate)
    # accelerate steps a prepared scheduler once for each rank that shares the batches.
    decay = 0 if args.even else 1 / 8
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step * decay))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    first = args.save_step * args.accumulation if args.resume else 0
    if args.resume:
        accelerator.load_state(args.resume)
    steps, losses = [], []
    last = (args.stop_step or args.num_steps) * args.accumulation
    for number, batch in enumerate(accelerator.skip_first_batches(loader, first) if first else loader, first):
        if number == last:
            break
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), max_norm(args))
            rate = optimizer.param_groups[0]["lr"]
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
        if accelerator.sync_gradients:
            steps.append((len(steps), sum(losses) / len(losses), rate))
            losses = []
        if args.save_step and not args.resume and number + 1 == args.save_step * args.accumulation:
            accelerator.save_state(f"{args.output_dir}/state")
    write(
        args,
        accelerator.process_index,
        steps=steps,
        seen=collate.seen,
        **traces(accelerator, model, optimizer),
    )
    weights = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        f"{args.output_dir}/model", is_main_process=accelerator.is_main_process, state_dict=weights
    )
    accelerator.end_training()


class Seen(TrainerCallback):
    """Losses and rates of each step, and a stop."""

    def __init__(self, stop_step: int) -> None:
        self.steps: list[tuple[int, float, float]] = []
        self.stop_step = stop_step

    def on_log(self, args, state, control, logs, **_) -> None:
        if "loss" in logs:
            self.steps.append((state.global_step, logs["loss"], logs["learning_rate"]))

    def on_step_end(self, args, state, control, **_) -> None:
        control.should_training_stop |= state.global_step == self.stop_step


def with_trainer(args: argparse.Namespace) -> None:
    arguments = TrainingArguments(
        args.output_dir,
        per_device_train_batch_size=args.batch_size,
        gradient_accumulation_steps=args.accumulation,
        learning_rate=LEARNING_RATE if args.optimizer == "sgd" else 5e-3,
        warmup_steps=2,
        max_grad_norm=max_norm(args),
        max_steps=args.num_steps,
        logging_steps=1,
        report_to="none",
        save_strategy="steps" if args.save_step else "no",
        save_steps=args.save_step or 1,
        train_sampling_strategy="group_by_length" if args.bucketed else "random",
        length_column_name="length",
        remove_unused_columns=False,
        dataloader_drop_last=True,
        ddp_backend=args.ddp_backend,
        bf16=args.bf16,
        use_cpu=args.bf16,  # else Trainer looks for a GPU that computes in it
        disable_tqdm=True,
    )
    set_seed(args.seed)
    model, collate, seen = make_model(args), Collator(), Seen(args.stop_step)
    optimizer_class, settings = optimizer_of(args, model)
    keep_start(args, model, arguments.process_index == 0)
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Samples(args.even, args.seed),
        data_collator=collate,
        optimizer_cls_and_kwargs=(optimizer_class, settings),
        callbacks=[seen],
    )
    trainer.train(resume_from_checkpoint=args.resume or None)
    found = traces(trainer.accelerator, trainer.model, trainer.optimizer)
    write(args, arguments.process_index, steps=seen.steps, seen=collate.seen, **found)
    trainer.save_model(f"{args.output_dir}/model")


def keep_start(args: argparse.Namespace, model: torch.nn.Module, is_main_process: bool) -> None:
    """Save the weights before training, from a run by itself: their way is measured from there."""
    if args.keep_start and is_main_process:
        Path(args.output_dir).mkdir(exist_ok=True)
        weights = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        save_file(weights, f"{args.output_dir}/start.safetensors")


def traces(accelerator: Any, model: torch.nn.Module, optimizer: Any) -> dict[str, object]:
    """Return what shows in the end how it was trained: results alone may be the same however that was."""
    plugin = accelerator.state.deepspeed_plugin if "DEEPSPEED" in str(accelerator.distributed_type) else None
    while not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    return {
        "zero_stage": plugin.zero_stage if plugin else None,
        "is_sharded": type(next(iter(model.parameters()))).__name__ == "DTensor",
        "checkpoints": any(getattr(module, "gradient_checkpointing", False) for module in model.modules()),
        "num_stored": StoredOnHost.num_stored,
        "has_eight_bit_states": any(getattr(tensor, "dtype", None) == torch.uint8 for tensor in states),
    }


def write(args: argparse.Namespace, rank: int, **values: object) -> None:
    Path(args.output_dir).mkdir(exist_ok=True)
    Path(f"{args.output_dir}/rank{rank}.json").write_text(json.dumps(values))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--output-dir", default="out")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--num-steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-step", type=int, default=0)
    parser.add_argument("--stop-step", type=int, default=0)
    parser.add_argument("--resume", default="")
    parser.add_argument("--optimizer", choices=("sgd", "adamw", "adamw-8bit"), default="sgd")
    parser.add_argument("--quantized", choices=("float32", "bfloat16"))
    parser.add_argument("--ddp-backend")
    for flag in ("--bf16", "--even", "--trainer", "--lora", "--frozen", "--bucketed", "--keep-start"):
        parser.add_argument(flag, action="store_true")
    args = parser.parse_args()
    with_trainer(args) if args.trainer else loop(args)


if __name__ == "__main__":
    main()
