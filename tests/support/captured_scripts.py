"""Captures to plan from: an Accelerator loop or a Trainer with the small model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from captures import LOOP, MODEL
from planning_problems import VERSIONS, machine, model

from zerofit.core.capture import (
    Capture,
    CapturedBatch,
    CapturedGroup,
    CapturedLengths,
    CapturedModel,
    CapturedModule,
    CapturedOptimizer,
    CapturedTensor,
)
from zerofit.core.command import Route
from zerofit.core.plan import Topology
from zerofit.planning.make_problem import problem_of
from zerofit.planning.problem import Problem
from zerofit.planning.run_spec import RunSpec
from zerofit.planning.subject import subject_of_capture

ADAMW = "torch.optim.adamw.AdamW"


def optimizer(
    class_path: str = ADAMW, *, is_prepared: bool = True, num_parameters: int = 1, **settings: Any
) -> CapturedOptimizer:
    """Return an optimizer with one group."""
    group = CapturedGroup(num_tensors=1, num_parameters=num_parameters, settings={"lr": 1e-3, **settings})
    return CapturedOptimizer(class_path=class_path, groups=(group,), is_prepared=is_prepared)


def batch(samples: int = 8, width: int = 512, *, longest: int = 512, shortest: int = 100) -> CapturedBatch:
    """Return a batch of tokens."""
    shape = (samples, width)
    names = ("input_ids", "attention_mask", "labels")
    return CapturedBatch(
        tensors=tuple(CapturedTensor(name=name, shape=shape, dtype="int64") for name in names),
        lengths=(longest, *(shortest,) * (samples - 1)),
    )


def captured_model(**fields: Any) -> CapturedModel:
    """Return the small decoder as a script creates it."""
    facts = fields.pop("facts", None) or model()
    module = CapturedModule(
        name="model",
        class_name="LlamaModel",
        num_parameters=facts.num_parameters,
        num_trainable_parameters=facts.num_trainable_parameters,
        dtype=fields.get("weight_dtype", "float32"),
    )
    ordinary: dict[str, Any] = {
        "class_path": "transformers.models.llama.modeling_llama.LlamaForCausalLM",
        "name": "small",
        "facts": facts,
        "modules": (module,),
    }
    return replace(MODEL, **{**ordinary, **fields})


def capture(**fields: Any) -> Capture:
    """Return a loop of 8 samples a pass and 2 passes a step; fields of the model begin with "model_"."""
    of_model = {name.removeprefix("model_"): fields.pop(name) for name in [*fields] if name[:6] == "model_"}
    assert LOOP.loader
    ordinary: dict[str, Any] = {
        "target": ("train.py",),
        "model": captured_model(**of_model),
        "optimizers": (optimizer(),),
        "loader": replace(LOOP.loader, num_batches=80, num_samples=640, collator="DataCollatorWithPadding"),
        "batches": (batch(),),
        "lengths": CapturedLengths(num_samples=80, is_whole=True, p50=100, p90=300, p99=500, longest=512),
    }
    return replace(LOOP, **{**ordinary, **fields})


def trainer(**fields: Any) -> Capture:
    """Return the same with a Trainer."""
    return capture(
        **{
            "route": Route.TRAINER,
            "trainer_class": "transformers.trainer.Trainer",
            "max_grad_norm": 1.0,
            **fields,
        }
    )


def captured_problem(
    captured: Capture | None = None,
    *,
    num_gpus: int = 4,
    memory_gib: float = 80,
    host_gib: float = 512,
    spec: RunSpec | None = None,
    **options: Any,
) -> Problem:
    """Return the problem of a capture on a node of GPUs."""
    asked = spec or RunSpec()
    return problem_of(
        replace(asked, options=replace(asked.options, **options)),
        subject_of_capture(captured or capture()),
        machine=machine(num_gpus, memory_gib=memory_gib, host_gib=host_gib),
        versions=VERSIONS,
        topology=Topology(world_size=num_gpus),
    )


def with_lengths(captured: Capture, *batches: CapturedBatch, longest: int) -> Capture:
    """Return a capture with other batches and another longest sample."""
    assert captured.lengths is not None
    return replace(captured, batches=batches, lengths=replace(captured.lengths, longest=longest))
