"""solve: reasons, rejected candidates, the unchanged script, and suggestions where nothing fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from captured_scripts import capture, captured_problem
from captures import TRAINER
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_problems import A100, LARGE, RATES, closed_forms, made_trace, model, problem, solved, spec_of

from zerofit.core.allocation_log import Trace, TraceRequest
from zerofit.core.estimates import Estimate, Holder, MemoryEstimate, PhaseMemory, RunPhase, Term
from zerofit.core.plan import Origin, plan_from_json, plan_to_json
from zerofit.core.setting import Said
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
from zerofit.core.units import GIB
from zerofit.planning.answer_lines import (
    answer_lines,
    as_it_is_lines,
    as_it_is_words,
    command_with,
    hint_lines,
)
from zerofit.planning.candidates import candidates
from zerofit.planning.options import Allow
from zerofit.planning.plan_table import plan_table
from zerofit.planning.problem import Problem
from zerofit.planning.run_spec import RunSpec
from zerofit.planning.search import TIME_TIE_SHARE, EstimatedStrategy, simplicity, tier
from zerofit.planning.solve import best_of, is_clearly_faster, script_as_it_is, solve
from zerofit.planning.sources.typed_line import TypedFlag, TypedLine
from zerofit.planning.suggestions import suggestions, with_more_host_memory
from zerofit.planning.training_estimator import TrainingEstimator

_CHECKPOINTING = spec_of(gradient_checkpointing=True)
"""Halves the candidates where nothing is said of them."""


def test_a_plan_carries_reasons_losers_and_its_estimate() -> None:
    answer = solved(problem(num_gpus=4, memory_gib=6, sequence_length=512))
    plan = answer.plan
    assert answer.fits
    assert plan.estimate == answer.found.chosen.estimate if answer.found.chosen else None
    assert {reason.origin for reason in plan.reasons} == {Origin.PLANNER}
    assert {"precision", "micro_batch_size", "gradient_accumulation_steps"} <= {
        reason.field for reason in plan.reasons
    }
    assert len(plan.rejected) == sum(
        map(len, (answer.found.others, answer.found.ruled_out, answer.found.variants))
    )
    assert all(rejected.why for rejected in plan.rejected)
    assert plan_from_json(plan_to_json(plan), name="plan.json") == plan


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    num_gpus=st.sampled_from([1, 2, 8]),
    memory_gib=st.sampled_from([2, 2.5, 3, 3.5, 4, 4.5, 5, 5.5, 6]),  # where an estimate is often close
    global_batch_size=st.sampled_from([16, 64, 512]),
    sequence_length=st.sampled_from([256, 1024, 4096]),
)
def test_no_plan_may_overflow_where_another_surely_fits_in_15_percent_more_time(
    num_gpus: int, memory_gib: float, global_batch_size: int, sequence_length: int
) -> None:
    asked = problem(
        num_gpus=num_gpus,
        memory_gib=memory_gib,
        global_batch_size=global_batch_size,
        sequence_length=sequence_length,
        facts=model(num_layers=1),
    )
    chosen, estimator = best_of(asked, closed_forms), closed_forms(asked)
    if chosen is None or estimator.surely_fits(chosen.strategy):
        return
    most = 1.15 * (estimator.seconds(chosen.strategy) or 0)
    others = (
        one
        for one in candidates(asked).strategies
        if tier(one) == tier(chosen.strategy) and (estimator.seconds(one) or 0) <= most
    )
    assert not any(map(estimator.surely_fits, others))


def test_what_the_user_fixed_is_said_to_be_the_users() -> None:
    request = spec_of(zero_stage=ZeroStage.PARAMETERS, gradient_checkpointing=True)
    plan = solved(problem(spec=request)).plan
    said = {reason.field: reason.why for reason in plan.reasons if reason.origin is Origin.FLAG}
    assert said == {
        "zero_stage": "--zero-stage says so",
        "gradient_checkpointing": "--gradient-checkpointing says so",
    }
    assert (plan.strategy.zero_stage, plan.strategy.gradient_checkpointing) == (3, True)


def test_more_host_memory_comes_in_powers_of_two() -> None:
    nodes = dict(with_more_host_memory(problem(num_gpus=1, host_gib=24).machine))
    assert list(nodes) == [f"{gib}.0 GiB of host memory on each node" for gib in (32, 64, 128, 256, 512)]
    assert [one.host_memory_bytes for one in nodes.values()] == [2**power for power in range(35, 40)]


@pytest.mark.slow
def test_each_suggestion_fits_by_itself() -> None:
    asked = problem(
        num_gpus=1, memory_gib=16, host_gib=24, global_batch_size=8, sequence_length=2048, facts=LARGE
    )
    bigger = tuple(
        replace(A100, name=f"GPU of {size}", memory_bytes=size * GIB) for size in (12, 16, 24, 48, 96, 192)
    )
    answer = solved(asked, gpus=bigger)
    changes = [suggestion.change for suggestion in answer.suggestions]
    assert not answer.fits
    assert changes == [
        "--allow lora",
        "--allow qlora",
        "128.0 GiB of host memory on each node",
        "512.0 GiB free on NVMe disks of each node",
        "4 x NVIDIA A100-SXM4-80GB in place of 1",
        "1 x GPU of 48 (48.0 GiB) on each node",
    ]
    assert all(suggestion.best.fits for suggestion in answer.suggestions)
    smaller = replace(asked, machine=replace(asked.machine, gpus=(bigger[2],)))
    assert not solved(smaller).fits  # the 48 GiB are the smallest of these that do


@pytest.mark.parametrize(
    ("memory_gib", "trained"), [(6, "adapters alone, on weights in 4 bits"), (10, "adapters alone")]
)
def test_what_the_user_set_is_given_up_before_samples_are_cut(memory_gib: int, trained: str) -> None:
    kept = spec_of(engine=Engine.NATIVE, gradient_checkpointing=True, micro_batch_size=8)
    asked = problem(
        num_gpus=1,
        memory_gib=memory_gib,
        host_gib=64,
        global_batch_size=16,
        sequence_length=2048,
        facts=LARGE,
        spec=kept,
    )
    (suggestion,) = solved(asked).suggestions
    assert suggestion.change == "--micro-batch-size 1 in place of 8, --allow lora,qlora"
    assert suggestion.results == f"changes what is trained: {trained}"
    set_to_8 = TypedFlag(name="micro_batch_size", words=("--micro-batch-size", "8"))
    typed = TypedLine(verb=("zerofit", "plan"), flags=(set_to_8,))
    line = command_with(suggestion, replace(asked.spec, typed=typed))
    assert line == "zerofit plan --micro-batch-size 1 --allow lora,qlora"


@pytest.mark.parametrize("maker", ["AMD Instinct", pytest.param("NVIDIA", marks=pytest.mark.slow)])
def test_another_makers_gpus_are_not_suggested(maker: str) -> None:
    asked = problem(
        num_gpus=1, memory_gib=16, host_gib=24, global_batch_size=8, facts=LARGE, spec=_CHECKPOINTING
    )
    unknown = replace(A100, name=f"{maker} of 16", memory_bytes=16 * GIB, compute_capability=None)
    asked = replace(asked, machine=replace(asked.machine, gpus=(unknown,)))
    amd = replace(unknown, name="AMD Instinct of 96", memory_bytes=96 * GIB)
    nvidia = replace(A100, name="NVIDIA of 128", memory_bytes=128 * GIB)
    change = solved(asked, gpus=(amd, nvidia)).suggestions[-1].change
    size = {"AMD Instinct": "96 (96.0", "NVIDIA": "128 (128.0"}[maker]
    assert change == f"1 x {maker} of {size} GiB) on each node"


@pytest.mark.slow
def test_changes_are_traced_in_the_precision_alone_that_closed_forms_choose() -> None:
    few = _CHECKPOINTING.setting(micro_batch_size=1)
    asked = captured_problem(num_gpus=1, memory_gib=1.2, host_gib=2, spec=few)
    told: list[tuple[str, int]] = []
    traced: list[TraceRequest] = []

    def estimator_of(one: Problem) -> TrainingEstimator:
        def trace(request: TraceRequest) -> Trace:
            traced.append(request)
            return made_trace(one.model)(request)

        return TrainingEstimator(one, trace=trace, rates=RATES)

    def tell(problem_: Problem, own: EstimatedStrategy | None) -> None:
        assert own is not None
        told.append((as_it_is_words(own, problem_), len(traced)))

    answer = solve(asked, estimator_of=estimator_of, quick_estimator_of=closed_forms, on_nothing_fits=tell)
    assert not answer.fits
    assert any(one.change == "--allow lora" for one in answer.suggestions)
    ((said, num_before),) = told
    assert said == as_it_is_lines(answer)[0]
    with_lora = {one.autocast for one in traced[num_before:] if one.lora is not None}
    assert len(with_lora) == 1


@pytest.mark.parametrize(
    "global_batch_size",
    [6, pytest.param(12, marks=pytest.mark.slow), pytest.param(40, marks=pytest.mark.slow)],
)
def test_the_fewest_gpus_that_make_the_batch_and_fit_are_suggested(global_batch_size: int) -> None:
    kept = _CHECKPOINTING.setting(optimizer_offload=OffloadDevice.NONE, param_offload=OffloadDevice.NONE)

    def ask(num_gpus: int) -> Problem:
        return problem(
            num_gpus=num_gpus,
            memory_gib=24,
            global_batch_size=global_batch_size,
            facts=LARGE,
            spec=kept,
        )

    suggestions = solved(ask(1)).suggestions
    fewest = next(
        number
        for number in range(2, 9)
        if global_batch_size % number == 0 and best_of(ask(number), closed_forms) is not None
    )
    assert f"{fewest} x NVIDIA A100-SXM4-80GB in place of 1" in [one.change for one in suggestions]


@pytest.mark.parametrize(
    ("memory_gib", "host_gib", "is_close"),
    [(40, 500, False), (21, 500, True), (40, 10.5, True)],
)
def test_an_estimate_is_close_where_its_uncertainty_goes_beyond_gpu_or_host(
    memory_gib: float, host_gib: float, is_close: bool
) -> None:
    def needs(size: int) -> MemoryEstimate:
        term = Term(name="weights", num_bytes=size * GIB, holder=Holder.TENSORS, formula="", source="")
        phases = (PhaseMemory(phase=RunPhase.STEP, terms=(term,)),)
        return MemoryEstimate(phases=phases, uncertainty=0.1, uncertainty_source="")

    estimate = Estimate(device=needs(20), host=needs(10), step_time=None, tokens_per_step=0)
    assert problem(memory_gib=memory_gib, host_gib=host_gib).is_close(estimate) == is_close


@pytest.mark.parametrize(("allow", "fits"), [((), False), ((Allow.LENGTH,), True)])
def test_samples_are_cut_only_when_allowed(allow: tuple[Allow, ...], fits: bool) -> None:
    asked = problem(
        num_gpus=1,
        memory_gib=4,
        host_gib=8,
        global_batch_size=1,
        sequence_length=4096,
        allow=frozenset(allow),
        spec=spec_of(engine=Engine.NATIVE, gradient_checkpointing=False),
    )
    answer = solved(asked)
    length = answer.plan.workload.sequence_length or 0
    assert (answer.fits, length < 4096) == (fits, fits)
    assert answer.notes == ((f"samples cut to {length} tokens, as --allow length says",) if fits else ())


def test_eight_bit_states_come_after_all_that_computes_the_same() -> None:
    asked = problem(num_gpus=1, memory_gib=1.6, host_gib=2, global_batch_size=1, sequence_length=128)
    strategy = solved(asked).plan.strategy
    assert strategy.optimizer is OptimizerName.ADAMW_8BIT
    with_host = replace(asked, machine=replace(asked.machine, host_memory_available_bytes=64 * GIB))
    strategy = solved(with_host).plan.strategy
    assert (strategy.optimizer, strategy.offloads) == (None, True)


def test_more_gpus_of_the_same_never_lose_a_fit() -> None:
    none = OffloadDevice.NONE
    spec = _CHECKPOINTING.setting(optimizer_offload=none, param_offload=none)
    fits = [
        best_of(problem(num_gpus=number, memory_gib=14, facts=LARGE, spec=spec), closed_forms) is not None
        for number in (1, 2, 4, 8)
    ]
    assert fits == sorted(fits)
    assert set(fits) == {False, True}


_NVME = spec_of(optimizer_offload=OffloadDevice.NVME, param_offload=OffloadDevice.NONE)


@pytest.mark.parametrize(
    ("nvme_gib", "spec", "lacks"),
    [
        (100, _NVME, ""),
        pytest.param(1, _NVME, "needs 1.6 GiB of 1.0 GiB on NVMe disks of each node", marks=pytest.mark.slow),
        (0, _NVME, "needs 1.6 GiB of none on NVMe disks of each node"),
        pytest.param(0, _NVME.setting(nvme_path="/disk"), "", id="a folder whose room is not known"),
    ],
)
def test_what_goes_to_nvme_has_to_have_room_there(nvme_gib: int, spec: RunSpec, lacks: str) -> None:
    answer = solved(problem(spec=spec, machine_fields={"nvme_bytes": nvme_gib * GIB}))
    assert (answer.head.shortage, answer.fits) == (lacks, not lacks)
    unnamed = "/local_nvme for the folder on the NVMe disks: set --nvme-path"
    assert answer.notes == (() if spec.overrides.has("nvme_path") else (unnamed,))


def test_the_simplest_of_those_that_take_as_long_is_chosen() -> None:
    answer = solved(problem(num_gpus=8, memory_gib=80, sequence_length=1024))
    chosen = answer.found.chosen
    assert chosen
    assert chosen.estimate.step_time
    limit = chosen.estimate.step_time.seconds / (1 + TIME_TIE_SHARE)
    fitting = [one for one in answer.found.others if one.fits]
    assert all(one.estimate.step_time and one.estimate.step_time.seconds >= limit for one in fitting)
    near = [
        one
        for one in fitting
        if one.estimate.step_time and one.estimate.step_time.seconds <= limit * (1 + TIME_TIE_SHARE)
    ]
    assert all(simplicity(one.strategy) > simplicity(chosen.strategy) for one in near)


_OWN = Strategy(
    precision=Precision.FP32,
    micro_batch_size=8,
    gradient_accumulation_steps=2,
    gradient_checkpointing=False,
)


_FITS = "your script as it is: 5.7 GiB ±20% of 80.0 GiB, fits, 304 ms ±30% a step"


def test_a_script_that_fits_runs_as_it_is_and_keeps_fp32() -> None:
    answer = solved(captured_problem(num_gpus=1))
    assert answer.plan.strategy == _OWN == script_as_it_is(answer.problem)
    assert as_it_is_lines(answer) == [f"{_FITS}; nothing is changed"]
    (hint,) = hint_lines(answer)
    flag = "--mixed-precision bf16"
    assert hint == f"hint: {flag} is about 6.3 x faster and rounds more; --prefer-speed takes it"


def test_one_that_does_not_fit_keeps_fp32_where_smaller_micro_batches_help() -> None:
    answer = solved(captured_problem(num_gpus=1, memory_gib=5))
    strategy = answer.plan.strategy
    assert strategy.precision is Precision.FP32
    assert (strategy.micro_batch_size or 0) * (strategy.gradient_accumulation_steps or 0) == 16
    first, *_ = as_it_is_lines(answer)
    assert first == "your script as it is: 5.7 GiB ±20% of 5.0 GiB, does not fit"


def test_16_bits_come_before_offload_where_fp32_does_not_fit_on_the_gpus() -> None:
    sizes = (5.0, 4.5, 4.0, 3.5, 3.0, 2.5, 2.2, 2.0)
    chosen = [solved(captured_problem(num_gpus=1, memory_gib=size)).plan.strategy for size in sizes]
    ways = [(one.offloads, one.precision) for one in chosen if one.optimizer is None]
    order = [(False, Precision.FP32), (False, Precision.BF16), (True, Precision.FP32), (True, Precision.BF16)]
    places = [order.index(way) for way in ways]
    assert places == sorted(places)


def test_the_fastest_is_taken_in_16_bits() -> None:
    answer = solved(captured_problem(num_gpus=1, prefers_speed=True))
    assert answer.plan.strategy.precision is Precision.BF16
    assert answer.in_16_bits is None
    first, last = answer_lines(answer)
    assert first == f"{_FITS}; changed: about 6.3 x faster"
    assert last.endswith("; rounds more: bf16")


@pytest.mark.parametrize(
    ("spec", "effect"),
    [
        (spec_of(gradient_checkpointing=True), "trains the same"),
        (spec_of(optimizer=OptimizerName.ADAMW_8BIT), "rounds more: 8-bit optimizer states"),
        (spec_of(lora=Lora()), "changes what is trained: adapters alone"),
        (spec_of(freeze=("embeddings",)), "changes what is trained: frozen embeddings"),
        (
            spec_of(optimizer=OptimizerName.ADAFACTOR),
            "changes what is trained: Adafactor in place of AdamW",
        ),
        (spec_of(optimizer=OptimizerName.LION), "changes what is trained: Lion in place of AdamW"),
        (spec_of(global_batch_size=64), "changes what is trained: a global batch of 64"),
    ],
)
def test_what_fits_says_if_it_changes_what_is_trained(spec: RunSpec, effect: str) -> None:
    captured = replace(TRAINER, model=replace(TRAINER.model, loads_weights=True))
    *_, last = answer_lines(solved(captured_problem(captured, num_gpus=1, spec=spec)))
    assert last.startswith("what fits: one GPU, ")
    assert last.partition("; ")[2] == effect


def test_what_fits_only_as_allowed_says_that_it_changes_what_is_trained() -> None:
    facts = {"facts": LARGE, "num_gpus": 1, "memory_gib": 20, "host_gib": 5, "global_batch_size": 1}
    answer = solved(problem(**facts, allow=frozenset({Allow.LORA}), spec=_CHECKPOINTING))
    (last,) = answer_lines(answer)
    assert last.endswith("; changes what is trained: adapters alone")
    cut = solved(problem(**facts, sequence_length=32768, allow=frozenset(Allow), spec=_CHECKPOINTING))
    assert f"samples of {cut.cut_to} tokens" in answer_lines(cut)[-1]


@pytest.mark.parametrize(
    ("spec", "ending"),
    [
        (spec_of(), "nothing is changed"),
        (spec_of(precision=Precision.FP32), "nothing is changed"),
        (spec_of(precision=Precision.BF16), "changed as --mixed-precision says: about 6.3 x faster"),
        (
            spec_of(micro_batch_size=4, gradient_checkpointing=True, zero_stage=ZeroStage.GRADIENTS),
            "changed as --zero-stage, --micro-batch-size and --gradient-checkpointing say: "
            "about 1.2 x slower",
        ),
    ],
)
def test_the_first_line_names_the_flags_that_change_a_script(spec: RunSpec, ending: str) -> None:
    first, *_ = as_it_is_lines(solved(captured_problem(num_gpus=1, spec=spec)))
    assert first == f"{_FITS}; {ending}"


def test_a_flag_of_two_fields_is_named_once() -> None:
    flag = Said(value=True, text="--offload-activations")
    spec = spec_of(gradient_checkpointing=flag, activation_offload=flag)
    first, *_ = as_it_is_lines(solved(captured_problem(num_gpus=1, spec=spec)))
    assert first.partition("; ")[2].startswith("changed as --offload-activations says")


def test_a_step_of_another_batch_is_not_compared() -> None:
    asked = captured_problem(TRAINER, num_gpus=1, spec=spec_of(global_batch_size=64))
    first, *_ = as_it_is_lines(solved(asked))
    assert first.partition("; ")[2] == "changed as --global-batch-size says"


@pytest.mark.parametrize(
    ("captured", "precision"),
    [
        (capture(mixed_precision="bf16"), Precision.BF16),
        (capture(names_precision=True), Precision.FP32),
        (capture(model_weight_dtype="bfloat16"), Precision.FP32),  # no autocast over weights of 16 bits
    ],
)
def test_what_the_script_names_is_kept_without_a_hint(captured: object, precision: Precision) -> None:
    answer = solved(captured_problem(captured, num_gpus=1))  # type: ignore[arg-type]
    assert answer.plan.strategy == replace(_OWN, precision=precision)


def test_what_computes_the_same_is_taken_only_where_it_wins_more_than_its_uncertainty() -> None:
    answer = solved(captured_problem(num_gpus=1))
    own = answer.as_it_is
    assert own is not None
    time = own.estimate.step_time
    assert time is not None

    def faster(share: float) -> bool:
        quicker = replace(time, terms=tuple(replace(one, seconds=one.seconds * share) for one in time.terms))
        return is_clearly_faster(replace(own, estimate=replace(own.estimate, step_time=quicker)), own)

    assert [faster(share) for share in (1.0, 0.8, 0.7)] == [False, False, True]


def test_one_that_asks_for_an_engine_itself_is_not_said_to_fit() -> None:
    answer = solved(captured_problem(capture(engine="FSDP")))
    assert (answer.as_it_is, as_it_is_lines(answer)) == (None, [])


def test_where_nothing_fits_free_changes_come_first_as_commands_to_paste() -> None:
    typed = TypedLine(
        verb=("zerofit", "plan"),
        flags=(TypedFlag(name="gpus", words=("--gpus", "1xL4")),),
        script=("train.py", "--lr", "1 2"),
    )
    asked = captured_problem(
        capture(model_facts=LARGE, model_loads_weights=True),
        num_gpus=1,
        memory_gib=16,
        host_gib=24,
        spec=replace(_CHECKPOINTING, target=typed.script, typed=typed),
    )
    answer = solved(asked)
    text = plan_table(answer)
    assert [one.change for one in answer.suggestions][:2] == ["--allow lora", "--allow qlora"]
    for allowed in ("lora", "qlora"):
        assert f"\n    zerofit launch --allow {allowed} train.py --lr '1 2'\n" in text
    assert text.index("--allow qlora") < text.index("of host memory on each node:")


def test_changes_that_only_help_together_are_one_command_without_a_flag_twice() -> None:
    flags = {"sequence_length": "--seq-len 32768", "allow": "--allow freeze", "gpus": "--gpus 1xL4"}
    flags |= {"plot": "--plot plan.png", "html": "--html plan.html"}  # which are there now
    typed = TypedLine(
        verb=("zerofit", "plan"),
        flags=tuple(TypedFlag(name=name, words=tuple(words.split())) for name, words in flags.items()),
    )
    asked = problem(
        num_gpus=1,
        memory_gib=20,
        host_gib=5,
        sequence_length=32768,
        global_batch_size=1,
        facts=LARGE,
        allow=frozenset({Allow.FREEZE}),
        spec=replace(_CHECKPOINTING, typed=typed),
    )
    answer = solved(asked)
    changed = "--seq-len 16384 --allow freeze,lora,qlora"
    assert answer.suggestions[0].change == changed
    assert plan_table(answer).endswith(f"\n    zerofit plan --gpus 1xL4 {changed}")


def test_allowed_qlora_quantizes_what_adapters_stand_beside() -> None:
    asked = problem(
        num_gpus=1,
        memory_gib=6,
        host_gib=24,
        global_batch_size=8,
        facts=LARGE,
        allow=frozenset({Allow.QLORA}),
    )
    answer = solved(asked)
    strategy = answer.plan.strategy
    assert strategy.lora is not None
    assert (strategy.quantization, strategy.offloads) == (Quantization.NF4, False)
    why = "nothing fits if all weights train, and --allow qlora permits it"
    reasons = {reason.field: reason.why for reason in answer.plan.reasons}
    assert (reasons["lora"], reasons["quantization"]) == (why, why)


def test_a_change_that_closed_forms_find_slightly_too_large_is_traced() -> None:
    """They exceed a trace by some per cent, more than Adafactor leaves free on a full GPU."""
    asked, tried = captured_problem(num_gpus=1, memory_gib=1.2, host_gib=2), list[float]()
    best = solved(captured_problem(num_gpus=1)).head

    def presolve(changed: Problem) -> EstimatedStrategy | None:
        tried.append(changed.spec.options.reserve.share)
        return best if changed.spec.options.reserve.share < 0 else None

    found = suggestions(asked, solve=lambda _, quick: quick, presolve=presolve, gpus=())
    assert found[0].change == "--allow adafactor"
    assert tried[:2] == [asked.spec.options.reserve.share, asked.spec.options.reserve.share - 0.1]


def test_traces_are_announced_before_the_first_is_made() -> None:
    asked, traced = problem(num_gpus=2, memory_gib=24), list[TraceRequest]()
    made, announced = made_trace(asked.model), list[tuple[TraceRequest, ...]]()

    def trace(request: TraceRequest) -> Trace:
        traced.append(request)
        return made(request)

    def expected(requests: Sequence[TraceRequest]) -> None:
        assert traced == []
        announced.append(tuple(requests))

    estimator = TrainingEstimator(asked, trace=trace, rates=RATES, trace_ahead=expected)
    assert solve(asked, estimator_of=lambda _: estimator).fits
    (requests,) = announced
    assert len(set(requests)) == len(requests) > 1
    assert set(traced) <= set(requests)
