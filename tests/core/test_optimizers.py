"""The table of optimizers: each entry is what the libraries have, and works through every reader."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from each_row import in_each

from zerofit.checking.inputs.strategy import situation_of_strategy
from zerofit.checking.rules.optimizer.rules import placed_optimizer
from zerofit.checking.rules.optimizer.table import OPTIMIZERS, verdict
from zerofit.configs.write.trainer import training_arguments
from zerofit.core.capture import CapturedGroup, CapturedOptimizer
from zerofit.core.command import Route
from zerofit.core.estimates import RunPhase
from zerofit.core.optimizers.entry import OptimizerEntry, Update
from zerofit.core.optimizers.lookup import (
    REPLACEMENT_IDS,
    REPLACEMENTS,
    TRAINER_OPTIMIZERS,
    entry_of,
    memory_of,
    optimizer_class,
    optimizer_of_class,
    optimizer_of_deepspeed,
)
from zerofit.core.optimizers.table import ENTRIES, LIBRARIES, NOT_TAKEN_OVER
from zerofit.core.plan import Topology
from zerofit.core.setting import Said
from zerofit.core.strategy import Engine, OffloadDevice, OptimizerName, Strategy, ZeroStage
from zerofit.core.supported import packages_of
from zerofit.planning.estimate.device_memory.optimizers import STATES, Stepped, optimizer_of
from zerofit.planning.estimate.device_memory.replay import Tape, replay_live
from zerofit.planning.estimate.model_use import own_stepper
from zerofit.planning.plan_labels import label
from zerofit.scripts.source.names import optimizer_id
from zerofit.training.setup.optimizer_kinds import make

_every = in_each(ENTRIES, lambda entry: entry.id)
_MADE_BY_SCRIPTS = [entry for entry in ENTRIES if entry.library != "config"]
_of_scripts = in_each(_MADE_BY_SCRIPTS, lambda entry: entry.id)
_SHAPES = ((128, 64), (4096,), (40,), (64, 100))
_MISSING = "the package that makes it is not installed: pip install {}"


def _paths(entry: OptimizerEntry) -> tuple[str, ...]:
    packages = LIBRARIES.get(entry.library, ())
    return entry.classes or tuple(f"{package}.{entry.class_name}" for package in packages[:1])


def _class_of(entry: OptimizerEntry) -> Any:
    """Return the class of an entry; the test is skipped where its package is not installed."""
    module, _, name = _paths(entry)[0].rpartition(".")
    pytest.importorskip(module.partition(".")[0], reason=_MISSING.format(entry.package or entry.library))
    return getattr(importlib.import_module(module), name)


def test_ids_and_names_are_unique() -> None:
    ids = [entry.id for entry in ENTRIES]
    trainer = [name for entry in ENTRIES for name in entry.trainer]
    classes = [path for entry in ENTRIES for path in entry.classes]
    assert [len(set(names)) for names in (ids, trainer, classes)] == [len(ids), len(trainer), len(classes)]
    assert set(REPLACEMENTS) == set(OptimizerName)


@_of_scripts
def test_each_class_has_its_id_in_a_capture_and_in_a_scripts_source(entry: OptimizerEntry) -> None:
    for path in _paths(entry):
        assert optimizer_of_class(path) == entry.id
        assert optimizer_id(path, takes_parameters=False) == entry.id
    assert _paths(entry) or entry.library in ("config", "accelerate")


@pytest.mark.parametrize(
    "entry", [one for one in ENTRIES if one.library == "config"], ids=lambda entry: entry.id
)
def test_each_type_of_deepspeeds_file_has_its_id(entry: OptimizerEntry) -> None:
    spelt = entry.class_name.upper() if entry.ignores_case else entry.class_name
    assert optimizer_of_deepspeed(spelt) == entry.id


def test_trainer_makes_the_class_of_each_name() -> None:
    """Its own function says so, for all that is installed."""
    from transformers import Trainer, TrainingArguments

    model = torch.nn.ModuleDict({"layer": torch.nn.Linear(8, 8)})
    made = {}
    for name in TRAINER_OPTIMIZERS:
        arguments = TrainingArguments(
            output_dir="unused", optim=name, optim_target_modules=["layer"], use_cpu=True, report_to="none"
        )
        try:
            kind, _ = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
        except (ImportError, ValueError):
            continue  # not installed
        if kind.__name__ == "LayerWiseDummyOptimizer":
            continue  # which holds one of the class for each parameter
        bits = "8bit" if "8bit" in name and "torch" not in name and "galore" not in name else ""
        path = f"{kind.__module__}.{kind.__qualname__}"
        made[name] = optimizer_of_class(path if path.endswith("8bit") else f"{path}{bits}")
    paged = {"paged_adamw_8bit", "paged_lion_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit"}
    expected = {name: TRAINER_OPTIMIZERS[name] for name in made}
    # Trainer makes paged ones as AdamW(is_paged=True); all but AdamW and Lion of 32 bits are known as Paged.
    assert {
        name: id_.replace("Paged", "") if name in paged else id_ for name, id_ in expected.items()
    } == made
    assert {"adamw_torch", "adamw_bnb_8bit", "lion_8bit", "sgd", "adafactor"} <= made.keys()


@_every
def test_each_entry_has_an_answer_in_every_placement(entry: OptimizerEntry) -> None:
    if entry.library == "other":
        return
    assert entry.id in OPTIMIZERS
    for stage in ZeroStage:
        for offload in OffloadDevice:
            for route in Route:
                row = verdict(
                    entry.id,
                    zero_stage=stage,
                    optimizer_offload=offload,
                    forces_cpu_optimizer=True,
                    route=route,
                )
                assert row.cause


@_every
def test_each_entry_passes_the_rules(entry: OptimizerEntry) -> None:
    situation = situation_of_strategy(
        Strategy(engine=Engine.DEEPSPEED, zero_stage=ZeroStage.GRADIENTS), topology=Topology(world_size=2)
    )
    said = Said(value=entry.id, text=entry.class_name)
    placed = placed_optimizer(replace(situation, settings=replace(situation.settings, optimizer=said)))
    assert placed is not None
    assert placed.optimizer.value == entry.id


@_of_scripts
def test_each_class_is_planned_with_its_memory_or_a_note(entry: OptimizerEntry) -> None:
    for path in _paths(entry):
        group = CapturedGroup(num_tensors=4, num_parameters=18_728, settings={})
        stepper, note = own_stepper(CapturedOptimizer(class_path=path, groups=(group,), is_prepared=True))
        assert (stepper is None) == (entry.memory is None)
        assert bool(note) == (entry.memory is None or "Paged" in entry.id)
        tape = Tape()
        tape.begin(RunPhase.STEP)
        tensors = [Stepped(num_elements=torch.Size(one).numel(), shape=one) for one in _SHAPES]
        optimizer_of(Strategy(), stepper).step(tape, tensors, is_first=True)
        (peak,) = replay_live(tape).peaks
        assert peak.live_bytes >= 0


@pytest.mark.parametrize("name", OptimizerName)
def test_what_zerofit_puts_in_place_works_through_every_reader(name: OptimizerName) -> None:
    strategy, new = Strategy(optimizer=name), REPLACEMENTS[name]
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in _SHAPES]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pages are for GPUs
        made = make(name, [{"params": parameters, "lr": 1e-3}], ())
    assert new.is_alike(made)
    entry = entry_of(REPLACEMENT_IDS[name])
    assert entry is not None
    assert entry.replacement == new
    assert training_arguments(strategy, deepspeed_file=None)["optim"] == new.trainer
    assert {new.trainer} <= new.trainer_alike <= set(TRAINER_OPTIMIZERS)
    assert new.label in label(strategy, Topology(world_size=1))
    assert ("bitsandbytes" in packages_of(strategy)) == (entry.library == "bitsandbytes")
    assert optimizer_of(strategy, None).costs == new.memory
    situation = situation_of_strategy(strategy, topology=Topology(world_size=1))
    assert situation.settings.optimizer is not None
    assert situation.settings.optimizer.value == entry.id


def _options(entry: OptimizerEntry) -> list[dict[str, Any]]:
    """Return the options of a class that change its memory, one at a time."""
    found: list[dict[str, Any]] = [{}, *({name: True} for name in entry.more_states)]
    for variant in entry.variants:
        found.append({name: 0.1 if name in ("momentum", "weight_decay") else True for name in variant.when})
    return [one for one in found if "is_paged" not in one]


_EXACT = [
    pytest.param(entry, options, id=" ".join((entry.id, *options)))
    for entry in ENTRIES
    if entry.is_exact and entry.memory is not None and entry.memory.offloads_from is None
    if entry.library in ("torch", "transformers", "bitsandbytes", "torchao")
    for options in _options(entry)
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("entry", "options"), _EXACT)
def test_states_are_the_live_ones_of_the_real_class(
    entry: OptimizerEntry, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """After one real step, on the CPU."""
    kind = _class_of(entry)
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in _SHAPES]
    more = {"scale_parameter": False, "relative_step": False} if entry.update is Update.WHOLE_TENSOR else {}
    more = more if entry.library == "transformers" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pages are for GPUs
        optimizer = kind(parameters, lr=1e-3, **more, **options)
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        if entry.library == "bitsandbytes":  # some kernels are for GPUs: what they step is made before
            for number, parameter in enumerate(parameters):
                optimizer.init_state(optimizer.param_groups[0], parameter, 0, number)
        else:
            with torch.compiler.set_stance("force_eager"):
                optimizer.step()
    memory, _ = memory_of(optimizer_class(optimizer), {**optimizer.param_groups[0], **options})
    assert memory is not None
    tensors = [
        Stepped(num_elements=one.numel(), bytes_per_element=one.element_size(), shape=tuple(one.shape))
        for one in parameters
    ]
    tape = Tape()
    optimizer_of(Strategy(), memory).step(tape, tensors, is_first=True)
    told = sum(size for size, term in zip(tape.sizes, tape.terms, strict=True) if term == STATES and size > 8)
    assert told == live_bytes(optimizer.state)


def live_bytes(state: Any) -> int:
    """Return the bytes of all storages in an optimizer's state but counters."""
    storages: dict[int, int] = {}

    def walk(value: Any) -> None:
        if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                walk(getattr(value, name))
        elif isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, dict):
            for one in value.values():
                walk(one)
        elif isinstance(value, (list, tuple)):
            for one in value:
                walk(one)
        elif hasattr(value, "__dict__"):
            walk(vars(value))

    for one in state.values():
        walk(one)
    return sum(size for size in storages.values() if size > 8)


def test_options_that_no_replacement_takes_over_stand_once() -> None:
    assert NOT_TAKEN_OVER == ("amsgrad", "maximize")
