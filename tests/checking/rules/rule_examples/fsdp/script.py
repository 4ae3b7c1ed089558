"""Examples of the rules of zerofit/checking/rules/fsdp/script.py."""

from __future__ import annotations

from dataclasses import replace

from rule_examples.example import LANGUAGE, LOADED, Example, Examples, changed, ending, sharding

_PREPARES = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"
_APART = "model = accelerator.prepare(model)\noptimizer, loader = accelerator.prepare(optimizer, loader)\n"
_TEACHER = "teacher = AutoModelForCausalLM.from_config(config)\n"
_PLAIN = sharding(LANGUAGE)
_STEP = "    optimizer.step()\n"
_WEIGHTS = "accelerator.get_state_dict(model)"
_SAVES_STATE = 'accelerator.save_state("checkpoint")'
_SAVES = """\
accelerator.unwrap_model(model).save_pretrained(
    "out", is_main_process=accelerator.is_main_process, save_function=accelerator.save{}
)
"""
_LOADS = "load_state_dict(AutoModelForCausalLM.from_config(config).state_dict())"
_RESIZES = "model.resize_token_embeddings(80)"
_UNEVEN = """\
length = 12 if accelerator.is_main_process else 4
model.generate(batch["input_ids"], max_new_tokens=length, do_sample=False{})
"""
_CHECKPOINTS = "model.gradient_checkpointing_enable()\nmodel.train()\noptimizer = torch"
_EIGHT_BIT = changed(
    changed(LANGUAGE, "import torch\n", "import bitsandbytes\nimport torch\n"),
    "torch.optim.AdamW",
    "bitsandbytes.optim.AdamW8bit",
)


_QLORA = changed(LOADED, "import torch\n", "import torch\nfrom peft import LoraConfig, get_peft_model\n")
_QLORA = changed(_QLORA, "import AutoModelForCausalLM, ", "import AutoModelForCausalLM, BitsAndBytesConfig, ")
_QLORA = changed(_QLORA, "hidden_size=32, intermediate_size=64", "hidden_size=128, intermediate_size=256")
_QLORA = changed(
    _QLORA,
    'model = AutoModelForCausalLM.from_pretrained("model")\n',
    """\
quantization = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage=torch.bfloat16
)
model = AutoModelForCausalLM.from_pretrained(
    "model", quantization_config=quantization, dtype=torch.bfloat16
)
model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj"]), autocast_adapter_dtype=False)
model.train()
""",
)


_LORA_8 = changed(
    _QLORA,
    """\
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage=torch.bfloat16
""",
    """\
    load_in_8bit=True
""",
)


def _quantized(script: str, **more: object) -> Example:
    """Return an example of QLoRA in bf16."""
    plain = sharding(script, **more)
    assert isinstance(plain.accelerate, dict)
    return replace(plain, accelerate={**plain.accelerate, "mixed_precision": "bf16"})


def _on_main(line: str) -> str:
    return f"if accelerator.is_main_process:\n    {line}"


def _with_step(line: str) -> str:
    return changed(LANGUAGE, _STEP, f"    {line}\n{_STEP}")


EXAMPLES = {
    "fsdp2-prepare-model-with-optimizer": Examples(
        bad=sharding(changed(LANGUAGE, _PREPARES, _APART)), good=_PLAIN
    ),
    "fsdp1-optimizer-after-model": Examples(
        bad=sharding(LANGUAGE, fsdp_version=1, fsdp_use_orig_params=False),
        good=sharding(LANGUAGE, fsdp_version=1, fsdp_use_orig_params=True),
    ),
    "fsdp2-one-model": Examples(
        bad=sharding(changed(LANGUAGE, _PREPARES, _TEACHER + _PREPARES.replace("model,", "model, teacher,"))),
        good=sharding(changed(LANGUAGE, _PREPARES, _TEACHER + _PREPARES)),
    ),
    "fsdp2-optimizer-takes-no-dtensors": Examples(bad=sharding(_EIGHT_BIT), good=_PLAIN),
    "fsdp-weights-need-all-ranks": Examples(
        bad=sharding(ending(LANGUAGE, _on_main(_WEIGHTS))), good=sharding(ending(LANGUAGE, _WEIGHTS))
    ),
    "fsdp-checkpoint-needs-all-ranks": Examples(
        bad=sharding(LANGUAGE + _on_main(_SAVES_STATE) + "\n"), good=sharding(LANGUAGE + _SAVES_STATE + "\n")
    ),
    "fsdp2-save-needs-whole-weights": Examples(
        bad=sharding(ending(LANGUAGE, _SAVES.format(""))),
        good=sharding(ending(LANGUAGE, _SAVES.format(f", state_dict={_WEIGHTS}"))),
    ),
    "fsdp2-weights-loaded-before-prepare": Examples(
        bad=sharding(ending(LANGUAGE, f"model.{_LOADS}")),
        good=sharding(changed(LANGUAGE, "optimizer = torch", f"model.{_LOADS}\noptimizer = torch")),
    ),
    "fsdp2-resize-before-prepare": Examples(
        bad=sharding(changed(LANGUAGE, "for batch in loader:", f"{_RESIZES}\nfor batch in loader:")),
        good=sharding(changed(LANGUAGE, "optimizer = torch", f"{_RESIZES}\noptimizer = torch")),
    ),
    "fsdp-generate-in-step": Examples(
        bad=sharding(LANGUAGE + _UNEVEN.format(", synced_gpus=False")),
        good=sharding(LANGUAGE + _UNEVEN.format("")),
    ),
    "fsdp-clips-by-norm": Examples(
        bad=sharding(_with_step("accelerator.clip_grad_value_(model.parameters(), 0.1)")),
        good=sharding(_with_step("accelerator.clip_grad_norm_(model.parameters(), 0.1)")),
    ),
    "fsdp-checkpoints-blocks-twice": Examples(
        bad=sharding(
            changed(LANGUAGE, "optimizer = torch", _CHECKPOINTS), fsdp_activation_checkpointing=True
        ),
        good=sharding(LANGUAGE, fsdp_activation_checkpointing=True),
    ),
    "fsdp2-shards-no-8-bit-weights": Examples(bad=_quantized(_LORA_8), good=_quantized(_QLORA)),
    "fsdp2-loads-quantized-whole": Examples(
        bad=_quantized(_QLORA, fsdp_cpu_ram_efficient_loading=True),
        good=_quantized(_QLORA, fsdp_cpu_ram_efficient_loading=False),
    ),
    "fsdp2-quantized-storage-is-float": Examples(
        bad=_quantized(changed(_QLORA, ", bnb_4bit_quant_storage=torch.bfloat16", "")),
        good=_quantized(_QLORA),
    ),
}
