"""Examples of the rules of zerofit/checking/rules/script/loop.py."""

from __future__ import annotations

from rule_examples.example import LANGUAGE, LOADED, SMALL, Example, Examples, at_zero, changed, zero

_AUTO = zero(1, gradient_accumulation_steps=2)
_ACCUMULATES = changed(SMALL, "Accelerator()\n", "Accelerator(gradient_accumulation_steps=2)\n")
_LOOP = """\
for batch in loader:
    loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""
_PENALIZES = changed(
    SMALL,
    "    accelerator.backward(loss)\n",
    """\
    batch.requires_grad_(True)
    (slope,) = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
    accelerator.backward(loss + 0.1 * (slope.norm(dim=1) - 1).square().mean())
""",
)
"""With a gradient penalty, as of WGAN-GP."""
_SAMPLES = """\
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

torch.distributed.init_process_group("gloo")
data = TensorDataset(torch.arange(64.0).reshape(8, 8))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=2, sampler=sampler)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (batch,) in loader:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
_WITH_ACCUMULATE = changed(
    _ACCUMULATES,
    _LOOP,
    """\
for batch in loader:
    with accelerator.accumulate(model):
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
""",
)
_MANUAL = changed(
    SMALL,
    _LOOP,
    """\
for step, batch in enumerate(loader, 1):
    loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
    accelerator.backward(loss / 2)
    if step % 2 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
)
_BYPASSES = changed(SMALL, "accelerator.backward(loss)", "loss.backward()")
_CLIPS = changed(
    SMALL,
    "    optimizer.step()\n",
    "    accelerator.clip_grad_norm_(model.parameters(), 0.1)\n    optimizer.step()\n",
)
_TWO_FORWARDS = changed(
    changed(
        LANGUAGE,
        "    loss = model(**batch).loss\n",
        "    chosen = model(**batch).loss\n"
        '    rejected = model(input_ids=batch["input_ids"].flip(1), labels=batch["labels"]).loss\n'
        "    loss = chosen - 0.1 * rejected\n",
    ),
    "optimizer = torch",
    'model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})\n'
    "optimizer = torch",
)
_PREFIX = changed(
    changed(
        LANGUAGE,
        "from transformers import",
        "from peft import PrefixTuningConfig, get_peft_model\nfrom transformers import",
    ),
    "optimizer = torch",
    'prefix = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)\n'
    "model = get_peft_model(model, prefix)\n"
    "optimizer = torch",
)
_CHECKPOINTS_PREFIX = changed(
    _PREFIX, "optimizer = torch", "model.gradient_checkpointing_enable()\noptimizer = torch"
)
_ADAPTED = changed(
    changed(
        LOADED,
        "import torch\n",
        "import torch\nfrom peft import LoraConfig, PeftModel, get_peft_model\n",
    ),
    """\
    LlamaForCausalLM(config).save_pretrained("model")
accelerator = Accelerator()
model = AutoModelForCausalLM.from_pretrained("model")
""",
    """\
    base = LlamaForCausalLM(config)
    base.save_pretrained("model")
    get_peft_model(base, LoraConfig(task_type="CAUSAL_LM")).save_pretrained("adapter")
accelerator = Accelerator()
model = AutoModelForCausalLM.from_pretrained("model")
model = PeftModel.from_pretrained(model, "adapter", is_trainable=True)
""",
)
_FROZEN = changed(_ADAPTED, ", is_trainable=True", "")


_TOLD = changed(
    changed(
        _WITH_ACCUMULATE,
        "accelerator = Accelerator(",
        """\
parser = argparse.ArgumentParser()
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
args = parser.parse_args()
accelerator = Accelerator(""",
    ),
    "Accelerator(gradient_accumulation_steps=2)",
    "Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)",
)
_TOLD = f"import argparse\n\n{_TOLD}"
_NOT_TOLD = changed(_TOLD, "gradient_accumulation_steps=args.gradient_accumulation_steps", "")
_TWO_STEPS = "--gradient_accumulation_steps 2"


EXAMPLES = {
    "accumulation-needs-accumulate": Examples(
        bad=Example(deepspeed=_AUTO, script=_ACCUMULATES),
        good=Example(deepspeed=_AUTO, script=_WITH_ACCUMULATE),
    ),
    "accelerator-not-told-accumulation": Examples(
        bad=Example(command="accelerate launch", script=_NOT_TOLD, arguments=_TWO_STEPS),
        good=Example(command="accelerate launch", script=_TOLD, arguments=_TWO_STEPS),
    ),
    "accumulation-by-hand": Examples(
        bad=at_zero(1, _MANUAL),
        good=Example(deepspeed=_AUTO, script=_WITH_ACCUMULATE),
    ),
    "backward-through-accelerator": Examples(
        bad=at_zero(2, _BYPASSES),
        good=at_zero(2, SMALL),
    ),
    "deepspeed-clips-by-its-own": Examples(
        bad=at_zero(1, _CLIPS),
        good=Example(deepspeed=zero(1, gradient_clipping=0.1), script=_CLIPS),
    ),
    "two-forwards-need-new-checkpointing": Examples(
        bad=at_zero(2, _TWO_FORWARDS),
        good=at_zero(2, changed(_TWO_FORWARDS, '"use_reentrant": True', '"use_reentrant": False')),
    ),
    "prefix-tuning-without-checkpointing": Examples(
        bad=at_zero(2, _CHECKPOINTS_PREFIX),
        good=at_zero(2, _PREFIX),
    ),
    "adapters-loaded-frozen": Examples(
        bad=at_zero(2, _FROZEN),
        good=at_zero(2, _ADAPTED),
    ),
    "second-order-gradients-under-zero": Examples(
        bad=at_zero(2, _PENALIZES),
        good=at_zero(2, SMALL),
    ),
    "sampler-without-set-epoch": Examples(
        bad=Example(script=changed(_SAMPLES, "    sampler.set_epoch(epoch)\n", "")),
        good=Example(script=_SAMPLES),
    ),
}
