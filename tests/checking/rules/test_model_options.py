"""Options of from_pretrained() that arguments of the line decide: device_map, bitsandbytes' quantization."""

from __future__ import annotations

from pathlib import Path

import pytest
from rule_examples.example import Example, zero
from rule_situations import situation_of_example

from zerofit.checking.check_run import check as check_run
from zerofit.checking.engine import check
from zerofit.checking.rules import ALL_RULES

_ZERO3, _RANKS, _WHOLE = "zero3-device-map", "device-map-not-on-ranks", "zero3-quantized-model-whole"
_RULES = [rule for rule in ALL_RULES if rule.id in (_ZERO3, _RANKS, _WHOLE)]
_PARSER = """\
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--device_map", default=None)
parser.add_argument("--model-map", default="auto")
parser.add_argument("--use_4bit", action="store_true")
parser.add_argument("--load_in_8bit", type=bool, default=False)
args = parser.parse_args()
"""
_FIELDS = """\
from transformers import HfArgumentParser

parser = HfArgumentParser((ModelArguments, TrainingArguments))
model_args, training_args = parser.parse_args_into_dataclasses()
"""
_SCRIPT = """\
import os
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TrainingArguments
{parser}
{before}
accelerator = Accelerator()
{load}
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
"""
_MODEL = "model = AutoModelForCausalLM.from_pretrained"


def _script(load: str, *, before: str = "", parser: str = _FIELDS) -> str:
    return _SCRIPT.format(parser=parser, before=before, load=load)


def _found(script: str | None, arguments: str, *, stage: int = 3, ranks: int = 2) -> list[str]:
    example = Example(
        script=script,
        deepspeed=zero(stage) if stage else None,
        command=f"torchrun --nproc_per_node {ranks}",
        arguments=arguments,
    )
    verdict = check(situation_of_example(example), rules=_RULES)
    return [f"{finding.rule}: {finding.found.rpartition(' with ')[2]}" for finding in verdict.findings]


_UNPACKED = f"{_MODEL}(path, **kwargs)"
_MAPPED = {
    "an attribute": _script(f"{_MODEL}(model_args.path, device_map=model_args.device_map)"),
    "a variable": _script(f"spread = model_args.device_map\n{_MODEL}(path, device_map=spread)"),
    "a dictionary": _script(f'kwargs = {{"device_map": model_args.device_map}}\n{_UNPACKED}'),
    "dict()": _script(f"kwargs = dict(dtype='auto', device_map=model_args.device_map)\n{_UNPACKED}"),
    "a key set later": _script(f'kwargs = {{}}\nkwargs["device_map"] = model_args.device_map\n{_UNPACKED}'),
    "an update": _script(f"kwargs = {{}}\nkwargs.update(device_map=model_args.device_map)\n{_UNPACKED}"),
    "a dictionary in another": _script(
        f'more = {{"device_map": model_args.device_map}}\nkwargs = {{"dtype": "auto", **more}}\n{_UNPACKED}'
    ),
    "a function of the script": _script(
        "model = load(model_args)",
        before="def load(given):\n"
        "    return AutoModelForCausalLM.from_pretrained(given.path, device_map=given.device_map)\n",
    ),
    "getattr": _script(f'{_MODEL}(path, device_map=getattr(model_args, "device_map", None))'),
    "argparse": _script(f"{_MODEL}(path, device_map=args.device_map)", parser=_PARSER),
    "a condition on the argument": _script(
        f"spread = None\nif model_args.device_map:\n    spread = model_args.device_map\n"
        f"{_MODEL}(path, device_map=spread)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("script", _MAPPED.values(), ids=_MAPPED)
def test_a_device_map_of_the_line_reaches_from_pretrained(script: str) -> None:
    assert _found(script, "--device_map auto") == [f"{_ZERO3}: --device_map auto"]
    assert _found(script, "--device_map=balanced --lr 1e-5") == [f"{_ZERO3}: --device_map=balanced"]
    assert _found(script, "--device_map cuda:0") == [f"{_ZERO3}: --device_map cuda:0"]
    assert _found(script, "--device_map none") == []
    assert _found(script, "--lr 1e-5") == []
    for stage in (0, 2):
        assert _found(script, "--device_map auto", stage=stage) == [f"{_RANKS}: --device_map auto"]
        assert _found(script, "--device_map cuda:0", stage=stage) == []
    assert _found(script, "--device_map auto", stage=0, ranks=1) == []


def test_a_default_of_argparse_counts() -> None:
    script = _script(f"{_MODEL}(path, device_map=args.model_map)", parser=_PARSER)
    assert _found(script, "") == [f"{_ZERO3}: --model_map auto by default"]
    assert _found(script, "", stage=2) == [f"{_RANKS}: --model_map auto by default"]
    assert _found(script, "--model-map None") == []


_RESET = """\
if int(os.environ.get("WORLD_SIZE", 1)) > 1:
    model_args.device_map = {"": int(os.environ["LOCAL_RANK"])}
"""


def test_a_script_that_gives_each_rank_its_gpu_is_only_wrong_under_zero3() -> None:
    script = _script(f"{_RESET}{_MODEL}(path, device_map=model_args.device_map)")
    assert _found(script, "--device_map auto", stage=2) == []
    assert _found(script, "--device_map auto", stage=0) == []
    assert _found(script, "--device_map auto") == [f"{_ZERO3}: --device_map auto"]


@pytest.mark.parametrize(
    "load",
    [
        f"{_MODEL}(path, device_map=None if is_deepspeed_zero3_enabled() else model_args.device_map)",
        f"spread = model_args.device_map\nif training_args.deepspeed:\n    device_map = spread = None\n"
        f"{_MODEL}(path, device_map=spread)",
        f"{_MODEL}(path, device_map=choose(model_args))",
        f"{_MODEL}(path)",
        f'kwargs = {{"dtype": model_args.dtype}}\n{_UNPACKED}',
    ],
)
def test_other_scripts_may_handle_the_device_map(load: str) -> None:
    assert _found(_script(load), "--device_map auto") == []


def test_an_unknown_script_may_take_a_device_map() -> None:
    assert _found(None, "--device_map auto --bf16") == [f"{_ZERO3}: --device_map auto"]
    assert _found(None, "--device_map auto", stage=2) == []


@pytest.mark.parametrize(
    "load",
    [
        f'{_MODEL}(path, device_map={{"": accelerator.local_process_index}})',
        f'{_MODEL}(path, device_map={{"": int(os.environ["LOCAL_RANK"])}})',
        f'spread = {{"": int(os.environ.get("LOCAL_RANK", 0))}}\n{_MODEL}(path, device_map=spread)',
        f'spread = {{"": 0}} if alone else {{"": rank()}}\n{_MODEL}(path, device_map=spread)',
        f'kwargs = {{"device_map": {{"": accelerator.process_index}}}}\n{_UNPACKED}',
    ],
)
def test_a_map_that_the_script_computes_is_refused_under_zero3_alone(load: str) -> None:
    assert [found.partition(":")[0] for found in _found(_script(load), "--bf16")] == [_ZERO3]
    assert _found(_script(load), "--bf16", stage=2) == []
    assert _found(_script(load), "--bf16", stage=0) == []


@pytest.mark.parametrize(
    "load",
    [
        f"spread = None\nif model_args.qlora:\n    spread = {{'': r()}}\n{_MODEL}(path, device_map=spread)",
        f"kwargs = {{}}\nif model_args.qlora:\n    kwargs['device_map'] = {{'': rank()}}\n{_UNPACKED}",
        f"{_MODEL}(path, device_map={{'': rank()}} if model_args.qlora else None)",
        f"if not training_args.deepspeed:\n    kwargs['device_map'] = {{'': rank()}}\n{_UNPACKED}",
        f"{_MODEL}(path, device_map=None)",
        f"{_MODEL}(path, device_map={{}})",
        "def load(spread=None):\n    if several:\n        spread = {'': rank()}\n"
        f"    return {_MODEL.removeprefix('model = ')}(path, device_map=spread)\nmodel = load()",
    ],
)
def test_a_map_that_may_be_none(load: str) -> None:
    assert _found(_script(load), "--bf16") == []


_MADE = "BitsAndBytesConfig(load_in_4bit=True)"
_QUANTIZED = {
    "a call": _script(f"{_MODEL}(path, quantization_config={_MADE})"),
    "a variable": _script(f"{_MODEL}(path, quantization_config=nf4)", before=f"nf4 = {_MADE}"),
    "a dictionary": _script(f'{_MODEL}(path, quantization_config={{"load_in_8bit": True}})'),
    "a named dictionary": _script(
        f"{_MODEL}(path, quantization_config=bits)", before='bits = {"load_in_4bit": True, "x": 1}'
    ),
    "unpacked": _script(f'kwargs = {{"quantization_config": {_MADE}}}\n{_UNPACKED}'),
    "a key set later": _script(f'kwargs = {{}}\nkwargs["quantization_config"] = {_MADE}\n{_UNPACKED}'),
    "dict()": _script(f"kwargs = dict(quantization_config={_MADE})\n{_UNPACKED}"),
    "an option itself": _script(f"{_MODEL}(path, load_in_8bit=True)"),
    "an option in a dictionary": _script(f'kwargs = {{"load_in_4bit": True}}\n{_UNPACKED}'),
    "a constant": _script(
        f"{_MODEL}(path, quantization_config=BitsAndBytesConfig(load_in_4bit=small))", before="small = True"
    ),
    "a function": _script(
        f"{_MODEL}(path, quantization_config=bits())", before=f"def bits():\n    return {_MADE}\n"
    ),
    "a Trainer's script": f"""\
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

arguments = TrainingArguments("out", deepspeed="ds_config.json")
settings = {{"quantization_config": {_MADE}, "attn_implementation": "sdpa"}}
Trainer(AutoModelForCausalLM.from_pretrained("base", **settings), arguments, train_dataset=rows).train()
""",
}


@pytest.mark.parametrize("script", _QUANTIZED.values(), ids=_QUANTIZED)
def test_a_quantized_model_is_whole_on_each_rank_under_zero3(script: str) -> None:
    (found,) = _found(script, "--bf16")
    assert found.startswith(_WHOLE)
    assert _found(script, "--bf16", stage=2) == []


_IF_ASKED = {
    "use_4bit": (
        _script(
            f"bits = {_MADE} if args.use_4bit else None\n{_MODEL}(path, quantization_config=bits)",
            parser=_PARSER,
        ),
        _script(
            f"bits = None\nif args.use_4bit:\n    bits = {_MADE}\n{_MODEL}(path, quantization_config=bits)",
            parser=_PARSER,
        ),
        _script(
            f"kwargs = {{}}\nif args.use_4bit:\n    kwargs['quantization_config'] = {_MADE}\n{_UNPACKED}",
            parser=_PARSER,
        ),
    ),
    "load_in_8bit True": (
        _script(
            f"{_MODEL}(path, quantization_config=BitsAndBytesConfig(load_in_8bit=model_args.load_in_8bit))"
        ),
        _script(f"{_MODEL}(path, load_in_8bit=model_args.load_in_8bit)"),
        _script(f"{_MODEL}(path, quantization_config=get_quantization_config(model_args))"),
        _script(
            f"bits = None\nif model_args.load_in_4bit:\n    bits = {_MADE}\nelif model_args.load_in_8bit:\n"
            f"    bits = BitsAndBytesConfig(load_in_8bit=True)\n{_MODEL}(path, quantization_config=bits)"
        ),
    ),
}


@pytest.mark.parametrize(
    ("script", "flag"), [(script, flag) for flag, several in _IF_ASKED.items() for script in several]
)
def test_a_model_that_the_line_quantizes(script: str, flag: str) -> None:
    assert _found(script, f"--{flag}") == [f"{_WHOLE}: --{flag}"]
    assert _found(script, "--bf16") == []
    assert _found(script, f"--{flag.split()[0]}=False") == []


@pytest.mark.parametrize(
    "load",
    [
        f"{_MODEL}(path)",
        f"{_MODEL}(path, quantization_config=None)",
        f"{_MODEL}(path, quantization_config=BitsAndBytesConfig())",
        f"{_MODEL}(path, quantization_config=BitsAndBytesConfig(load_in_4bit=False))",
        f"{_MODEL}(path, quantization_config=GPTQConfig(bits=4))",
        f"bits = {_MADE} if training_args.deepspeed is None else None\n"
        f"{_MODEL}(path, quantization_config=bits)",
        f"bits = None\nif not is_deepspeed_zero3_enabled():\n    bits = {_MADE}\n"
        f"{_MODEL}(path, quantization_config=bits)",
        f"{_MODEL}(path)\nteacher = AutoModelForCausalLM.from_pretrained(path, quantization_config={_MADE})",
    ],
)
def test_a_model_that_nothing_quantizes(load: str) -> None:
    assert _found(_script(load), "--load_in_8bit false") == []


_RECIPE = "model_name_or_path: m\nlearning_rate: 1e-5\nper_device_train_batch_size: 2\noutput_dir: out\n"
_LAUNCH_FILE = """\
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  zero_stage: {}
  zero3_save_16bit_model: true
num_machines: 1
num_processes: 4
"""
_READS_RECIPE = """\
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser

training_args, model_args = TrlParser((SFTConfig, ModelConfig)).parse_args_and_config()
kwargs = dict(dtype="auto", device_map=model_args.device_map)
if model_args.load_in_4bit:
    kwargs["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True)
model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, **kwargs)
SFTTrainer(model=model, args=training_args, train_dataset=rows).train()
"""


@pytest.mark.parametrize(
    ("lines", "stage", "rules"),
    [
        ("device_map: auto\n", 3, {_ZERO3}),
        ("device_map: balanced\n", 2, {_RANKS}),
        ("device_map: null\n", 3, set()),
        ("load_in_4bit: true\n", 3, {_WHOLE}),
        ("load_in_4bit: false\n", 3, set()),
        ("load_in_4bit: true\ndevice_map: auto\n", 3, {_ZERO3, _WHOLE}),
        ("load_in_4bit: true\n", 2, set()),
        ("", 3, set()),
    ],
)
def test_a_recipe_gives_arguments_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, stage: int, rules: set[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(f"{_RECIPE}{lines}")
    Path("z3.yaml").write_text(_LAUNCH_FILE.format(stage))
    Path("sft.py").write_text(_READS_RECIPE)
    line = "accelerate launch --config_file z3.yaml sft.py --config recipe.yaml"
    found = {finding.rule for finding in check_run(*line.split()).findings}
    assert found & {rule.id for rule in _RULES} == rules


_OWN_TRAINER = """\
import os
import transformers
from transformers import AutoModelForCausalLM, TrainingArguments
from {module} import {name}

local_rank = int(os.environ.get("LOCAL_RANK", 0))
training_args = TrainingArguments("out", deepspeed="ds_config.json")
model = AutoModelForCausalLM.from_pretrained("m", {map})
trainer = {name}(model=model, args=training_args, train_dataset=[])
trainer.train()
"""
_RANK = 'device_map={"": local_rank}'


def _of_own(module: str, name: str, map_: str = _RANK) -> str:
    return _OWN_TRAINER.format(module=module, name=name, map=map_)


@pytest.mark.parametrize(
    "script",
    [
        _of_own("dataloader", "CustomTrainerForgetting"),
        _of_own("llava.train.llava_trainer", "LLaVATrainer"),
        _of_own("trainers", "WeightedTrainer", 'device_map="auto"'),
        _of_own(".trainer", "KTrainer", "device_map={'': int(os.environ['LOCAL_RANK'])}"),
        _of_own("transformers", "Trainer"),
        _of_own("dataloader", "OwnTrainer").replace(
            "trainer = ", "model = PeftModel.from_pretrained(model, 'a').merge_and_unload()\ntrainer = "
        ),
        _of_own("transformers", "Trainer").replace(
            "trainer = ", f"teacher = AutoModelForCausalLM.from_pretrained('t', {_RANK})\ntrainer = "
        ).replace(f'"m", {_RANK}', '"m"'),
    ],
)  # fmt: skip
def test_a_file_that_the_script_names_is_of_its_own_trainer(script: str) -> None:
    verdict = check(situation_of_example(Example(script=script, deepspeed=zero(3))), rules=_RULES)
    assert [finding.rule for finding in verdict.findings] == [_ZERO3]
    two = check(situation_of_example(Example(script=script, deepspeed=zero(2))), rules=_RULES)
    assert _ZERO3 not in [finding.rule for finding in two.findings]


@pytest.mark.parametrize(
    ("before", "behind", "route"),
    [
        ("", "", "trainer"),
        ("", "train(arguments)", "trainer"),
        ("import deepspeed\n", "engine, *_ = deepspeed.initialize(model=model)", "native"),
        ("from accelerate import Accelerator\n", "accelerator = Accelerator()", "accelerate"),
        ("from transformers import AutoModel\n", "model = AutoModel.from_pretrained('m')\nfit(model)", None),
    ],
)
def test_arguments_alone_are_of_a_trainer_that_is_elsewhere(
    before: str, behind: str, route: str | None
) -> None:
    made = "from transformers import TrainingArguments\narguments = TrainingArguments('out')\n"
    assert situation_of_example(Example(script=f"{before}{made}{behind}\n")).route == route


@pytest.mark.parametrize(
    ("script", "route"),
    [
        (_of_own("dataloader", "CustomTrainer"), "trainer"),
        (_of_own("lightning", "Trainer").replace("args=training_args, ", ""), None),
        (_of_own("mine", "Loop"), None),
        (_of_own("mine", "TrainerConfig"), None),
        (_of_own("mine", "make_Trainer"), None),
    ],
)
def test_what_counts_as_a_trainer_of_another_module(script: str, route: str | None) -> None:
    assert situation_of_example(Example(script=script)).route == route
