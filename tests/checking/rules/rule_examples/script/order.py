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


_FOREVER = """\
def forever(loader):
    while True:
        yield from loader


"""
_ITERATES = changed(
    changed(SMALL, "accelerator = Accelerator()\n", f"{_FOREVER}accelerator = Accelerator()\n"),
    "for batch in loader:\n",
    "for batch, _ in zip(loader, range(8)):\n",
)
_PREPARES_ITERATOR = changed(_ITERATES, "batch_size=2)\n", "batch_size=2)\nloader = forever(loader)\n")
_PREPARES_LOADER = changed(_ITERATES, "zip(loader, range(8))", "zip(forever(loader), range(8))")
_DUMMIES = changed(
    SMALL,
    "optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)\n",
    """\
optimizer = accelerate.utils.DummyOptim(model.parameters(), lr=0.01)
scheduler = accelerate.utils.DummyScheduler(optimizer, total_num_steps=8, warmup_num_steps=4)
""",
)
_DUMMIES = changed(_DUMMIES, "import torch\n", "import accelerate.utils\nimport torch\n")
_DUMMIES = changed(
    _DUMMIES,
    "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
    "model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)",
)
_DUMMIES = changed(_DUMMIES, "    optimizer.step()\n", "    optimizer.step()\n    scheduler.step()\n")
_OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto"}}
_WARMUP = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.01, "warmup_num_steps": "auto", "total_num_steps": "auto"}
_SCHEDULER = {"type": "WarmupDecayLR", "params": _WARMUP}


EXAMPLES = {
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
    "unsloth-without-zero3": Examples(
        bad=at_zero(3, SMALL, command="accelerate launch", arguments="--use_unsloth true"),
        good=at_zero(3, SMALL, command="accelerate launch", arguments="--use_unsloth false"),
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
    "prepare-splits-no-iterator": Examples(
        bad=Example(command="accelerate launch --num_processes 2", script=_PREPARES_ITERATOR),
        good=Example(command="accelerate launch --num_processes 2", script=_PREPARES_LOADER),
    ),
    "dummy-scheduler-needs-section": Examples(
        bad=Example(deepspeed=zero(1, optimizer=_OPTIMIZER), script=_DUMMIES),
        good=Example(deepspeed=zero(1, optimizer=_OPTIMIZER, scheduler=_SCHEDULER), script=_DUMMIES),
    ),
    "dummy-scheduler-argument-ignored": Examples(
        bad=Example(
            deepspeed=zero(1, optimizer=_OPTIMIZER, scheduler=_SCHEDULER),
            script=changed(_DUMMIES, "warmup_num_steps=4", "num_warmup_steps=4"),
        ),
        good=Example(deepspeed=zero(1, optimizer=_OPTIMIZER, scheduler=_SCHEDULER), script=_DUMMIES),
    ),
    "zero12-needs-optimizer": Examples(
        bad=at_zero(2, _EVALUATION),
        good=at_zero(3, _EVALUATION),
    ),
}
