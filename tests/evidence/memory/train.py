"""Runs a case on this rank, phase by phase, under the tracker."""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from measuring_ranks import fresh_state

from memory.cases import BATCH, STEPS, Case, deepspeed_config
from memory.devices import DEVICE, two_memories
from memory.models import make_inputs, make_model
from memory.track import Tracker, summary
from zerofit.core.upstream.deepspeed import sequence_groups
from zerofit.training.changes import Changes
from zerofit.training.pipeline.make_pipeline import make_pipeline
from zerofit.training.setup.deepspeed.sequence_shards import Shards

if TYPE_CHECKING:
    from collections.abc import Iterator


def measure(case: Case) -> dict[str, Any]:
    """Return the phases of a case, and the parameters of its model."""
    tracker = Tracker()
    with fresh_state(), two_memories(tracker), tracker:
        tracker.phase("load")
        accelerator = _accelerator(case) if case.zero_init else None
        model = make_model(case)
        if case.stage is not None:
            accelerator = accelerator or _accelerator(case)
        params = [
            (name, list(getattr(p, "ds_shape", p.shape)), p.requires_grad)
            for name, p in model.named_parameters()
        ]
        optimizer = torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad],
            lr=1e-3, **({"fused": True} if case.fused else {"foreach": True}),
        )  # fmt: skip
        for param in model.parameters():
            if param.requires_grad:  # this hook runs before the engine's, which takes the gradient away
                param.register_post_accumulate_grad_hook(lambda param: tracker.mark_gradient(param.grad))
        del param  # a stage drops those of others
        if case.pipeline > 1:
            _train_in_stages(case, tracker, model, optimizer)
        elif accelerator:
            _train_deepspeed(case, tracker, accelerator, model, optimizer)
        else:
            _train_native(case, tracker, model, optimizer)
        del accelerator, model, optimizer
        tracker.phase("after")
    phases = [phase for phase in tracker.phases if phase.name not in ("before", "after")]
    return {"phases": summary(phases), "params": params}


def _accelerator(case: Case) -> Any:
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    plugin = DeepSpeedPlugin(hf_ds_config=deepspeed_config(case))
    accelerator = Accelerator(deepspeed_plugin=plugin)
    assert accelerator.num_processes == case.num_ranks
    return accelerator


def _train_deepspeed(
    case: Case, tracker: Tracker, accelerator: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    tracker.phase("initialise")
    with _groups(case):
        engine, optimizer = accelerator.prepare(model, optimizer)
    forward: Any = engine
    if case.sequence > 1:
        shards = Shards(engine.module, group=engine.seq_parallel_group)

        def forward(**inputs: Any) -> Any:
            return shards.forward(engine, inputs)

    inside = engine.step
    label = ""

    def step(*args: Any, **kwargs: Any) -> Any:
        tracker.phase(f"step {label}")
        return inside(*args, **kwargs)

    engine.step = step
    try:
        for number in range(1, STEPS + 1):
            for micro in range(1, case.accumulation + 1):
                label = f"{number}.{micro}"
                # As accelerate's accumulate() does.
                accelerator.gradient_state._set_sync_gradients(micro == case.accumulation)
                inputs = make_inputs(case, DEVICE)
                tracker.phase(f"forward {label}")
                loss = forward(**inputs).loss
                tracker.phase(f"backward {label}")
                accelerator.backward(loss)
                del loss, inputs
        tracker.phase("after")
    finally:
        del engine.step
        engine.destroy()


@contextlib.contextmanager
def _groups(case: Case) -> Iterator[None]:
    """Let the engine that is made inside have the case's groups; torch makes none on "cpu:0"."""
    import deepspeed
    from torch.distributed import device_mesh

    original, mesh = deepspeed.initialize, device_mesh.init_device_mesh
    device_mesh.init_device_mesh = lambda _, *args, **kwargs: mesh("cpu", *args, **kwargs)
    if case.sequence > 1:
        deepspeed.initialize = functools.partial(original, mpu=sequence_groups(case.sequence))
    try:
        yield
    finally:
        deepspeed.initialize, device_mesh.init_device_mesh = original, mesh


def _train_in_stages(
    case: Case, tracker: Tracker, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Train as in a launch, whose forward pass runs the backward pass too."""
    tracker.phase("initialise")
    settings: Any = SimpleNamespace(
        pipeline_parallel_size=case.pipeline,
        pipeline_stages_per_rank=case.stages_per_rank,
        stage_blocks=(),
        most_rows=BATCH,
        plan=SimpleNamespace(generate_limit_s=60),
    )
    stages = make_pipeline(model, settings, Changes(announce=False))
    stages.cut_optimizer(optimizer)
    pipeline = stages.pipeline
    model.to(DEVICE)
    tracker.default_on_device = True
    pipeline.accelerator = accelerator = SimpleNamespace(sync_gradients=True)
    for number in range(1, STEPS + 1):
        for micro in range(1, case.accumulation + 1):
            accelerator.sync_gradients = micro == case.accumulation
            tracker.phase(f"backward {number}.{micro}")
            inputs = make_inputs(case, DEVICE, rows=BATCH * case.micro_batches)
            model(**inputs).loss.backward()
            del inputs
        tracker.phase(f"step {number}.{micro}")
        norm = pipeline.norm(model.parameters(), 2.0, error_if_nonfinite=False)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), case.clipping, norm)
        optimizer.step()
        optimizer.zero_grad()
    tracker.phase("after")


def _train_native(
    case: Case, tracker: Tracker, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    tracker.phase("initialise")
    model.to(DEVICE)
    tracker.default_on_device = True  # what DistributedDataParallel makes in C++ names no device here
    as_view = case.zero.get("gradient_as_bucket_view", False)
    wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=as_view)
    for number in range(1, STEPS + 1):
        for micro in range(1, case.accumulation + 1):
            label = f"{number}.{micro}"
            syncs = micro == case.accumulation
            with contextlib.nullcontext() if syncs else wrapped.no_sync():
                inputs = make_inputs(case, DEVICE)
                tracker.phase(f"forward {label}")
                loss = wrapped(**inputs).loss
                tracker.phase(f"backward {label}")
                loss.backward()
                del loss, inputs
            if syncs:
                tracker.phase(f"step {label}")
                torch.nn.utils.clip_grad_norm_(model.parameters(), case.clipping)
                optimizer.step()
                optimizer.zero_grad()
    tracker.phase("after")
