"""Captures of scripts with a Trainer."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from transformers import TrainingArguments

from zerofit.core.command import Route
from zerofit.core.strategy import Precision
from zerofit.scripts.capture.child.trainer_hooks import given_by_user
from zerofit.scripts.capture_summary import capture_lines


@pytest.fixture(scope="module")
def left(captured_in_forks: Any) -> Any:
    """Return what scripts/forked/trainer_lora.py leaves."""
    return captured_in_forks("trainer_lora")


def test_the_script_ends_where_its_trainer_would_train(left: Any) -> None:
    assert left.exit_code == 0
    assert "the script went on" not in left.output
    assert "the callback saw PeftModelForSequenceClassification" in left.output
    assert left.capture.stopped_at == left.place_of("trainer.train()")


def test_the_adapted_model_is_told_by_its_base(left: Any) -> None:
    model = left.capture.model
    assert model.class_path == "transformers.models.bert.modeling_bert.BertForSequenceClassification"
    assert (model.adapters, model.is_transformers, model.name) == (("LORA",), True, "bert")
    # Four matrices of rank 4 on 32 and 32, and the head's 32 x 5 + 5, of which peft keeps a frozen copy.
    assert model.facts.num_trainable_parameters == 4 * 4 * (32 + 32) + 165
    assert not model.passes_num_items


def test_arguments_are_as_the_script_says_though_they_need_a_gpu(left: Any) -> None:
    capture = left.capture
    said = capture.trainer_arguments
    assert (said["bf16"], said["tf32"], said["push_to_hub"], said["eval_strategy"]) == (
        True,
        True,
        True,
        "epoch",
    )
    assert said["deepspeed"]["zero_optimization"] == {"stage": 2}
    assert (capture.engine, capture.made_by_engine) == (
        "DeepSpeed ZeRO-2",
        ("scheduler",),
    )  # it has AdamW, too
    assert "  engine              DeepSpeed ZeRO-2, replaced by the plan's" in capture_lines(
        capture, is_cached=False
    )
    assert (capture.mixed_precision, capture.max_grad_norm, capture.seed) == ("bf16", 1.0, 5)


def test_trls_hooks_on_activations_need_no_gpu_in_a_capture(captured_in_forks: Any) -> None:
    pytest.importorskip("trl")
    left = captured_in_forks("trl_offloading")
    assert left.exit_code == 0, left.output
    assert left.capture.stopped_at == left.place_of("trainer.train()")
    assert left.capture.trainer_arguments["activation_offloading"] is True


def test_optimizer_and_schedule_are_the_trainers(left: Any) -> None:
    capture = left.capture
    assert capture.optimizer.class_path == "torch.optim.adamw.AdamW"
    assert {group.settings["lr"] for group in capture.optimizer.groups} == {2e-4}
    # 40 samples, 4 x 2 a step, 3 epochs
    assert [(one.num_steps, one.is_prepared) for one in capture.schedulers] == [(15, True)]
    assert (capture.micro_batch_size, capture.gradient_accumulation_steps) == (4, 2)


def test_the_first_batch_is_what_the_model_is_given(left: Any) -> None:
    capture = left.capture
    names = [one.name for one in capture.batches[0].tensors]
    assert names == ["input_ids", "attention_mask", "labels", "num_items_in_batch"]
    assert all(len(batch.lengths) == 4 for batch in capture.batches)
    assert (capture.loader.collator, capture.loader.num_samples) == ("collate", 40)


def test_lengths_are_those_of_the_whole_dataset(left: Any) -> None:
    lengths = left.capture.lengths
    # Lengths 3 to 11 in turn, the first four once more than the others.
    assert (lengths.num_samples, lengths.is_whole) == (40, True)
    assert (lengths.p50, lengths.p90, lengths.p99, lengths.longest) == (6, 10, 11, 11)


def test_evaluation_and_saving_are_told(left: Any) -> None:
    capture = left.capture
    assert (capture.route, capture.trainer_class) == (Route.TRAINER, "transformers.trainer.Trainer")
    assert (capture.evaluates, capture.saves, capture.generates) == (True, True, False)
    assert capture.trainer_overrides == ()


def test_batches_of_evaluation_are_those_of_the_largest_dataset(left: Any) -> None:
    found = left.capture.evaluation
    assert (found.batch_size, found.num_samples, found.is_certain) == (6, 40, True)
    assert (found.keeps_predictions, found.moves_every, found.concatenates) == (True, 2, True)
    assert found.lengths.longest == 11
    assert [one.name for one in found.batches[0].tensors] == ["input_ids", "attention_mask", "labels"]
    assert found.batches[0].tensors[0].shape == (6, 8)  # lengths 3 to 8
    words = "40 samples in batches of 6 on each rank, predictions on the GPU until 2 batches are done"
    assert any(words in line for line in capture_lines(left.capture))


def test_a_subclass_is_told_with_what_it_overrides(captured_in_forks: Any) -> None:
    capture = captured_in_forks("seq2seq").capture
    assert (capture.trainer_class, capture.trainer_overrides) == ("__main__.Weighted", ("compute_loss",))
    assert (capture.generates, capture.mixed_precision) == (True, "fp16")
    # Six samples can't fill a batch of the eight that the script says.
    assert (capture.micro_batch_size, capture.batches[0].tensors[0].shape) == (8, (6, 9))
    assert not capture.model.passes_num_items


def test_fp32_and_the_cpu_are_the_scripts_choice_where_it_names_them(
    left: Any, captured_in_forks: Any
) -> None:
    capture = captured_in_forks("on_cpu").capture
    assert (capture.asks_for_cpu, capture.names_precision, capture.precision) == (True, True, Precision.FP32)
    silent = captured_in_forks("preferences").capture
    assert (silent.asks_for_cpu, silent.names_precision, silent.precision) == (False, False, None)
    assert (left.capture.names_precision, left.capture.precision) == (True, Precision.BF16)


@pytest.mark.parametrize(
    ("command_line", "named"),
    [
        (["train.py", "--bf16", "False"], {"bf16"}),
        (["train.py", "--no_fp16"], {"fp16"}),
        (["train.py"], set()),
    ],
)
def test_of_a_parser_that_gives_all_fields_the_command_line_and_what_differs_from_defaults_count(
    command_line: list[str], named: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", command_line)
    everything = {field.name: field.default for field in fields(TrainingArguments) if field.init}
    assert given_by_user(TrainingArguments, everything) == named
    assert given_by_user(TrainingArguments, {**everything, "tf32": False}) == {*named, "tf32"}
    assert given_by_user(TrainingArguments, {"output_dir": "out", "bf16": False}) == {"output_dir", "bf16"}


def test_samples_are_the_loaders_and_rows_the_models(captured_in_forks: Any) -> None:
    capture = captured_in_forks("preferences").capture
    assert (capture.micro_batch_size, capture.rows_per_sample) == (4, 2)
    assert capture.batches[0].tensors[0].shape == (8, 9)
    assert capture.other_weight_bytes == 2 * capture.model.facts.num_parameters
    assert "  batch on each rank  4 x 1, 8 rows at the model" in capture_lines(capture, is_cached=False)


def test_a_trainer_that_does_not_reach_its_model_is_captured_by_its_data(captured_in_forks: Any) -> None:
    capture = captured_in_forks("stuck_trainer").capture
    assert (capture.route, capture.trainer_overrides) == (Route.TRAINER, ("compute_loss",))
    assert [one.name for one in capture.batches[0].tensors] == ["input_ids", "labels"]
    assert len(capture.optimizers) == 1
    assert any(note.startswith("the Trainer's first forward pass was not reached") for note in capture.notes)


def test_a_trainer_that_goes_on_from_a_checkpoint_reads_none_of_it(captured_in_forks: Any) -> None:
    left = captured_in_forks("goes_on")
    capture = left.capture
    assert capture.stopped_at == left.place_of("train(resume_from_checkpoint=True)")
    assert capture.model.facts.num_trainable_parameters == 2 * 2 * (32 + 32)
    assert capture.model.passes_num_items
    assert [one.num_steps for one in capture.schedulers] == [9]


@pytest.mark.slow
def test_it_is_the_same_where_the_script_itself_imports_the_libraries(
    left: Any, capture_in_child: Any
) -> None:
    alone = capture_in_child("trainer_lora", left.script.read_text())
    assert "the script went on" not in alone.output
    assert "the callback saw PeftModelForSequenceClassification" in alone.output
    assert _comparable(alone) == _comparable(left)


def _comparable(left: Any) -> Any:
    """Return a capture without what names its script or measures its run."""
    line = left.capture.stopped_at.rpartition(":")[2]
    arguments = {
        name: value
        for name, value in left.capture.trainer_arguments.items()
        if name not in ("output_dir", "logging_dir", "run_name")
    }
    return replace(
        left.capture,
        target=(),
        stopped_at=line,
        trainer_arguments=arguments,
        wall_time_s=0.0,
        peak_host_bytes=0,
    )
