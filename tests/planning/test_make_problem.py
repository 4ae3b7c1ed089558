"""From a capture to a problem: batches, lengths, what the script's own optimizer and weights cost."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from captured_scripts import (
    batch,
    capture,
    captured_model,
    captured_problem,
    optimizer,
    trainer,
    with_lengths,
)
from planning_problems import A100, LARGE, RATES, made_trace, model, replays, solved, spec_of

from zerofit.core.capture import Capture, CapturedTensor
from zerofit.core.errors import UserError
from zerofit.core.optimizers import memory as of
from zerofit.core.plan import Origin
from zerofit.core.setting import Place, Said
from zerofit.core.strategy import Engine, Precision, Strategy, ZeroStage
from zerofit.core.units import GIB
from zerofit.planning.estimate.device_memory.optimizers import STATES, Stepper
from zerofit.planning.estimate.model_use import own_stepper
from zerofit.planning.options import Allow
from zerofit.planning.subject import captured_subject
from zerofit.planning.training_estimator import TrainingEstimator

_NATIVE = Strategy(precision=Precision.BF16, micro_batch_size=1, gradient_accumulation_steps=1)
_ZERO2 = replace(_NATIVE, engine=Engine.DEEPSPEED, zero_stage=ZeroStage.GRADIENTS)


@pytest.mark.parametrize(
    ("captured", "expected"),
    [
        (capture(), 8 * 2 * 4),
        (capture(splits_batches=True), 8 * 2),
        (capture(micro_batch_size=None), None),
        (trainer(gradient_accumulation_steps=1), 8 * 4),
        (capture(gradient_accumulation_steps=1, accumulates_by_hand=3), 8 * 3 * 4),
    ],
)
def test_the_global_batch_is_the_scripts_own(captured: Capture, expected: int | None) -> None:
    assert captured_problem(captured).workload.global_batch_size == expected


@pytest.mark.parametrize(
    ("captured", "found"),
    [
        (capture(asks_for_cpu=True), "Accelerator(cpu=True)"),
        (trainer(asks_for_cpu=True), "TrainingArguments.use_cpu=True"),
    ],
)
def test_a_script_for_the_cpu_is_not_planned_for_gpus(captured: Capture, found: str) -> None:
    with pytest.raises(UserError) as caught:
        captured_problem(captured)
    assert (caught.value.rule, caught.value.found) == ("script-asks-for-cpu", found)


@pytest.mark.parametrize(
    ("on_cpu", "fix"),
    [
        (False, "leave that out of the script or its arguments, or launch with --cpu"),
        (True, "leave that out of the script or its arguments: --cpu runs it on the CPU all the same"),
    ],
)
@pytest.mark.parametrize("captured", [capture(asks_for_cpu=True), trainer(asks_for_cpu=True)])
def test_a_plan_for_gpus_that_is_tried_on_the_cpu_is_not_told_to_add_cpu(
    captured: Capture, on_cpu: bool, fix: str
) -> None:
    with pytest.raises(UserError) as caught:
        captured_problem(captured, spec=spec_of(on_cpu=on_cpu))
    assert caught.value.fix == fix


def test_another_global_batch_is_refused_where_the_script_makes_it() -> None:
    with pytest.raises(UserError) as caught:
        captured_problem(spec=spec_of(global_batch_size=128))
    assert str(caught.value) == (
        "error[global-batch-is-the-scripts]: the global batch is set in the script\n"
        "  found: --global-batch-size 128, and the script's is 8 x 2 x 4 = 64   "
        "(samples x accumulation x ranks)\n"
        "  why:   zerofit does not change the script's DataLoader and accumulation\n"
        "  fix:   leave out --global-batch-size, or set in the script its DataLoader's batch_size to 16 "
        "or its gradient_accumulation_steps to 4"
    )


@pytest.mark.parametrize(
    ("captured", "parts", "changes"),
    [
        (
            capture(gradient_accumulation_steps=1, accumulates_by_hand=2),
            "8 x 2 x 4 = 64",
            "batch_size to 16 or the number of passes after which it steps to 4",
        ),
        (
            capture(splits_batches=True),
            "2 x 2 x 4 = 16",
            "batch_size to 64 or its gradient_accumulation_steps to 16",
        ),
    ],
)
def test_another_global_batch_names_what_makes_it_in_the_script(
    captured: Capture, parts: str, changes: str
) -> None:
    with pytest.raises(UserError) as caught:
        captured_problem(captured, spec=spec_of(global_batch_size=128))
    assert (caught.value.found, caught.value.fix) == (
        f"--global-batch-size 128, and the script's is {parts}   (samples x accumulation x ranks)",
        f"leave out --global-batch-size, or set in the script its DataLoader's {changes}",
    )


def test_what_is_accumulated_by_hand_is_counted_like_what_accelerate_accumulates() -> None:
    by_hand, by_accelerate = (
        solved(captured_problem(captured)).found.chosen
        for captured in (
            capture(gradient_accumulation_steps=1, accumulates_by_hand=4),
            capture(gradient_accumulation_steps=4),
        )
    )
    once = solved(captured_problem(capture(gradient_accumulation_steps=1))).found.chosen
    assert by_hand == by_accelerate
    assert by_hand is not None
    assert once is not None
    assert by_hand.estimate.step_time is not None
    assert once.estimate.step_time is not None
    assert by_hand.estimate.tokens_per_step == 4 * once.estimate.tokens_per_step
    assert by_hand.estimate.step_time.seconds > 3 * once.estimate.step_time.seconds


def test_other_models_of_the_script_lie_on_each_gpu_from_the_start() -> None:
    strategy = Strategy(micro_batch_size=8, gradient_accumulation_steps=2)
    without, beside = (
        replays(problem)
        for problem in map(captured_problem, (capture(), capture(other_weight_bytes=3 * GIB)))
    )
    pairs = list(
        zip(
            without.estimate(strategy).estimate.device.phases,
            beside.estimate(strategy).estimate.device.phases,
            strict=True,
        )
    )
    assert [more.total_bytes - less.total_bytes for less, more in pairs] == [3 * GIB] * len(pairs)
    assert beside.least_bytes(strategy) - without.least_bytes(strategy) == 3 * GIB


@pytest.mark.parametrize("captured", [trainer(), capture(gradient_accumulation_steps=4)])
def test_another_global_batch_is_taken_where_trainer_makes_it_or_it_is_the_same(captured: Capture) -> None:
    problem = captured_problem(captured, spec=spec_of(global_batch_size=128))
    assert problem.workload.global_batch_size == 128


@pytest.mark.parametrize(
    ("batches", "longest", "expected", "is_padded"),
    [
        pytest.param((batch(width=300, longest=300),), 512, 512, True, id="padded to the longest of a batch"),
        pytest.param((batch(width=1024, longest=300),), 512, 1024, True, id="padded to a fixed length"),
        pytest.param(
            (batch(width=304, longest=300), batch(width=88, longest=81, shortest=50)),
            509,
            512,
            True,
            id="padded to a multiple of 8",
        ),
        pytest.param((batch(width=384, longest=300),), 512, 512, True, id="padded to a multiple of 128"),
        pytest.param(
            (batch(width=384, longest=300),), 513, 640, True, id="padded to the next multiple of 128"
        ),
        pytest.param((batch(width=512, shortest=512),), 512, 512, False, id="packed to one length"),
    ],
)
def test_the_longest_sample_decides(batches: Any, longest: int, expected: int, is_padded: bool) -> None:
    workload = captured_problem(with_lengths(capture(), *batches, longest=longest)).workload
    assert (workload.sequence_length, workload.is_padded) == (expected, is_padded)


def test_samples_that_were_not_all_looked_at_are_told() -> None:
    captured = capture()
    assert captured.lengths
    some = replace(captured, lengths=replace(captured.lengths, is_whole=False))
    assert captured_problem(some).notes == (
        "the longest of the 80 samples that were looked at, 512 tokens, stands for all",
    )


def test_the_targets_of_an_encoder_decoder_are_its_labels() -> None:
    tensors = (
        CapturedTensor(name="input_ids", shape=(8, 512), dtype="int64"),
        CapturedTensor(name="labels", shape=(8, 60), dtype="int64"),
    )
    captured = capture(batches=(replace(batch(), tensors=tensors),), model_facts=model(num_decoder_layers=2))
    assert captured_problem(captured).workload.target_length == 60


_WHOLE = "a model whose inputs come from another model of the script runs without micro-batches"


@pytest.mark.parametrize(
    ("captured", "notes"),
    [
        (capture(), ()),
        (
            capture(model_is_quantized=True),
            ("the weights of small are counted as wide as they are before quantization",),
        ),
        (capture(num_models=2), ("of the 2 models of the script only small is counted", _WHOLE)),
        (
            capture(num_models=2, other_weight_bytes=3 * GIB),
            ("other models of the script are counted with their weights alone, 3.0 GiB on each GPU", _WHOLE),
        ),
        (
            capture(accumulates_by_hand=4),
            ("the script itself counts 4 forward passes to a step of its optimizer",),
        ),
        (
            capture(trainer_arguments={"activation_offloading": True}),
            (
                "activations count as on the GPU: the script's activation_offloading moves them to the host, "
                "and it needs less",
            ),
        ),
        (
            capture(optimizers=(optimizer("mine.Sophia"),)),
            ("Sophia is counted as AdamW: what it keeps is not known",),
        ),
        (
            capture(micro_batch_size=None),
            ("the size of the script's batches is unknown; its first batch is taken for all",),
        ),
    ],
)
def test_what_is_assumed_of_a_script_is_told(captured: Capture, notes: tuple[str, ...]) -> None:
    problem = captured_problem(captured)
    assert problem.notes == notes
    assert solved(problem).notes == notes


def test_a_model_without_tokens_has_no_length() -> None:
    assert captured_problem(capture(lengths=None)).workload.sequence_length is None


@pytest.mark.parametrize(("captured", "keeps"), [(capture(), True), (trainer(), False)])
def test_a_loop_holds_the_outputs_and_trainer_does_not(captured: Capture, keeps: bool) -> None:
    problem = captured_problem(captured, num_gpus=1)
    assert problem.workload.keeps_outputs is keeps
    strategy = Strategy(micro_batch_size=1, gradient_accumulation_steps=1)
    assert replays(problem)._setup(strategy).keeps_outputs is keeps


def test_what_the_script_alone_can_do_is_left_out_of_what_is_allowed() -> None:
    problem = captured_problem(allow=frozenset(Allow))
    assert problem.allow == {Allow.ADAFACTOR, Allow.FREEZE, Allow.LORA, Allow.QLORA}
    assert problem.notes == (
        "--allow length is left out: only the script can change the length of its samples",
    )


def test_what_the_model_rules_out_is_left_out_of_what_is_allowed() -> None:
    problem = captured_problem(capture(model_adapters=("LORA",)), allow=frozenset({Allow.FREEZE, Allow.LORA}))
    assert problem.allow == frozenset()
    why = "the script has adapters of its own (LORA)"
    assert problem.notes == (f"--allow freeze is left out: {why}", f"--allow lora is left out: {why}")


def _states(captured: Capture, strategy: Strategy) -> int:
    asked = captured_problem(captured, num_gpus=1)
    estimated = replays(asked).estimate(strategy)
    phase = estimated.estimate.device.phases[-1]
    return sum(term.num_bytes for term in phase.terms if term.name == STATES)


_P = model().num_parameters


@pytest.mark.parametrize(
    ("class_path", "settings", "per_parameter"),
    [
        ("torch.optim.adamw.AdamW", {}, 8),
        ("torch.optim.sgd.SGD", {"momentum": 0.9}, 4),
        ("torch.optim.sgd.SGD", {"momentum": 0}, 0),
        ("bitsandbytes.optim.adamw.AdamW8bit", {}, 2),
        ("bitsandbytes.optim.lion.Lion8bit", {}, 1),
        ("mine.Sophia", {}, 8),
    ],
)
def test_the_scripts_own_optimizer_is_counted(
    class_path: str, settings: dict[str, Any], per_parameter: int
) -> None:
    states = _states(capture(optimizers=(optimizer(class_path, **settings),)), _NATIVE)
    assert states / _P == pytest.approx(per_parameter, rel=0.02, abs=0.01)


@pytest.mark.parametrize("strategy", [_NATIVE, _ZERO2, replace(_ZERO2, zero_stage=ZeroStage.PARAMETERS)])
@pytest.mark.parametrize(
    "captured",
    [
        pytest.param(capture(optimizers=(optimizer("torch.optim.sgd.SGD", momentum=0.9),)), id="momentum"),
        pytest.param(capture(optimizers=(optimizer("bitsandbytes.optim.lion.Lion8bit"),)), id="8 bit"),
        pytest.param(capture(model_weight_dtype="bfloat16"), id="weights in bf16"),
        pytest.param(
            capture(model_facts=model(num_trainable_parameters=0), model_adapters=("LORA",)), id="adapters"
        ),
    ],
)
def test_bounds_are_never_above_the_estimate(captured: Capture, strategy: Strategy) -> None:
    asked = captured_problem(captured, num_gpus=2)
    estimator = replays(asked)
    peak = estimator.estimate(strategy).estimate.device.peak_bytes
    for bound in (estimator.least_bytes, estimator.least_live_bytes, estimator.least_played_bytes):
        assert bound(strategy) <= peak


def test_an_unclipped_step_takes_less_time() -> None:
    seconds = [
        replays(asked).seconds(replace(_NATIVE, gradient_clipping=clipping))
        for asked, clipping in ((captured_problem(num_gpus=1), clipping) for clipping in (0.0, None, 1.0))
    ]
    assert seconds[0] is not None
    assert seconds[1] == seconds[2] > seconds[0]


def test_weights_that_the_script_makes_in_16_bit_stay_so_without_deepspeed() -> None:
    asked = captured_problem(capture(model_weight_dtype="bfloat16"), num_gpus=1)
    requests = []

    def trace(request: Any) -> Any:
        requests.append(request)
        return made_trace(asked.model)(request)

    estimator = TrainingEstimator(asked, trace=trace, rates=RATES)
    estimator.least_live_bytes(_NATIVE)
    estimator.least_live_bytes(replace(_ZERO2, precision=Precision.FP32))
    assert [(one.weights, one.autocast) for one in requests] == [
        (Precision.BF16, Precision.BF16),
        (Precision.FP32, None),
    ]


def test_the_plan_says_what_the_script_decided() -> None:
    captured = capture(
        model_mixes_samples=("bn",), optimizers=(optimizer("torch.optim.sgd.SGD"),), mixed_precision="fp16"
    )
    plan = solved(captured_problem(captured)).plan
    said = {
        reason.field: (reason.value, reason.why) for reason in plan.reasons if reason.origin is Origin.SCRIPT
    }
    assert said == {
        "micro_batch_size": ("8", "bn of the model compute over all samples of a batch"),
        "gradient_accumulation_steps": ("2", "bn of the model compute over all samples of a batch"),
        "optimizer": ("as the script says", "the script trains with SGD"),
        "precision": ("fp16", "the script trains in fp16"),
    }
    assert len({reason.field for reason in plan.reasons}) == len(plan.reasons)


def test_what_stays_as_it_is_without_a_flag_needs_no_reason() -> None:
    plan = solved(captured_problem(capture(model_adapters=("LORA",)))).plan
    assert {reason.field for reason in plan.reasons}.isdisjoint({"freeze", "lora", "quantization"})


def test_a_batch_of_unknown_size_is_left_alone() -> None:
    strategy = solved(captured_problem(capture(micro_batch_size=None))).plan.strategy
    assert (strategy.micro_batch_size, strategy.gradient_accumulation_steps) == (None, None)


_CHECKPOINTING = spec_of(gradient_checkpointing=True)


def test_more_gpus_mean_a_larger_global_batch_of_the_script() -> None:
    captured = capture(model_facts=LARGE, splits_batches=True)
    asked = captured_problem(captured, num_gpus=1, memory_gib=16, host_gib=24, spec=_CHECKPOINTING)
    answer = solved(asked, gpus=(A100,))
    (more,) = (one for one in answer.suggestions if one.change.endswith("in place of 1"))
    assert more.change == "4 x NVIDIA A100-SXM4-80GB in place of 1"
    assert (more.best.strategy.micro_batch_size or 0) <= 2  # of each 8, on 4 ranks
    assert "--allow lora" in [one.change for one in answer.suggestions]


def test_the_models_own_dimensions_are_planned_with() -> None:
    facts = model(num_trainable_parameters=1_000_000)
    problem = captured_problem(replace(capture(), model=captured_model(facts=facts)))
    assert problem.model is facts
    assert problem.use.optimizer == of.FOREACH_ADAMW
    assert captured_problem(capture(optimizers=(optimizer(fused=True),))).use.optimizer == of.FUSED_ADAMW
    assert problem.host_bytes == 512 * GIB


_BNB, _ON_HOST = "bitsandbytes.optim", "are counted on the host, where the driver may move them"


@pytest.mark.parametrize(
    ("class_path", "settings", "kind", "note"),
    [
        ("torch.optim.adamw.AdamW", {}, of.FOREACH_ADAMW, ""),
        ("torch.optim.adamw.AdamW", {"fused": True}, of.FUSED_ADAMW, ""),
        ("torch.optim.adam.Adam", {"fused": None}, of.FOREACH_ADAMW, ""),
        (
            "torch.optim.adamw.AdamW",
            {"amsgrad": True},
            replace(
                of.FOREACH_ADAMW,
                formula="2 b P + b P of amsgrad",
                like_parameter=3,
                least_bytes=12,
                step_bytes=96,
                step_bytes_16bit=48,
            ),
            "",
        ),
        ("torch.optim.sgd.SGD", {"momentum": 0}, of.SGD, ""),
        ("torch.optim.sgd.SGD", {"momentum": 0.9}, of.MOMENTUM, ""),
        (
            "torch.optim.sgd.SGD",
            {"momentum": 0.9, "weight_decay": 0.1},
            of.ONE_STATE,
            "",
        ),
        ("torch.optim.sgd.SGD", {"weight_decay": 0.1}, of.DECAYED_SGD, ""),
        ("torch.optim.sgd.SGD", {"weight_decay": 0.1, "foreach": False}, of.SGD, ""),
        ("torch.optim.sgd.SGD", {"weight_decay": 0.1, "fused": True}, of.SGD, ""),
        ("torch.optim.adagrad.Adagrad", {}, of.ONE_STATE, ""),
        ("torch.optim._adafactor.Adafactor", {}, of.ADAFACTOR, ""),
        ("transformers.optimization.Adafactor", {}, of.ADAFACTOR, ""),
        (f"{_BNB}.adamw.AdamW", {}, of.ADAMW_32BIT, ""),
        (f"{_BNB}.adamw.AdamW8bit", {}, of.ADAMW_8BIT, ""),
        (
            f"{_BNB}.adamw.PagedAdamW8bit",
            {},
            of.PAGED_ADAMW_8BIT,
            f"the pages of PagedAdamW8bit {_ON_HOST}",
        ),
        (
            f"{_BNB}.adam.PagedAdam32bit",
            {},
            of.PAGED_ADAMW,
            f"the pages of PagedAdam32bit {_ON_HOST}",
        ),
        (
            f"{_BNB}.lion.PagedLion",
            {},
            of.LION,
            "the pages of PagedLion are counted as if they stayed on the GPU",
        ),
        (f"{_BNB}.lion.Lion8bit", {}, of.LION_8BIT, ""),
        (f"{_BNB}.lion.Lion", {}, of.LION, ""),
        (f"{_BNB}.rmsprop.RMSprop", {}, of.ONE_STATE, ""),
        (f"{_BNB}.rmsprop.RMSprop8bit", {}, of.LION_8BIT, ""),
        ("deepspeed.ops.adam.fused_adam.FusedAdam", {}, of.FUSED_ADAMW, ""),
        ("mine.Sophia", {}, None, "Sophia is counted as AdamW: what it keeps is not known"),
        (
            f"{_BNB}.adamw.AdamW",
            {"is_paged": True},
            of.PAGED_ADAMW,
            f"the pages of AdamW {_ON_HOST}",
        ),
        (f"{_BNB}.ademamix.AdEMAMix", {}, of.ADEMAMIX, ""),
        ("torchao.optim.adam.AdamW4bit", {}, of.TORCHAO_4BIT, ""),
        (
            "galore_torch.adamw.AdamW",
            {},
            None,
            "GaLoreAdamW is counted as AdamW: what it keeps is not known",
        ),
    ],
)
def test_classes_are_known_by_what_they_keep(
    class_path: str, settings: dict[str, Any], kind: Stepper, note: str
) -> None:
    assert own_stepper(optimizer(class_path, **settings)) == (kind, note)


def test_several_optimizers_are_counted_as_adamw() -> None:
    assert own_stepper(None) == (None, "the optimizer is counted as AdamW, as none or several were seen")


def test_a_model_whose_class_is_called_lies_whole_in_every_ranks_memory() -> None:
    called = captured_problem(capture(model_loads_weights=False, model_is_made_whole=True))
    from_config = captured_problem(capture(model_loads_weights=False))
    loaded = captured_problem(capture())
    found = [(one.use.loads_weights, one.use.makes_model_first) for one in (called, from_config, loaded)]
    assert found == [(False, True), (False, False), (True, False)]


@pytest.mark.parametrize(
    ("asked", "by_hand", "is_taken"),
    [(2, None, True), (1, None, False), (4, 2, True), (2, 2, True), (3, 2, False)],
)
def test_a_files_accumulation_is_taken_where_it_is_the_scripts_own(
    asked: int, by_hand: int | None, is_taken: bool
) -> None:
    said = Said(value=asked, text="", place=Place(file="acc.yaml", line=4))
    spec = spec_of(gradient_accumulation_steps=said)
    found = capture(gradient_accumulation_steps=2, accumulates_by_hand=by_hand)
    if is_taken:
        assert captured_problem(found, num_gpus=1, spec=spec) == captured_problem(found, num_gpus=1)
        return
    with pytest.raises(UserError) as error:
        captured_problem(found, num_gpus=1, spec=spec)
    own = found.passes_per_step
    assert error.value.found == (
        f"acc.yaml:4: gradient_accumulation_steps {asked}, and its loop steps after {own} forward passes"
    )
    assert error.value.fix == f"write {own} there, or leave it out"


def test_the_engine_of_a_launch_line_is_no_part_of_what_the_script_was_seen_to_do() -> None:
    script = SimpleNamespace(capture=capture(target=("-m", "train")), is_cached=False)
    subject = captured_subject(script, engine="DeepSpeed ZeRO-2")  # type: ignore[arg-type]
    assert subject.capture == replace(script.capture, engine="DeepSpeed ZeRO-2")
    assert script.capture.engine == ""
    own = SimpleNamespace(capture=replace(script.capture, engine="FSDP"), is_cached=False)
    assert captured_subject(own, engine="ZeRO").capture.engine == "FSDP"  # type: ignore[arg-type, union-attr]
