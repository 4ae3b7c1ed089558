"""What a request makes of the model, its outputs and its costs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from tiny_traces import kept_bytes, run_once, tiny

from zerofit.core.allocation_log import CostKind, Pass, TensorKind, TraceRequest
from zerofit.core.strategy import Lora, Precision
from zerofit.models.find import probe_model
from zerofit.models.trace import trace_model

_PLAIN = TraceRequest(sequence_length=16, is_padded=False)
_LOW = replace(_PLAIN, weights=Precision.BF16)


@pytest.mark.parametrize("name", ["gpt2", "bert-base-uncased"])
def test_a_tied_head_is_counted_once(name: str) -> None:
    import transformers
    from torch._subclasses.fake_tensor import FakeTensorMode

    from zerofit.models.trace.entry import describe
    from zerofit.models.trace.prepare import prepare_model

    source = probe_model(name)
    build: Any = getattr(transformers, source.task.auto_class).from_config
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = prepare_model(build, transformers.AutoConfig.for_model(**source.config), _PLAIN)
    assert sum(one.num_elements for one in describe(model).parameters) == source.facts.num_parameters


@pytest.mark.evidence
@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "bert-base-uncased",
        "roberta-base",
        "deberta-v3-base",
        "t5-small",
        "flan-t5-base",
        "opt-125m",
        "llama-3.2-1b",
        "mistral-7b-v0.1",
        "mixtral-8x7b",
        "qwen2.5-0.5b",
        "qwen3-0.6b",
        "gemma-2b",
        "gemma-3-1b",
        "phi-2",
        "falcon-7b",
        "vit-base",
        "whisper-small",
    ],
)
def test_a_log_has_the_parameters_that_the_catalog_counts(name: str) -> None:
    source = probe_model(name)
    trace = trace_model(source, replace(_PLAIN, sequence_length=8), cache_folder=None)
    assert sum(one.num_elements for one in trace.logs[0].parameters) == source.facts.num_parameters


def test_modules_to_save_train_as_copies_beside_the_frozen_ones() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from zerofit.models.trace.entry import describe
    from zerofit.models.trace.prepare import prepare_model

    config, build = tiny("llama", 1)
    lora = Lora(rank=2, target_modules=("q_proj",), modules_to_save=("embed_tokens", "lm_head"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        skeleton = describe(prepare_model(build, config, replace(_LOW, lora=lora)))
    matrices = {one.name: one.trains for one in skeleton.parameters if one.shape == (64, 32)}
    assert matrices == {
        "base_model.model.model.embed_tokens.original_module.weight": False,
        "base_model.model.model.embed_tokens.modules_to_save.default.weight": True,
        "base_model.model.lm_head.original_module.weight": False,
        "base_model.model.lm_head.modules_to_save.default.weight": True,
    }


@pytest.mark.parametrize(("adapters", "num_bytes"), [(Precision.FP32, 4), (Precision.BF16, 2)])
def test_adapters_are_in_fp32_or_in_the_weights_format(adapters: Precision, num_bytes: int) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from zerofit.models.trace.entry import describe
    from zerofit.models.trace.prepare import prepare_model

    config, build = tiny("llama", 1)
    lora = Lora(rank=2, target_modules=("q_proj",))
    with FakeTensorMode(allow_non_fake_inputs=True):
        skeleton = describe(prepare_model(build, config, replace(_LOW, lora=lora, adapters=adapters)))
    assert {one.bytes_per_element for one in skeleton.parameters if one.trains} == {num_bytes}
    assert {one.bytes_per_element for one in skeleton.parameters if not one.trains} == {2}


@pytest.mark.parametrize(
    ("name", "embeddings"),
    [
        ("llama", {"model.embed_tokens.weight"}),
        ("gpt2", {"transformer.wte.weight", "transformer.wpe.weight"}),
    ],
)
def test_an_embedding_is_told_from_other_matrices(name: str, embeddings: set[str]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from zerofit.models.trace.entry import describe
    from zerofit.models.trace.prepare import prepare_model

    config, build = tiny(name, 1)
    with FakeTensorMode(allow_non_fake_inputs=True):
        skeleton = describe(prepare_model(build, config, _PLAIN))
    assert {one.name for one in skeleton.parameters if one.is_embedding} == embeddings


def test_lora_imports_no_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from zerofit.models.trace.prepare import prepare_model

    for name in [name for name in sys.modules if name.split(".")[0] == "bitsandbytes"]:
        monkeypatch.delitem(sys.modules, name)
    config, build = tiny("llama", 1)
    with FakeTensorMode(allow_non_fake_inputs=True):
        prepare_model(build, config, replace(_LOW, lora=Lora(rank=2, target_modules=("q_proj",))))
    assert "bitsandbytes" not in sys.modules


def test_trainer_lets_go_of_the_outputs_before_the_backward_pass() -> None:
    held, dropped = (
        run_once("llama", replace(_LOW, keeps_outputs=keeps), num_layers=1) for keeps in (True, False)
    )
    logits = 3 * 16 * 64 * 2  # samples, tokens, words, bytes: the loss itself saves an fp32 copy
    assert kept_bytes(held) - kept_bytes(dropped) == logits


def test_causal_attention_costs_half_the_square() -> None:
    encoder, decoder = (
        {
            call.during: call.flops
            for call in run_once(name, _LOW, num_layers=1).calls
            if call.kind is CostKind.ATTENTION
        }
        for name in ("bert", "llama")
    )
    square = 3 * 4 * 16 * 16 * 8  # samples, heads, queries, keys, channels of a head
    assert encoder == {Pass.FORWARD: 2 * 2 * square, Pass.BACKWARD: 5 * 2 * square}
    assert decoder == {Pass.FORWARD: 2 * square, Pass.BACKWARD: 5 * square}


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_only_checkpointing_recomputes(is_checkpointed: bool) -> None:
    log = run_once("llama", replace(_PLAIN, gradient_checkpointing=is_checkpointed))
    assert any(call.during is Pass.RECOMPUTATION for call in log.calls) is is_checkpointed
    assert (TensorKind.RECOMPUTED in log.kinds) is is_checkpointed


def test_every_second_block_keeps_half_of_what_checkpointing_saves() -> None:
    on = replace(_PLAIN, gradient_checkpointing=True)
    requests = (_PLAIN, on, replace(on, checkpoint_every=2))
    off, each, second = (kept_bytes(run_once("llama", request, num_layers=2)) for request in requests)
    assert each < second < off
    assert second - each == pytest.approx((off - each) / 2, rel=1e-3)


@pytest.mark.evidence
def test_a_trace_with_lora_is_silent_and_leaves_bitsandbytes_alone() -> None:
    program = (
        "import sys\n"
        "from zerofit.core.allocation_log import TraceRequest\n"
        "from zerofit.models.find import probe_model\n"
        "from zerofit.models.trace import trace_model\n"
        "from zerofit.core.strategy import Lora\n"
        "request = TraceRequest(sequence_length=8, gradient_checkpointing=True, lora=Lora(rank=2))\n"
        "trace_model(probe_model('gpt2'), request, cache_folder=None)\n"
        "assert 'bitsandbytes' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
