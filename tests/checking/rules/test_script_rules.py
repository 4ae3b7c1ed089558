"""The rules of scripts: each on small sources, and none where the source gives no reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from rule_examples import EXAMPLES
from rule_examples.example import (
    EVALUATES,
    LANGUAGE,
    LOADED,
    SMALL,
    ZERO2_LAUNCH,
    Example,
    changed,
    ending,
    zero,
)
from rule_situations import situation_of_example, situation_of_script, wrong_in

from zerofit.checking.engine import check
from zerofit.checking.rule import Rule
from zerofit.checking.rules.script import generation as script_generation
from zerofit.checking.rules.script import inference as script_inference
from zerofit.checking.rules.script import loop as script_loop
from zerofit.checking.rules.script import order as script_order
from zerofit.checking.rules.script import ranks as script_ranks
from zerofit.checking.situation import Situation
from zerofit.core.plan import Topology

_RULES = (
    *script_ranks.RULES,
    *script_order.RULES,
    *script_loop.RULES,
    *script_generation.RULES,
    *script_inference.RULES,
)


def _found(script: str, deepspeed: Any) -> list[tuple[str, str]]:
    findings = check(situation_of_script(script, deepspeed), rules=_RULES).findings
    return [(finding.rule, finding.found) for finding in findings]


_WRONG_AT_STAGE_0_TOO = {
    # A Trainer that evaluates first is refused below ZeRO-3 for another reason than at ZeRO-3.
    "zero3-evaluate-before-train": ("trainer-inference-needs-zero3",),
    # The file that is given at stage 0 has no scheduler that the example's placeholder could stand for.
    "dummy-scheduler-argument-ignored": ("dummy-scheduler-needs-section",),
}


def _wrong_at_stage_0(rule: Rule) -> Iterator[str]:
    script = EXAMPLES[rule.id].bad.script
    assert script is not None
    found = {found_rule for found_rule, _ in _found(script, zero(0))}
    if others := found - {rule.id, *_WRONG_AT_STAGE_0_TOO.get(rule.id, ())}:
        yield f"its bad script breaks {sorted(others)} at stage 0"


def test_at_stage_0_a_bad_script_is_wrong_for_no_other_reason() -> None:
    assert wrong_in(_RULES, _wrong_at_stage_0) == []


@pytest.mark.parametrize(("rule", "others"), _WRONG_AT_STAGE_0_TOO.items())
def test_each_other_reason_at_stage_0_is_there(rule: str, others: tuple[str, ...]) -> None:
    script = EXAMPLES[rule].bad.script
    assert script is not None
    assert {found for found, _ in _found(script, zero(0))} - {rule} == set(others)


@pytest.mark.parametrize("script", [SMALL, LANGUAGE, LOADED, EVALUATES])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nothing_is_wrong_with_what_examples_start_from(script: str, stage: int) -> None:
    assert _found(script, zero(stage)) == []


def _main(line: str, script: str = LANGUAGE) -> str:
    return ending(script, f"if accelerator.is_main_process:\n    {line}")


_UNDER = "under `accelerator.is_main_process`"
_AT_ZERO3 = "zero3-weights-need-all-ranks"
_UNGATHERED = "zero3-save-needs-gathered-weights"
_TRAINER = """\
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
arguments = TrainingArguments("out")
model = AutoModelForCausalLM.from_pretrained("gpt2")
trainer = Trainer(model=model, args=arguments)
trainer.train()
"""


def _pipeline(made: str, *, where: str = "if accelerator.is_main_process:") -> str:
    """Return a script that trains a UNet of diffusers and draws samples from it, as its examples do."""
    return f"""\
from accelerate import Accelerator
from diffusers import DDPMPipeline, UNet2DModel
accelerator = Accelerator()
model = UNet2DModel.from_config(UNet2DModel.load_config("unet"))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    accelerator.backward(model(batch).sample.mean())
{where}
    unet = accelerator.unwrap_model(model)
    pipeline = {made}.to("cuda")
    images = pipeline(steps=2)
"""


@pytest.mark.parametrize(
    ("script", "stage", "expected"),
    [
        (_main("model(**batch)"), 3, [(_AT_ZERO3, f"model(**batch) {_UNDER}")]),
        (_main("model(**batch)"), 2, []),
        (_main("accelerator.unwrap_model(model).generate(x)"), 2, []),
        (
            _main("accelerator.get_state_dict(model)"),
            3,
            [(_AT_ZERO3, f"accelerator.get_state_dict(model) {_UNDER}")],
        ),
        (
            _main("accelerator.save_model(model, 'out')"),
            3,
            [(_AT_ZERO3, f"accelerator.save_model(model, 'out') {_UNDER}")],
        ),
        (
            _main("model.save_checkpoint('out')"),
            1,
            [("deepspeed-checkpoint-needs-all-ranks", f"model.save_checkpoint('out') {_UNDER}")],
        ),
        (
            _main("accelerator.gather(loss)"),
            0,
            [("all-ranks-must-meet", f"accelerator.gather(loss) {_UNDER}")],
        ),
        (
            ending(LANGUAGE, "def f():\n    if not is_main_process():\n        return\n    model(1)\nf()"),
            3,
            [(_AT_ZERO3, "model(1) if `not is_main_process()` is false")],
        ),
        (_main("teacher(batch)"), 3, []),
        (_main("tokenizer.save_pretrained('out')"), 3, []),
        (
            ending(LANGUAGE, "if zero_stage != 3 and rank == 0:\n    model(1)"),
            3,
            [],
        ),
        (
            f"{_TRAINER}if trainer.is_world_process_zero():\n    trainer.evaluate()\n",
            1,
            [("all-ranks-must-meet", "trainer.evaluate() under `trainer.is_world_process_zero()`")],
        ),
        (
            f"{_TRAINER}if trainer.is_world_process_zero():\n    trainer.save_state()\n",
            3,
            [],
        ),
        (f"{_TRAINER}trainer.save_model()\n", 3, []),
        (
            f"{_TRAINER}model.save_pretrained('out')\n",
            3,
            [(_UNGATHERED, "model.save_pretrained('out') without state_dict=")],
        ),
        (f"{_TRAINER}model.save_pretrained('out')\n", 2, []),
        (_pipeline("DDPMPipeline(unet=unet)"), 3, [(_AT_ZERO3, f"pipeline(steps=2) {_UNDER}")]),
        (
            _pipeline("DDPMPipeline.from_pretrained('x', unet=unet)"),
            3,
            [(_AT_ZERO3, f"pipeline(steps=2) {_UNDER}")],
        ),
        (_pipeline("DDPMPipeline(unet=unet)"), 2, []),
        (_pipeline("DDPMPipeline.from_pretrained('x')"), 3, []),
        (_pipeline("DDPMPipeline(unet=unet)", where="if True:"), 3, []),
    ],
)  # fmt: skip
def test_ranks(script: str, stage: int, expected: list[tuple[str, str]]) -> None:
    assert _found(script, zero(stage)) == expected


@pytest.mark.parametrize(
    ("script", "saves"),
    [
        (_TRAINER, "the Trainer's save_model()"),
        (
            "import deepspeed\nmodel, *_ = deepspeed.initialize(None, model)\n",
            "the engine's save_16bit_model()",
        ),
    ],
)
def test_whole_weights_are_saved_by_what_the_script_has(script: str, saves: str) -> None:
    situation = situation_of_script(f"{script}model.state_dict()\n", zero(3))
    fixes = [one.fix for one in check(situation, rules=_RULES).findings if one.rule == _UNGATHERED]
    assert fixes == [f"call {saves}, which gathers them, on every rank"]


_PREFIX = """\
from peft import PrefixTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
arguments = TrainingArguments("out"{argument})
model = AutoModelForCausalLM.from_pretrained("gpt2")
{config}
{switch}
trainer = Trainer(model=get_peft_model(model, config), args=arguments)
trainer.train()
"""
_MAKES = "config = PrefixTuningConfig()"
_SWITCHES = "model.gradient_checkpointing_enable()"


@pytest.mark.parametrize(
    ("parts", "found"),
    [
        ({"switch": _SWITCHES}, [(f"{_SWITCHES} with PrefixTuningConfig()", "likely")]),
        (
            {"argument": ", gradient_checkpointing=True"},
            [("PrefixTuningConfig() with gradient_checkpointing=True", "likely")],
        ),
        (
            {"argument": ", activation_checkpointing=True"},
            [("PrefixTuningConfig() with activation_checkpointing=True", "likely")],
        ),
        ({"argument": ", gradient_checkpointing=False"}, []),
        ({}, []),
        ({"config": "config = LoraConfig()", "switch": _SWITCHES}, []),
        (
            {"config": f"if kind == 'prefix':\n    {_MAKES}", "switch": _SWITCHES},
            [(f"{_SWITCHES} with PrefixTuningConfig()", "possible")],
        ),
    ],
)
@pytest.mark.parametrize("deepspeed", [None, zero(2)])
def test_prefix_tuning_beside_gradient_checkpointing(
    deepspeed: Any, parts: dict[str, str], found: list[tuple[str, str]]
) -> None:
    script = _PREFIX.format(**{"argument": "", "config": _MAKES, "switch": "", **parts})
    (rule,) = [rule for rule in script_loop.RULES if rule.id == "prefix-tuning-without-checkpointing"]
    findings = check(situation_of_script(script, deepspeed), rules=(rule,)).findings
    assert [(one.found, one.confidence.value) for one in findings] == found


_LOADS_ADAPTERS = """\
import peft
from peft import AutoPeftModelForCausalLM, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Trainer
base = AutoModelForCausalLM.from_pretrained("gpt2")
model = {model}
{more}
trainer = Trainer(model=model)
trainer.{runs}()
"""
_LOAD = 'PeftModel.from_pretrained(base, "adapters")'


@pytest.mark.parametrize(
    ("parts", "is_found"),
    [
        ({}, True),
        ({"model": 'AutoPeftModelForCausalLM.from_pretrained("adapters")'}, True),
        ({"model": 'PeftModel.from_pretrained(load(), "adapters", is_trainable=False)'}, True),
        ({"more": "model = model.to('cuda')"}, True),
        ({"model": 'PeftModel.from_pretrained(base, "adapters", is_trainable=True)'}, False),
        ({"model": 'PeftModel.from_pretrained(base, "adapters", is_trainable=args.train)'}, False),
        ({"model": 'PeftModel.from_pretrained(base, "adapters", **more)'}, False),
        ({"model": 'PeftModel.from_pretrained(base, "adapters", "default", True)'}, False),
        ({"model": f"{_LOAD} if args.resume else get_peft_model(base, config)"}, False),
        ({"more": "model = model.merge_and_unload()"}, False),
        ({"more": "model = get_peft_model(model, config)"}, False),
        ({"more": "for one in model.parameters():\n    one.requires_grad = True"}, False),
        ({"more": "unfreeze(model)"}, False),
        ({"runs": "evaluate"}, False),
        ({"model": "base"}, False),
    ],
)
def test_adapters_that_were_loaded_frozen(parts: dict[str, str], is_found: bool) -> None:
    script = _LOADS_ADAPTERS.format(**{"model": _LOAD, "more": "", "runs": "train", **parts})
    (rule,) = [rule for rule in script_loop.RULES if rule.id == "adapters-loaded-frozen"]
    assert bool(check(situation_of_script(script, None), rules=(rule,)).findings) is is_found


_EVALUATES_FROZEN = """\
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Trainer
model = get_peft_model(AutoModelForCausalLM.from_pretrained("gpt2"), config)
Trainer(model=model, args=args).train()
best = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("gpt2"), "out")
trainer = Trainer(model=best, args=args)
trainer.evaluate()
"""
_PREPARES_FROZEN = """\
import torch
from accelerate import Accelerator
from peft import PeftModel
from transformers import AutoModelForCausalLM
accelerator = Accelerator()
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("gpt2"), "out")
head = torch.nn.Linear(8, 2)
optimizer = torch.optim.AdamW(head.parameters())
model, head, optimizer = accelerator.prepare(model, head, optimizer)
accelerator.backward(head(model(batch)).loss)
"""


@pytest.mark.parametrize(
    ("script", "is_found"),
    [
        (_EVALUATES_FROZEN, False),
        (changed(_EVALUATES_FROZEN, "trainer.evaluate()", "trainer.train()"), True),
        (_PREPARES_FROZEN, False),
        (changed(_PREPARES_FROZEN, "(model, head, optimizer)", "(model, optimizer)"), True),
    ],
)
def test_frozen_adapters_beside_what_trains(script: str, is_found: bool) -> None:
    (rule,) = [rule for rule in script_loop.RULES if rule.id == "adapters-loaded-frozen"]
    assert bool(check(situation_of_script(script, None), rules=(rule,)).findings) is is_found


_ADAPTED = """\
from accelerate import Accelerator
from peft import get_peft_model
from transformers import AutoModelForCausalLM
accelerator = Accelerator()
model = accelerator.prepare(get_peft_model(AutoModelForCausalLM.from_pretrained("gpt2"), config))
"""
_OWN_TRAINER = """\
from transformers import Trainer
class Mine(Trainer):
    def _save(self, folder, state_dict=None):
        state_dict = state_dict or self.model.state_dict()
        self.model.save_pretrained(folder)
"""


@pytest.mark.parametrize(
    "script",
    [
        _OWN_TRAINER,
        _ADAPTED + "model.save_pretrained('out')\n",
        _ADAPTED + "accelerator.unwrap_model(model).save_pretrained('out')\n",
        _TRAINER.replace("args=arg", "peft_config=x, args=arg") + "trainer.model.save_pretrained('out')\n",
        ending(LANGUAGE, "with deepspeed.zero.GatheredParameters(x):\n    model.state_dict()").replace(
            "import torch\n", "import deepspeed\nimport torch\n", 1
        ),
        ending(LANGUAGE, "accelerator.unwrap_model(model).save_pretrained('out', **arguments)"),
        changed(LANGUAGE, "optimizer = torch", "model.save_pretrained('fresh')\noptimizer = torch"),
        changed(LANGUAGE, "from_config(config)", "from_pretrained('gpt2', device_map=None)"),
        changed(LANGUAGE, "from_config(config)", "from_pretrained('gpt2', device_map=device_map)"),
        changed(
            LOADED, "accelerator = Accelerator()\n", "accelerator = Accelerator()\nLlamaForCausalLM(config)\n"
        ),
        "from transformers import AutoModel\nmodel = AutoModel.from_pretrained('x', device_map='auto')\n",
        "from accelerate import Accelerator\ndef f(model):\n    Accelerator().prepare(model)\n",
    ],
)
def test_no_alarm_at_zero3(script: str) -> None:
    assert _found(script, zero(3)) == []


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        (4, ["accelerator.backward(loss) outside accumulate(), with gradient_accumulation_steps=4"]),
        (1, []),
        ("auto", []),
    ],
)
def test_accumulation(steps: object, found: list[str]) -> None:
    expected = [("accumulation-needs-accumulate", text) for text in found]
    assert _found(SMALL, zero(1, gradient_accumulation_steps=steps)) == expected


def _clips(norm: str, before: str = "") -> str:
    step = f"    accelerator.clip_grad_norm_(model.parameters(), {norm})\n    optimizer.step()\n"
    return before + changed(SMALL, "    optimizer.step()\n", step)


_CLIP = "accelerator.clip_grad_norm_(model.parameters(), "
_PARSER = 'parser.add_argument("--norm", type=float, default=0.5)\n'


@pytest.mark.parametrize(
    ("script", "clipping", "found"),
    [
        (_clips("0.5"), 1.0, [f"{_CLIP}0.5) with gradient_clipping=1.0"]),
        (_clips("0.5"), "auto", [f"{_CLIP}0.5) with the default of 1.0"]),
        (_clips("0.5"), 0.5, []),
        (_clips("1"), 1.0, []),
        (_clips("norm"), 1.0, []),
        (_clips("args.norm", _PARSER), 0.5, []),
        (_clips("args.norm", _PARSER), 1, [f"{_CLIP}args.norm) (0.5 by default) with gradient_clipping=1"]),
    ],
)  # fmt: skip
def test_clipping(script: str, clipping: object, found: list[str]) -> None:
    expected = [("deepspeed-clips-by-its-own", text) for text in found]
    assert _found(script, zero(1, gradient_clipping=clipping)) == expected


def test_what_is_unknown_without_settings() -> None:
    verdict = check(situation_of_script(_main("model(**batch)"), None), rules=_RULES)
    assert verdict.findings == ()
    assert [(item.rule, item.fact) for item in verdict.unknown] == [(_AT_ZERO3, "the engine")]
    assert check(situation_of_script(LANGUAGE, None), rules=_RULES).unknown == ()


def test_a_finding_about_a_script_is_a_warning_with_its_place() -> None:
    situation = situation_of_script(_main("model(**batch)"), zero(3))
    (finding,) = check(situation, rules=_RULES).findings
    assert (str(finding.severity), str(finding.confidence), str(finding.place)) == (
        "warning", "likely", "train.py:22",
    )  # fmt: skip


def test_without_a_script_nothing_is_found_or_unknown() -> None:
    verdict = check(Situation(), rules=_RULES)
    assert (verdict.findings, verdict.unknown) == ((), ())


def _backward(lines: str, script: str = SMALL) -> str:
    return changed(script, "    accelerator.backward(loss)\n", f"    {lines}\n")


@pytest.mark.parametrize(
    ("script", "found"),
    [
        (_backward("loss.backward()"), ["loss.backward()"]),
        (_backward("loss.backward(retain_graph=True)"), ["loss.backward(retain_graph=True)"]),
        (_backward("(loss / 2).backward()"), ["(loss / 2).backward()"]),
        (_backward("loss.backward()\n    model.step()"), []),
        (_backward("if accelerator.distributed_type != 'DEEPSPEED':\n        loss.backward()"), []),
        (_backward("loss.backward()\n    accelerator.backward(loss)"), []),
        (_backward("trainer.backward(loss)"), []),
        (
            _backward("loss.backward()").replace("accelerator.prepare(model, optimizer", "prepare(model, x"),
            [],
        ),
        (ending(SMALL, "probe(torch.ones(1)).backward()"), []),
    ],
)
def test_backward_past_the_accelerator(script: str, found: list[str]) -> None:
    for stage in (0, 1, 2, 3):
        expected = [("backward-through-accelerator", text) for text in found]
        assert _found(script, zero(stage)) == expected


_LOADS = 'AutoModelForCausalLM.from_pretrained("model"'
_EARLY = changed(
    LOADED,
    f"accelerator = Accelerator()\nmodel = {_LOADS})\n",
    f"model = {_LOADS})\naccelerator = Accelerator()\n",
)


@pytest.mark.parametrize(
    ("device_map", "ranks", "stage", "expected"),
    [
        ("'auto'", None, 2, ["device-map-not-on-ranks"]),
        ("'balanced'", Topology(world_size=8), 0, ["device-map-not-on-ranks"]),
        ("'auto'", Topology(world_size=8), 3, ["zero3-device-map"]),
        ("{'model': 0, 'lm_head': 1}", Topology(world_size=1), 1, ["device-map-not-on-ranks"]),
        ("'auto'", Topology(world_size=1), 2, []),
        ("'auto'", Topology(world_size=2, num_nodes=2), 2, []),
        ("'auto'", Topology(world_size=2, on_cpu=True), 2, []),
        ("{'': accelerator.process_index}", None, 2, []),
        ("{'model': 0, 'lm_head': 0}", None, 2, []),
        ("'cpu'", None, 2, []),
        ("'sequential'", None, 2, []),
        ("None", None, 2, []),
        ("args.device_map", None, 2, []),
    ],
)
def test_device_map(device_map: str, ranks: Topology | None, stage: int, expected: list[str]) -> None:
    script = changed(LOADED, f"{_LOADS})", f"{_LOADS}, device_map={device_map})")
    situation = replace(situation_of_script(script, zero(stage)), topology=ranks)
    assert [finding.rule for finding in check(situation, rules=_RULES).findings] == expected


_MAPPED = changed(LOADED, f"{_LOADS})", f'{_LOADS}, device_map="auto")')
_ZERO3_LAUNCH = {**ZERO2_LAUNCH, "deepspeed_config": {"zero_stage": 3}}


def _indented(script: str, before: str) -> str:
    """Return a script with its model created under a condition, or inside another block."""
    return changed(script, "model = AutoModel", f"{before}\n    model = AutoModel")


@pytest.mark.parametrize(
    ("script", "layers", "confidence"),
    [
        (_MAPPED, {"deepspeed": zero(3)}, "certain"),
        (_MAPPED, {"accelerate": _ZERO3_LAUNCH}, "certain"),
        (_MAPPED, {"command": "accelerate launch --use_deepspeed --zero_stage 3"}, "certain"),
        (changed(_MAPPED, '"auto"', "{'': 0}"), {"deepspeed": zero(3)}, "certain"),
        (_indented(_MAPPED, "with report():"), {"deepspeed": zero(3)}, "certain"),
        (_indented(_MAPPED, "if args.maps:"), {"deepspeed": zero(3)}, "likely"),
        (_indented(_MAPPED, "for _ in sizes:"), {"deepspeed": zero(3)}, "likely"),
    ],
)
def test_device_map_is_certainly_refused(script: str, layers: dict[str, Any], confidence: str) -> None:
    findings = check(situation_of_example(Example(script=script, **layers)), rules=_RULES).findings
    assert [(found.rule, str(found.confidence)) for found in findings] == [("zero3-device-map", confidence)]


_PREPARES = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"


def _prepares(*lines: str, loader: str = "batch_size=2") -> str:
    script = changed(SMALL, _PREPARES, "\n".join(lines) or _PREPARES)
    return changed(script, "DataLoader(torch.randn(32, 8), batch_size=2)", f"DataLoader(data, {loader})")


_APART = ("model, optimizer = accelerator.prepare(model, optimizer)", "loader = accelerator.prepare(loader)")


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (_prepares(), []),
        (_prepares(*_APART), ["accelerator.prepare(model, optimizer) without a DataLoader"]),
        (_prepares(*_APART[::-1]), ["accelerator.prepare(model, optimizer) without a DataLoader"]),
        (_prepares(_PREPARES, "other = accelerator.prepare(torch.optim.SGD(model.parameters()))"), []),
        (_prepares("model, loader = accelerator.prepare(*both)", *_APART), []),
        (_prepares("model, optimizer, loader = accelerator.prepare(model, optimizer, load())"), []),
        (_prepares("if apart:", f"    {_APART[0]}"), []),
        (_prepares('config["train_micro_batch_size_per_gpu"] = 2', *_APART), []),
        (_prepares(*_APART).replace("Accelerator()", "Accelerator(deepspeed_plugin=make())"), []),
        *(
            (_prepares(loader=loader), [f"DataLoader(data, {loader}) without a batch_size, in prepare()"])
            for loader in ("batch_sampler=sampler", "batch_size=None")
        ),
        *(
            (_prepares(loader=loader), [])
            for loader in ("2, batch_sampler=sampler", "batch_sampler=sampler, batch_size=4", "**more")
        ),
        (_prepares(loader="batch_sampler=None"), []),
    ],
)
def test_what_prepare_takes_the_micro_batch_size_from(script: str, expected: list[str]) -> None:
    auto = zero(2, train_micro_batch_size_per_gpu="auto")
    assert _found(script, auto) == [("prepare-needs-batch-size", text) for text in expected]
    assert _found(script, zero(2)) == []


@pytest.mark.parametrize(
    ("more", "is_found"),
    [({}, True), ({"deepspeed_config": {"deepspeed_config_file": "missing.json"}}, False)],
)
def test_without_a_deepspeed_file_the_micro_batch_size_is_the_loaders(
    more: dict[str, Any], is_found: bool
) -> None:
    example = Example(accelerate={**ZERO2_LAUNCH, **more}, script=_prepares(*_APART))
    found = [finding.rule for finding in check(situation_of_example(example), rules=_RULES).findings]
    assert found == ["prepare-needs-batch-size"] * is_found


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (Topology(world_size=2), ["device-map-not-on-ranks"]),
        (Topology(world_size=2, on_cpu=True), []),
        (Topology(world_size=1), []),
        (None, []),
    ],
)
def test_without_deepspeed_a_device_map_is_refused_on_several_ranks(
    ranks: Topology | None, expected: list[str]
) -> None:
    script = changed(LOADED, f"{_LOADS})", f"{_LOADS}, device_map='auto')")
    situation = replace(situation_of_script(script, None), topology=ranks)
    assert [finding.rule for finding in check(situation, rules=_RULES).findings] == expected


def test_device_map_of_a_model_made_before_zero3_is_known() -> None:
    script = changed(_EARLY, f"{_LOADS})", f"{_LOADS}, device_map='auto')")
    assert [rule for rule, _ in _found(script, zero(3))] == [
        "device-map-not-on-ranks",
        "zero3-model-made-too-early",
    ]
