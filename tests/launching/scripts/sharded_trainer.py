"""Trains a small Llama by Trainer, which evaluates, generates and saves on the way: sharded_trainer.py CASE.

Two ranks share the seven samples of its evaluation unevenly. Writes what it ends with into out/.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

NUM_STEPS, GLOBAL_BATCH, VOCAB = 4, 8, 96


def make_model(case):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes, **tokens))
    if case == "adapters":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    return model


class Samples(TrainerCallback):
    """Generates completions of other lengths on each rank, after every second step."""

    seen = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % 2 == 0:
            length = 3 + 9 * args.process_index
            prompt = torch.tensor([[1, 5 + args.process_index, 9]], device=args.device)
            with torch.no_grad():
                out = model.generate(prompt, max_new_tokens=length, min_new_tokens=length, do_sample=False)
            self.seen.append(out[0].tolist())


def main(case, ranks):
    set_seed(0)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, VOCAB, (12,), generator=generator) for _ in range(NUM_STEPS * GLOBAL_BATCH + 7)]
    data = [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in rows]
    arguments = TrainingArguments(
        "out",
        max_steps=NUM_STEPS,
        per_device_train_batch_size=GLOBAL_BATCH // ranks,
        per_device_eval_batch_size=1,
        learning_rate=1e-2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        load_best_model_at_end=case == "best",
        torch_compile=case == "compiled",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        make_model(case), arguments, train_dataset=data[:-7], eval_dataset=data[-7:], callbacks=[Samples()]
    )
    trainer.train()
    trainer.save_model("out/saved")
    if trainer.is_world_process_zero():
        log = [{name: line[name] for name in line if "loss" in name} for line in trainer.state.log_history]
        Path("out/seen.json").write_text(json.dumps({"log": log[:-1], "samples": Samples.seen}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
