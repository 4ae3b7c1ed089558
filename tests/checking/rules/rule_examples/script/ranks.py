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
    "zero3-generate-in-step": Examples(
        bad=at_zero(3, ending(LANGUAGE, _UNEVEN.format(", synced_gpus=False"))),
        good=at_zero(3, ending(LANGUAGE, _UNEVEN.format(""))),
    ),
}
