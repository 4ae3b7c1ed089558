"""Trains a small Llama for four steps, and does one thing that FSDP2's shards may spoil: sharded.py CASE.

Writes what it ends with into out/: whole weights, and a JSON of what it has seen.
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from safetensors.torch import save_file
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

GLOBAL_BATCH, NUM_TOKENS, NUM_STEPS, VOCAB = 8, 12, 4, 96


def make_model(case):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = LlamaConfig(vocab_size=VOCAB, **sizes, **tokens, tie_word_embeddings=case.startswith("tied"))
    model = LlamaForCausalLM(config)
    if case.startswith("adapters"):
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    return model


def prepare(case, accelerator, model, loader):
    """Prepare a model and its optimizer as scripts do: together, apart, or the optimizer later."""
    if case == "model-first":
        model = accelerator.prepare(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, accelerator.prepare(optimizer), accelerator.prepare(loader)
    if case == "compiled-state":
        model = torch.compile(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    if case == "apart":
        return tuple(accelerator.prepare(item) for item in (model, optimizer, loader))
    if case == "optimizer-first":
        optimizer = accelerator.prepare(optimizer)
        return accelerator.prepare(model), optimizer, accelerator.prepare(loader)
    return accelerator.prepare(model, optimizer, loader)


def generated(accelerator, model):
    """Generate completions of other lengths on each rank, as prompts of an evaluation are."""
    prompt = torch.tensor([[1, 5 + accelerator.process_index, 9]], device=accelerator.device)
    length = 3 + 9 * accelerator.process_index
    with torch.no_grad():
        unwrapped = accelerator.unwrap_model(model)
        out = unwrapped.generate(prompt, max_new_tokens=length, min_new_tokens=length, do_sample=False)
    return out[0].tolist()


def evaluated(accelerator, model, batch):
    """Evaluate, and write into the weights right after it, as a script that clamps them does."""
    model.eval()
    with torch.no_grad():
        loss = accelerator.reduce(model(input_ids=batch, labels=batch).loss, reduction="mean")
        for parameter in model.parameters():
            parameter.mul_(0.999)
    model.train()
    return loss.item()


def main(case):
    steps = 2 if case in ("window", "cleared-window", "unreduced-window", "generates") else 1
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    set_seed(0)
    model = make_model(case)
    generator = torch.Generator().manual_seed(1)
    data = [torch.randint(3, VOCAB, (NUM_TOKENS,), generator=generator) for _ in range(8 * GLOBAL_BATCH)]
    loader = DataLoader(data, GLOBAL_BATCH // accelerator.num_processes)
    model, optimizer, loader = prepare(case, accelerator, model, loader)
    seen = {"losses": [], "norms": [], "more": []}
    for number, batch in zip(range(NUM_STEPS * steps), loader, strict=False):
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            if case == "cleared-window" and number == 2:
                accelerator.backward(loss * 100)  # a spoiled batch, dropped with what it has left
                model.zero_grad()
                continue
            if not (case == "unreduced-window" and number == 3):
                accelerator.backward(loss)
            if accelerator.sync_gradients:
                if case == "clip-value":
                    accelerator.clip_grad_value_(model.parameters(), 1e-3)
                elif case == "torch-clip":
                    seen["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
                elif case == "own-norm":
                    squares = sum(float(p.grad.norm()) ** 2 for p in model.parameters() if p.grad is not None)
                    seen["norms"].append(squares**0.5)
                else:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    seen["norms"].append(float(norm))
            optimizer.step()
            optimizer.zero_grad()
        seen["losses"].append(accelerator.reduce(loss.detach(), reduction="mean").item())
        if case == "generates":
            seen["more"].append(generated(accelerator, model))
        if case == "evaluates":
            seen["more"].append(evaluated(accelerator, model, batch))
    out = Path("out")
    out.mkdir(exist_ok=True)
    if case == "torch-save":
        if accelerator.is_main_process:
            torch.save({"model": accelerator.unwrap_model(model).state_dict()}, out / "model.pt")
        return
    if case == "saved-by-one-rank":
        if accelerator.is_main_process:
            accelerator.unwrap_model(model).save_pretrained(out / "saved")
        return
    if case.endswith("-state"):
        accelerator.save_state(out / f"checkpoint-{NUM_STEPS}")
    if case in ("saved", "adapters-saved"):
        accelerator.unwrap_model(model).save_pretrained(out / "saved")
    if case in ("save-model", "tied-save-model"):
        accelerator.save_model(model, out / "saved")
    weights = accelerator.get_state_dict(model)
    if case == "tied-saved":
        accelerator.unwrap_model(model).save_pretrained(
            out / "saved", is_main_process=accelerator.is_main_process, state_dict=weights
        )
    if accelerator.is_main_process:
        save_file({name: value.clone() for name, value in weights.items()}, out / "end.safetensors")
        (out / "seen.json").write_text(json.dumps(seen))
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
