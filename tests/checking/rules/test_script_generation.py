"""The rules of generation and inference in scripts: each sign by itself, and where there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rule_examples.example import EVALUATES, INFERENCE, LANGUAGE, changed, ending, zero
from rule_situations import situation_of_script

from zerofit.checking.engine import check
from zerofit.checking.rules import ALL_RULES
from zerofit.core.plan import Topology


def _found(script: str, stage: int = 3) -> list[str]:
    return [
        finding.rule for finding in check(situation_of_script(script, zero(stage)), rules=ALL_RULES).findings
    ]


_ONE_CALL = "model.module.generate(prompts[:2], max_new_tokens=4, do_sample=False)\n"
_CALL = "model.module.generate(prompts[:1], max_new_tokens=4"


def _doing(lines: str) -> str:
    return changed(INFERENCE, _ONE_CALL, lines)


_EQUALLY = "zero3-ranks-run-equally-often"
_MEET = "all-ranks-must-meet"
_OWN = "prompts[accelerator.process_index :: accelerator.num_processes]"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (f"for prompt in {_OWN}:\n    {_CALL})\n", [_EQUALLY]),
        (f"for prompt in {_OWN}:\n    model(prompt)\n", [_EQUALLY]),
        (f"for prompt in {_OWN}:\n    print(prompt)\n{_CALL})\n", []),
        (f"if accelerator.is_main_process:\n    {_CALL})\n", ["zero3-weights-need-all-ranks"]),
        (
            f"match accelerator.process_index:\n    case 0:\n        {_CALL})\n",
            ["zero3-weights-need-all-ranks"],
        ),
        (f"for prompt in prompts:\n    {_CALL})\n", []),
        (f"{_CALL}, assistant_model=other)\n", ["zero3-no-assisted-generation"]),
        (f"{_CALL}, assistant_early_exit=2)\n", ["zero3-no-assisted-generation"]),
        (f"{_CALL}, assistant_model=None)\n", []),
        (f"{_CALL}, prompt_lookup_num_tokens=3)\n", []),
        (f"{_CALL}, prefill_chunk_size=64)\n", ["zero3-no-chunked-prefill"]),
        (f"{_CALL}, prefill_chunk_size=None)\n", []),
    ],
)
def test_ranks_that_generate(lines: str, expected: list[str]) -> None:
    assert _found(_doing(lines)) == expected


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("zerofit.generate(model, prompts)\n", []),
        ("generate(model, prompts)\n", []),
        ("zerofit.generate(accelerator.unwrap_model(model), prompts, synced_gpus=False)\n", []),
        ("if accelerator.is_main_process:\n    zerofit.generate(model, prompts)\n", [_MEET]),
        ("if accelerator.is_main_process:\n    generate(model, prompts)\n", [_MEET]),
        (f"for prompt in {_OWN}:\n    generate(model, [prompt])\n", [_MEET]),
        (f"generate(model, {_OWN}, per_rank=True)\n", []),
    ],
)
@pytest.mark.parametrize("stage", [0, 3])
def test_zerofit_generate(lines: str, expected: list[str], stage: int) -> None:
    script = f"import zerofit\nfrom zerofit import generate\n{_doing(lines)}"
    assert _found(script, stage) == expected


@pytest.mark.parametrize(
    ("lines", "is_found"),
    [
        (f"tokens = {_CALL})\naccelerator.gather(tokens)\n", True),
        (f"accelerator.gather_for_metrics({_CALL}))\n", True),
        (f"tokens = {_CALL})[:, 8:].cpu()\naccelerator.gather((tokens, prompts))\n", True),
        (f"tokens = {_CALL})\ntorch.distributed.all_gather(parts, tokens)\n", True),
        (f"tokens = {_CALL})\ntorch.distributed.all_gather_object(parts, tokens)\n", False),
        (f"tokens = {_CALL})\naccelerator.gather_for_metrics(tokens, use_gather_object=True)\n", False),
        (f"x = {_CALL})\nx = accelerator.pad_across_processes(x)\naccelerator.gather(x)\n", False),
        (f"tokens = {_CALL})\ntokens = pad(tokens)\naccelerator.gather(tokens)\n", False),
        (f"tokens = {_CALL}, min_new_tokens=4)\naccelerator.gather(tokens)\n", False),
        (f"tokens = {_CALL})\naccelerator.gather(tokens[0])\n", True),
        (f"tokens = {_CALL})\naccelerator.gather(tokens[:, -1])\n", False),
        (f"tokens = {_CALL})\naccelerator.gather((tokens[:, 0], tokens[:, :3]))\n", False),
        (f"out = {_CALL}, return_dict_in_generate=True)\naccelerator.gather(out.sequences)\n", True),
        ("accelerator.gather(model.module.generate(prompts, max_new_tokens=1))\n", False),
    ],
)  # fmt: skip
def test_tokens_that_ranks_gather(lines: str, is_found: bool) -> None:
    assert _found(_doing(lines)) == (["gather-needs-padded-tokens"] if is_found else [])


@pytest.mark.parametrize(
    ("settings", "confidence"),
    [
        ("max_new_tokens=4", "likely"),
        ("**inputs, max_new_tokens=4", "likely"),
        ("**inputs", "possible"),
        ("generation_config=GenerationConfig(min_new_tokens=4, max_new_tokens=4)", "possible"),
    ],
)
def test_settings_from_elsewhere_may_make_all_tokens_as_many(settings: str, confidence: str) -> None:
    lines = f"accelerator.gather(model.module.generate({settings}))\n"
    (finding,) = check(situation_of_script(_doing(lines), zero(3)), rules=ALL_RULES).findings
    assert (finding.rule, finding.confidence) == ("gather-needs-padded-tokens", confidence)


def test_one_rank_gathers_what_it_likes() -> None:
    situation = situation_of_script(_doing(f"accelerator.gather({_CALL}))\n"), zero(3))
    alone = replace(situation, topology=Topology(world_size=1))
    assert check(alone, rules=ALL_RULES).findings == ()


_GATHERS = "import deepspeed\nwith deepspeed.zero.GatheredParameters(list(model.parameters())):\n"


@pytest.mark.parametrize(
    ("line", "is_found"),
    [("model(**batch)", True), ("model.module.generate(x)", True), ("print(model.module.weight)", False)],
)
def test_gathered_weights_are_released_again_by_a_model_that_runs(line: str, is_found: bool) -> None:
    script = ending(LANGUAGE, f"{_GATHERS}    if accelerator.is_main_process:\n        {line}")
    assert _found(script) == (["zero3-weights-need-all-ranks"] if is_found else [])


_LOOP = "    optimizer.zero_grad()\n"
_MODE = "zero3-no-inference-mode"
_WATCHES = "with torch.inference_mode():\n"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (changed(LANGUAGE, _LOOP, f"{_LOOP}    {_WATCHES}        model(**batch)\n"), [_MODE]),
        (changed(LANGUAGE, "for batch", f"{_WATCHES}    model(1)\nfor batch"), [_MODE]),
        (ending(LANGUAGE, f"{_WATCHES}    model(**batch)"), []),
        (changed(LANGUAGE, _LOOP, f"{_LOOP}    {_WATCHES}        teacher(**batch)\n"), []),
        (
            changed(LANGUAGE, "for ba", "@torch.inference_mode()\ndef run():\n    model(1)\nrun()\nfor ba"),
            [_MODE],
        ),
    ],
)  # fmt: skip
def test_inference_mode(script: str, expected: list[str]) -> None:
    assert _found(script) == expected
    assert _found(script, 2) == []


_OWN_MODULE = """\
class Head(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
"""
_OWN_OBJECT = """\
class Judge:
    def __init__(self, model):
        self.model = model
    def look(self):
        self.model(1)
"""
_TEACHER = "teacher = AutoModelForCausalLM.from_config(config)\n"


@pytest.mark.parametrize(
    ("lines", "is_found"),
    [
        (f"{_TEACHER}teacher(1)", True),
        (f"{_TEACHER}teacher.generate(1)", True),
        (f"{_TEACHER}teacher = prepare(teacher)\nteacher(1)", False),
        (f"{_TEACHER}wrap(teacher)\nteacher(1)", False),
        (f"{_TEACHER}", False),
        (f"with unset_deepspeed():\n    {_TEACHER}teacher(1)", False),
        ("teacher = torch.nn.Linear(2, 2)\nteacher(1)", False),
        (f"{_TEACHER}{_OWN_MODULE}head = accelerator.prepare(Head(teacher))\nteacher.generate(1)", False),
        (f"{_TEACHER}head = torch.nn.Sequential(teacher)\nteacher.generate(1)", False),
        (f"{_TEACHER}for m in [model, teacher]:\n    accelerator.prepare(m)\nteacher(1)", False),
        (f"{_TEACHER}[accelerator.prepare(m) for m in (teacher,)]\nteacher(1)", False),
        (f"{_TEACHER}heads = wrap([teacher])\nteacher(1)", False),
        (f"{_TEACHER}model.teacher = teacher\nteacher(1)", False),
        (f"{_TEACHER}{_OWN_OBJECT}Judge(teacher).look()", True),
    ],
)
def test_a_model_beside_the_engine(lines: str, is_found: bool) -> None:
    assert _found(ending(LANGUAGE, lines)) == (["zero3-model-needs-engine"] if is_found else [])
    assert _found(ending(LANGUAGE, lines), 2) == []


_PREPARES = "accelerator.prepare(AutoModelForCausalLM.from_config(config))"
_UNPREPARED = changed(INFERENCE, _PREPARES, "AutoModelForCausalLM.from_config(config)").replace(".module", "")
_NATIVE = (
    "import deepspeed\nengine, *_ = deepspeed.initialize(model=model, config='ds_config.json'{})\nengine(1)\n"
)


@pytest.mark.parametrize(
    ("script", "stages", "expected"),
    [
        (_UNPREPARED, (0, 1, 2), ["inference-model-not-prepared"]),
        (_UNPREPARED, (3,), ["zero3-model-needs-engine"]),
        (_UNPREPARED.replace("model.generate(", "zerofit.generate(model, "), (0, 1, 2, 3), []),
        (INFERENCE, (1, 2), ["zero12-needs-optimizer"]),
        (INFERENCE, (0, 3), []),
        (_NATIVE.format(""), (1, 2), ["zero12-needs-optimizer"]),
        (_NATIVE.format(""), (0, 3), []),
        (_NATIVE.format(", model_parameters=x"), (0, 1, 2, 3), []),
        (_NATIVE.format("") + "engine.backward(loss)\n", (0, 1, 2, 3), []),
    ],
)
def test_which_stage_an_inference_script_can_have(
    script: str, stages: tuple[int, ...], expected: list[str]
) -> None:
    assert [_found(script, stage) for stage in stages] == [expected] * len(stages)


_NEEDS_ZERO3 = "trainer-inference-needs-zero3"
_BEFORE = "zero3-evaluate-before-train"
_TRAINS = "trainer.train()\ntrainer.evaluate()\n"


@pytest.mark.parametrize(
    ("lines", "below", "at_zero3"),
    [
        ("trainer.predict(rows)\n", [_NEEDS_ZERO3], []),
        ("trainer.evaluate()\ntrainer.train()\n", [_NEEDS_ZERO3], [_BEFORE]),
        ("if first:\n    trainer.evaluate()\ntrainer.train()\n", [_NEEDS_ZERO3], [_BEFORE]),
        ("if arguments.do_train:\n    trainer.train()\ntrainer.evaluate()\n", [], []),
        ("if first:\n    trainer.evaluate()\n    sys.exit(0)\ntrainer.train()\n", [], []),
        ("if first:\n    trainer.evaluate()\nelse:\n    trainer.train()\n", [], []),
        ("if a.predict and not a.train:\n    trainer.predict(r)\nif a.train:\n    trainer.train()\n", [], []),
        ('if m == "eval":\n    trainer.evaluate()\nif m == "train":\n    trainer.train()\n', [], []),
        (
            'match m:\n    case "eval" | "test":\n        trainer.evaluate()\n'
            "    case _:\n        trainer.train()\n",
            [],
            [],
        ),
        (
            'def run():\n    if m == "eval":\n        trainer.evaluate()\n        return\n'
            '    elif m == "predict":\n        trainer.predict(r)\n        return\n'
            "    trainer.train()\nrun()\n",
            [],
            [],
        ),
        ("run(trainer)\ntrainer.evaluate()\n", [], []),
        ("if not arguments.deepspeed:\n    trainer.evaluate()\n", [], []),
    ],
)
def test_a_trainer_that_evaluates(lines: str, below: list[str], at_zero3: list[str]) -> None:
    script = changed(EVALUATES, _TRAINS, lines)
    assert [_found(script, stage) for stage in (0, 2, 3)] == [below, below, at_zero3]


@pytest.mark.parametrize(
    ("lines", "confidence"),
    [
        ("trainer.evaluate()\ntrainer.train()\n", "likely"),
        ("trainer.evaluate()\nif again:\n    trainer.train()\n", "likely"),
        ("if first:\n    trainer.evaluate()\n    trainer.train()\n", "likely"),
        ("if first:\n    trainer.evaluate()\ntrainer.train()\n", "possible"),
        ("for n in x:\n    if n:\n        trainer.train()\n    else:\n        trainer.evaluate()\n", None),
        (
            "for n in x:\n    if n:\n        trainer.evaluate()\n    else:\n        trainer.train()\n",
            "possible",
        ),
    ],
)
def test_how_sure_it_is_that_a_trainer_evaluates_before_it_trains(lines: str, confidence: str | None) -> None:
    situation = situation_of_script(changed(EVALUATES, _TRAINS, lines), zero(3))
    findings = check(situation, rules=ALL_RULES).findings
    assert [(finding.rule, finding.confidence) for finding in findings] == (
        [(_BEFORE, confidence)] if confidence else []
    )


_OWN_TRAINER = """\
from transformers import Trainer, TrainingArguments
class Mine(Trainer):
    {}
arguments = TrainingArguments("out", per_device_train_batch_size=2, max_grad_norm=0.0)
trainer = Mine(args=arguments)
trainer.train()
trainer.evaluate()
"""


@pytest.mark.parametrize(
    "method",
    [
        "def train(self):\n        return super().train()",
        "def look(self):\n        self.evaluate()",
        "def training_step(self):\n        pass",
    ],
)
def test_a_trainer_of_the_script(method: str) -> None:
    assert _found(_OWN_TRAINER.format(method), 2) == []
