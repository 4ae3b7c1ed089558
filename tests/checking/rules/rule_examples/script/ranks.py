"""Examples of the rules of zerofit/checking/rules/script/ranks.py."""

from __future__ import annotations

from rule_examples.example import LANGUAGE, SMALL, Examples, at_zero, changed, ending


def _on_main(line: str) -> str:
    return f"if accelerator.is_main_process:\n    {line}"


_MAKES = "model = AutoModelForCausalLM.from_config(config)"
_SAVES_STATE = 'accelerator.save_state("checkpoint")'
_GENERATES = 'model.module.generate(batch["input_ids"], max_new_tokens=4, do_sample=False)'
_WEIGHTS = "accelerator.get_state_dict(model)"
_SAVES = """\
accelerator.unwrap_model(model).save_pretrained(
    "out", is_main_process=accelerator.is_main_process, save_function=accelerator.save{}
)
accelerator.wait_for_everyone()
AutoModelForCausalLM.from_pretrained("out")
"""
_UNEVEN = """\
length = 12 if accelerator.is_main_process else 4
model.module.generate(batch["input_ids"], max_new_tokens=length, do_sample=False{})
"""


_GATHER = """\
def whole(parameter):
    if not hasattr(parameter, "ds_id"):
        return parameter
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.data.clone()


def whole_weights(named):
    return {name: whole(parameter) for name, parameter in named.items()}


"""
_HELPED = changed(LANGUAGE, "accelerator = Accelerator()\n", f"{_GATHER}accelerator = Accelerator()\n")
_HELPED = changed(
    _HELPED,
    "import torch\n",
    "import deepspeed\nimport torch\nfrom peft import LoraConfig, get_peft_model\n",
)
_HELPED = changed(
    _HELPED,
    _MAKES,
    f'{_MAKES}\nmodel = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))',
)
_FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
_HELPED = ending(
    _HELPED,
    f"""\
state = whole_weights(model.module.state_dict())
torch.nn.Linear(32, 4, bias=False).load_state_dict({{"weight": state["{_FIRST}"]}})
""",
)
_HELPED_RIGHTLY = changed(_HELPED, "model.module.state_dict()", "dict(model.module.named_parameters())")


EXAMPLES = {
    "all-ranks-must-meet": Examples(
        bad=at_zero(1, ending(SMALL, _on_main("accelerator.wait_for_everyone()"))),
        good=at_zero(1, ending(SMALL, "accelerator.wait_for_everyone()")),
    ),
    "deepspeed-checkpoint-needs-all-ranks": Examples(
        bad=at_zero(2, ending(SMALL, _on_main(_SAVES_STATE))),
        good=at_zero(2, ending(SMALL, _SAVES_STATE)),
    ),
    "zero3-weights-need-all-ranks": Examples(
        bad=at_zero(3, ending(LANGUAGE, _on_main(_GENERATES))),
        good=at_zero(3, ending(LANGUAGE, _GENERATES)),
    ),
    "zero3-model-made-by-all-ranks": Examples(
        bad=at_zero(3, changed(LANGUAGE, _MAKES, f"with accelerator.main_process_first():\n    {_MAKES}")),
        good=at_zero(3, LANGUAGE),
    ),
    "zero3-save-needs-gathered-weights": Examples(
        bad=at_zero(3, ending(LANGUAGE, _SAVES.format(""))),
        good=at_zero(3, ending(LANGUAGE, _SAVES.format(f", state_dict={_WEIGHTS}"))),
    ),
    "zero3-state-dict-not-gathered": Examples(
        bad=at_zero(3, _HELPED),
        good=at_zero(3, _HELPED_RIGHTLY),
    ),
    "zero3-generate-in-step": Examples(
        bad=at_zero(3, ending(LANGUAGE, _UNEVEN.format(", synced_gpus=False"))),
        good=at_zero(3, ending(LANGUAGE, _UNEVEN.format(""))),
    ),
}
