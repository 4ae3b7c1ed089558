"""What each of two ranks does in test_whole_saving.py: saves models that ZeRO-3 partitions, under the hook.

Usage: torchrun --nproc_per_node 2 ranks_of_saving.py
"""

import json
from dataclasses import replace
from pathlib import Path

import torch
from accelerators import quiet, settings
from peft import LoraConfig, PeftModel, get_peft_model, peft_model
from random_cases import Family
from tiny_engines import engine_of
from tiny_models import make_model
from transformers import AutoModelForCausalLM, modeling_utils

from zerofit.core.errors import UserError
from zerofit.core.strategy import ZeroStage
from zerofit.training.saving import whole_saving

EMBEDDINGS = ["wte"]


def tied():
    return make_model(Family.GPT2, is_tied=True, weight_seed=0)


def adapted():
    """Return a model with adapters that are not as peft makes them, and with trained embeddings."""
    torch.manual_seed(0)
    config = LoraConfig(target_modules=["c_attn"], modules_to_save=EMBEDDINGS, init_lora_weights=False)
    return get_peft_model(tied(), config)


def is_saved(model, read):
    """Return True if a model that ZeRO-3 partitions is read again with its own weights."""
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    engine_of(model, trains=False).module.save_pretrained("out")
    torch.distributed.barrier()
    found = read().state_dict()
    torch.distributed.barrier()
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def of_the_script():
    """Return True if weights that the script has gathered are saved, without another gathering."""
    engine = engine_of(tied(), trains=False)
    weights = engine._zero3_consolidated_16bit_state_dict()  # as accelerator.get_state_dict() does
    is_main = torch.distributed.get_rank() == 0
    engine.module.save_pretrained("given", is_main_process=is_main, state_dict=weights)
    torch.distributed.barrier()
    found = AutoModelForCausalLM.from_pretrained("given").state_dict()
    return all(torch.equal(found[name], value) for name, value in tied().state_dict().items())


def on_one_rank():
    """Return the error of rank 0, which saves alone."""
    module = engine_of(tied(), trains=False).module
    error = None
    if torch.distributed.get_rank() == 0:
        try:
            module.save_pretrained("alone")
        except UserError as raised:
            error = [raised.rule, raised.args[0], raised.why, raised.fix]
    torch.distributed.barrier()
    return error


torch.distributed.init_process_group("gloo")
planned = settings(uses_deepspeed=True, zero_stage=ZeroStage.PARAMETERS)
planned = replace(planned, plan=replace(planned.plan, generate_limit_s=1))
changes = quiet()
whole_saving.install(modeling_utils, planned, changes)
whole_saving.install_in_peft(peft_model, planned, changes)
seen = {
    "tied": is_saved(tied(), lambda: AutoModelForCausalLM.from_pretrained("out")),
    "adapted": is_saved(adapted(), lambda: PeftModel.from_pretrained(tied(), "out")),
    "given": of_the_script(),
    "alone": on_one_rank(),
}
if torch.distributed.get_rank() == 0:
    Path("out.json").write_text(json.dumps(seen))
torch.distributed.destroy_process_group()
