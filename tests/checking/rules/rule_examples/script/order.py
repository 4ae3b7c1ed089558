"""Examples of the rules of zerofit/checking/rules/script/order.py."""

from __future__ import annotations

from rule_examples.example import LANGUAGE, LOADED, SMALL, Example, Examples, at_zero, changed, zero

_LOADS = 'model = AutoModelForCausalLM.from_pretrained("model")\n'
_MADE_WHOLE = changed(
    LOADED,
    f"""\
with PartialState().main_process_first():
    LlamaForCausalLM(config).save_pretrained("model")
accelerator = Accelerator()
{_LOADS}""",
    "accelerator = Accelerator()\nmodel = LlamaForCausalLM(config)\n",
)
_QUANTIZED = changed(LOADED, "import torch\n", "import torch\nfrom peft import LoraConfig, get_peft_model\n")
_QUANTIZED = changed(
    _QUANTIZED, "LlamaForCausalLM, set_seed", "BitsAndBytesConfig, LlamaForCausalLM, set_seed"
)
_QUANTIZED = changed(
    _QUANTIZED,
    _LOADS,
    """\
quantization = BitsAndBytesConfig(load_in_8bit=True)
model = AutoModelForCausalLM.from_pretrained("model", quantization_config=quantization)
model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
""",
)
_EARLY = changed(LOADED, f"accelerator = Accelerator()\n{_LOADS}", f"{_LOADS}accelerator = Accelerator()\n")
_ON_TWO_DEVICES = 'device_map={"model": "cpu", "lm_head": "disk"}'
_FIRST_STEP = "for batch in loader:\n"
_RESIZE = "model.resize_token_embeddings(72)\n"
_PREPARES = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"
_STUDENT = changed(SMALL, _PREPARES, f"teacher = torch.nn.Linear(8, 1)\n{_PREPARES}")
_TWO = changed(_STUDENT, _PREPARES, _PREPARES.replace("model, ", "model, teacher, "))
_AUTO = zero(2, train_micro_batch_size_per_gpu="auto")
_LOADER_APART = (
    "model, optimizer = accelerator.prepare(model, optimizer)\nloader = accelerator.prepare(loader)"
)
_EVALUATION = """\
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
model, loader = accelerator.prepare(model, DataLoader(torch.randn(32, 8), batch_size=2))
with torch.no_grad():
    outputs = torch.cat([accelerator.gather(model(batch)) for batch in loader])
print("weights", f"{outputs.abs().sum().item():.6f}")
"""


EXAMPLES = {
    "unsloth-without-zero3": Examples(
        bad=at_zero(3, SMALL, command="accelerate launch", arguments="--use_unsloth true"),
        good=at_zero(3, SMALL, command="accelerate launch", arguments="--use_unsloth false"),
    ),
    "zero3-device-map": Examples(
        bad=at_zero(
            3, changed(LOADED, 'from_pretrained("model")', 'from_pretrained("model", device_map="cpu")')
        ),
        good=at_zero(3, LOADED),
    ),
    "device-map-not-on-ranks": Examples(
        bad=at_zero(
            2,
            changed(
                LOADED,
                'from_pretrained("model")',
                f'from_pretrained("model", {_ON_TWO_DEVICES}, offload_folder="offload")',
            ),
        ),
        good=at_zero(2, LOADED),
    ),
    "zero3-model-made-too-early": Examples(
        bad=at_zero(3, _EARLY),
        good=at_zero(3, LOADED),
    ),
    "zero3-quantized-model-whole": Examples(
        bad=at_zero(3, _QUANTIZED),
        good=at_zero(2, _QUANTIZED),
    ),
    "zero3-model-made-whole": Examples(
        bad=at_zero(3, _MADE_WHOLE),
        good=at_zero(3, LOADED),
    ),
    "resize-before-prepare": Examples(
        bad=at_zero(3, changed(LANGUAGE, _FIRST_STEP, f"{_RESIZE}{_FIRST_STEP}")),
        good=at_zero(3, changed(LANGUAGE, "optimizer = torch", f"{_RESIZE}optimizer = torch")),
    ),
    "zero3-compile-after-prepare": Examples(
        bad=at_zero(
            3, changed(SMALL, "optimizer = torch", "model = torch.compile(model)\noptimizer = torch")
        ),
        good=at_zero(3, SMALL),
    ),
    "one-model-per-accelerator": Examples(
        bad=at_zero(1, _TWO),
        good=at_zero(1, _STUDENT),
    ),
    "prepare-needs-batch-size": Examples(
        bad=Example(deepspeed=_AUTO, script=changed(SMALL, _PREPARES, _LOADER_APART)),
        good=Example(deepspeed=_AUTO, script=SMALL),
    ),
    "zero12-needs-optimizer": Examples(
        bad=at_zero(2, _EVALUATION),
        good=at_zero(3, _EVALUATION),
    ),
}
