"""Trainer trains the same under a plan as without it: in this process, on tiny models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from accelerators import quiet, settings
from refusals import refusal
from trainer_training import PIECES, SPLIT, Trained, causal_model, planned_arguments, train_in
from transformers import TrainingArguments

from zerofit.core.upstream.checkpointing import enable_checkpointing, is_checkpointing

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FP32_TOLERANCE = 1e-5
"""Relative. Sums over a batch are rounded in another order."""


def assert_same(found: Trained, expected: Trained) -> None:
    for names in (("loss",), ("grad_norm",), ("learning_rate",), ("eval_loss",)):
        assert found.numbers(*names) == pytest.approx(expected.numbers(*names), rel=FP32_TOLERANCE), names
    assert found.samples == expected.samples
    assert found.trainer.state.max_steps == expected.trainer.state.max_steps
    assert found.trainer.state.global_step == expected.trainer.state.global_step
    substeps = {"on_substep_end": 0}
    assert dict(found.events) | substeps == dict(expected.events) | substeps


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """One big batch in each step, without a plan."""
    return train_in(tmp_path_factory.mktemp("whole"), None, (8, 1))


@pytest.mark.parametrize(
    ("plan", "batches"),
    [
        ({}, (4, 2)),
        ({}, (2, 4)),
        (PIECES, (8, 1)),
        (PIECES, (4, 2)),
        ({"micro_batch_size": 8, "gradient_accumulation_steps": 1}, (2, 4)),
        (SPLIT, (8, 1)),
        (SPLIT, (4, 2)),
    ],
)
def test_under_a_plan_they_are_those_of_one_large_batch(
    plan: dict[str, Any], batches: tuple[int, int], train: Callable[..., Trained], whole: Trained
) -> None:
    found = train(plan, batches)
    assert_same(found, whole)
    weighted = any(line.startswith("each batch's loss counts by its share") for line in found.changes.lines)
    assert weighted == (found.trainer.args.gradient_accumulation_steps > 1)


EVALUATES = {"eval_strategy": "steps", "eval_steps": 2, "logging_steps": 2, "save_strategy": "steps"}


def loss_of_items(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    from torch.nn.functional import cross_entropy

    total = cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total / num_items_in_batch


@pytest.mark.parametrize(
    ("arguments", "more", "plans"),
    [
        ({}, {}, (PIECES,)),
        pytest.param(
            {**EVALUATES, "save_steps": 2, "load_best_model_at_end": True},
            {},
            (PIECES, SPLIT),
            marks=pytest.mark.slow,
        ),
        ({"num_train_epochs": 2, "max_steps": -1}, {}, (PIECES,)),
        pytest.param({"label_smoothing_factor": 0.1}, {}, (PIECES, SPLIT), marks=pytest.mark.slow),
        ({"neftune_noise_alpha": 0.0, "gradient_checkpointing": True}, {}, (PIECES, SPLIT)),
        ({"train_sampling_strategy": "group_by_length"}, {}, (PIECES,)),
        ({}, {"compute_loss_func": loss_of_items}, (PIECES,)),
    ],
    ids=["plain", "evaluating", "epochs", "label smoothing", "neftune", "grouped by length", "own loss"],
)
def test_a_model_that_divides_by_the_items_trains_the_same(
    arguments: dict[str, Any],
    more: dict[str, Any],
    plans: tuple[dict[str, Any], ...],
    train: Callable[..., Trained],
) -> None:
    options = {"make_model": causal_model, "arguments": arguments, **more}
    expected = train(None, (8, 1), **options)
    for plan in plans:
        found = train(plan, (8, 1), **options)
        assert_same(found, expected)
        assert not any("share of the step's labels" in line for line in found.changes.lines)
        if plan is PIECES:
            assert found.events["on_substep_end"] == 3 * found.trainer.state.global_step


@pytest.mark.parametrize(("first", "then"), [(None, PIECES), (PIECES, None), (PIECES, PIECES)])
def test_a_run_resumes_from_a_checkpoint_made_with_and_without_the_plan(
    first: dict[str, Any] | None, then: dict[str, Any] | None, train: Callable[..., Trained]
) -> None:
    options = {"make_model": causal_model, "arguments": {"save_strategy": "steps", "save_steps": 2}}
    whole = train(None, (8, 1), **options)
    train(first, (8, 1), **options)  # leaves checkpoint-2 and checkpoint-3
    _forget(train, "checkpoint-3", whole)
    resumed = train(then, (8, 1), **options, resume=True)
    assert resumed.numbers("loss") == pytest.approx(whole.numbers("loss"), rel=FP32_TOLERANCE)
    assert resumed.samples == [whole.samples[-2], set()]


def test_batches_that_would_take_other_samples_at_an_epochs_end_are_refused(
    train: Callable[..., Trained],
) -> None:
    dropping = {"max_steps": -1, "num_train_epochs": 1, "dataloader_drop_last": True}
    refused = refusal(train, {"micro_batch_size": 2}, (10, 1), arguments=dropping)
    assert refused.rule == "epochs-differ"
    assert "24 samples in steps of 10 on 1 rank, with dataloader_drop_last=True" in str(refused)


def test_arguments_that_nothing_trains_with_are_left_alone(
    train: Callable[..., Trained], tmp_path: Path
) -> None:
    """sentence-transformers makes default TrainingArguments for its model card, with batches of 8."""
    plan = {"micro_batch_size": 16, "trainer_accumulates": False}
    arguments_class = planned_arguments(TrainingArguments, settings(**plan), quiet())
    assert arguments_class(output_dir=str(tmp_path), use_cpu=True).per_device_train_batch_size == 8
    assert refusal(train, plan, (8, 1)).rule == "micro-batch-too-large"


def test_checkpointing_that_the_script_switched_on_in_the_model_is_switched_off(
    train: Callable[..., Trained],
) -> None:
    def checkpointing() -> Any:
        model = causal_model()
        enable_checkpointing(model, use_reentrant=False)
        return model

    options = {"make_model": checkpointing, "arguments": {"max_steps": 1}}
    assert is_checkpointing(train(None, (8, 1), **options).trainer.model)
    found = train({"gradient_checkpointing": False}, (8, 1), **options)
    assert not is_checkpointing(found.trainer.model)
    off = "gradient checkpointing is off in LlamaForCausalLM; the script had it on"
    assert off in found.changes.lines


def _forget(train: Any, name: str, run: Trained) -> None:
    import shutil
    from pathlib import Path

    shutil.rmtree(Path(run.trainer.args.output_dir) / name)


def adapted_model() -> Any:
    """Return a model that trains adapters alone."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(causal_model(), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))


def sequence_model() -> Any:
    """Return an encoder and decoder; its loss ignores num_items_in_batch or not, as transformers has it."""
    from transformers import T5Config, T5ForConditionalGeneration, set_seed

    set_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(vocab_size=64, decoder_start_token_id=0, **sizes))


@pytest.mark.parametrize("plan", [PIECES, SPLIT], ids=["accumulated", "split"])
@pytest.mark.parametrize("kind", ["LoRA", "Seq2Seq"])
def test_adapters_and_sequence_to_sequence_models_train_the_same(
    kind: str, plan: dict[str, Any], train: Callable[..., Trained]
) -> None:
    from transformers import Seq2SeqTrainer

    options: dict[str, Any] = {
        "LoRA": {"make_model": adapted_model, "arguments": {"gradient_checkpointing": True}},
        "Seq2Seq": {
            "make_model": sequence_model,
            "base": Seq2SeqTrainer,
            "arguments": {"learning_rate": 0.01},
        },
    }[kind]
    assert_same(train(plan, (8, 1), **options), train(None, (8, 1), **options))


def distilling(base: Any) -> Any:
    """Return a Trainer of a script's own: its loss is made of two forward passes, one of them a teacher's."""
    import torch

    teacher = causal_model().eval()

    class Distilling(base):
        loss_is_scaled_for_ga = True

        def compute_loss(self, model: Any, inputs: Any, num_items_in_batch: Any = None, **_: Any) -> Any:
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
            outputs = model(**inputs)
            again = model(**inputs)
            with torch.no_grad():
                wanted = teacher(**inputs).logits
            apart = (outputs.logits.log_softmax(-1) - wanted.softmax(-1)).square().sum() / num_items_in_batch
            return outputs.loss + 0.5 * again.loss + 0.1 * apart

    return Distilling


def test_a_trainer_of_the_scripts_own_is_split(train: Callable[..., Trained]) -> None:
    from transformers import Trainer

    options = {"make_model": causal_model, "base": distilling(Trainer)}
    found = train(SPLIT, (8, 1), **options)
    assert_same(found, train(None, (8, 1), **options))
    assert found.sizes == {2, 3}
