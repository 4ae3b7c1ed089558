"""A user's loop that saves, and resumes from where it saved: a tiny model, and its losses step by step."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from transformers import GPT2Config, GPT2LMHeadModel

parser = argparse.ArgumentParser()
parser.add_argument("--num-steps", type=int, default=6)
parser.add_argument("--save-at", type=int, action="append", default=[])
parser.add_argument("--save-to", help="in place of automatic naming")
parser.add_argument("--total-limit", type=int)
parser.add_argument("--resume", nargs="?", const="newest")
parser.add_argument("--skip", type=int, default=0, help="steps that were done before")
parser.add_argument("--losses", type=Path)
parser.add_argument("--resume_from_checkpoint", dest="resume")
parser.add_argument("--die-in-third-save", type=float, help="after which share of its acts on files")
parser.add_argument("--length", type=int, default=32, help="of a sample; over 32 with eager attention")
parser.add_argument("--continues", action="store_true", help="after the step that it resumes from")
parser.add_argument("--num-short", type=int, default=0, help="first batches of half that length")
parser.add_argument("--weights", type=Path, help="a folder for the gathered weights")
arguments = parser.parse_args()

set_seed(0)
project = ProjectConfiguration("project", automatic_checkpoint_naming=True, total_limit=arguments.total_limit)
if arguments.save_to:
    project = ProjectConfiguration("project")
# Counts steps, not each rank's batches, so that the schedule is the same on any number of ranks.
accelerator = Accelerator(project_config=project, step_scheduler_with_optimizer=False)
length = arguments.length
# Above DeepSpeed's stage3_param_persistence_threshold, 100,000: ZeRO-3 shards the embedding.
config = GPT2Config(
    vocab_size=4096, n_positions=length, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
)
config.embd_pdrop = config.attn_pdrop = config.resid_pdrop = 0.0
if length > 32:
    config._attn_implementation = "eager"
model = GPT2LMHeadModel(config)
decayed = [one for one in model.parameters() if one.dim() > 1]
others = [one for one in model.parameters() if one.dim() < 2]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 10))
data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, 128, (64, length))]
for number in range(8 * arguments.num_short):
    data[number] = {name: tokens[: length // 2] for name, tokens in data[number].items()}
loader = torch.utils.data.DataLoader(data, batch_size=8 // accelerator.num_processes)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
if arguments.resume:
    accelerator.load_state(None if arguments.resume == "newest" else arguments.resume)
    if arguments.continues:
        arguments.skip = scheduler.scheduler.last_epoch
        project.iteration = len(list(Path("project/checkpoints").iterdir()))
acts, acts_of_save, num_saves = 0, 0, 0


def count_act(event: str, _: object) -> None:
    """Count what is done to files, and be killed amid the third save."""
    global acts
    if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree", "os.listdir"):
        acts += 1
        if num_saves == 2 and acts >= acts_of_save * arguments.die_in_third_save:
            os.kill(os.getpid(), signal.SIGKILL)


losses = []
model.train()
for step, batch in enumerate(loader):
    if step < arguments.skip:
        continue
    if step == arguments.num_steps:
        break
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    losses.append(accelerator.reduce(loss.detach(), "mean").item())
    if step + 1 in arguments.save_at:
        if arguments.die_in_third_save is not None and num_saves == 1:  # the first one imports, too
            sys.addaudithook(count_act)
        accelerator.save_state(arguments.save_to)
        acts_of_save, acts, num_saves = acts, 0, num_saves + 1
if arguments.weights:
    accelerator.unwrap_model(model).save_pretrained(
        arguments.weights,
        is_main_process=accelerator.is_main_process,
        state_dict=accelerator.get_state_dict(model),
    )
if accelerator.is_main_process and arguments.losses:
    arguments.losses.write_text(json.dumps(losses))
