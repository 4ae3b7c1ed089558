"""What each rank of test_gathering.py does: runs the cases in order, and rank 0 writes what it saw.

Usage: torchrun --nproc_per_node 2 ranks_of_gathering.py OUT CASE ...
"""

import json
import sys
import tempfile
from contextlib import contextmanager, nullcontext, suppress

import deepspeed
import torch
from random_cases import VOCABULARY, Family
from tiny_engines import engine_of
from tiny_models import make_model
from transformers import LlamaConfig, LlamaForCausalLM

from zerofit.generation import gathering
from zerofit.generation.free_memory import working_bytes
from zerofit.generation.generation_job import Gather

PROMPT = torch.tensor([[5, 6, 7, 8]])


def llama():
    return make_model(Family.LLAMA, is_tied=False, weight_seed=0)


def large_llama():
    """Return a model with two weights whose shards are large enough for NVMe: 1 MiB."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    return LlamaForCausalLM(LlamaConfig(vocab_size=2**15, **sizes, eos_token_id=None))


def tied_gpt2():
    return make_model(Family.GPT2, is_tied=True, weight_seed=0)


def t5():
    return make_model(Family.T5, is_tied=True, weight_seed=0)


def with_leaf_modules():
    model = llama()
    deepspeed.utils.set_z3_leaf_modules(model, [type(model.model.layers[0])])
    return model


def lora():
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(llama(), LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def engine(model, *, trains=True, dtype="fp32", threshold=0, **zero):
    return engine_of(
        model,
        trains=trains,
        zero={"stage3_param_persistence_threshold": threshold, **zero},
        gradient_accumulation_steps=2,
        bf16={"enabled": dtype == "bf16"},
    )


def states(model):
    return {name: each.ds_status.name for name, each in model.named_parameters()}


def hooks(model):
    return [
        (number, name)
        for module in model.modules()
        for each in (module._forward_pre_hooks, module._forward_hooks)
        for number, name in each.items()
    ]


def generated(model, num_tokens=5, *, in_step=False):
    settings = {"max_new_tokens": num_tokens, "do_sample": False, "synced_gpus": in_step}
    was_training = model.training
    model.eval()
    tokens = model.generate(PROMPT.clone(), **settings).tolist()
    model.train(was_training)
    return tokens


def same_tokens(make, **settings):
    """Ranks that generate a different number of times agree with the plain model, and nothing changes."""
    plain = make().bfloat16() if settings.get("dtype") == "bf16" else make()
    expected = generated(plain)
    model = engine(make(), **settings).module
    before = states(model), hooks(model)
    with gathering.gathered_once(model):
        whole = all(map(gathering.is_available, gathering.partitioned_parameters(model)))
        found = [generated(model) for _ in range(1 + 2 * torch.distributed.get_rank())]
    return {
        "whole inside": whole,
        "same tokens": all(tokens == expected for tokens in found),
        "as before": (states(model), hooks(model)) == before,
    }


def train(make, do_between, **engine_settings):
    """Return losses and final weights of a short training, interrupted by a callback."""
    trained = engine(make(), **engine_settings)
    random = torch.Generator().manual_seed(torch.distributed.get_rank())
    batches = torch.randint(0, VOCABULARY, (6, 1, 6), generator=random)
    torch.manual_seed(7)
    losses = []
    for number, batch in enumerate(batches):
        loss = trained(input_ids=batch, labels=batch).loss
        losses.append(loss.item())
        if number == 2:
            do_between(trained.module, batch, "before backward")
        trained.backward(loss)
        trained.step()
        if number in (0, 3):
            do_between(trained.module, batch, "after step")
    parameters = list(trained.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        weights = [each.detach().clone() for each in parameters]
    return losses, weights


def same_training(make, **engine_settings):
    """Gathering between backward and step, and between steps, changes no bit of the training."""
    seen = []

    def generate(model, _batch, _when):
        before = states(model)
        with gathering.gathered_once(model):
            generated(model)
        seen.append(states(model) == before)

    losses, weights = train(make, lambda *_: None, **engine_settings)
    others, other_weights = train(make, generate, **engine_settings)
    equal = map(torch.equal, weights, other_weights)
    return {
        "losses": losses == others,
        "weights": all(equal),
        "as before": all(seen),
        "it trains": losses[0] != losses[-1],
    }


def after_evaluation():
    """Weights that an evaluation's prefetch left under way arrive, and training goes on."""
    was_in_flight = []

    def evaluate(model, batch, when):
        if when == "after step":
            with torch.no_grad():
                model(input_ids=batch)
            was_in_flight.append("INFLIGHT" in states(model).values())
            with gathering.gathered_once(model) if gathers else nullcontext():
                if gathers:
                    generated(model)

    small = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 2000}
    gathers = False
    losses, _ = train(llama, evaluate, **small)
    gathers = True
    others, _ = train(llama, evaluate, **small)
    return {"some were in flight": any(was_in_flight), "losses": losses == others}


def layer_by_layer():
    """Generation with ZeRO's hooks leaves no weights: in the middle of training, and after an error."""
    more = []

    def fail(*_):
        raise KeyError("inside")

    def generate(model, _batch, when):
        if when != "after step":
            return
        held = {name for name, state in states(model).items() if state != "NOT_AVAILABLE"}
        with gathering.layer_by_layer(model):
            found.append(generated(model, in_step=True))
        hook = model.model.layers[1].mlp.up_proj.register_forward_pre_hook(fail)
        with suppress(KeyError), gathering.layer_by_layer(model):
            generated(model, in_step=True)
        hook.remove()
        model.train()
        after = {name for name, state in states(model).items() if state != "NOT_AVAILABLE"}
        more.append(not after <= held)

    found = []
    losses, _ = train(llama, lambda *_: None, threshold=40)
    others, _ = train(llama, generate, threshold=40)
    return {"losses": losses == others, "nothing stays": not any(more), "it generated": len(found) == 2}


def after_an_error():
    model = engine(llama(), trains=False, threshold=40).module
    before = states(model), hooks(model)
    try:
        with gathering.gathered_once(model):
            raise KeyError("inside")
    except KeyError as error:
        raised = error.args == ("inside",)
    return {"it comes through": raised, "as before": (states(model), hooks(model)) == before}


def inside_the_users_own():
    """What the user's context gathered stays gathered after ours, and goes with theirs."""
    model = engine(llama(), trains=False).module
    before = states(model)
    expected = generated(llama())
    with deepspeed.zero.GatheredParameters(list(model.model.parameters())):
        held = states(model)
        with gathering.gathered_once(model):
            found = generated(model)
        kept = states(model) == held
    return {"same tokens": found == expected, "kept": kept, "as before": states(model) == before}


def layer_by_layer_inside_the_users_own():
    """What the user holds and has written stays whole, and reaches the weights as their context ends."""
    model = engine(llama(), trains=False).module
    before = states(model)
    first = next(model.parameters())
    with deepspeed.zero.GatheredParameters([first], modifier_rank=0):
        held = states(model)
        first.data.add_(1)
        written = first.detach().clone()
        with gathering.layer_by_layer(model):
            generated(model, in_step=True)
        kept = states(model) == held
    as_before = states(model) == before
    with deepspeed.zero.GatheredParameters([first]):
        return {"kept": kept, "as before": as_before, "written": torch.equal(first, written)}


def others_hooks():
    """Hooks of others run inside, keep their places, and come and go inside as they like."""
    model = engine(llama(), trains=False).module
    first = model.lm_head.register_forward_hook(lambda *_: calls.append("first"))
    calls = []
    model.lm_head.register_forward_pre_hook(lambda *_: calls.append("before"), prepend=True)
    before = hooks(model)
    with gathering.gathered_once(model):
        generated(model, 1)
        added = model.lm_head.register_forward_hook(lambda *_: calls.append("added"))
        first.remove()
        generated(model, 1)
    after = hooks(model)
    added.remove()
    without_first = [each for each in before if each[0] != first.id]
    return {
        "they ran": calls == ["before", "first", "before", "added"],
        "places": hooks(model) == without_first,
        "added stays": [each for each in after if each[0] == added.id] != [],
    }


def in_inference_mode():
    """Weights gathered in the user's inference mode can be trained afterwards."""

    @torch.inference_mode()
    def generate(model, _batch, when):
        if when == "after step":
            with gathering.gathered_once(model):
                generated(model)

    losses, _ = train(llama, generate)
    return {"it trains": losses[0] != losses[-1]}


def choices():
    """All ranks decide alike, by the rank that has least."""
    model = engine(llama(), trains=False, dtype="bf16", threshold=40).module
    another = engine(tied_gpt2(), trains=False, dtype="bf16").module
    added = gathering.missing_bytes(model)
    elements = sum(each.ds_numel for each in model.parameters() if not gathering.is_available(each))
    huge = 2**50 * torch.distributed.get_rank()  # rank 1 alone has no room
    needed = working_bytes(model, num_sequences=4, num_prompt_tokens=16, max_new_tokens=16)
    answers = {
        "auto": gathering.will_gather(model, Gather.AUTO, needed_bytes=needed),
        "auto, no room": gathering.will_gather(model, Gather.AUTO, needed_bytes=huge),
        "always, no room": gathering.will_gather(model, Gather.ALWAYS, needed_bytes=huge),
        "never": gathering.will_gather(model, Gather.NEVER, needed_bytes=0),
        "auto, another model": gathering.will_gather(another, Gather.AUTO, needed_bytes=needed),
        "auto, again": gathering.will_gather(model, Gather.AUTO, needed_bytes=needed),
    }
    with gathering.gathered_once(model):
        inside = gathering.missing_bytes(model)
    return {
        **answers,
        "bytes": added == 2 * elements > 0,
        "free": gathering.free_bytes() > 2**20,
        "nothing inside": inside == 0,
    }


@contextmanager
def kept(results, name):
    """Keep a case's answers of all ranks as lists: [of rank 0, of rank 1]."""
    mine = {}
    yield mine
    every = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, mine)
    results[name] = {what: [each[what] for each in every] for what in mine}
    print(name, results[name], file=sys.stderr, flush=True)


def on_nvme(num_buffers):
    settings = {"nvme_path": tempfile.mkdtemp(), "buffer_count": num_buffers, "buffer_size": 2**20}
    return {"offload_param": {"device": "nvme", **settings}}


OFFLOAD = {"offload_param": {"device": "cpu"}}
CASES = {
    "tokens, tied": lambda: same_tokens(tied_gpt2),
    "tokens, tied, bf16": lambda: same_tokens(tied_gpt2, dtype="bf16"),
    "tokens, some persist": lambda: same_tokens(llama, threshold=40),
    "tokens, on CPU": lambda: same_tokens(llama, **OFFLOAD),
    "tokens, on NVMe": lambda: same_tokens(large_llama, trains=False, dtype="bf16", **on_nvme(1)),
    "training, on NVMe": lambda: same_training(large_llama, dtype="bf16", **on_nvme(5)),
    "tokens, encoder-decoder": lambda: same_tokens(t5),
    "tokens, LoRA": lambda: same_tokens(lora),
    "tokens, leaf modules": lambda: same_tokens(with_leaf_modules),
    "tokens, leaf modules by size": lambda: same_tokens(llama, stage3_module_granularity_threshold=100),
    "tokens, inference engine": lambda: same_tokens(llama, trains=False),
    "tokens, checked by DeepSpeed": lambda: same_tokens(llama, enable_sanity_checks=True),
    "training": lambda: same_training(llama),
    "training, bf16, some persist": lambda: same_training(llama, dtype="bf16", threshold=40),
    "training, tied": lambda: same_training(tied_gpt2),
    "training, on CPU": lambda: same_training(llama, **OFFLOAD),
    "training, LoRA": lambda: same_training(lora),
    "training, LoRA, on CPU": lambda: same_training(lora, **OFFLOAD),
    "training, leaf modules": lambda: same_training(with_leaf_modules),
    "training, second copies": lambda: same_training(llama, zero_hpz_partition_size=2),
    "after an evaluation": after_evaluation,
    "layer by layer": layer_by_layer,
    "after an error": after_an_error,
    "inside the user's own": inside_the_users_own,
    "layer by layer inside the user's own": layer_by_layer_inside_the_users_own,
    "others' hooks": others_hooks,
    "in inference mode": in_inference_mode,
    "choices": choices,
}

if __name__ == "__main__":
    deepspeed.init_distributed(dist_backend="gloo")
    results = {}
    for name in sys.argv[2:]:
        with kept(results, name) as mine:
            mine.update(CASES[name]())
    if torch.distributed.get_rank() == 0:
        with open(sys.argv[1], "w") as out:
            json.dump(results, out)
    torch.distributed.destroy_process_group()
