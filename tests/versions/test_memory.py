"""The memory of a step on the installed versions, beside its trace there: `make test-versions`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from allocator_counts import PLAIN, SAMPLES, composed, counted
from tiny_traces import run_sharded_once

from zerofit.core.allocation_log import Event, Sharding, TensorKind, TraceRequest
from zerofit.core.strategy import Precision
from zerofit.models.trace.entry import describe
from zerofit.models.trace.prepare import prepare_model
from zerofit.models.trace.run import run_micro_batch

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.versions

_SIZES = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "num_hidden_layers": 2}
_DECODER = {**_SIZES, "vocab_size": 512, "num_key_value_heads": 2, "head_dim": 16}
_MODELS = {
    "bert": ("bert", "BertForMaskedLM", {**_SIZES, "vocab_size": 512}),
    "gpt2": ("gpt2", "GPT2LMHeadModel", {"n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 512}),
    "llama": ("llama", "LlamaForCausalLM", {**_DECODER, "num_key_value_heads": 4}),
    "grouped_llama": ("llama", "LlamaForCausalLM", _DECODER),
    "gemma2": ("gemma2", "Gemma2ForCausalLM", _DECODER),
    "t5": (
        "t5",
        "T5ForConditionalGeneration",
        {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "num_layers": 2, "vocab_size": 512},
    ),
    "whisper": (
        "whisper",
        "WhisperForConditionalGeneration",
        {
            "d_model": 64,
            "vocab_size": 512,
            "num_mel_bins": 8,
            "max_source_positions": 64,
            "pad_token_id": 0,
            "decoder_start_token_id": 1,
            **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
            **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
            **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 128),
        },
    ),
}


@pytest.mark.parametrize("checkpoints", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("name", _MODELS)
def test_peak_of_a_step(name: str, checkpoints: bool, record_property: Callable[[str, object], None]) -> None:
    import torch
    import transformers
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch.set_num_threads(1)
    model_type, architecture, sizes = _MODELS[name]
    build = getattr(transformers, architecture)._from_config
    request = replace(PLAIN, gradient_checkpointing=checkpoints)

    def config() -> object:
        return transformers.AutoConfig.for_model(model_type, **sizes)

    with FakeTensorMode(allow_non_fake_inputs=True):
        model = prepare_model(build, config(), request)
        traced, _ = composed(run_micro_batch(model, describe(model), SAMPLES, request, as_on_cuda=False), 1)
    real, _ = counted(prepare_model(build, config(), request), 1)
    record_property("peak_bytes", real)
    assert traced == pytest.approx(real, rel=0.03)


@pytest.mark.parametrize("offload", [False, True], ids=["on the GPU", "offloaded"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_fsdp2_runs_on_fake_tensors(name: str, offload: bool) -> None:
    sharding = Sharding(shard_size=4, precision=Precision.BF16, cpu_offload=offload)
    log = run_sharded_once(
        name, TraceRequest(sequence_length=16, sharding=sharding, keeps_outputs=False), num_layers=3
    )
    freed = {argument for code, argument in zip(log.codes, log.arguments, strict=True) if code == Event.FREE}
    left = {kind for storage, kind in enumerate(log.storages.kinds) if storage not in freed}
    assert TensorKind.GATHERED in log.storages.kinds
    assert left == {TensorKind.GRADIENT}
    assert {shard.unit for shard in log.shards} >= {0, 1, 2}
