"""Problems to test the planner on: models, machines and estimators that need no trace."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from zerofit.core.allocation_log import Trace, TraceRequest
from zerofit.core.facts import GpuSpec, Machine, ModelFacts, Versions, Workload
from zerofit.core.overrides import overrides
from zerofit.core.plan import Topology
from zerofit.core.strategy import Precision
from zerofit.core.units import GIB
from zerofit.machine.rates import catalog_rates
from zerofit.planning.closed_form_estimator import ClosedFormEstimator
from zerofit.planning.estimate.closed_form.log import closed_form_log
from zerofit.planning.estimate.model_use import use_of_named
from zerofit.planning.options import MachineFlags, ModelFlags
from zerofit.planning.problem import Problem
from zerofit.planning.run_spec import RunSpec
from zerofit.planning.solve import Answer, solve
from zerofit.planning.subject import Subject
from zerofit.planning.training_estimator import TrainingEstimator

A100 = GpuSpec(
    name="NVIDIA A100-SXM4-80GB",
    memory_bytes=80 * GIB,
    compute_capability=(8, 0),
    memory_bytes_per_s=2.0e12,
    fp32_flops_per_s=19.5e12,
    tf32_flops_per_s=156e12,
    fp16_flops_per_s=312e12,
    bf16_flops_per_s=312e12,
    peer_bytes_per_s=300e9,
    host_bytes_per_s=32e9,
    has_fast_links=True,
)
VERSIONS = Versions(python="3.11.7", zerofit="0.1.0", deepspeed="0.19.8", torch="2.13.0")


def model(**fields: Any) -> ModelFacts:
    """Return a small decoder, with some fields changed."""
    small: dict[str, Any] = {
        "name": "small",
        "model_type": "llama",
        "num_parameters": 110_000_000,
        "num_trainable_parameters": 110_000_000,
        "num_layers": 4,
        "hidden_size": 1024,
        "vocab_size": 32_000,
        "max_sequence_length": 4096,
        "architecture": "LlamaForCausalLM",
        "intermediate_size": 2816,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 64,
        "is_gated": True,
        "is_causal": True,
        "num_largest_layer_parameters": 12_845_056,
        "largest_parameter": 32_768_000,
    }
    return ModelFacts(**{**small, **fields})


def machine(num_gpus: int = 8, *, memory_gib: float = 80, host_gib: float = 512, **fields: Any) -> Machine:
    """Return a node of A100s with another memory."""
    gpu = replace(A100, memory_bytes=int(memory_gib * GIB))
    return Machine(
        gpus=(gpu,) * num_gpus,
        num_cpu_cores=32,
        host_memory_bytes=int(host_gib * GIB),
        host_memory_available_bytes=int(host_gib * GIB),
        **fields,
    )


_OF_SPEC = frozenset(RunSpec.__dataclass_fields__)
_OF_OPTIONS = frozenset(ModelFlags.__dataclass_fields__)
_RENAMED = {"num_processes": "world_size"}


def spec_of(**said: Any) -> RunSpec:
    """Return a spec with these overrides; fields of RunSpec and options of planning are set as such."""
    options = {name: said.pop(name) for name in [*said] if name in _OF_OPTIONS}
    fields = {name: said.pop(name) for name in [*said] if name in _OF_SPEC}
    values = {_RENAMED.get(name, name): value for name, value in said.items()}
    return RunSpec(overrides=overrides(**values), options=ModelFlags(**options), **fields)


def subject(facts: ModelFacts | None = None, *, sequence_length: int = 1024, **fields: Any) -> Subject:
    """Return a named model that nothing can trace."""
    described = facts or model()
    samples = Workload(sequence_length=sequence_length)
    ordinary: dict[str, Any] = {
        "said": f"--model {described.name}",
        "name": described.name,
        "use": use_of_named(described, Precision.FP32),
    }
    return Subject(**{**ordinary, "facts": described, "samples": samples, **fields})


_OF_SUBJECT = frozenset(Subject.__dataclass_fields__) - {"notes"}


def problem(
    *,
    num_gpus: int = 8,
    num_nodes: int = 1,
    memory_gib: float = 80,
    host_gib: float = 512,
    global_batch_size: int | None = 64,
    sequence_length: int = 1024,
    facts: ModelFacts | None = None,
    machine_fields: dict[str, Any] | None = None,
    spec: RunSpec | None = None,
    **fields: Any,
) -> Problem:
    """Return the small model on a node of GPUs; options of planning and fields of Subject are set as such."""
    options = {name: fields.pop(name) for name in [*fields] if name in _OF_OPTIONS}
    limits = {name: fields.pop(name) for name in [*fields] if name == "limits"}
    of_subject = {name: fields.pop(name) for name in [*fields] if name in _OF_SUBJECT}
    found = Problem(
        spec=replace(spec or RunSpec(described=_ELSEWHERE), **limits),
        subject=subject(facts, sequence_length=sequence_length, **of_subject),
        machine=machine(num_gpus, memory_gib=memory_gib, host_gib=host_gib, **(machine_fields or {})),
        topology=Topology(num_nodes=num_nodes, world_size=num_gpus * num_nodes),
        workload=Workload(global_batch_size=global_batch_size, sequence_length=sequence_length),
        versions=VERSIONS,
    )
    return replace(found.with_options(**options), **fields)


_ELSEWHERE = MachineFlags(gpus="8xA100-80G")


def made_trace(facts: ModelFacts) -> Any:
    """Return a function that traces a model by closed forms, once for all tests of a process."""
    return partial(_made_trace, facts)


@lru_cache(maxsize=512)
def _made_trace(facts: ModelFacts, request: TraceRequest) -> Trace:
    return Trace(request=request, logs=(closed_form_log(facts, request),))


RATES = catalog_rates()
LARGE = model(
    num_parameters=3_000_000_000,
    num_trainable_parameters=3_000_000_000,
    num_layers=5,
    hidden_size=4096,
    intermediate_size=42_240,
)
"""A decoder whose model states do not fit a small GPU, in few layers: they take the planner's time."""


def closed_forms(asked: Problem) -> ClosedFormEstimator:
    """Return an estimator that needs no trace."""
    return ClosedFormEstimator(asked, trace=made_trace(asked.model), rates=RATES)


def replays(asked: Problem) -> TrainingEstimator:
    """Return the estimator of traces, with logs made by closed forms."""
    return TrainingEstimator(asked, trace=made_trace(asked.model), rates=RATES)


def solved(asked: Problem, **options: Any) -> Answer:
    """Return the answer to a problem by closed forms."""
    return replace(solve(asked, estimator_of=closed_forms, **options), is_fast=True)
