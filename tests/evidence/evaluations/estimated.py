"""The same cases by zerofit: the Trainer's evaluation traced as for a plan, after an engine's steps."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from evaluations.cases import BUCKETS, EVAL_BATCH, LENGTH, NUM_BATCHES, TRAIN_BATCH, Case
from evaluations.trainers import make_model, make_trainer
from zerofit.core.allocation_log import Sharding, TraceRequest
from zerofit.core.estimates import RunPhase
from zerofit.core.facts import Versions
from zerofit.core.plan import Topology
from zerofit.core.strategy import Buckets, Engine, OffloadDevice, Precision, Strategy, ZeroStage
from zerofit.models.trace.live import trace_live
from zerofit.models.trace.prepare import attribute_replaced
from zerofit.models.trace.script_loss import ScriptLoss
from zerofit.planning.estimate.device_memory.memory import play_strategy
from zerofit.planning.estimate.device_memory.replay import replay_live
from zerofit.planning.estimate.engines import engine as engine_module
from zerofit.planning.estimate.engines import fsdp2 as fsdp2_module
from zerofit.planning.estimate.engines.engine import MAX_PLAYED_MICRO_BATCHES, Setup
from zerofit.planning.estimate.engines.evaluation import Evaluation, play_evaluation
from zerofit.planning.estimate.model_use import ModelUse

if TYPE_CHECKING:
    from zerofit.core.allocation_log import AllocationLog
    from zerofit.planning.estimate.device_memory.replay import TapePeak


def estimated(case: Case) -> int:
    """Return the most that each rank holds in a case's evaluations, in bytes."""
    return peak_of(case).live_bytes


def peak_of(case: Case) -> TapePeak:
    """Return the moment of a case's evaluations in which most is live."""
    with tempfile.TemporaryDirectory() as folder:
        from transformers import Trainer

        trainer = make_trainer(Trainer, case, make_model(case), folder, use_cpu=True)
        trained = _traced(case, trainer, evaluates=False)
        evaluated = _traced(case, trainer, evaluates=True)
    setup = Setup(
        log=trained,
        strategy=_strategy(case),
        topology=Topology(world_size=case.num_ranks),
        versions=Versions(python="3.11", zerofit="0", deepspeed="0.19.8"),
        use=ModelUse(has_adapters=case.lora),
    )
    with (
        attribute_replaced(engine_module, "cublas_workspace_bytes", lambda _: 0),
        attribute_replaced(fsdp2_module, "cublas_workspace_bytes", lambda _: 0),
    ):
        engine = play_strategy(setup, sketch=True)
        play_evaluation(engine, _evaluation(case, evaluated))
    (peak,) = (peak for peak in replay_live(engine.tape).peaks if peak.phase is RunPhase.EVALUATE)
    return peak


def _evaluation(case: Case, log: AllocationLog) -> Evaluation:
    together = 1 if case.keeps == "loss" or case.by_batch else NUM_BATCHES
    num_batches = min(together, case.moves_every or together)
    return Evaluation(
        log=log,
        batch_size=EVAL_BATCH,
        num_batches=num_batches,
        num_ranks=case.num_ranks,
        concatenates=case.concatenates,
        num_lacking=case.lacking if num_batches == NUM_BATCHES else 0,
    )


def _strategy(case: Case) -> Strategy:
    offload = OffloadDevice.CPU if case.offload else OffloadDevice.NONE
    keeps_params = case.stage in (0, 1, 2)
    return Strategy(
        engine=Engine.FSDP2 if case.stage is None else Engine.DEEPSPEED,
        zero_stage=ZeroStage(case.stage or 0),
        optimizer_offload=offload,
        param_offload=OffloadDevice.NONE if keeps_params else offload,
        precision=Precision.BF16 if case.bf16 else Precision.FP32,
        micro_batch_size=TRAIN_BATCH,
        gradient_accumulation_steps=case.accumulation,
        reshard_after_forward=case.reshard,
        buckets=Buckets(**{**BUCKETS, **case.zero}),
    )


def _request(case: Case) -> TraceRequest:
    precision = Precision.BF16 if case.bf16 else Precision.FP32
    sharding = Sharding(
        shard_size=case.num_ranks,
        reshard_after_forward=case.reshard,
        precision=precision,
        cpu_offload=case.offload,
        micro_batches=min(case.accumulation, MAX_PLAYED_MICRO_BATCHES),
    )
    return TraceRequest(
        sequence_length=LENGTH,
        is_padded=case.has_lengths,
        weights=Precision.FP32 if case.stage is None else precision,
        keeps_outputs=False,
        gradient_checkpointing=case.checkpointing,
        saves_linear_inputs=case.stage == 3 and case.lora,
        sharding=sharding if case.stage is None else None,
    )


def _traced(case: Case, trainer: Any, *, evaluates: bool) -> AllocationLog:
    """Return the log of a batch that a Trainer trains on, or evaluates."""
    request, size = _request(case), TRAIN_BATCH
    inputs = next(iter(trainer.get_eval_dataloader()))
    if evaluates:
        request = replace(request, evaluates=True, gradient_checkpointing=False)
        size = EVAL_BATCH
    loss = ScriptLoss(
        trainer=trainer, model=trainer.model, keeps_predictions=evaluates and case.keeps != "loss"
    )
    trace = trace_live(trainer.model, ((inputs,), {}), request, micro_batch_size=EVAL_BATCH, loss=loss)
    return trace.log_for(size)
