"""Trains in several ways, generating on the way or not, and writes what each rank saw.

Usage: torchrun --nproc_per_node 2 generate_in_training.py OUT CASE ...
A case is accelerate|trainer, ZeRO's stage, and what is done on the way, such as "accelerate 3 always".
"""

import json
import os
import sys

import torch
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from accelerate.state import AcceleratorState, GradientState
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

import zerofit

NUM_SAMPLES, BATCH_SIZE, ACCUMULATION, NUM_TOKENS = 32, 2, 2, 8
PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12], [13, 14, 15]]
"""One more than there are ranks, of different lengths."""


def untrained():
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(vocab_size=97, **sizes, bos_token_id=0, eos_token_id=96))


def deepspeed_config(stage, batch_size):
    return {
        "train_micro_batch_size_per_gpu": batch_size,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 40},
    }


def samples():
    tokens = torch.randint(0, 96, (NUM_SAMPLES, NUM_TOKENS), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def settings_of(model):
    """Return what generation must leave as it was: modes, settings, and caches."""
    modes = [(part.training, getattr(part, "gradient_checkpointing", None)) for part in model.modules()]
    caches = [name for name in vars(model) if "cache" in name]
    return modes, caches, model.config.to_dict(), model.generation_config.to_dict()


def held_weights(model):
    """Return the names of weights that this rank has whole, or that are on their way."""
    return {name for name, each in model.named_parameters() if each.numel() > 0 or is_on_its_way(each)}


def is_on_its_way(parameter):
    return getattr(parameter, "ds_status", None) == ZeroParamStatus.INFLIGHT


class OnTheWay:
    """What is done in the middle of the training.

    Args:
        what: nothing, a way of zerofit.generate to find the weights, or plain generation as scripts do it.
    """

    def __init__(self, what):
        self.what = what
        self.keeps_settings, self.holds_more, self.holds_less, self.num_tokens = [], [], [], []

    def do(self, model, **settings):
        """Generate, and compare the model before and after."""
        inner = getattr(model, "module", model)
        before, held = settings_of(inner), held_weights(inner)
        if self.what == "plain":
            inner.eval()
            inner.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=4, do_sample=True)
            inner.train()
        elif self.what != "nothing":
            found = zerofit.generate(model, PROMPTS, max_new_tokens=6, gather=self.what, **settings)
            self.num_tokens += [len(each.tokens) for each in found]
        self.keeps_settings.append(settings_of(inner) == before)
        self.holds_more.append(not held_weights(inner) <= held)
        self.holds_less.append(not held_weights(inner) >= held)


def by_accelerate(stage, on_the_way):
    plugin = DeepSpeedPlugin(hf_ds_config=deepspeed_config(stage, BATCH_SIZE))
    accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=ACCUMULATION)
    model = untrained()
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(samples(), batch_size=BATCH_SIZE, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    losses = []
    for number, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            losses.append(loss.item())
            accelerator.backward(loss)
            if number == 2:  # the first half of a window
                on_the_way.do(model)
            optimizer.step()
            optimizer.zero_grad()
        if number == 3:  # between two windows
            on_the_way.do(accelerator.unwrap_model(model), do_sample=True, num_return_sequences=2)
    return losses


class _AtStep(TrainerCallback):
    def __init__(self, on_the_way):
        self.on_the_way = on_the_way

    def on_step_end(self, args, state, control, model=None, **_):
        if state.global_step == 2:
            self.on_the_way.do(model, do_sample=True)


class _EvaluatesByGenerating(Trainer):
    on_the_way = None

    def evaluate(self, *_, **__):
        self.on_the_way.do(self.model_wrapped)
        return {"eval_nothing": 0.0}


class _Losses(_EvaluatesByGenerating):
    losses = None

    def compute_loss(self, *arguments, **keywords):
        loss = super().compute_loss(*arguments, **keywords)
        self.losses.append((loss[0] if isinstance(loss, tuple) else loss).item())
        return loss


def by_trainer(stage, on_the_way):
    args = TrainingArguments(
        output_dir="out",
        deepspeed=deepspeed_config(stage, "auto"),
        accelerator_config={"use_configured_state": True},  # the ranks on the CPU that were set up below
        per_device_train_batch_size=BATCH_SIZE,
        gradient_accumulation_steps=ACCUMULATION,
        gradient_checkpointing=True,
        max_steps=4,
        learning_rate=1e-2,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model = untrained()
    data = {"train_dataset": samples(), "eval_dataset": samples()}
    trainer = _Losses(model=model, args=args, callbacks=[_AtStep(on_the_way)], **data)
    trainer.on_the_way, trainer.losses = on_the_way, []
    trainer.train()
    return trainer.losses


def run(case):
    """Run one case from a clean state, and return what this rank saw."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    route, stage, what = case.split()
    on_the_way = OnTheWay(what)
    set_seed(int(os.environ["RANK"]))
    losses = {"accelerate": by_accelerate, "trainer": by_trainer}[route](int(stage), on_the_way)
    return {"losses": losses, **vars(on_the_way)}


if __name__ == "__main__":
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    seen = {case: run(case) for case in sys.argv[2:]}
    with open(f"{sys.argv[1]}.{os.environ['RANK']}", "w") as out:
        json.dump(seen, out)
    torch.distributed.destroy_process_group()
