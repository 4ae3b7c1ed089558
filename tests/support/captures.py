"""Handmade captures of GPT-2 scripts: an ordinary Accelerator loop, and a Trainer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zerofit.core.capture import (
    Capture,
    CapturedBatch,
    CapturedGroup,
    CapturedLengths,
    CapturedLoader,
    CapturedModel,
    CapturedModule,
    CapturedOptimizer,
    CapturedTensor,
)
from zerofit.core.command import Route
from zerofit.core.facts import ModelFacts

FACTS = ModelFacts(
    name="gpt2",
    model_type="gpt2",
    num_parameters=124_439_808,
    num_trainable_parameters=124_439_808,
    num_layers=12,
    hidden_size=768,
    vocab_size=50_257,
    max_sequence_length=1024,
    architecture="GPT2LMHeadModel",
    intermediate_size=3072,
    num_attention_heads=12,
    num_key_value_heads=12,
    head_dim=64,
    is_causal=True,
    num_largest_layer_parameters=7_087_872,
    largest_parameter=38_597_376,
)
MODEL = CapturedModel(
    class_path="transformers.models.gpt2.modeling_gpt2.GPT2LMHeadModel",
    name="gpt2",
    facts=FACTS,
    is_transformers=True,
    modules=(
        CapturedModule(
            name="transformer",
            class_name="GPT2Model",
            num_parameters=124_439_808,
            num_trainable_parameters=124_439_808,
            dtype="float32",
        ),
    ),
    can_checkpoint=True,
    attention="sdpa",
    passes_num_items=True,
)
LOOP = Capture(
    target=("train.py", "--epochs", "3"),
    route=Route.ACCELERATE,
    stopped_at="train.py:118",
    model=MODEL,
    optimizers=(
        CapturedOptimizer(
            class_path="torch.optim.adamw.AdamW",
            groups=(
                CapturedGroup(num_tensors=50, num_parameters=124_318_464, settings={"lr": 5e-5}),
                CapturedGroup(num_tensors=98, num_parameters=121_344, settings={"lr": 5e-5}),
            ),
            is_prepared=True,
        ),
    ),
    schedulers=(),
    loader=CapturedLoader(
        batch_size=8,
        num_batches=100,
        num_samples=800,
        collator="default_data_collator",
        draws_random=False,
        sampler="RandomSampler",
        drops_last=False,
        num_workers=0,
    ),
    batches=(
        CapturedBatch(
            tensors=tuple(
                CapturedTensor(name=name, shape=(8, 128), dtype="int64") for name in ("input_ids", "labels")
            ),
            lengths=(128,) * 8,
        ),
    ),
    lengths=CapturedLengths(num_samples=64, is_whole=False, p50=96, p90=120, p99=128, longest=128),
    micro_batch_size=8,
    gradient_accumulation_steps=2,
    accumulates=True,
    wall_time_s=11.5,
    peak_host_bytes=600 << 20,
)
TRAINER = replace(
    LOOP,
    route=Route.TRAINER,
    trainer_class="transformers.trainer.Trainer",
    max_grad_norm=1.0,
    trainer_arguments={"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "bf16": True},
    mixed_precision="bf16",
)


def with_model(capture: Capture, **changes: Any) -> Capture:
    """Return a capture with another model."""
    return replace(capture, model=replace(capture.model, **changes))
