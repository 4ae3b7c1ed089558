"""Faults of scripts as people write them: helpers, classes and conditions around the call that goes wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zerofit.checking.check_run import check

_STAGE3 = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
_STAGE2 = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    Path("stage3.json").write_text(json.dumps(_STAGE3))
    Path("stage2.json").write_text(json.dumps(_STAGE2))


_LINE = "accelerate launch --num_processes 2 --use_deepspeed --deepspeed_config_file stage3.json"


def _found(script: str, rule: str, line: str = _LINE, arguments: str = "") -> list[str]:
    Path("train.py").write_text(script)
    report = check(*line.split(), "train.py", *arguments.split())
    return [finding.found for finding in report.findings if finding.rule == rule]


_ACCELERATOR = "from accelerate import Accelerator\naccelerator = Accelerator()\n"


@pytest.mark.parametrize(
    "script",
    [
        """
class Fitter:
    def __init__(self, net, accelerator):
        self.net, self.accelerator = net, accelerator
    def save(self, path):
        if self.accelerator.is_main_process:
            weights = self.accelerator.get_state_dict(self.net)
            torch.save(weights, path)
""",
        """
class Loop:
    def __init__(self, net, accelerator):
        self.net = net
        self.accelerator = accelerator
    def save(self):
        if not self.accelerator.is_main_process:
            return
        torch.save(self.accelerator.get_state_dict(self.net), "w.pt")
""",
        """
def save(accelerator, net, out):
    if accelerator.is_local_main_process:
        net_ = accelerator.unwrap_model(net)
        net_.save_pretrained(out, state_dict=accelerator.get_state_dict(net))
""",
        """
def export(net, out):
    weights = accelerator.get_state_dict(net)
    torch.save(weights, out)

def finish(net):
    accelerator.wait_for_everyone()
    if accelerator.process_index == 0:
        export(net, "w.pt")
finish(build())
""",
        """
@accelerator.on_main_process
def save(net):
    torch.save(accelerator.get_state_dict(net), "w.pt")
save(build())
""",
    ],
)
def test_weights_that_the_main_rank_alone_collects(script: str) -> None:
    script = f"import torch\nfrom models import build\n{_ACCELERATOR}{script}"
    assert len(_found(script, "zero3-weights-need-all-ranks")) == 1
    assert _found(script, "zero3-weights-need-all-ranks", _LINE.replace("stage3", "stage2")) == []


@pytest.mark.parametrize(
    "script",
    [
        "weights = accelerator.get_state_dict(net)\nif accelerator.is_main_process:\n"
        "    torch.save(weights, 'w')\n",
        "if deepspeed_stage != 3 and accelerator.is_main_process:\n    accelerator.get_state_dict(net)\n",
        "if accelerator.is_main_process or zero_stage == 3:\n    w = accelerator.get_state_dict(net)\n",
        "if accelerator.is_main_process:\n    a = accelerator.get_state_dict(net)\n"
        "else:\n    accelerator.get_state_dict(net)\n",
        "if step % 100 == 0:\n    accelerator.get_state_dict(net)\n",
    ],
)
def test_weights_that_all_ranks_collect(script: str) -> None:
    script = f"import torch\nfrom models import net, step, zero_stage\n{_ACCELERATOR}{script}"
    assert _found(script, "zero3-weights-need-all-ranks") == []


_LOAD = "AutoModelForCausalLM.from_pretrained('m')"
_IMPORTS = "from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments, Trainer\n"


@pytest.mark.parametrize(
    "script",
    [
        f"{_ACCELERATOR}with accelerator.main_process_first():\n    model = {_LOAD}\n",
        f"{_ACCELERATOR}with accelerator.local_main_process_first():\n    tok = 1\n    model = {_LOAD}\n",
        f"{_ACCELERATOR}def load():\n    return {_LOAD}\n\nwith accelerator.main_process_first():\n"
        f"    m = load()\n",
        f"{_ACCELERATOR}if accelerator.is_local_main_process:\n    {_LOAD}\n"
        f"accelerator.wait_for_everyone()\n",
        "from accelerate import Accelerator, DeepSpeedPlugin\n"
        "accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=3))\n"
        f"with accelerator.main_process_first():\n    model = {_LOAD}\n",
        "args = TrainingArguments('out', deepspeed='stage3.json', per_device_train_batch_size=1)\n"
        f"with args.main_process_first(desc='model'):\n    model = {_LOAD}\nTrainer(model, args).train()\n",
    ],
)
def test_models_that_one_rank_makes_first(script: str) -> None:
    line = _LINE if "DeepSpeedPlugin" not in script else "accelerate launch --num_processes 2"
    line = line if "Trainer(" not in script else "torchrun --nproc_per_node 2"
    assert len(_found(f"{_IMPORTS}{script}", "zero3-model-made-by-all-ranks", line)) == 1


@pytest.mark.parametrize(
    "script",
    [
        f"{_ACCELERATOR}with accelerator.main_process_first():\n"
        f"    tok = AutoTokenizer.from_pretrained('m')\n"
        f"model = {_LOAD}\n",
        f"from accelerate import PartialState, Accelerator\n"
        f"with PartialState().main_process_first():\n    {_LOAD}\n"
        f"accelerator = Accelerator()\nmodel = {_LOAD}\n",
        f"{_ACCELERATOR}with accelerator.main_process_first():\n    import datasets\nmodel = {_LOAD}\n",
        "from accelerate import Accelerator, DeepSpeedPlugin\n"
        "accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))\n"
        f"with accelerator.main_process_first():\n    model = {_LOAD}\n",
        f"{_ACCELERATOR}if accelerator.is_main_process:\n    print('loading')\nmodel = {_LOAD}\n",
    ],
)
def test_models_that_all_ranks_make_together(script: str) -> None:
    line = _LINE if "DeepSpeedPlugin" not in script else "accelerate launch --num_processes 2"
    assert _found(f"{_IMPORTS}{script}", "zero3-model-made-by-all-ranks", line) == []


_ENGINE = f"""
import deepspeed
{_IMPORTS}
model = {_LOAD}
engine, *_ = deepspeed.initialize(model=model, config="stage3.json", model_parameters=model.parameters())
"""
_NATIVE = "deepspeed --num_gpus 2"


@pytest.mark.parametrize(
    "call",
    [
        "engine.generate(ids, max_new_tokens=64)",
        "engine.module.generate(ids)",
        "out = model.generate(input_ids=ids, do_sample=True)",
        "for ids in prompts:\n    engine.module.generate(ids, num_beams=4)",
        "def complete(net, ids):\n    return net.generate(ids)\n\ncomplete(engine, ids)",
    ],
)
def test_generation_that_transformers_does_not_know_to_keep_in_step(call: str) -> None:
    assert len(_found(f"{_ENGINE}{call}\n", "zero3-generate-in-step", _NATIVE)) == 1


@pytest.mark.parametrize(
    ("script", "line"),
    [
        (f"{_ENGINE}engine.module.generate(ids, synced_gpus=True)\n", _NATIVE),
        (f"{_ENGINE}engine.module.generate(ids, **settings)\n", _NATIVE),
        (
            "from transformers.integrations import HfDeepSpeedConfig\n"
            "held = HfDeepSpeedConfig('stage3.json')\n"
            f"{_ENGINE}engine.module.generate(ids)\n",
            _NATIVE,
        ),
        (f"{_ENGINE.replace('stage3', 'stage2')}engine.module.generate(ids)\n", _NATIVE),
        (f"{_ENGINE}engine.module.generate(ids)\n", "deepspeed --num_gpus 1"),
        (f"{_ENGINE.replace(_LOAD, 'build()')}engine.module.generate(ids)\n", _NATIVE),
        (f"{_IMPORTS}{_ACCELERATOR}m = accelerator.prepare({_LOAD})\nm.module.generate(ids)\n", _LINE),
    ],
)
def test_generation_in_step(script: str, line: str) -> None:
    assert _found(script, "zero3-generate-in-step", line) == []


_DATA = "from torch.utils.data import DataLoader\nfrom parts import net, data, opt\n"
_FOREVER = "def forever(dl):\n    while True:\n        for batch in dl:\n            yield batch\n"


@pytest.mark.parametrize(
    "script",
    [
        f"{_FOREVER}dl = forever(DataLoader(data, batch_size=4))\nnet, dl = accelerator.prepare(net, dl)\n",
        "dl = iter(DataLoader(data, batch_size=4))\nnet, opt, dl = accelerator.prepare(net, opt, dl)\n",
        "import itertools\ndl = itertools.cycle(DataLoader(data))\nnet, dl = accelerator.prepare(net, dl)\n",
        "from utils import cycle\nloader = DataLoader(data, 8)\ndl = cycle(loader)\n"
        "dl = accelerator.prepare(dl)\n",
        f"{_FOREVER}class Fitter:\n    def __init__(self, dataset):\n"
        "        self.dl = forever(DataLoader(dataset, batch_size=2))\n"
        "    def fit(self, net):\n        net, self.dl = accelerator.prepare(net, self.dl)\n",
    ],
)
def test_iterators_that_prepare_leaves_as_they_are(script: str) -> None:
    assert len(_found(f"{_DATA}{_ACCELERATOR}{script}", "prepare-splits-no-iterator", "torchrun")) == 1


@pytest.mark.parametrize(
    "script",
    [
        f"{_FOREVER}dl = accelerator.prepare(DataLoader(data))\nfor batch in forever(dl):\n    pass\n",
        f"{_FOREVER}dl = DataLoader(data)\nnet, dl = accelerator.prepare(net, dl)\ndl = forever(dl)\n",
        f"{_FOREVER}dl = forever(DataLoader(data, sampler=per_rank))\n"
        f"net, dl = accelerator.prepare(net, dl)\n",
        f"{_FOREVER}dl = forever(DataLoader(data))\nnet = accelerator.prepare(net)\n",
        "def make(data):\n    return DataLoader(data)\n\ndl = make(data)\n"
        "net, dl = accelerator.prepare(net, dl)\n",
    ],
)
def test_loaders_that_prepare_splits(script: str) -> None:
    assert _found(f"{_DATA}{_ACCELERATOR}{script}", "prepare-splits-no-iterator", "torchrun") == []


_DUMMY = "DummyScheduler(opt, total_num_steps=10, warmup_num_steps=1)"
_PLUGIN = "accelerator.state.deepspeed_plugin"
_CONFIG = f"{_PLUGIN}.deepspeed_config"
_BUILDS = f"from accelerate.utils import DummyScheduler\nfrom parts import opt, real\n{_ACCELERATOR}"


@pytest.mark.parametrize(
    ("script", "line"),
    [
        (f"s = {_DUMMY}\n", _LINE),
        (f"s = {_DUMMY}\n", "accelerate launch --use_deepspeed --zero_stage 2"),
        (f"if 'scheduler' not in {_CONFIG}:\n    s = {_DUMMY}\nelse:\n    s = real(opt)\n", _LINE),
        (
            f"if {_PLUGIN} is None or 'scheduler' in {_CONFIG}:\n    s = real(opt)\nelse:\n"
            f"    s = {_DUMMY}\n",
            _LINE,
        ),
        (
            f"lacks = {_PLUGIN} is not None and 'scheduler' not in {_CONFIG}\n"
            f"s = real(opt)\nif lacks:\n    s = {_DUMMY}\n",
            _LINE,
        ),
    ],
)
def test_placeholders_of_schedulers_that_the_file_lacks(script: str, line: str) -> None:
    assert len(_found(f"{_BUILDS}{script}", "dummy-scheduler-needs-section", line)) == 1


@pytest.mark.parametrize(
    ("script", "line"),
    [
        (
            f"if {_PLUGIN} is None or 'scheduler' not in {_CONFIG}:\n    s = real(opt)\nelse:\n"
            f"    s = {_DUMMY}\n",
            _LINE,
        ),
        (f"if 'scheduler' in {_CONFIG}:\n    s = {_DUMMY}\nelse:\n    s = real(opt)\n", _LINE),
        (f"has = {_PLUGIN} and 'scheduler' in {_CONFIG}\nif has:\n    s = {_DUMMY}\n", _LINE),
        ("s = DummyScheduler(opt, lr_scheduler_callable=real)\n", _LINE),
        (f"s = {_DUMMY}\n", "accelerate launch --num_processes 2"),
        (f"if args.dummy:\n    s = {_DUMMY}\n", _LINE),
    ],
)
def test_placeholders_of_schedulers_where_the_file_has_one(script: str, line: str) -> None:
    assert _found(f"{_BUILDS}{script}", "dummy-scheduler-needs-section", line) == []


_STEPS = (
    "    with accelerator.accumulate(net):\n        accelerator.backward(net(batch))\n        opt.step()\n"
)
_TRAINS = f"from parts import net, opt, batches\nfor batch in batches:\n{_STEPS}"
_PARSES = (
    "import argparse\np = argparse.ArgumentParser()\n"
    "p.add_argument('--gradient_accumulation_steps', type=int, "
    "default={})\nargs = p.parse_args()\n"
)


@pytest.mark.parametrize(
    ("before", "arguments"),
    [
        ("", "--trainer.gradient_accumulation_steps 4"),
        ("", "--grad_accum_steps=8"),
        (_PARSES.format(1), "--gradient_accumulation_steps 2"),
        (_PARSES.format(4), ""),
        ("", "--optim.gradient_accumulation 16"),
    ],
)
def test_an_accelerator_that_is_not_told_the_accumulation(before: str, arguments: str) -> None:
    script = f"{before}{_ACCELERATOR}{_TRAINS}"
    assert len(_found(script, "accelerator-not-told-accumulation", "torchrun", arguments)) == 1


@pytest.mark.parametrize(
    ("before", "made", "line", "arguments"),
    [
        (
            "",
            "Accelerator(gradient_accumulation_steps=args.n)",
            "torchrun",
            "--gradient_accumulation_steps 4",
        ),
        ("", "Accelerator(**settings)", "torchrun", "--gradient_accumulation_steps 4"),
        ("", "Accelerator()", "accelerate launch --gradient_accumulation_steps 4", "--grad_accum 4"),
        ("", "Accelerator()\naccelerator.gradient_accumulation_steps = 4", "torchrun", "--grad_accum 4"),
        ("", "Accelerator()", "torchrun", "--gradient_accumulation_steps 1"),
        (_PARSES.format(1), "Accelerator()", "torchrun", ""),
        ("", "Accelerator()", "accelerate launch --config_file gone.yaml", "--gradient_accumulation_steps 4"),
    ],
)
def test_an_accelerator_that_knows_the_accumulation(
    before: str, made: str, line: str, arguments: str
) -> None:
    script = f"{before}from accelerate import Accelerator\naccelerator = {made}\n{_TRAINS}"
    assert _found(script, "accelerator-not-told-accumulation", line, arguments) == []


_PEFT = f"""
{_IMPORTS}from peft import LoraConfig, get_peft_model
from deepspeed import zero
def whole(p):
    if hasattr(p, "ds_id"):
        with zero.GatheredParameters([p]):
            return p.data.clone()
    return p
def adapters(named, bias="none"):
    return {{name: whole(p) for name, p in named.items() if "lora_" in name}}
args = TrainingArguments("out", deepspeed="stage3.json", per_device_train_batch_size=1)
model = get_peft_model({_LOAD}, LoraConfig())
trainer = Trainer(model, args)
trainer.train()
"""


@pytest.mark.parametrize(
    "line",
    [
        "adapters(model.state_dict())",
        "state = adapters(model.state_dict(), 'none')\nif args.local_rank == 0:\n"
        "    model.save_pretrained('o', state)",
        "weights = model.state_dict()\nstate = adapters(weights)",
        "def save(model):\n    return adapters(model.state_dict())\n\nsave(trainer.model)",
        "state = {k: v for k, v in adapters(trainer.model.state_dict()).items()}",
    ],
)
def test_copies_that_a_helper_can_not_gather(line: str) -> None:
    assert len(_found(f"{_PEFT}{line}\n", "zero3-state-dict-not-gathered", "torchrun")) == 1


@pytest.mark.parametrize(
    "line",
    [
        "adapters(dict(model.named_parameters()))",
        "print(model.state_dict().keys())",
        "def count(named):\n    return len(named)\n\ncount(model.state_dict())",
        "trainer.save_model('out')",
        "from deepspeed import zero\nwith zero.GatheredParameters(list(model.parameters())):\n"
        "    model.state_dict()",
    ],
)
def test_weights_that_are_gathered_or_not_meant_to_be(line: str) -> None:
    assert _found(f"{_PEFT}{line}\n", "zero3-state-dict-not-gathered", "torchrun") == []


_ONE_BIT = '{"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 1}}'


@pytest.mark.parametrize(
    "script",
    [
        f"config = {_ONE_BIT}\nargs = TrainingArguments('out', deepspeed=config)\nTrainer(None, args)\n",
        f"args = TrainingArguments('out', deepspeed={_ONE_BIT})\nTrainer(None, args)\n",
        f"import deepspeed\nds = {_ONE_BIT}\ndeepspeed.initialize(model=net, config=ds)\n",
        f"import deepspeed\ndeepspeed.initialize(model=net, config_params={_ONE_BIT})\n",
        f"def run():\n    ds = {_ONE_BIT}\n    args = TrainingArguments(output_dir='o', deepspeed=ds)\n"
        "    return Trainer(None, args)\n",
    ],
)
def test_dictionaries_of_scripts_are_read(script: str) -> None:
    rule = "optimizer-type-removed"
    assert _found(f"{_IMPORTS}{script}", rule, "torchrun") == ["optimizer.type=OneBitAdam"]


@pytest.mark.parametrize(
    ("arguments", "rule", "expected"),
    [
        ("--use_unsloth true --deepspeed stage3.json", "unsloth-without-zero3", 1),
        ("--use_unsloth --deepspeed stage3.json", "unsloth-without-zero3", 1),
        ("--tuner_backend unsloth --deepspeed stage3.json", "unsloth-without-zero3", 1),
        ("--use_unsloth false --deepspeed stage3.json", "unsloth-without-zero3", 0),
        ("--use_unsloth true --deepspeed stage2.json", "unsloth-without-zero3", 0),
        ("--bits 4 --deepspeed stage3.json", "zero3-quantized-model-whole", 1),
        ("--load_in_4bit True --deepspeed stage3.json", "zero3-quantized-model-whole", 1),
        ("--quantization_bit 8 --deepspeed stage3.json", "zero3-quantized-model-whole", 1),
        ("--q_lora True --deepspeed stage3.json", "zero3-quantized-model-whole", 1),
        ("--use_4bit --deepspeed stage3.json", "zero3-quantized-model-whole", 1),
        ("--bits 16 --deepspeed stage3.json", "zero3-quantized-model-whole", 0),
        ("--load_in_8bit False --deepspeed stage3.json", "zero3-quantized-model-whole", 0),
        ("--bits 4 --deepspeed stage2.json", "zero3-quantized-model-whole", 0),
    ],
)
def test_arguments_of_a_script_that_is_not_here(arguments: str, rule: str, expected: int) -> None:
    found = check(*["torchrun", "--nproc_per_node", "2", "gone.py"], *arguments.split()).findings
    assert [finding.rule for finding in found].count(rule) == expected
