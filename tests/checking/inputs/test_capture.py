"""Captured facts replace what the source shows; files and flags stay."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from captures import LOOP, TRAINER
from small_runs import PLAN

from zerofit.checking.engine import check
from zerofit.checking.inputs.capture import with_capture
from zerofit.checking.inputs.situations import situations
from zerofit.checking.inputs.strategy import situation_of_launch, situation_of_strategy
from zerofit.checking.rule import Severity
from zerofit.checking.rules import ALL_RULES
from zerofit.checking.situation import Situation
from zerofit.checking.targets import TargetFile, Targets
from zerofit.configs.document import FileKind
from zerofit.configs.schemas.catalog import load_schemas
from zerofit.configs.text.read import read_document
from zerofit.core.capture import Capture
from zerofit.core.command import Route
from zerofit.core.plan import Topology
from zerofit.core.setting import Confidence
from zerofit.core.strategy import Engine, OptimizerName, Precision, Strategy, ZeroStage

_OPAQUE_LOOP = """\
import make
from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps=make.steps(), mixed_precision=make.precision())
model, optimizer = accelerator.prepare(make.model(), make.optimizer())
"""
_OPAQUE_TRAINER = """\
import make
from transformers import Trainer, TrainingArguments
arguments = TrainingArguments(per_device_train_batch_size=make.size(), learning_rate=1e-3)
Trainer(model=make.model(), args=arguments).train()
"""


def _situation(script: str, deepspeed: dict[str, Any] | None = None, *arguments: str) -> Situation:
    files = [TargetFile(name="train.py", kind=FileKind.SCRIPT, source=script)]
    if deepspeed is not None:
        document = read_document(json.dumps(deepspeed), name="ds_config.json")
        files.append(TargetFile(name="ds_config.json", kind=FileKind.DEEPSPEED, document=document))
    targets = Targets(files=tuple(files), arguments=arguments, schemas=load_schemas())
    (situation,) = situations(targets)
    return situation


def _optimizer(class_path: str) -> Capture:
    return replace(LOOP, optimizers=(replace(LOOP.optimizers[0], class_path=class_path),))


def test_the_optimizer_is_known_for_certain() -> None:
    before = _situation(_OPAQUE_LOOP)
    after = with_capture(before, _optimizer("torch.optim.sgd.SGD"))
    assert before.settings.optimizer is None
    said = after.settings.optimizer
    assert said is not None
    assert (said.value, said.text, said.confidence) == ("torch.SGD", "the script's SGD", Confidence.CERTAIN)


def test_where_the_source_was_right_its_words_and_place_stay() -> None:
    source = "import torch\nfrom accelerate import Accelerator\noptimizer = torch.optim.SGD(params, lr=1)\n"
    before = _situation(source + "Accelerator().prepare(optimizer)\n").settings.optimizer
    after = with_capture(
        _situation(source + "Accelerator().prepare(optimizer)\n"), _optimizer("torch.optim.sgd.SGD")
    ).settings.optimizer
    assert before is not None
    assert before.confidence is Confidence.LIKELY
    assert after == replace(before, confidence=Confidence.CERTAIN)


def test_the_optimizer_of_a_deepspeed_file_or_of_a_flag_stays() -> None:
    file = {"optimizer": {"type": "AdamW"}}
    after = with_capture(_situation(_OPAQUE_LOOP, file), _optimizer("torch.optim.sgd.SGD"))
    assert after.settings.optimizer is not None
    assert after.settings.optimizer.value == "config.AdamW"
    strategy = Strategy(engine=Engine.DEEPSPEED, optimizer=OptimizerName.ADAFACTOR)
    flags = situation_of_strategy(strategy, topology=Topology())
    assert with_capture(flags, LOOP).settings.optimizer == flags.settings.optimizer


def test_several_optimizers_leave_open_which_one_is_meant() -> None:
    before = _situation(_OPAQUE_LOOP)
    assert with_capture(before, replace(LOOP, optimizers=LOOP.optimizers * 2)).settings.optimizer is None


@pytest.mark.parametrize(
    ("capture", "deepspeed", "precision"),
    [
        (LOOP, None, None),
        (replace(LOOP, mixed_precision="bf16"), None, Precision.BF16),
        (replace(LOOP, mixed_precision="bf16"), {"bf16": {"enabled": "auto"}}, Precision.BF16),
        (replace(LOOP, mixed_precision="bf16"), {"fp16": {"enabled": True}}, Precision.FP16),
    ],
)
def test_precision(capture: Capture, deepspeed: dict[str, Any] | None, precision: Precision | None) -> None:
    said = with_capture(_situation(_OPAQUE_LOOP, deepspeed), capture).settings.precision
    assert said is not None
    assert said.value is precision


def test_the_keywords_of_accelerator_are_as_they_came_out() -> None:
    before = _situation(_OPAQUE_LOOP)
    after = with_capture(before, replace(LOOP, mixed_precision="bf16"))
    assert before.script is not None
    assert before.script.accelerator_keywords == ()
    assert after.script is not None
    assert [(one.text, one.place.line) for one in after.script.accelerator_keywords] == [
        ("gradient_accumulation_steps=2", 3),
        ("mixed_precision='bf16'", 3),
    ]


def test_a_default_that_came_out_is_no_keyword() -> None:
    after = with_capture(_situation(_OPAQUE_LOOP), replace(LOOP, gradient_accumulation_steps=1))
    assert after.script is not None
    assert after.script.accelerator_keywords == ()


def test_fields_of_training_arguments_that_only_running_shows() -> None:
    before = _situation(_OPAQUE_TRAINER)
    arguments = {
        "per_device_train_batch_size": 16,
        "learning_rate": 1e-3,
        "bf16": True,
        "warmup_steps": 0,
        "deepspeed": None,
        "logging_steps": 500,
    }
    trainer = with_capture(before, replace(TRAINER, trainer_arguments=arguments)).trainer
    assert before.trainer is not None
    assert before.trainer.unread == {"per_device_train_batch_size"}
    assert trainer is not None
    assert {name: said.value for name, said in trainer.said.items()} == {
        "per_device_train_batch_size": 16,
        "learning_rate": 1e-3,
        "bf16": True,
    }
    assert {said.confidence for said in trainer.said.values()} == {Confidence.CERTAIN}
    assert (trainer.unread, trainer.is_complete) == (frozenset(), True)
    assert (
        trainer.said["per_device_train_batch_size"].text == "TrainingArguments.per_device_train_batch_size=16"
    )


def test_the_route_is_the_one_that_was_taken() -> None:
    assert with_capture(_situation(_OPAQUE_LOOP), TRAINER).route is Route.TRAINER


def _rules(situation: Situation) -> set[str]:
    return {finding.rule for finding in check(situation, rules=ALL_RULES).findings}


@pytest.mark.parametrize(
    ("script", "deepspeed", "capture", "rule"),
    [
        (_OPAQUE_LOOP, {"zero_optimization": {"stage": 2}}, LOOP, "accumulation-not-in-deepspeed-file"),
        (
            _OPAQUE_LOOP,
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            _optimizer("torch.optim.sgd.SGD"),
            "offload-needs-adam",
        ),
        (
            _OPAQUE_TRAINER,
            {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}},
            TRAINER,
            "trainer-values-differ",
        ),
    ],
)
def test_rules_find_what_the_source_does_not_show(
    script: str, deepspeed: dict[str, Any], capture: Capture, rule: str
) -> None:
    before = _situation(script, deepspeed)
    assert rule not in _rules(before)
    assert rule in _rules(with_capture(before, capture))


_WITH_TEACHER = """\
from accelerate import Accelerator
from transformers import AutoModel
accelerator = Accelerator()
teacher = AutoModel.from_pretrained("bert")
model, optimizer = accelerator.prepare(make_model(), make_optimizer())
teacher(1)
"""


@pytest.mark.parametrize(
    ("unprepared", "is_launched", "is_found"),
    [
        (("BertModel",), True, False),  # the ranks keep it whole
        (("BertModel",), False, True),
        ((LOOP.model.class_path.rpartition(".")[2],), True, True),  # of the trained model's class
        ((), True, True),  # made behind what the capture saw
    ],
)
def test_a_launch_warns_of_a_model_left_alone_only_where_it_stays_so(
    unprepared: tuple[str, ...], is_launched: bool, is_found: bool
) -> None:
    before = _situation(_WITH_TEACHER, {"zero_optimization": {"stage": 3}})
    after = with_capture(before, replace(LOOP, unprepared_models=unprepared), is_launched=is_launched)
    rules = [finding.rule for finding in check(after, rules=ALL_RULES).findings]
    assert ("zero3-model-needs-engine" in rules) == is_found


_SAVES = """\
from accelerate import Accelerator
from transformers import AutoModel
accelerator = Accelerator()
model = accelerator.prepare(AutoModel.from_pretrained("bert"))
{}accelerator.unwrap_model(model).{}
"""
_UNGATHERED = "zero3-save-needs-gathered-weights"


@pytest.mark.parametrize(
    ("condition", "saves", "severity"),
    [
        ("", "save_pretrained('out')", None),
        ("if accelerator.is_main_process: ", "save_pretrained('out')", Severity.ERROR),
        ("if accelerator.is_main_process: ", "state_dict()", Severity.ERROR),
        ("", "state_dict()", Severity.ERROR),
    ],
)
def test_a_launch_refuses_what_saves_no_weights_under_zero3(
    condition: str, saves: str, severity: Severity | None
) -> None:
    script = TargetFile(name="train.py", kind=FileKind.SCRIPT, source=_SAVES.format(condition, saves))
    strategy = Strategy(engine=Engine.DEEPSPEED, zero_stage=ZeroStage.PARAMETERS)
    targets = Targets(files=(script,), schemas=load_schemas())
    situation = situation_of_launch(replace(PLAN, strategy=strategy), machine=None, targets=targets)
    found = [one for one in check(situation, rules=ALL_RULES).findings if one.rule == _UNGATHERED]
    assert [one.severity for one in found] == ([] if severity is None else [severity])
    # Without hooks, as accelerate launches it, all ranks save placeholders.
    assert _UNGATHERED in _rules(_situation(_SAVES.format("", saves), {"zero_optimization": {"stage": 3}}))
