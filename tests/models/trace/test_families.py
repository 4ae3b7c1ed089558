"""Families with inputs, sizes or loops of their own trace, with the memory of a real run on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
from allocator_counts import composed, counted_in

from zerofit.core.allocation_log import TraceRequest
from zerofit.core.errors import UserError
from zerofit.models.trace.batches import make_batch
from zerofit.models.trace.entry import describe, trace_config
from zerofit.models.trace.prepare import prepare_model
from zerofit.models.trace.run import run_micro_batch

_SAMPLES = 3
_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}
_SPOKEN = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "conv_dim": [16, 16],
    "conv_kernel": [10, 8],
    "conv_stride": [5, 4],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 40,
    "classifier_proj_size": 16,
    "layerdrop": 0.0,
}
_VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}

FAMILIES: dict[str, tuple[str, str, dict[str, Any], int, float]] = {
    "convnext": (
        "convnext",
        "ConvNextForImageClassification",
        {"hidden_sizes": [16, 32], "depths": [2, 3], "num_stages": 2, "image_size": 32, "num_labels": 3},
        1,
        0.01,
    ),
    "longformer": (
        "longformer",
        "LongformerForMaskedLM",
        {**_TEXT, "attention_window": [8, 8], "max_position_embeddings": 130},
        48,
        0.01,
    ),
    "longformer with global attention": (
        "longformer",
        "LongformerForSequenceClassification",
        {**_TEXT, "attention_window": [8, 8], "max_position_embeddings": 130},
        48,
        0.01,
    ),
    "idefics3": (
        "idefics3",
        "Idefics3ForConditionalGeneration",
        {
            "text_config": {**_TEXT, "model_type": "llama"},
            "vision_config": {**_VISION, "image_size": 32, "patch_size": 8},
            "image_token_id": 63,
            "scale_factor": 2,
        },
        24,
        0.01,
    ),
    "wav2vec2": ("wav2vec2", "Wav2Vec2ForSequenceClassification", _SPOKEN, 2000, 0.02),
    "hubert": ("hubert", "HubertForSequenceClassification", _SPOKEN, 2000, 0.02),
    "qwen2_5_vl": (
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": {
                **_TEXT,
                "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
            },
            "vision_config": {
                "depth": 2,
                "hidden_size": 128,
                "intermediate_size": 512,
                "num_heads": 4,
                "out_hidden_size": 32,
                "patch_size": 28,
                "window_size": 112,
                "fullatt_block_indexes": [1],
            },
            "image_token_id": 63,
            "video_token_id": 62,
            "vision_start_token_id": 61,
        },
        80,
        0.02,
    ),
    "switch_transformers": (
        "switch_transformers",
        "SwitchTransformersForConditionalGeneration",
        {
            "d_model": 32,
            "d_kv": 16,
            "d_ff": 64,
            "num_heads": 2,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "num_experts": 4,
            "vocab_size": 64,
            "decoder_start_token_id": 0,
        },
        32,
        0.05,  # a real router's choices are not balanced
    ),
}
"""Type, class, dimensions, length of the samples, and how far a traced peak may be from a real one."""


def _family(name: str) -> tuple[Any, Any, TraceRequest, float]:
    import transformers

    model_type, architecture, dimensions, length, within = FAMILIES[name]
    config = transformers.AutoConfig.for_model(model_type, **dimensions)
    request = TraceRequest(sequence_length=length, is_padded=False)
    return config, getattr(transformers, architecture)._from_config, request, within


_QUICK_PEAKS = ("convnext", "wav2vec2", "idefics3")
"""Pictures, sound, pictures in a text; the other families are slow."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in _QUICK_PEAKS else pytest.mark.slow) for name in FAMILIES],
)
def test_a_traced_run_has_the_peak_of_a_real_one(name: str) -> None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    config, build, request, within = _family(name)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = prepare_model(build, config, request)
        log = run_micro_batch(model, describe(model), _SAMPLES, request, as_on_cuda=False)
    peak, _ = composed(log, 1)

    config, build, _, _ = _family(name)
    real = prepare_model(build, config, request)

    def micro_batch() -> None:
        batch = make_batch(real, _SAMPLES, request)
        with torch.backends.mkldnn.flags(enabled=False):  # its scratch memory depends on the CPU
            outputs = real(**batch)
            outputs.loss.backward()

    assert peak == pytest.approx(counted_in(micro_batch, real)[0], rel=within)


_QUICK = ("convnext",)


@pytest.mark.parametrize(
    "name",
    [name if name in _QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES],
)
def test_a_trace_holds_for_each_number_of_samples(name: str) -> None:
    config, build, request, _ = _family(name)
    trace = trace_config(config, build, request)
    assert trace.logs[-1].least_micro_batch_size == 1
    assert trace.logs[0].least_micro_batch_size <= 8
    assert any("image" in note for note in trace.notes) == (name in ("idefics3", "qwen2_5_vl"))


def test_samples_shorter_than_their_image_are_refused() -> None:
    config, build, _, _ = _family("idefics3")
    with pytest.raises(UserError) as caught:
        trace_config(config, build, TraceRequest(sequence_length=3))
    assert caught.value.rule == "sequence-too-short"
    assert "an image of 32 x 32 pixels takes 4 tokens" in caught.value.why
