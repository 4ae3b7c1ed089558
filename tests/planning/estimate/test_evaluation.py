"""A Trainer's evaluations: what an engine's tape holds in them, and what a real one allocates on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from allocator_counts import counted_in
from made_logs import LayerSizes, LogBuilder, layered_log
from tiny_traces import tiny

from zerofit.core.allocation_log import Event, TensorKind, TraceRequest
from zerofit.core.errors import UserError
from zerofit.core.estimates import RunPhase
from zerofit.core.facts import Versions
from zerofit.core.plan import Topology
from zerofit.core.strategy import Buckets, Engine, Precision, Strategy, ZeroStage
from zerofit.planning.estimate.device_memory.memory import play_strategy
from zerofit.planning.estimate.device_memory.replay import Tape, replay_live
from zerofit.planning.estimate.engines.engine import Setup
from zerofit.planning.estimate.engines.evaluation import KEPT, Evaluation, play_evaluation
from zerofit.planning.estimate.engines.native import NativeEngine

if TYPE_CHECKING:
    from pathlib import Path

    from zerofit.core.allocation_log import AllocationLog

BATCH, LENGTH, SAMPLES = 4, 48, 24
VERSIONS = Versions(python="3", zerofit="0")
REQUEST = TraceRequest(sequence_length=LENGTH, is_padded=False, keeps_outputs=False, evaluates=True)
TOLERANCE = 0.02
"""Relative, of the live tensors' largest sum: losses and what the DataLoader holds are not counted."""


class Samples:
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        ids = torch.full((LENGTH,), index)
        return {"input_ids": ids, "labels": ids}


def _no_metrics(_: Any) -> dict[str, float]:
    return {}


def _best_tokens(logits: Any, _: Any) -> Any:
    return logits.argmax(-1)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "logits are kept": ({"compute_metrics": _no_metrics}, {}),
    "in a list": ({"compute_metrics": _no_metrics}, {"eval_do_concat_batches": False}),
    "reduced at once": (
        {"compute_metrics": _no_metrics, "preprocess_logits_for_metrics": _best_tokens},
        {},
    ),
    "the loss alone": ({}, {}),
}
"""What the Trainer gets, and its arguments."""


@pytest.mark.parametrize("case", CASES)
def test_live_tensors_of_evaluations_are_those_of_the_real_ones(case: str, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    given, said = CASES[case]
    arguments = TrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", per_device_eval_batch_size=BATCH, **said
    )
    config, build = tiny("llama", 2)
    trainer = Trainer(model=build(config), args=arguments, eval_dataset=Samples(), **given)
    keeps = trainer.compute_metrics is not None
    evaluation = Evaluation(
        log=_traced(trainer, keeps=keeps),
        batch_size=BATCH,
        num_batches=SAMPLES // BATCH if keeps else 1,
        num_ranks=1,
        concatenates=arguments.eval_do_concat_batches,
    )
    real, _ = counted_in(trainer.evaluate, trainer.model)
    assert _played_peak(evaluation) == pytest.approx(real, rel=TOLERANCE)


@pytest.mark.parametrize("keeps", [False, True])
def test_live_tensors_of_trls_evaluations_are_those_of_the_real_ones(keeps: bool, tmp_path: Path) -> None:
    """SFTTrainer's loss has no logits, and a second forward pass makes them where they are kept."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")
    samples = Dataset.from_dict({"input_ids": [[2 + index] * LENGTH for index in range(SAMPLES)]})
    arguments = SFTConfig(
        str(tmp_path), use_cpu=True, bf16=False, report_to="none", per_device_eval_batch_size=BATCH
    )
    config, build = tiny("llama", 2)
    trainer = SFTTrainer(
        model=build(config),
        args=arguments,
        train_dataset=samples,
        eval_dataset=samples,
        processing_class=tokenizer,
        compute_metrics=_no_metrics if keeps else None,
    )
    evaluation = Evaluation(
        log=_traced(trainer, keeps=keeps),
        batch_size=BATCH,
        num_batches=SAMPLES // BATCH if keeps else 1,
        num_ranks=1,
    )
    real, _ = counted_in(trainer.evaluate, trainer.model)
    assert _played_peak(evaluation) == pytest.approx(real, rel=TOLERANCE)


def test_an_evaluation_that_generates_is_refused_rather_than_counted_for_a_token(tmp_path: Path) -> None:
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    arguments = Seq2SeqTrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", predict_with_generate=True, generation_max_length=40
    )
    config, build = tiny("t5", 2)
    trainer = Seq2SeqTrainer(
        model=build(config), args=arguments, eval_dataset=Samples(), compute_metrics=_no_metrics
    )
    with pytest.raises(UserError, match="evaluation generates text"):
        _traced(trainer, keeps=True)
    assert _traced(trainer, keeps=False).codes  # the loss alone generates nothing


def _traced(trainer: Any, *, keeps: bool) -> AllocationLog:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from zerofit.models.trace.affine import exact, to_allocation_log
    from zerofit.models.trace.entry import describe
    from zerofit.models.trace.live import copy_without_values, prepare_live
    from zerofit.models.trace.live_batch import live_batch
    from zerofit.models.trace.run import run_micro_batch
    from zerofit.models.trace.script_loss import ScriptLoss

    inputs = next(iter(trainer.get_eval_dataloader()))
    feed = live_batch(((inputs,), {}), has_tokens=True, has_decoder=False, micro_batch_size=BATCH).feed
    loss = ScriptLoss(trainer=trainer, model=trainer.model, keeps_predictions=keeps)
    with FakeTensorMode(allow_non_fake_inputs=True):
        copied = prepare_live(trainer.model, REQUEST)
        loss.bind(copied, copy_without_values)
        skeleton = describe(copied)
        raw = run_micro_batch(copied, skeleton, BATCH, REQUEST, feed=feed, loss=loss, as_on_cuda=False)
    return to_allocation_log(exact(raw), skeleton, BATCH)


def _played_peak(evaluation: Evaluation) -> int:
    setup = Setup(log=evaluation.log, strategy=Strategy(), topology=Topology(world_size=1), versions=VERSIONS)
    engine = NativeEngine(setup, Tape())
    play_evaluation(engine, evaluation)
    return replay_live(engine.tape).peaks[0].live_bytes


def _made_log() -> AllocationLog:
    """Return the log of a forward pass that keeps 100 bytes of each sample."""
    builder = LogBuilder()
    builder.allocate(TensorKind.KEPT, 0, per_sample=100)
    return builder.build()


@pytest.mark.parametrize(
    ("num_batches", "num_ranks", "concatenates", "expected"),
    [
        (1, 1, True, 200),
        (5, 1, True, 200 * (4 + 5 + 1)),  # those before, their copy, and the last batch's own
        (5, 1, False, 200 * 5),
        (5, 4, True, 4 * 200 * (4 + 5 + 1)),
        (1000, 1, True, 200 * (999 + 1000 + 1)),
    ],
)
def test_kept_predictions_grow_with_the_batches_and_ranks(
    num_batches: int, num_ranks: int, concatenates: bool, expected: int
) -> None:
    evaluation = Evaluation(
        log=_made_log(), batch_size=2, num_batches=num_batches, num_ranks=num_ranks, concatenates=concatenates
    )
    assert _played_peak(evaluation) == expected


def test_a_last_batch_that_is_not_full_is_gathered_whole_and_kept_in_part() -> None:
    evaluation = Evaluation(log=_made_log(), batch_size=2, num_batches=5, num_ranks=4, num_lacking=3)
    assert _played_peak(evaluation) == 100 * (4 * 8 + (5 * 8 - 3) + 8)


def test_evaluations_hold_the_states_of_training_and_no_gradients() -> None:
    log = _made_log()
    training = layered_log((LayerSizes(elements=(1024, 2048)),))
    setup = Setup(
        log=training,
        strategy=Strategy(micro_batch_size=1, gradient_accumulation_steps=1),
        topology=Topology(world_size=1),
        versions=VERSIONS,
    )
    engine = play_strategy(setup, sketch=True)
    play_evaluation(engine, Evaluation(log=log, batch_size=2, num_batches=1, num_ranks=1))
    (peak,) = (peak for peak in replay_live(engine.tape).peaks if peak.phase is RunPhase.EVALUATE)
    held = dict(peak.live)
    assert (held["weights"], held["optimizer states"], held[KEPT]) == (4 * 3072, 8 * 3072, 200)
    assert "gradients" not in held


def _forward_alone(log: AllocationLog) -> AllocationLog:
    """Return a log up to the end of its forward pass, as an evaluation has it."""
    ends = log.codes.index(Event.FORWARD_ENDS)
    return replace(log, codes=log.codes[:ends], arguments=log.arguments[:ends])


@pytest.mark.parametrize("stage", ZeroStage)
def test_a_partitioned_model_is_gathered_to_evaluate(stage: ZeroStage) -> None:
    layers = tuple(LayerSizes(elements=(1 << 20, 1 << 20)) for _ in range(6))
    log = layered_log(layers, bytes_per_element=2)
    setup = Setup(
        log=log,
        strategy=Strategy(
            engine=Engine.DEEPSPEED,
            zero_stage=stage,
            precision=Precision.BF16,
            micro_batch_size=1,
            gradient_accumulation_steps=1,
            buckets=Buckets(stage3_param_persistence_threshold=0),
        ),
        topology=Topology(world_size=4),
        versions=VERSIONS,
    )
    engine = play_strategy(setup, sketch=True)
    forward = _forward_alone(log)
    play_evaluation(engine, Evaluation(log=forward, batch_size=1, num_batches=1, num_ranks=4))
    (peak,) = (peak for peak in replay_live(engine.tape).peaks if peak.phase is RunPhase.EVALUATE)
    held, whole = dict(peak.live), 2 * 12 * (1 << 20)
    is_partitioned = stage is ZeroStage.PARAMETERS
    assert held["weights"] == (whole // 4 if is_partitioned else whole)
    assert ("gathered weights" in held) is is_partitioned
    assert "activations" in held


def test_a_batch_finds_what_zero3_left_gathered_of_the_one_before() -> None:
    """A Trainer that keeps nothing, or moves each batch's predictions, evaluates more than one batch too."""
    log = layered_log(tuple(LayerSizes(elements=(1 << 20, 1 << 20)) for _ in range(6)), bytes_per_element=2)
    setup = Setup(
        log=log,
        strategy=Strategy(
            engine=Engine.DEEPSPEED,
            zero_stage=ZeroStage.PARAMETERS,
            precision=Precision.BF16,
            micro_batch_size=1,
            gradient_accumulation_steps=1,
            buckets=Buckets(
                stage3_param_persistence_threshold=0,
                stage3_prefetch_bucket_size=0,
                stage3_max_reuse_distance=4 << 20,
            ),
        ),
        topology=Topology(world_size=4),
        versions=VERSIONS,
    )

    def gathered(num_batches: int) -> int:
        engine = play_strategy(setup, sketch=True)
        forward = _forward_alone(log)
        play_evaluation(engine, Evaluation(log=forward, batch_size=1, num_batches=num_batches, num_ranks=4))
        (peak,) = (peak for peak in replay_live(engine.tape).peaks if peak.phase is RunPhase.EVALUATE)
        return dict(peak.live)["gathered weights"]

    assert gathered(1) == gathered(2) == gathered(3)
