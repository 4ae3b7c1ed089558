"""What check says of scripts under FSDP: what they prepare, save, clip and generate with."""

from __future__ import annotations

import pytest
from rule_examples.example import FSDP2, FSDP_FILE, Example
from rule_situations import situations_of_example

from zerofit.checking.engine import check
from zerofit.checking.rules import ALL_RULES

_SETUP = """\
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

accelerator = Accelerator()
model = AutoModelForCausalLM.from_pretrained("gpt2")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
loader = DataLoader(data, batch_size=2)
"""
_PREPARES = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"
_LOOP = """\
for batch in loader:
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    optimizer.zero_grad()
"""
_TRAINER = """\
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

arguments = TrainingArguments("out")
trainer = Trainer(AutoModelForCausalLM.from_pretrained("gpt2"), arguments, train_dataset=data)
trainer.train()
"""


def _found(script: str, version: int = 2, **section: object) -> set[str]:
    file = {**FSDP_FILE, "fsdp_config": {**FSDP2, "fsdp_version": version, **section}}
    return {
        finding.rule
        for situation in situations_of_example(Example(accelerate=file, script=script))
        for finding in check(situation, rules=ALL_RULES).findings
    }


_PREPARED = [
    ("model = accelerator.prepare(model)\n", {"fsdp2-prepare-model-with-optimizer"}),
    ("model, loader = accelerator.prepare(model, loader)\n", {"fsdp2-prepare-model-with-optimizer"}),
    ("model = accelerator.prepare_model(model)\n", {"fsdp2-prepare-model-with-optimizer"}),
    (
        "model = accelerator.prepare(model)\noptimizer = accelerator.prepare(optimizer)\n",
        {"fsdp2-prepare-model-with-optimizer"},
    ),
    (
        "if not accelerator.is_fsdp2:\n    model = accelerator.prepare(model)\n",
        set(),
    ),
    ("model, optimizer = accelerator.prepare(model, make_optimizer(model))\n", set()),
    (_PREPARES, set()),
    ("loader = accelerator.prepare(loader)\n" + _PREPARES, set()),
    (
        'other = AutoModelForCausalLM.from_pretrained("gpt2")\n'
        "model, other, optimizer = accelerator.prepare(model, other, optimizer)\n",
        {"fsdp2-one-model"},
    ),
    ('other = AutoModelForCausalLM.from_pretrained("gpt2")\n' + _PREPARES, set()),
    (_PREPARES + "model.resize_token_embeddings(90)\n", {"fsdp2-resize-before-prepare"}),
    (
        _PREPARES + "accelerator.unwrap_model(model).resize_token_embeddings(90)\n",
        {"fsdp2-resize-before-prepare"},
    ),
    ("model.resize_token_embeddings(90)\n" + _PREPARES, set()),
    (
        _PREPARES + 'model.load_state_dict(torch.load("w.pt"))\n',
        {"fsdp2-weights-loaded-before-prepare"},
    ),
    ('model.load_state_dict(torch.load("w.pt"))\n' + _PREPARES, set()),
]


@pytest.mark.parametrize(("lines", "rules"), _PREPARED)
def test_prepare_under_fsdp_2(lines: str, rules: set[str]) -> None:
    assert _found(_SETUP + lines + _LOOP) == rules


_MAIN = "if accelerator.is_main_process:\n    "
_UNWRAPPED = "accelerator.unwrap_model(model)"
_ENDS = [
    (f"{_MAIN}accelerator.get_state_dict(model)\n", {"fsdp-weights-need-all-ranks"}),
    (f"{_MAIN}model(**batch)\n", {"fsdp-weights-need-all-ranks"}),
    (f"{_MAIN}model.generate(batch['input_ids'])\n", {"fsdp-weights-need-all-ranks"}),
    (f'{_MAIN}accelerator.save_model(model, "out")\n', {"fsdp-weights-need-all-ranks"}),
    (f"{_MAIN}{_UNWRAPPED}.generate(batch['input_ids'])\n", {"fsdp-weights-need-all-ranks"}),
    (f'{_MAIN}accelerator.save_state("out")\n', {"fsdp-checkpoint-needs-all-ranks"}),
    (
        'if not accelerator.is_main_process:\n    exit()\naccelerator.save_state("out")\n',
        {"fsdp-checkpoint-needs-all-ranks"},
    ),
    ('accelerator.save_state("out")\n', set()),
    ('accelerator.save_model(model, "out")\n', set()),
    (f'weights = accelerator.get_state_dict(model)\n{_MAIN}torch.save(weights, "w.pt")\n', set()),
    (f"{_MAIN}print(len(loader))\n", set()),
    ('model.save_pretrained("out")\n', {"fsdp2-save-needs-whole-weights"}),
    (f'{_UNWRAPPED}.save_pretrained("out")\n', {"fsdp2-save-needs-whole-weights"}),
    ('torch.save(model.state_dict(), "w.pt")\n', {"fsdp2-save-needs-whole-weights"}),
    (f'{_MAIN}torch.save({_UNWRAPPED}.state_dict(), "w.pt")\n', {"fsdp2-save-needs-whole-weights"}),
    (
        f'{_UNWRAPPED}.save_pretrained("out", state_dict=accelerator.get_state_dict(model))\n',
        set(),
    ),
    ("model.generate(batch['input_ids'], synced_gpus=False)\n", {"fsdp-generate-in-step"}),
    (f"{_UNWRAPPED}.generate(batch['input_ids'], synced_gpus=False)\n", {"fsdp-generate-in-step"}),
    ("model.generate(batch['input_ids'], synced_gpus=True)\n", set()),
    ("model.generate(batch['input_ids'])\n", set()),
    ("accelerator.clip_grad_value_(model.parameters(), 1.0)\n", {"fsdp-clips-by-norm"}),
    ("accelerator.clip_grad_norm_(model.parameters(), 1.0)\n", set()),
    ("torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n", set()),
]


@pytest.mark.parametrize(("lines", "rules"), _ENDS)
def test_what_follows_the_loop(lines: str, rules: set[str]) -> None:
    assert _found(_SETUP + _PREPARES + _LOOP + lines) == rules


@pytest.mark.parametrize(
    ("optimizer", "fails"),
    [
        ("bitsandbytes.optim.AdamW8bit", True),
        ("bitsandbytes.optim.PagedAdamW32bit", True),
        ("bitsandbytes.optim.Lion8bit", True),
        ("torch.optim.Adafactor", True),
        ("torch.optim.Rprop", True),
        ("transformers.optimization.Adafactor", True),
        ("torch.optim.AdamW", False),
        ("torch.optim.SGD", False),
        ("torch.optim.RMSprop", False),
        ("somewhere.Optimizer", False),
    ],
)
def test_optimizers_that_step_no_shards(optimizer: str, fails: bool) -> None:
    module = optimizer.partition(".")[0]
    script = f"import {optimizer.rpartition('.')[0]}\n" + _SETUP.replace("torch.optim.AdamW", optimizer)
    script = script.replace("import torch\n", f"import torch\nimport {module}\n", 1)
    found = _found(script + _PREPARES + _LOOP)
    assert ("fsdp2-optimizer-takes-no-dtensors" in found) == fails
    assert "fsdp2-optimizer-takes-no-dtensors" not in _found(script + _PREPARES + _LOOP, version=1)


@pytest.mark.parametrize(
    ("arguments", "is_whole"),
    [
        ("load_in_4bit=True", True),
        ('load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16', True),
        ('load_in_4bit=True, bnb_4bit_quant_storage="uint8"', True),
        ("load_in_4bit=True, bnb_4bit_use_double_quant=True", True),
        ("True, load_in_4bit=True, bnb_4bit_quant_storage=None", True),
        ("load_in_4bit=True, bnb_4bit_quant_storage=torch.bfloat16", False),
        ('load_in_4bit=True, bnb_4bit_quant_storage="float16"', False),
        ("load_in_4bit=True, bnb_4bit_quant_storage=storage", False),
        ("load_in_8bit=True", False),
        ("load_in_4bit=args.quantize", False),
        ("**settings", False),
    ],
)
def test_storage_of_4_bit_weights(arguments: str, is_whole: bool) -> None:
    script = _SETUP.replace(
        'from_pretrained("gpt2")',
        f'from_pretrained("gpt2", quantization_config=BitsAndBytesConfig({arguments}))',
    )
    found = _found(script + _PREPARES + _LOOP)
    assert ("fsdp2-quantized-storage-is-float" in found) == is_whole


_SHARDED = {"fsdp_state_dict_type": "SHARDED_STATE_DICT"}
_WHOLE = {"fsdp_state_dict_type": "FULL_STATE_DICT"}


@pytest.mark.parametrize(
    ("lines", "section", "rules"),
    [
        ("trainer.save_model()\n", {}, {"fsdp-sharded-save-has-no-weights"}),
        ('trainer.save_model("final")\n', _SHARDED, {"fsdp-sharded-save-has-no-weights"}),
        ("trainer.save_model()\n", _WHOLE, set()),
        ("trainer.save_state()\n", _SHARDED, set()),
        (
            "if trainer.is_world_process_zero():\n    trainer.save_model()\n",
            _WHOLE,
            {"fsdp-save-model-needs-all-ranks"},
        ),
        (
            "if trainer.args.process_index == 0:\n    trainer.save_model()\n",
            _WHOLE,
            {"fsdp-save-model-needs-all-ranks"},
        ),
        ("if trainer.is_fsdp_enabled:\n    trainer.save_model()\n", _SHARDED, set()),
        (
            "if trainer.is_fsdp_enabled:\n"
            '    trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")\n'
            "trainer.save_model()\n",
            _SHARDED,
            set(),
        ),
        (
            "from accelerate.utils import merge_fsdp_weights\n"
            'trainer.save_model()\nmerge_fsdp_weights("out", "merged")\n',
            _SHARDED,
            set(),
        ),
        (
            "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType\n"
            "FSDP.set_state_dict_type(trainer.model, StateDictType.FULL_STATE_DICT)\ntrainer.save_model()\n",
            _SHARDED,
            set(),
        ),
    ],
)
def test_saving_with_trainer(lines: str, section: dict[str, str], rules: set[str]) -> None:
    assert _found(_TRAINER + lines, **section) == rules


@pytest.mark.parametrize(
    ("arguments", "rules"),
    [
        (", optimizers=(optimizer, None)", {"fsdp-trainer-makes-optimizer"}),
        (", optimizers=(optimizer, scheduler)", {"fsdp-trainer-makes-optimizer"}),
        (", optimizers=make_optimizers(model)", {"fsdp-trainer-makes-optimizer"}),
        (", optimizers=(None, None)", set()),
        ("", set()),
    ],
)
def test_optimizers_that_trainer_is_given(arguments: str, rules: set[str]) -> None:
    assert _found(_TRAINER.replace("train_dataset=data", f"train_dataset=data{arguments}"), **_WHOLE) == rules


def test_without_fsdp_none_of_these_rules_speaks() -> None:
    ends = "".join(lines for lines, rules in _ENDS if rules)
    script = _SETUP + _PREPARES + _LOOP + ends
    situations = situations_of_example(Example(script=script, command="torchrun --nproc_per_node 2"))
    found = {finding.rule for s in situations for finding in check(s, rules=ALL_RULES).findings}
    assert not {rule for rule in found if rule.startswith("fsdp")}


_MADE_LATER = "model = accelerator.prepare(model)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"


@pytest.mark.parametrize(
    ("lines", "section", "is_found"),
    [
        (_PREPARES, {"fsdp_use_orig_params": False}, True),
        (
            "model, optimizer = accelerator.prepare(model, optimizer)\n",
            {"fsdp_use_orig_params": "false"},
            True,
        ),
        (
            "def start():\n    return accelerator.prepare(model, optimizer)\nmodel, optimizer = start()\n",
            {"fsdp_use_orig_params": False},
            True,
        ),
        ("optimizer, model = accelerator.prepare(optimizer, model)\n", {"fsdp_use_orig_params": False}, True),
        (
            "for group in optimizer.param_groups:\n    group['lr'] = 1\n" + _PREPARES,
            {"fsdp_use_orig_params": False, "fsdp_sharding_strategy": "SHARD_GRAD_OP"},
            True,
        ),
        (_PREPARES, {"fsdp_use_orig_params": True}, False),
        (_PREPARES, {}, False),
        (
            _MADE_LATER + "optimizer = accelerator.prepare(optimizer)\n",
            {"fsdp_use_orig_params": False},
            False,
        ),
        (
            "if accelerator.distributed_type != 'FSDP':\n    "
            "model, optimizer = accelerator.prepare(model, optimizer)\n",
            {"fsdp_use_orig_params": False},
            False,
        ),
    ],
)
def test_an_optimizer_of_the_parameters_before_flattening(
    lines: str, section: dict[str, object], is_found: bool
) -> None:
    found = _found(_SETUP + lines + _LOOP, version=1, **section)
    assert ("fsdp1-optimizer-after-model" in found) == is_found
    assert "fsdp1-optimizer-after-model" not in _found(_SETUP + lines + _LOOP, version=2, **section)


def test_a_trainer_creates_its_optimizer_from_the_wrapped_model() -> None:
    assert "fsdp1-optimizer-after-model" not in _found(_TRAINER, version=1, fsdp_use_orig_params=False)
