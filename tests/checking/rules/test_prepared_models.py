"""Models that are loaded in bits, and attributes that the wrapper of a prepared model lacks."""

from __future__ import annotations

import pytest
from rule_examples.example import LAUNCH_FILE, Example, zero
from rule_situations import situations_of_example
from torch.nn.parallel import DistributedDataParallel

from zerofit.checking.engine import check
from zerofit.checking.rules import ALL_RULES
from zerofit.scripts.source.wrappers import WRAPPER_ATTRIBUTES

_LOADS = """\
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, BitsAndBytesConfig, LlamaForCausalLM
from transformers import Trainer, TrainingArguments
from peft import AutoPeftModelForCausalLM

path = "some/model"
{}
Trainer(model=model, args=TrainingArguments("out")).train()
"""


def _rules(example: Example, rule: str) -> list[tuple[str, str]]:
    chosen = [declared for declared in ALL_RULES if declared.id == rule]
    return [
        (finding.found, finding.fix)
        for situation in situations_of_example(example)
        for finding in check(situation, rules=chosen).findings
    ]


@pytest.mark.parametrize(
    ("load", "flag"),
    [
        ("model = AutoModelForCausalLM.from_pretrained(path, load_in_4bit=True)", "load_in_4bit"),
        (
            "model = LlamaForCausalLM.from_pretrained(path, device_map='auto', load_in_8bit=True)",
            "load_in_8bit",
        ),
        ("model = AutoModelForSeq2SeqLM.from_pretrained(path, load_in_8bit=False)", "load_in_8bit"),
        ("model = AutoPeftModelForCausalLM.from_pretrained(path, load_in_4bit=True)", "load_in_4bit"),
        (
            "kwargs = {'load_in_4bit': True}\nmodel = LlamaForCausalLM.from_pretrained(path, **kwargs)",
            "load_in_4bit",
        ),
        (
            "kwargs = dict(load_in_8bit=True)\nmodel = LlamaForCausalLM.from_pretrained(path, **kwargs)",
            "load_in_8bit",
        ),
        (
            "kwargs = {}\nif path:\n    kwargs['load_in_8bit'] = True\n"
            "model = LlamaForCausalLM.from_pretrained(path, **kwargs)",
            "load_in_8bit",
        ),
    ],
)
def test_transformers_5_loads_in_bits_by_a_config_alone(load: str, flag: str) -> None:
    rule = "load-in-bits-needs-config"
    ((found, fix),) = _rules(Example(script=_LOADS.format(load)), rule)
    assert flag in found
    assert fix == f"pass quantization_config=BitsAndBytesConfig({flag}=True)"
    older = Example(script=_LOADS.format(load), versions={"transformers": "4.57.0"})
    assert _rules(older, rule) == []


@pytest.mark.parametrize(
    "load",
    [
        "model = LlamaForCausalLM.from_pretrained(path)",
        "config = BitsAndBytesConfig(load_in_4bit=True)\n"
        "model = LlamaForCausalLM.from_pretrained(path, quantization_config=config)",
        "from unsloth import FastLanguageModel\n"
        "model, _ = FastLanguageModel.from_pretrained(path, load_in_4bit=True)",
        "from optimum.x import OVModelForCausalLM\n"
        "model = OVModelForCausalLM.from_pretrained(path, load_in_8bit=True)",
        "kwargs = {'dtype': 'auto'}\nmodel = LlamaForCausalLM.from_pretrained(path, **kwargs)",
    ],
)
def test_other_ways_to_load(load: str) -> None:
    assert _rules(Example(script=_LOADS.format(load)), "load-in-bits-needs-config") == []


_LOOP = """\
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.encoder(x)

    def compute_loss(self, x):
        return self(x).square().mean()

accelerator = Accelerator({given})
model = {model}
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(torch.randn(32, 8), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    loss = model(batch).loss
{body}
    accelerator.backward(loss)
    optimizer.step()
"""
_HIDDEN = "prepared-model-hides-attributes"
_RANKS = "torchrun --nproc_per_node 2"
_OF_HUB = 'AutoModelForCausalLM.from_pretrained("x")'


def _loop(body: str, *, model: str = _OF_HUB, given: str = "") -> str:
    return _LOOP.format(body=body, model=model, given=given)


@pytest.mark.parametrize(
    ("body", "model", "attribute"),
    [
        ("    model.generate(batch)", _OF_HUB, "model.generate"),
        ("    size = model.config.vocab_size", _OF_HUB, "model.config"),
        ("    model.get_input_embeddings().weight.data[0] = 0", _OF_HUB, "model.get_input_embeddings"),
        ("    loss = model.compute_loss(batch)", "Net()", "model.compute_loss"),
        ("    norm = model.encoder.weight.norm()", "Net()", "model.encoder"),
        ("    model.save_pretrained('out')", _OF_HUB, "model.save_pretrained"),
        ("    if accelerator.is_main_process:\n        model.push_to_hub('x')", _OF_HUB, "model.push_to_hub"),
    ],
)
def test_a_wrapper_has_no_attributes_of_the_model(body: str, model: str, attribute: str) -> None:
    script = _loop(body, model=model)
    name = attribute.rpartition(".")[2]
    fix = f"write accelerator.unwrap_model(model).{name}"
    assert _rules(Example(script=script, command=_RANKS), _HIDDEN) == [(f"{attribute} with 2 ranks", fix)]
    assert _rules(Example(script=script), _HIDDEN) == [(f"{attribute} of a prepared model", fix)]
    # one rank has no wrapper; those of DeepSpeed and FSDP forward what they lack
    assert _rules(Example(script=script, command="torchrun --nproc_per_node 1"), _HIDDEN) == []
    assert _rules(Example(script=script, deepspeed=zero(2)), _HIDDEN) == []
    file = {**LAUNCH_FILE, "distributed_type": "FSDP", "num_processes": 2, "fsdp_config": {"fsdp_version": 2}}
    assert _rules(Example(script=script, accelerate=file), _HIDDEN) == []


@pytest.mark.parametrize(
    "body",
    [
        "    accelerator.unwrap_model(model).generate(batch)",
        "    model.module.generate(batch)",
        "    plain = accelerator.unwrap_model(model)\n    plain.config.use_cache = False",
        "    model.train()\n    model.eval()\n    model.zero_grad()\n"
        "    norm = sum(p.norm() for p in model.parameters())",
        "    with model.no_sync():\n        pass",
        "    if accelerator.num_processes == 1:\n        model.generate(batch)",
        "    if hasattr(model, 'config'):\n        size = model.config.vocab_size",
        "    try:\n        size = model.config.vocab_size\n    except AttributeError:\n        size = 0",
        "    own = model.module if hasattr(model, 'module') else model\n    own.generate(batch)",
        "    model.ema = None\n    print(model.ema)",
        "    from transformers import pipeline\n    pipe = pipeline('text-generation', model=model)\n"
        "    pipe.save_pretrained('out')\n    pipe.set_progress_bar_config(disable=True)",
    ],
)
def test_scripts_that_unwrap_or_look_for_a_wrapper(body: str) -> None:
    assert _rules(Example(script=_loop(body), command=_RANKS), _HIDDEN) == []


def test_a_script_may_bring_another_wrapper() -> None:
    for given in ("fsdp_plugin=plugin", "deepspeed_plugin=plugin", "**kwargs"):
        script = _loop("    model.generate(batch)", given=given)
        assert _rules(Example(script=script, command=_RANKS), _HIDDEN) == []


def is_of_torch(attribute: object) -> bool:
    """Return True unless another package, such as transformers, has put an attribute on torch's modules."""
    return getattr(attribute, "__module__", "torch").startswith(("torch", "builtins", "typing"))


def test_the_wrappers_attributes_are_torchs() -> None:
    public = {
        name
        for name in dir(DistributedDataParallel)
        if not name.startswith("_") and is_of_torch(getattr(DistributedDataParallel, name))
    }
    assert public - WRAPPER_ATTRIBUTES == set()
    assert {"module", "training", "device"} <= WRAPPER_ATTRIBUTES
    assert not {"generate", "config", "save_pretrained"} & WRAPPER_ATTRIBUTES
