"""Captures of scripts with a loop of their own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from zerofit.core.capture import for_plan
from zerofit.core.command import Route
from zerofit.core.optimizers.memory import CPU_OFFLOAD, PAGED_ADAMW_8BIT
from zerofit.models.weight_formats import format_of
from zerofit.planning.estimate.model_use import own_stepper


@pytest.fixture(scope="module")
def left(capture_in_child: Any) -> Any:
    """Return what scripts/accelerate_loop.py leaves."""
    return capture_in_child("accelerate_loop")


def test_the_script_ends_where_it_would_train(left: Any) -> None:
    assert left.exit_code == 0
    assert "the script went on" not in left.output
    assert left.capture.stopped_at == left.place_of("model(**batch)")
    assert left.capture.target == ("accelerate_loop.py", "--epochs", "3")


def test_no_weights_are_written(left: Any) -> None:
    place = left.folder.parent
    assert sorted(path.name for path in place.iterdir() if path.suffix == ".pt") == ["data.pt"]
    assert not (place / "early").exists()
    assert not (place / "late").exists()


def test_the_model_is_that_of_the_script(left: Any) -> None:
    model = left.capture.model
    assert model.class_path == "transformers.models.llama.modeling_llama.LlamaForCausalLM"
    assert (model.name, model.facts.model_type, model.facts.num_layers) == ("llama", "llama", 2)
    # Of 26,272 elements the 120 rows of the input embedding are frozen.
    assert (model.facts.num_parameters, model.facts.num_trainable_parameters) == (26272, 22432)
    assert model.facts.vocab_size == model.config["vocab_size"] == 120
    assert sum(one.num_parameters for one in model.modules) == 26272
    assert (model.weight_dtype, model.attention) == ("bfloat16", "eager")
    assert (model.can_checkpoint, model.checkpoints, model.is_transformers) == (True, True, True)
    assert (model.passes_num_items, model.mixes_samples, model.adapters) == (True, (), ())


def test_the_learning_rate_is_that_before_warm_up(left: Any) -> None:
    optimizer = left.capture.optimizer
    assert optimizer.class_path == "torch.optim.adamw.AdamW"
    assert [group.settings["lr"] for group in optimizer.groups] == [3e-4, 3e-4]
    assert [group.settings["weight_decay"] for group in optimizer.groups] == [0.1, 0.0]
    assert [group.num_parameters for group in optimizer.groups] == [22272, 160]
    assert optimizer.groups[0].settings["betas"] == [0.9, 0.999]
    (scheduler,) = left.capture.schedulers
    assert (scheduler.initial_lrs, scheduler.num_steps, scheduler.is_prepared) == ((3e-4, 3e-4), 50, True)


def test_batches_and_lengths_are_those_of_the_data(left: Any) -> None:
    capture = left.capture
    assert capture.loader.num_workers == 1
    assert (capture.loader.batch_size, capture.loader.num_batches, capture.loader.num_samples) == (4, 5, 20)
    assert (capture.loader.sampler, capture.loader.collator) == ("RandomSampler", "default_collate")
    assert len(capture.batches) == 4
    for batch in capture.batches:
        assert [(one.name, one.shape) for one in batch.tensors] == [
            ("input_ids", (4, 12)),
            ("attention_mask", (4, 12)),
            ("labels", (4, 12)),
        ]
        assert all(4 <= length <= 8 for length in batch.lengths)
    assert capture.lengths.num_samples == 16
    assert not capture.lengths.is_whole


def test_settings_are_as_the_script_says_though_there_is_no_gpu(left: Any) -> None:
    capture = left.capture
    assert (capture.route, capture.mixed_precision, capture.seed) == (Route.ACCELERATE, "fp16", 7)
    assert capture.names_precision
    assert (capture.micro_batch_size, capture.gradient_accumulation_steps, capture.accumulates) == (
        4,
        3,
        True,
    )
    assert (capture.generates, capture.saves, capture.evaluates) == (True, True, True)
    assert (capture.num_models, capture.notes) == (1, ())


def test_parts_that_were_not_prepared_together_are_found(captured_in_forks: Any) -> None:
    capture = captured_in_forks("separate").capture
    assert (capture.model.class_path, capture.model.is_transformers) == ("__main__.Net", False)
    assert (capture.model.mixes_samples, capture.whole_because) == (("norm",), "")
    assert [(one.class_path, one.is_prepared) for one in capture.optimizers] == [
        ("torch.optim.sgd.SGD", False)
    ]
    assert [(one.num_steps, one.is_prepared) for one in capture.schedulers] == [(10, False)]
    assert (capture.loader.batch_size, capture.micro_batch_size, capture.lengths) == (5, 5, None)
    assert [one.shape for one in capture.batches[0].tensors] == [(5, 6)]


@pytest.mark.parametrize(
    ("script", "because"),
    [
        ("diffuses", ""),
        (
            "mixes_up",
            "the forward pass of Mixup draws random numbers (randperm), which would differ in parts",
        ),
        ("encodes", "in the inputs of Linear, an argument requires a gradient"),
    ],
)
def test_why_a_forward_pass_can_not_run_in_parts_is_seen(
    script: str, because: str, captured_in_forks: Any
) -> None:
    assert captured_in_forks(script).capture.whole_because == because


def test_a_moving_average_of_the_trained_weights_is_seen(captured_in_forks: Any) -> None:
    assert captured_in_forks("diffuses").capture.averages == "AveragedModel"
    assert captured_in_forks("distils").capture.averages == ""


def test_a_model_whose_containers_have_none_in_them_is_captured(captured_in_forks: Any) -> None:
    facts = captured_in_forks("skips").capture.model.facts
    block = 2 * 20 + 8  # two linear layers and a norm; the first block has one layer less
    assert facts.num_parameters == 3 * block - 20 + 5
    assert (facts.num_layers, facts.num_largest_layer_parameters) == (5, block)


@pytest.mark.slow
def test_a_model_of_diffusers_can_checkpoint(captured_in_forks: Any) -> None:
    pytest.importorskip("diffusers", reason="it comes with the extra dev")
    model = captured_in_forks("unet").capture.model
    assert (model.name, model.is_transformers) == ("UNet2DModel", False)
    assert (model.can_checkpoint, model.checkpoints) == (True, False)


def test_a_model_that_is_called_in_parts_is_captured_at_backward(captured_in_forks: Any) -> None:
    left = captured_in_forks("in_parts")
    capture = left.capture
    assert capture.model.class_path == "torch.nn.modules.container.ModuleDict"
    assert capture.stopped_at == left.place_of("accelerator.backward")
    assert capture.notes == (
        "the model is never called as a whole: its first batch is taken from the DataLoader",
    )


def test_seventy_billion_parameters_take_no_memory(captured_in_forks: Any) -> None:
    capture = captured_in_forks("huge").capture
    # https://huggingface.co/meta-llama/Llama-3.1-70B has 70,553,706,496; two embeddings got 44 rows more.
    assert capture.model.facts.num_parameters == 70_553_706_496 + 2 * 44 * 8192
    assert capture.peak_host_bytes < 2 * 2**30
    assert capture.wall_time_s < 120
    assert (capture.model.loads_weights, capture.model.is_made_whole) == (False, False)  # from_config()
    assert capture.model.passes_num_items
    # Its two samples can't fill a batch of the four that the script says.
    assert (capture.micro_batch_size, capture.batches[0].tensors[0].shape) == (4, (2, 64))


def test_data_types_follow_transformers(captured_in_forks: Any) -> None:
    left = captured_in_forks("dtypes")
    (said,) = [line for line in left.output.splitlines() if line.startswith("{")]
    assert json.loads(said) == {
        "as the config says": "torch.bfloat16",
        "as the checkpoint holds": "torch.float16",
        "as nothing says": "torch.float32",
        "as asked": "torch.float16",
        "as asked of old": "torch.float32",
        "made directly": "torch.float32",
        "made and halved": "torch.float16",
    }


def test_quantized_and_adapted_weights_are_told(captured_in_forks: Any) -> None:
    capture = captured_in_forks("quantized").capture
    assert (capture.model.is_quantized, capture.model.adapters) == (True, ("LORA",))
    assert (capture.model.loads_weights, capture.model.is_made_whole) == (True, False)
    assert (capture.mixed_precision, capture.model.attention) == ("bf16", "flash_attention_2")
    assert capture.model.passes_num_items
    # q_proj of 2 layers, each with two matrices of rank 2 on 32 and 32.
    assert capture.model.facts.num_trainable_parameters == 2 * 2 * (32 + 32)


@pytest.mark.parametrize(
    ("name", "method", "weight_dtype"),
    [("in_8_bit", "bitsandbytes_8bit", "float32"), ("on_gptq", "gptq", "bfloat16")],
)
def test_weights_in_other_formats_are_told_without_their_libraries(
    captured_in_forks: Any, name: str, method: str, weight_dtype: str
) -> None:
    capture = captured_in_forks(name).capture
    form = format_of(capture.model.config)
    assert form is not None
    assert form.method == method
    assert (capture.model.is_quantized, capture.model.adapters) == (True, ("LORA",))
    assert capture.model.weight_dtype == weight_dtype
    assert capture.model.facts.num_trainable_parameters == 2 * 2 * (32 + 32)
    # Two layers of 4 x 32 x 32 less half of key and value, and 3 x 32 x 64; embedding, head and norms.
    whole = 2 * (3 * 32 * 32 + 3 * 32 * 64) + 2 * 100 * 32 + 5 * 32
    assert capture.model.facts.num_parameters == whole + 2 * 2 * (32 + 32)
    assert not any("left out" in note for note in capture.notes)


def test_a_checkpoint_that_is_unpacked_while_it_is_loaded_is_a_plain_model(captured_in_forks: Any) -> None:
    capture = captured_in_forks("unpacks").capture
    assert (capture.model.is_quantized, capture.model.weight_dtype) == (False, "bfloat16")
    facts = capture.model.facts
    assert facts.num_trainable_parameters == facts.num_parameters
    assert capture.notes == (
        "its checkpoint is in FP8, as wide as 16 bits: dequantize=True unpacks them while they are loaded",
    )


def test_a_student_in_a_loss_is_the_model_and_no_frozen_teacher(captured_in_forks: Any) -> None:
    left = captured_in_forks("distils")
    capture = left.capture
    assert capture.model.class_path == "__main__.Student"
    assert capture.stopped_at == left.place_of("self.student(batch)")
    assert [one.shape for one in capture.batches[0].tensors] == [(3, 4)]
    # 4 x 4 of the encoder and 4 x 2 of the teacher, in fp32.
    assert capture.other_weight_bytes == 4 * (4 * 4 + 4 * 2)
    assert (capture.gradient_accumulation_steps, capture.accumulates_by_hand) == (1, 4)
    assert capture.notes == (
        "the script asks for the GPUs of its node, and was shown 1 x a GPU that stands in for yours",
        "the script uses a parallelism_config, which is left out of the capture",
    )
    assert left.output.splitlines()[:2] == ["a GPU that stands in for yours 80", "[80, 80] 0.0"]


def test_a_frozen_teacher_is_not_the_model_at_backward(captured_in_forks: Any) -> None:
    capture = captured_in_forks("teaches_in_parts").capture
    assert capture.model.class_path == "torch.nn.modules.container.ModuleDict"
    assert capture.other_weight_bytes == 4 * (4 * 2 + 2)
    assert capture.accumulates_by_hand is None


def test_fewer_batches_are_recorded_where_one_cannot_be_read(captured_in_forks: Any) -> None:
    capture = captured_in_forks("tears").capture
    assert len(capture.batches) == 2
    (note,) = capture.notes
    assert note.startswith("only 2 of the first 4 batches could be read: OSError: no sample 6")


def test_trackers_send_nothing_and_keep_the_configuration(captured_in_forks: Any) -> None:
    capture = captured_in_forks("tracked").capture
    assert (capture.micro_batch_size, capture.batches[0].tensors[0].shape) == (3, (3, 4))
    assert capture.optimizer.groups[0].settings["lr"] == 0.5


def test_what_rules_out_deepspeed_or_its_stage_3_is_told(captured_in_forks: Any) -> None:
    capture = captured_in_forks("beside").capture
    assert capture.uses_local_sgd
    # The causal one was made before the Accelerator.
    assert capture.unprepared_models == ("BertForMaskedLM", "LlamaForSequenceClassification")
    other = captured_in_forks("distils").capture
    assert (other.uses_local_sgd, other.unprepared_models) == (False, ())


def test_a_script_that_asks_for_gpus_sees_one_that_stands_in(captured_in_forks: Any) -> None:
    left = captured_in_forks("asks_for_gpus")
    assert left.exit_code == 0, left.output
    assert (left.capture.micro_batch_size, left.capture.optimizer.class_path) == (
        4,
        "torch.optim.adamw.AdamW",
    )
    told = "1 x a GPU that stands in for yours"
    assert f"the script asks for the GPUs of its node, and was shown {told}" in left.capture.notes


def test_an_optimizer_of_the_scripts_own_is_known_by_its_step(captured_in_forks: Any) -> None:
    capture = captured_in_forks("own_optimizer").capture
    own = capture.optimizer.steps.own
    assert own.elements == (64 * 32,)
    assert own.state_bytes == 2 * 4 * 64 * 32 + 4 * 64
    assert own_stepper(capture.optimizer) == (capture.optimizer.steps, "")
    assert for_plan(capture).optimizer.steps is None


def test_an_optimizer_of_the_table_needs_no_trace(captured_in_forks: Any) -> None:
    optimizer = captured_in_forks("optim_bits").capture.optimizer
    assert optimizer.class_path == "bitsandbytes.optim.adamw.AdamW8bit"
    assert optimizer.steps is None
    note = "the pages of AdamW8bit are counted on the host, where the driver may move them"
    assert own_stepper(optimizer) == (PAGED_ADAMW_8BIT, note)


def test_an_optimizer_that_wraps_others_counts_as_one(captured_in_forks: Any) -> None:
    pytest.importorskip("torchao", reason="pip install torchao")
    capture = captured_in_forks("offloads_optimizer").capture
    (optimizer,) = capture.optimizers
    assert optimizer.class_path == "torchao.optim.cpu_offload.CPUOffloadOptimizer"
    assert own_stepper(optimizer) == (CPU_OFFLOAD, "")
