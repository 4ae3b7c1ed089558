"""Strategy fields that a script pins, with the reasons, and those that it leaves open."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from captured_scripts import capture, captured_problem, optimizer, trainer
from planning_problems import model, spec_of

from zerofit.checking.constraints import constraints_of
from zerofit.checking.engine import check
from zerofit.checking.inputs.capture import with_capture
from zerofit.checking.inputs.strategy import situation_of_strategy
from zerofit.checking.rule import ACCELERATE
from zerofit.checking.rules import LIMITS
from zerofit.core.capture import Capture
from zerofit.core.errors import UserError
from zerofit.core.freezing import FROZEN_EMBEDDINGS, FROZEN_LAYERS
from zerofit.core.plan import Topology
from zerofit.core.setting import Place, Said
from zerofit.core.strategy import (
    Engine,
    Lora,
    OffloadDevice,
    OptimizerName,
    Precision,
    Quantization,
    Strategy,
    ZeroStage,
)
from zerofit.planning.candidates import candidates
from zerofit.planning.options import Allow
from zerofit.planning.run_spec import RunSpec
from zerofit.planning.search import placement_of

_SGD = optimizer("torch.optim.sgd.SGD", momentum=0.9)
_QLORA = spec_of(
    quantization=Said(value=Quantization.NF4, text="--qlora"), lora=Said(value=Lora(), text="--qlora")
)
_IN_A_FILE = Said(value=ZeroStage.GRADIENTS, text="", place=Place(file="ds_config.json", line=4))
_DIVISORS = (8, 4, 2, 1)
_TRL_OVERRIDES = ("compute_loss", "prediction_step", "training_step")
"""Of SFTTrainer and DPOTrainer (trl 1.16)."""
_TRAINED = capture().model.facts.num_trainable_parameters
_NOT_KEPT = "the script has {}=True, which no replacement optimizer supports"
_LOADER, _LENGTHS = capture().loader, capture().lengths
assert _LOADER
assert _LENGTHS
_NUM_SEEN = sum(len(batch.lengths) for batch in capture().batches)
_MY_NET = capture(model_is_transformers=False, model_class_path="train.MyNet")


_BATCH, _STEPS = "micro_batch_size", "gradient_accumulation_steps"
_SPLIT = "the script's batches of 8 samples are split in equal parts inside the forward pass"
_COMPARED = "the losses of sentence-transformers compare the samples of a batch with each other"
_MIXED = "bn of the model compute over all samples of a batch"
_OWN_STEP = ("training_step", "_inner_training_loop")
_WITHOUT_DEEPSPEED = (Engine.NATIVE, Engine.FSDP2)
_ONE_OPTIMIZER = "DeepSpeed's engine steps one optimizer, and the script"
_NOT_PREPARED = "DeepSpeed's engine has to step the optimizer, and the script's does not go through prepare()"
_NOT_PARTITIONED = (ZeroStage.NOTHING, ZeroStage.OPTIMIZER_STATES, ZeroStage.GRADIENTS)
_CAPTURED_MODEL = "sentence_transformers.SentenceTransformer.SentenceTransformer"


def _trl(name: str, overrides: tuple[str, ...] = _TRL_OVERRIDES) -> Capture:
    return trainer(trainer_overrides=overrides, trainer_class=name)


def _steps_with(*optimizers: Any) -> Capture:
    return capture(optimizers=optimizers)


@pytest.mark.parametrize(
    ("captured", "field", "values", "why"),
    [
        (capture(), _BATCH, _DIVISORS, _SPLIT),
        (trainer(model_passes_num_items=False), _BATCH, _DIVISORS, _SPLIT),
        (trainer(loader=replace(_LOADER, draws_random=True)), _BATCH, _DIVISORS, _SPLIT),
        (capture(), _STEPS, (2, 4, 8, 16), _SPLIT),
        (capture(splits_batches=True), _BATCH, (4, 2, 1), _SPLIT.replace("8", "4")),
        (
            capture(model_mixes_samples=("bn1", "bn2", "bn3", "bn4", "bn5")),
            _BATCH,
            (8,),
            "bn1, bn2, bn3 and 2 more of the model compute over all samples of a batch",
        ),
        (trainer(model_mixes_samples=("bn",)), _STEPS, (2,), _MIXED),
        (capture(whole_because="it draws"), _BATCH, (8,), "it draws"),
        (trainer(whole_because="it draws", model_passes_num_items=False), _BATCH, (8,), "it draws"),
        (capture(accumulates_by_hand=4, model_mixes_samples=("bn",)), _STEPS, (8,), _MIXED),
        (_trl("train.MyTrainer", _OWN_STEP[:1]), _BATCH, (8,), "MyTrainer has its own training_step"),
        (_trl("trl.trainer.sft_trainer.SFTTrainer"), _BATCH, _DIVISORS, _SPLIT),
        (_trl("trl.trainer.grpo_trainer.GRPOTrainer"), _BATCH, (8,), "GRPOTrainer has its own training_step"),
        (_trl("trl.SFTTrainer", _OWN_STEP), _BATCH, (8,), "SFTTrainer has its own _inner_training_loop"),
        (_trl("train.SFTTrainer"), _BATCH, (8,), "SFTTrainer has its own training_step"),
        (_trl("sentence_transformers.trainer.MyTrainer", ("compute_loss",)), _BATCH, (8,), _COMPARED),
        (trainer(trainer_class="train.A", model_class_path=_CAPTURED_MODEL), _BATCH, (8,), _COMPARED),
        (
            capture(micro_batch_size=None),
            _BATCH,
            (None,),
            "the size of the script's batches is unknown",
        ),
        (
            capture(model_can_checkpoint=False, model_class_path="train.MyNet"),
            "gradient_checkpointing",
            (False,),
            "MyNet does not support gradient checkpointing",
        ),
        (capture(model_checkpoints=True), "gradient_checkpointing", (True,), "the script enables it"),
        (
            capture(num_models=2),
            "engine",
            _WITHOUT_DEEPSPEED,
            "accelerate takes one model under DeepSpeed, and the script prepares 2",
        ),
        (_steps_with(optimizer(), _SGD), "engine", _WITHOUT_DEEPSPEED, f"{_ONE_OPTIMIZER} prepares 2"),
        (_steps_with(optimizer(is_prepared=False)), "engine", _WITHOUT_DEEPSPEED, _NOT_PREPARED),
        (
            _steps_with(optimizer(), optimizer(is_prepared=False)),
            "engine",
            _WITHOUT_DEEPSPEED,
            f"{_ONE_OPTIMIZER} has another that it does not prepare",
        ),
        (
            _steps_with(optimizer(num_parameters=_TRAINED + 5120)),
            "zero_stage",
            (ZeroStage.NOTHING,),
            "DeepSpeed's engine steps what the model trains, and the optimizer has 5,120 elements beside it",
        ),
        (_steps_with(optimizer(maximize=True)), "optimizer", (None,), _NOT_KEPT.format("maximize")),
        (_steps_with(optimizer(amsgrad=True)), "optimizer", (None,), _NOT_KEPT.format("amsgrad")),
        (
            _steps_with(optimizer(amsgrad=True)),
            "optimizer_offload",
            (OffloadDevice.NONE,),
            "the script has amsgrad=True, which DeepSpeed's CPU Adam ignores",
        ),
        (_steps_with(optimizer(), _SGD), "optimizer", (None,), "the script has several optimizers"),
        (_steps_with(_SGD), "optimizer", (None,), "the script trains with SGD"),
        (capture(mixed_precision="fp16"), "precision", (Precision.FP16,), "the script trains in fp16"),
        (capture(mixed_precision="fp8"), "precision", (None,), "the script trains in fp8"),
        (
            capture(model_is_quantized=True),
            "zero_stage",
            _NOT_PARTITIONED,
            "a quantized base at stage 3 was not measured on GPUs",
        ),
        (
            capture(unprepared_models=("LlamaForCausalLM",)),
            "zero_stage",
            _NOT_PARTITIONED,
            "at stage 3 transformers partitions LlamaForCausalLM on creation, and the script does not"
            " prepare all of its models",
        ),
        (
            capture(averages="EMA"),
            "zero_stage",
            _NOT_PARTITIONED,
            "EMA averages the model's weights, which stage 3 partitions",
        ),
        (
            capture(made_by_engine=("scheduler",)),
            "engine",
            (Engine.DEEPSPEED,),
            "the script's DeepSpeed configuration makes its scheduler, which no other engine reads",
        ),
        (
            capture(edits_gradients="train.py:9"),
            "zero_stage",
            (ZeroStage.NOTHING,),
            "the script edits gradients (train.py:9), which ZeRO moves in backward()",
        ),
        (
            capture(edits_gradients="train.py:9", made_by_engine=("scheduler",)),
            "engine",
            (Engine.DEEPSPEED,),
            "the script's DeepSpeed configuration makes its scheduler, which no other engine reads",
        ),
        (
            capture(edits_weights="train.py:9"),
            "zero_stage",
            _NOT_PARTITIONED,
            "the script works with weights by hand (train.py:9), which stage 3 partitions",
        ),
        (
            capture(optimizers=(replace(_SGD, is_element_wise=False),)),
            "engine",
            _WITHOUT_DEEPSPEED,
            "ZeRO joins and cuts tensors, and SGD looks at whole ones",
        ),
        (
            capture(uses_local_sgd=True),
            "engine",
            (Engine.NATIVE,),
            "accelerate's LocalSGD runs without DeepSpeed alone",
        ),
        (
            capture(model_adapters=("PREFIX_TUNING",)),
            "gradient_checkpointing",
            (False,),
            "prefix tuning keeps its prefix in the cache, which gradient checkpointing drops",
        ),
        (
            capture(model_is_quantized=True),
            "precision",
            (None,),
            "the base is quantized: its layers compute in the format that they were made for",
        ),
        (trainer(max_grad_norm=0.0), "gradient_clipping", (0.0,), "the script's max_grad_norm is 0"),
        (capture(model_adapters=("LORA",)), "lora", (None,), "the script has adapters of its own (LORA)"),
        (
            capture(num_models=2),
            "freeze",
            ((),),
            "the script prepares 2 models, and a flag names none of them",
        ),
        (
            capture(model_is_quantized=True),
            "quantization",
            (None,),
            "the script quantizes its weights itself, and has no adapters beside them",
        ),
        (
            capture(model_loads_weights=False),
            "quantization",
            (None,),
            "from_pretrained() quantizes weights as it loads them; the script creates this model without it",
        ),
        (
            _MY_NET,
            "quantization",
            (None,),
            "only transformers' models can be quantized on loading, and MyNet is not one",
        ),
        (_MY_NET, "attention", (None,), "the script's model has its own attention"),
        (
            _MY_NET,
            "liger",
            (False,),
            "Liger's kernels replace transformers' modules, and MyNet has none",
        ),
        (
            capture(model_can_checkpoint=False, model_class_path="train.MyNet"),
            "checkpoint_every",
            (1,),
            "MyNet does not support gradient checkpointing in each block",
        ),
        (
            capture(model_can_checkpoint=False, model_class_path="train.MyNet"),
            "activation_offload",
            (False,),
            "MyNet does not support gradient checkpointing",
        ),
        *(
            (captured, "group_by_length", (False,), why)
            for captured, why in (
                (capture(lengths=None), "the script's samples have no token lengths"),
                (
                    capture(loader=replace(_LOADER, num_samples=None)),
                    "the script reads its samples as a stream, whose order can't be changed",
                ),
                (
                    capture(loader=replace(_LOADER, batch_size=None, sampler="MyBatches")),
                    "the script makes its batches itself (MyBatches)",
                ),
                (
                    capture(loader=replace(_LOADER, sampler="SequentialSampler")),
                    "the script does not shuffle: it sets the order of its samples (SequentialSampler)",
                ),
                (
                    capture(lengths=replace(_LENGTHS, is_whole=False, num_samples=_NUM_SEEN)),
                    "the script's dataset has no lengths: no column input_ids or length, no field lengths",
                ),
            )
        ),
    ],
)
def test_what_can_not_be_changed_is_pinned_with_a_reason(
    captured: Capture, field: str, values: tuple[Any, ...], why: str
) -> None:
    found = [
        pin for pin in constraints_of(captured, topology=Topology(world_size=2)).pins if pin.field == field
    ]
    assert [(pin.values, pin.why) for pin in found] == [(values, why)]


@pytest.mark.parametrize(
    ("captured", "fields"),
    [
        (capture(), {_BATCH, _STEPS}),
        (trainer(), set()),
        (trainer(trainer_overrides=("compute_loss",)), {_BATCH, _STEPS}),
        (
            capture(optimizers=(optimizer(num_parameters=_TRAINED, amsgrad=False, maximize=False),)),
            {_BATCH, _STEPS},
        ),
        (
            capture(
                model_facts=replace(model(), num_trainable_parameters=1000),
                optimizers=(optimizer(num_parameters=model().num_parameters),),
            ),
            {_BATCH, _STEPS},
        ),
    ],
)
def test_an_ordinary_script_leaves_the_rest_open(captured: Capture, fields: set[str]) -> None:
    assert {pin.field for pin in constraints_of(captured, topology=Topology()).pins} == fields


def test_a_batch_of_all_ranks_has_to_divide_over_them() -> None:
    with pytest.raises(UserError) as caught:
        captured_problem(capture(splits_batches=True), num_gpus=3)
    assert str(caught.value) == (
        "error[split-batch-not-divisible]: the script's batch does not divide over the ranks\n"
        "  found: split_batches=True with batches of 8 samples, on 3 ranks\n"
        "  why:   accelerate gives each rank the same part of every batch\n"
        "  fix:   use as many ranks as divide 8, or change the script's batch size\n"
        f"  see:   {ACCELERATE}/data_loader.py"
    )


@pytest.mark.parametrize(
    ("captured", "spec", "rule", "found"),
    [
        (
            capture(),
            spec_of(micro_batch_size=16),
            "batches-split-in-equal-parts",
            "--micro-batch-size 16",
        ),
        (
            capture(model_is_transformers=False),
            spec_of(attention="eager"),
            "attention-needs-transformers",
            "--attention eager",
        ),
        (capture(model_adapters=("LORA",)), spec_of(lora=Lora(rank=4)), "script-has-adapters", "--lora"),
        (
            capture(model_adapters=("LORA",)),
            _QLORA,
            "script-has-adapters",
            "--qlora",
        ),
        (
            capture(num_models=2),
            spec_of(freeze=("embeddings", "*.h.0.*")),
            "changes-need-one-model",
            "--freeze embeddings, *.h.0.*",
        ),
        (
            capture(model_loads_weights=False),
            spec_of(quantization=Quantization.NF4, lora=Lora()),
            "quantization-needs-from-pretrained",
            "--qlora",
        ),
        (
            capture(model_loads_weights=False),
            _QLORA,
            "quantization-needs-from-pretrained",
            "--qlora",
        ),
        (capture(lengths=None), spec_of(group_by_length=True), "grouping-needs-lengths", "--group-by-length"),
        (
            capture(model_can_checkpoint=False),
            spec_of(gradient_checkpointing=True),
            "checkpointing-needs-support",
            "--gradient-checkpointing",
        ),
        (
            capture(model_can_checkpoint=False),
            spec_of(activation_offload=True),
            "checkpointing-needs-support",
            "--offload-activations",
        ),
        (
            capture(model_adapters=("PREFIX_TUNING",)),
            spec_of(gradient_checkpointing=True),
            "prefix-tuning-without-checkpointing",
            "--gradient-checkpointing",
        ),
        (
            capture(num_models=2),
            spec_of(engine=Engine.DEEPSPEED),
            "one-model-per-accelerator",
            "--engine deepspeed",
        ),
        (
            capture(num_models=2),
            spec_of(zero_stage=ZeroStage.GRADIENTS, optimizer_offload=OffloadDevice.CPU),
            "one-model-per-accelerator",
            "--zero-stage 2 and --offload-optimizer cpu",
        ),
        (
            capture(num_models=2),
            spec_of(zero_stage=_IN_A_FILE),
            "one-model-per-accelerator",
            "ds_config.json:4: zero_stage 2",
        ),
        (
            capture(optimizers=(optimizer(), _SGD)),
            spec_of(optimizer=OptimizerName.ADAMW),
            "replacement-needs-one-optimizer",
            "--optimizer adamw",
        ),
        (
            capture(model_is_quantized=True),
            spec_of(zero_stage=ZeroStage.PARAMETERS),
            "quantized-script-below-zero3",
            "--zero-stage 3",
        ),
        (
            capture(optimizers=(optimizer(maximize=True),)),
            spec_of(optimizer=OptimizerName.ADAMW_8BIT),
            "optimizer-option-without-replacement",
            "--optimizer adamw-8bit",
        ),
        (
            capture(optimizers=(optimizer(amsgrad=True),)),
            spec_of(optimizer_offload=OffloadDevice.CPU),
            "optimizer-option-without-replacement",
            "--offload-optimizer cpu",
        ),
    ],
)
def test_a_flag_that_the_script_can_not_take_is_refused(
    captured: Capture, spec: RunSpec, rule: str, found: str
) -> None:
    with pytest.raises(UserError) as caught:
        captured_problem(captured, spec=spec)
    assert (caught.value.rule, caught.value.found) == (rule, found)


def test_flags_beyond_several_limits_are_all_refused() -> None:
    spec = spec_of(attention="eager", group_by_length=True)
    with pytest.raises(ExceptionGroup) as caught:
        captured_problem(capture(model_is_transformers=False, lengths=None), spec=spec)
    assert {error.rule for error in caught.value.exceptions if isinstance(error, UserError)} == {
        "attention-needs-transformers",
        "grouping-needs-lengths",
    }


@pytest.mark.parametrize(("steps", "rules"), [(1, set()), (4, set()), (3, {"batches-split-in-equal-parts"})])
def test_the_scripts_own_number_of_passes_is_no_change(steps: int, rules: set[str]) -> None:
    captured = capture(gradient_accumulation_steps=1, accumulates_by_hand=4)
    situation = situation_of_strategy(
        Strategy(gradient_accumulation_steps=steps),
        topology=Topology(world_size=2),
        typed=("gradient_accumulation_steps",),
    )
    findings = check(with_capture(situation, captured), rules=LIMITS).findings
    assert {finding.rule for finding in findings} == rules


def test_every_limit_names_its_rule_and_no_habit_does() -> None:
    known = {rule.id for rule in LIMITS}
    captures = (
        capture(),
        capture(micro_batch_size=None, lengths=None),
        capture(num_models=2, model_is_transformers=False, model_can_checkpoint=False),
        capture(model_is_quantized=True, model_checkpoints=True, optimizers=(_SGD,)),
        trainer(model_mixes_samples=("bn",), max_grad_norm=0.0, mixed_precision="bf16"),
        capture(optimizers=(optimizer(amsgrad=True), _SGD), edits_gradients="train.py:9"),
    )
    for captured in captures:
        for pin in constraints_of(captured, topology=Topology(world_size=2)).pins:
            assert (pin.rule in known) is not pin.is_habit, pin


@pytest.mark.parametrize(
    ("captured", "stage", "fix"),
    [
        (
            capture(model_is_quantized=True),
            ZeroStage.PARAMETERS,
            "leave out --zero-stage, or give it 0 or 1 or 2",
        ),
        (capture(num_models=2), ZeroStage.GRADIENTS, "leave out --zero-stage"),
    ],
)
def test_a_refusal_names_the_values_that_are_open(captured: Capture, stage: ZeroStage, fix: str) -> None:
    with pytest.raises(UserError) as caught:
        captured_problem(captured, spec=spec_of(zero_stage=stage))
    assert caught.value.fix == fix


@pytest.mark.parametrize(
    ("captured", "spec", "field", "values"),
    [
        (capture(optimizers=(_SGD,)), spec_of(optimizer=OptimizerName.ADAMW), "optimizer", {"adamw"}),
        (capture(mixed_precision="fp16"), spec_of(precision=Precision.BF16), "precision", {"bf16"}),
        (capture(edits_gradients="train.py:9"), spec_of(zero_stage=ZeroStage(2)), "zero_stage", {2}),
        (
            capture(model_checkpoints=True),
            spec_of(gradient_checkpointing=False),
            "gradient_checkpointing",
            {False},
        ),
    ],
)
def test_a_habit_of_the_script_gives_way_to_a_flag(
    captured: Capture, spec: RunSpec, field: str, values: set[Any]
) -> None:
    found = candidates(captured_problem(captured, spec=spec)).strategies
    assert {getattr(one, field) for one in found} == values


@pytest.mark.parametrize(
    ("captured", "field", "values"),
    [
        (capture(), "micro_batch_size", {8, 4, 2, 1}),
        (capture(), "gradient_accumulation_steps", {2, 4, 8, 16}),
        (capture(), "optimizer", {None, OptimizerName.ADAMW, OptimizerName.ADAMW_8BIT}),
        (capture(optimizers=(optimizer(fused=True),)), "optimizer", {None, OptimizerName.ADAMW_8BIT}),
        (trainer(), "micro_batch_size", {16, 8, 4, 2, 1}),
        (capture(model_mixes_samples=("bn",)), "micro_batch_size", {8}),
        (capture(micro_batch_size=None), "gradient_accumulation_steps", {None}),
        (capture(accumulates_by_hand=4), "gradient_accumulation_steps", {8, 16, 32, 64}),
        (capture(optimizers=(optimizer(amsgrad=True),)), "optimizer_offload", {OffloadDevice.NONE}),
        (capture(num_models=2), "engine", {Engine.NATIVE}),
        (capture(mixed_precision="fp16"), "precision", {Precision.FP16}),
        (capture(model_is_quantized=True), "zero_stage", {0, 1, 2}),
        (trainer(max_grad_norm=0.0), "gradient_clipping", {0.0}),
        (trainer(), "gradient_clipping", {None}),
        (capture(), "lora", {None, Lora()}),
        (capture(), "freeze", {(), FROZEN_EMBEDDINGS, FROZEN_LAYERS}),
        (capture(model_adapters=("LORA",)), "lora", {None}),
    ],
)
def test_every_candidate_keeps_to_the_constraints(captured: Capture, field: str, values: set[Any]) -> None:
    problem = captured_problem(captured, allow=frozenset({Allow.LORA, Allow.FREEZE}))
    found = candidates(problem).strategies
    assert {getattr(one, field) for one in found} == values
    assert all(getattr(one, pin.field) in pin.values for one in found for pin in problem.constraints.pins)


@pytest.mark.parametrize(
    ("class_path", "offloads"),
    [
        ("torch.optim.adamw.AdamW", True),
        ("torch.optim.sgd.SGD", False),
        ("transformers.optimization.Adafactor", False),
        ("torch.optim._muon.Muon", False),
    ],
)
def test_only_what_the_optimizer_table_allows_is_offloaded(class_path: str, offloads: bool) -> None:
    found = candidates(captured_problem(capture(optimizers=(optimizer(class_path),))))
    assert any(one.optimizer_offload is OffloadDevice.CPU for one in found.strategies) is offloads
    rules = {finding.rule for dropped in found.dropped for finding in dropped.findings}
    assert bool(rules) is not offloads


def test_a_quantized_base_is_never_partitioned_nor_its_parameters_offloaded() -> None:
    found = candidates(captured_problem(capture(model_is_quantized=True))).strategies
    assert {placement_of(one)[3] for one in found} == {OffloadDevice.NONE}


def test_a_micro_batch_that_would_not_make_the_scripts_global_batch_is_refused() -> None:
    problem = captured_problem(capture(gradient_accumulation_steps=3), spec=spec_of(micro_batch_size=8))
    cut = replace(problem, spec=spec_of(gradient_accumulation_steps=2))
    with pytest.raises(UserError) as caught:
        candidates(cut)
    assert (caught.value.rule, caught.value.found) == (
        "batches-split-in-equal-parts",
        "micro-batches of 12, for a global batch of 96",
    )


def test_lengths_of_more_samples_than_were_seen_leave_batches_free() -> None:
    captured = capture(lengths=replace(_LENGTHS, is_whole=False, num_samples=_NUM_SEEN + 1))
    pins = constraints_of(captured, topology=Topology(world_size=2)).pins
    assert "group_by_length" not in {pin.field for pin in pins}
