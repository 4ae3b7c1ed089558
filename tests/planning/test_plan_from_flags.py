"""choose: defaults, what flags and presets change, and each refusal."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning_problems import spec_of

from zerofit.checking.rule import ACCELERATE
from zerofit.core.errors import UserError
from zerofit.core.facts import GpuSpec, Machine, Versions, Workload
from zerofit.core.plan import Origin, Plan, Reason, Topology
from zerofit.core.presets import PRESETS, Preset
from zerofit.core.setting import Said
from zerofit.core.strategy import (
    Engine,
    Lora,
    OffloadDevice,
    OptimizerName,
    Precision,
    Strategy,
    ZeroStage,
)
from zerofit.core.units import GIB
from zerofit.planning.plan_from_flags import choose, with_explicit_numbers
from zerofit.planning.run_spec import RunSpec

_H100 = GpuSpec(name="NVIDIA H100 80GB HBM3", memory_bytes=80 * GIB, compute_capability=(9, 0))
_V100 = GpuSpec(name="Tesla V100-SXM2-32GB", memory_bytes=32 * GIB, compute_capability=(7, 0))
_NO_GPU = Machine(gpus=(), num_cpu_cores=8, host_memory_bytes=64 * GIB, host_memory_available_bytes=60 * GIB)
_ONE_NEW = replace(_NO_GPU, gpus=(_H100,))
_ONE_OLD = replace(_NO_GPU, gpus=(_V100,))
_EIGHT_NEW = replace(_NO_GPU, gpus=(_H100,) * 8)
_EIGHT_OLD = replace(_NO_GPU, gpus=(_V100,) * 8)
_MIXED = replace(_NO_GPU, gpus=(_H100, _V100))
_VERSIONS = Versions(python="3.12.4", zerofit="0.1.0")

_ZERO2 = Strategy(engine=Engine.DEEPSPEED, zero_stage=ZeroStage.GRADIENTS)
_ZERO3 = Strategy(engine=Engine.DEEPSPEED, zero_stage=ZeroStage.PARAMETERS)
_CPU, _NVME = OffloadDevice.CPU, OffloadDevice.NVME


def _choose(machine: Machine, spec: RunSpec) -> Plan:
    return choose(machine=machine, versions=_VERSIONS, spec=spec)


def _on(strategy: Strategy, precision: Precision) -> Strategy:
    return replace(strategy, precision=precision)


_BF16, _FP16, _FP32 = Precision.BF16, Precision.FP16, Precision.FP32
_NATIVE, _ZERO0 = Strategy(), replace(_ZERO2, zero_stage=ZeroStage.NOTHING)
_ON_NVME = replace(_ZERO3, optimizer_offload=_NVME, nvme_path="/nvme")
_NO_OFFLOAD = spec_of(optimizer_offload=OffloadDevice.NONE, param_offload=OffloadDevice.NONE)
_TWO_NODES = Topology(num_nodes=2, world_size=16)


@pytest.mark.parametrize(
    ("machine", "spec", "strategy", "topology"),
    [
        (_NO_GPU, spec_of(), _on(_NATIVE, _FP32), Topology(on_cpu=True)),
        (_ONE_NEW, spec_of(), _on(_NATIVE, _BF16), Topology()),
        (_ONE_OLD, spec_of(), _on(_NATIVE, _FP16), Topology()),
        (_EIGHT_NEW, spec_of(), _on(_ZERO2, _BF16), Topology(world_size=8)),
        (_EIGHT_OLD, spec_of(), _on(_ZERO2, _FP16), Topology(world_size=8)),
        (_MIXED, spec_of(), _on(_ZERO2, _FP16), Topology(world_size=2)),
        (_NO_GPU, spec_of(num_processes=2), _on(_ZERO2, _FP32), Topology(world_size=2, on_cpu=True)),
        (_EIGHT_NEW, spec_of(on_cpu=True), _on(_NATIVE, _FP32), Topology(on_cpu=True)),
        (_EIGHT_NEW, spec_of(num_processes=1), _on(_NATIVE, _BF16), Topology()),
        (_EIGHT_NEW, spec_of(num_nodes=2), _on(_ZERO2, _BF16), _TWO_NODES),
        (
            _EIGHT_NEW,
            spec_of(num_nodes=2, num_processes=8),
            _on(_ZERO2, _BF16),
            Topology(num_nodes=2, world_size=8),
        ),
        (_ONE_NEW, spec_of(engine=Engine.DEEPSPEED), _on(_ZERO2, _BF16), Topology()),
        (
            _ONE_NEW,
            spec_of(optimizer_offload=_CPU),
            _on(replace(_ZERO2, optimizer_offload=_CPU), _BF16),
            Topology(),
        ),
        (_ONE_NEW, spec_of(param_offload=_CPU), _on(replace(_ZERO3, param_offload=_CPU), _BF16), Topology()),
        (_ONE_NEW, spec_of(optimizer_offload=_NVME, nvme_path="/nvme"), _on(_ON_NVME, _BF16), Topology()),
        (_ONE_NEW, _NO_OFFLOAD, _on(_NATIVE, _BF16), Topology()),
        (_EIGHT_NEW, spec_of(engine=Engine.NATIVE), _on(_NATIVE, _BF16), Topology(world_size=8)),
        (_EIGHT_NEW, spec_of(zero_stage=ZeroStage.NOTHING), _on(_ZERO0, _BF16), Topology(world_size=8)),
        (_ONE_NEW, spec_of(zero_stage=ZeroStage.NOTHING), _on(_NATIVE, _BF16), Topology()),
    ],
)
def test_strategy_and_ranks(machine: Machine, spec: RunSpec, strategy: Strategy, topology: Topology) -> None:
    plan = _choose(machine, spec)
    assert (plan.strategy, plan.topology) == (strategy, topology)
    assert (plan.machine, plan.versions) == (machine, _VERSIONS)


def test_files_for_another_machine_are_for_gpus_that_are_not_here() -> None:
    spec = spec_of(num_processes=8)
    plan = choose(machine=_NO_GPU, versions=_VERSIONS, spec=spec, has_these_gpus=False)
    assert (plan.strategy, plan.topology) == (_on(_ZERO2, _BF16), Topology(world_size=8))


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_a_preset_is_taken_whole(preset: Preset) -> None:
    plan = _choose(_EIGHT_NEW, spec_of(preset=preset.name))
    assert plan.strategy == _on(preset.strategy, Precision.BF16)


def test_a_flag_wins_over_a_preset() -> None:
    spec = spec_of(
        preset="z3-offload",
        param_offload=OffloadDevice.NONE,
        precision=Precision.FP16,
        gradient_clipping=0.0,
        gradient_checkpointing=False,
        optimizer=OptimizerName.ADAMW,
        compile=True,
    )
    assert _choose(_EIGHT_NEW, spec).strategy == replace(
        _ZERO3,
        optimizer_offload=_CPU,
        precision=Precision.FP16,
        gradient_clipping=0.0,
        gradient_checkpointing=False,
        optimizer=OptimizerName.ADAMW,
        compile=True,
    )


_DEFAULT_BF16 = ("precision", "bf16", Origin.DEFAULT, "every GPU from Ampere on has bf16")
_WHY_ZERO2 = "shards gradients and optimizer states and sends no more than data parallelism does"
_WHY_NATIVE = "DeepSpeed shards over ranks or offloads; with neither, plain PyTorch is as small and faster"
_WHY_FP16 = "these GPUs are older than Ampere (compute capability 8.0) and have no bf16"


@pytest.mark.parametrize(
    ("machine", "spec", "reasons"),
    [
        (_EIGHT_NEW, spec_of(), (("zero_stage", "2", Origin.DEFAULT, _WHY_ZERO2), _DEFAULT_BF16)),
        (
            _ONE_OLD,
            spec_of(),
            (
                ("engine", "native", Origin.DEFAULT, _WHY_NATIVE),
                ("precision", "fp16", Origin.DEFAULT, _WHY_FP16),
            ),
        ),
        (
            _ONE_NEW,
            spec_of(param_offload=_CPU, precision=Precision.FP32),
            (
                ("zero_stage", "3", Origin.DEFAULT, "this offload needs the parameters sharded"),
                ("param_offload", "cpu", Origin.FLAG, "--offload-param says so"),
                ("precision", "fp32", Origin.FLAG, "--mixed-precision says so"),
            ),
        ),
        (
            _EIGHT_NEW,
            spec_of(preset="z3", gradient_checkpointing=True, micro_batch_size=2, global_batch_size=64),
            (
                ("zero_stage", "3", Origin.PRESET, "preset z3: ZeRO-3"),
                _DEFAULT_BF16,
                ("micro_batch_size", "2", Origin.FLAG, "--micro-batch-size says so"),
                ("gradient_checkpointing", "on", Origin.FLAG, "--gradient-checkpointing says so"),
                ("gradient_accumulation_steps", "4", Origin.FLAG, "global batch 64 = 2 x 4 x 8 ranks"),
            ),
        ),
        (
            _NO_GPU,
            spec_of(zero_stage=ZeroStage.PARAMETERS),
            (
                ("precision", "fp32", Origin.DEFAULT, "the ranks run on the CPU"),
                ("zero_stage", "3", Origin.FLAG, "--zero-stage says so"),
            ),
        ),
    ],
)
def test_every_choice_has_its_reason(
    machine: Machine, spec: RunSpec, reasons: tuple[tuple[str, str, Origin, str], ...]
) -> None:
    expected = [
        Reason(field=field, value=value, origin=origin, why=why) for field, value, origin, why in reasons
    ]
    assert list(_choose(machine, spec).reasons) == expected


@pytest.mark.parametrize(
    ("machine", "spec", "message"),
    [
        pytest.param(
            _EIGHT_NEW,
            spec_of(num_processes=9, num_nodes=2),
            "error[num-processes-is-for-all-machines]: the ranks do not divide over the nodes\n"
            "  found: --num-processes 9 with --num-machines 2\n"
            "  why:   --num-processes counts the ranks of all nodes together, and each node gets as many\n"
            "  fix:   set --num-processes to a multiple of 2\n"
            f"  see:   {ACCELERATE}/utils/launch.py",
            id="9 ranks on 2 nodes",
        ),
        pytest.param(
            _EIGHT_NEW,
            spec_of(num_processes=32, num_nodes=2),
            "error[more-ranks-than-gpus]: there are fewer GPUs than ranks\n"
            "  found: --num-processes 32 on 2 x 8 GPUs\n"
            "  why:   each rank needs a GPU of its own\n"
            "  fix:   set --num-processes to at most 16, or rehearse with --cpu\n"
            f"  see:   {ACCELERATE}/state.py",
            id="32 ranks on 16 GPUs",
        ),
        pytest.param(
            _EIGHT_NEW,
            spec_of(global_batch_size=60, micro_batch_size=4),
            "error[global-batch-not-divisible]: the global batch can't be made from these parts\n"
            "  found: --global-batch-size 60 with 8 ranks x micro-batch 4 = 32\n"
            "  why:   every rank takes the same whole number of samples, and zerofit never rounds a global "
            "batch\n"
            "  fix:   set --global-batch-size to 32 or 64, or change the other parts",
            id="global batch",
        ),
    ],
)
def test_refusal(machine: Machine, spec: RunSpec, message: str) -> None:
    with pytest.raises(UserError) as error:
        _choose(machine, spec)
    assert str(error.value) == message


def test_a_presets_nvme_folder_goes_with_its_offload() -> None:
    kept = _choose(_EIGHT_NEW, spec_of(preset="z3-nvme", optimizer_offload=_CPU))
    gone = _choose(_EIGHT_NEW, spec_of(preset="z3-nvme", optimizer_offload=_CPU, param_offload=_CPU))
    asked = _choose(_EIGHT_NEW, spec_of(nvme_path="/nvme"))
    assert [plan.strategy.nvme_path for plan in (kept, gone, asked)] == ["/local_nvme", None, "/nvme"]


@pytest.mark.parametrize(
    ("spec", "numbers", "filled_in"),
    [
        (
            spec_of(),
            (1, 1, 0.0),
            [("micro_batch_size", "1"), ("gradient_accumulation_steps", "1"), ("gradient_clipping", "0.0")],
        ),
        (
            spec_of(gradient_clipping=1.0, micro_batch_size=4),
            (4, 1, 1.0),
            [("gradient_accumulation_steps", "1")],
        ),
        (spec_of(global_batch_size=64), (8, 1, 0.0), [("gradient_clipping", "0.0")]),
        (spec_of(preset="z3-inference"), (1, None, None), [("micro_batch_size", "1")]),
        (spec_of(engine=Engine.NATIVE), (None, None, None), []),
    ],
)
def test_explicit_numbers_are_filled_in_for_deepspeed_and_have_their_reasons(
    spec: RunSpec, numbers: tuple[int | None, ...], filled_in: list[tuple[str, str]]
) -> None:
    chosen = _choose(_EIGHT_NEW, spec)
    plan = with_explicit_numbers(chosen)
    strategy = plan.strategy
    assert numbers == (
        strategy.micro_batch_size,
        strategy.gradient_accumulation_steps,
        strategy.gradient_clipping,
    )
    assert plan.reasons == (
        *chosen.reasons,
        *(
            Reason(field=field, value=value, origin=Origin.DEFAULT, why="no flag says otherwise")
            for field, value in filled_in
        ),
    )


def test_a_plan_is_taken_up_as_it_was_made() -> None:
    spec = spec_of(preset="z3-offload", micro_batch_size=2, global_batch_size=64)
    plan = _choose(_EIGHT_NEW, spec)
    assert _choose(_EIGHT_NEW, spec_of(plan=plan)) == plan


def test_a_plan_for_the_cpu_stays_on_the_cpu() -> None:
    plan = _choose(_EIGHT_NEW, spec_of(on_cpu=True, num_processes=2))
    assert _choose(_EIGHT_NEW, spec_of(plan=plan)).topology == Topology(world_size=2, on_cpu=True)


def test_a_flag_wins_over_a_plan_and_over_its_reason() -> None:
    plan = _choose(_EIGHT_NEW, spec_of())
    again = _choose(_EIGHT_NEW, spec_of(plan=plan, precision=Precision.FP16))
    assert again.strategy == _on(plan.strategy, Precision.FP16)
    assert [reason.origin for reason in again.reasons if reason.field == "precision"] == [Origin.FLAG]


@pytest.mark.parametrize("num_processes", [1, 2, 4, 8])
def test_the_global_batch_of_a_plan_outlives_a_change_of_ranks(num_processes: int) -> None:
    plan = _choose(_EIGHT_NEW, spec_of(micro_batch_size=2, global_batch_size=64))
    try:
        again = _choose(_EIGHT_NEW, spec_of(plan=plan, num_processes=num_processes))
    except UserError:
        return  # refused is as good: what must not be is another batch in silence
    micro_batch_size, steps = again.strategy.micro_batch_size, again.strategy.gradient_accumulation_steps
    assert (micro_batch_size or 0) * (steps or 0) * num_processes == 64
    assert again.workload == Workload(global_batch_size=64)


def test_a_plan_and_a_preset_together_are_refused() -> None:
    plan = _choose(_EIGHT_NEW, spec_of())
    with pytest.raises(UserError) as error:
        _choose(_EIGHT_NEW, spec_of(plan=plan, preset="z3"))
    assert error.value.found == "--plan with --preset z3"


@pytest.mark.parametrize(
    ("made_on", "spec", "taken_to", "precision"),
    [
        (_NO_GPU, spec_of(), _ONE_NEW, Precision.BF16),
        (_NO_GPU, spec_of(), _ONE_OLD, Precision.FP16),
        (_EIGHT_NEW, spec_of(preset="z3"), _EIGHT_OLD, Precision.FP16),
        (_EIGHT_NEW, spec_of(preset="z3"), _NO_GPU, Precision.FP32),
        (_NO_GPU, spec_of(precision=Precision.BF16), _ONE_NEW, Precision.BF16),
    ],
)
def test_what_nobody_asked_for_is_chosen_anew_on_another_machine(
    made_on: Machine, spec: RunSpec, taken_to: Machine, precision: Precision
) -> None:
    again = _choose(taken_to, spec_of(plan=_choose(made_on, spec)))
    assert again.strategy.precision is precision
    assert again.topology.on_cpu is (not taken_to.gpus)
    [reason] = [reason for reason in again.reasons if reason.field == "precision"]
    assert reason.value == precision.value


def test_the_default_engine_of_a_plan_follows_the_ranks_and_keeps_what_was_asked_for() -> None:
    plan = _choose(_ONE_NEW, spec_of())
    assert plan.strategy.engine is Engine.NATIVE
    again = _choose(_EIGHT_NEW, spec_of(plan=plan, num_processes=8))
    assert (again.strategy, again.topology) == (_on(_ZERO2, Precision.BF16), Topology(world_size=8))
    offloaded = _choose(_EIGHT_NEW, spec_of(param_offload=_CPU))
    alone = _choose(_ONE_NEW, spec_of(plan=offloaded, num_processes=1))
    assert alone.strategy == offloaded.strategy


def test_a_plan_of_more_ranks_than_there_are_gpus_is_named_as_the_cause() -> None:
    plan = _choose(_EIGHT_NEW, spec_of())
    with pytest.raises(UserError) as error:
        _choose(_ONE_NEW, spec_of(plan=plan))
    assert str(error.value) == (
        "error[more-ranks-than-gpus]: there are fewer GPUs than ranks\n"
        "  found: 8 ranks in the plan on 1 x 1 GPU\n"
        "  why:   each rank needs a GPU of its own\n"
        "  fix:   set --num-processes to at most 1, or rehearse with --cpu\n"
        f"  see:   {ACCELERATE}/state.py"
    )


def test_a_plan_for_inference_stays_one() -> None:
    plan = _choose(_EIGHT_NEW, spec_of(preset="z3-inference"))
    assert (plan.trains, _choose(_EIGHT_NEW, spec_of(plan=plan)).trains) == (False, False)
    assert _choose(_EIGHT_NEW, spec_of(preset="z3")).trains


def test_blocks_of_a_plan_that_recompute_are_gone_with_checkpointing() -> None:
    said = {"gradient_checkpointing": True, "checkpoint_every": 2, "activation_offload": True}
    plan = _choose(_EIGHT_NEW, spec_of(**said))
    again = _choose(_EIGHT_NEW, spec_of(plan=plan, gradient_checkpointing=False))
    assert (again.strategy.gradient_checkpointing, again.strategy.checkpoint_every) == (False, 1)
    assert (plan.strategy.activation_offload, again.strategy.activation_offload) == (True, False)
    whys = {reason.field: reason.why for reason in again.reasons}
    assert whys["gradient_checkpointing"] == "--no-gradient-checkpointing says so"
    assert {"checkpoint_every", "activation_offload"}.isdisjoint(whys)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (spec_of(tf32=False), "--no-tf32 says so"),
        (spec_of(lora=Lora()), "--lora says so"),
        (spec_of(lora=Said(value=Lora(), text="--qlora")), "--qlora says so"),
    ],
)
def test_a_reason_names_the_flag_as_it_was_typed(spec: RunSpec, why: str) -> None:
    fields = {"tf32", "lora", "quantization"}
    assert {one.why for one in _choose(_EIGHT_NEW, spec).reasons if one.field in fields} == {why}
