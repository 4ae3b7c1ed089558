"""What DeepSpeed's linear function and an old softmax keep, and what that makes of a log."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tiny_traces import kept_bytes, run_once, tiny

from zerofit.core.allocation_log import TensorKind, TraceRequest
from zerofit.core.strategy import Lora, Precision
from zerofit.models.trace.cuda_like import old_softmaxes, zero3_linear
from zerofit.models.trace.entry import describe
from zerofit.models.trace.prepare import prepare_model
from zerofit.models.trace.run import run_micro_batch

_LOW = TraceRequest(sequence_length=16, is_padded=False, weights=Precision.BF16)
_ADAPTED = replace(_LOW, lora=Lora(rank=4, target_modules=("q_proj", "v_proj")))


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("weight_trains", [True, False])
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)])
def test_the_linear_function_keeps_and_returns_what_deepspeeds_does(
    shape: tuple[int, ...], weight_trains: bool, has_bias: bool
) -> None:
    import torch
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    def run(linear: Any) -> list[Any]:
        torch.manual_seed(0)
        given = torch.randn(shape, requires_grad=True)
        weight = torch.randn(5, 4, requires_grad=weight_trains)
        bias = torch.randn(5, requires_grad=weight_trains) if has_bias else None
        out = linear(given, weight, bias)
        saved = out.grad_fn.saved_tensors
        out.square().sum().backward()
        return [*saved, given.grad, weight.grad, bias.grad if bias is not None else None]

    for ours, theirs in zip(run(zero3_linear()), run(zero3_linear_wrap), strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


def test_under_lora_stage_3_keeps_the_inputs_of_frozen_layers() -> None:
    plain, kept = (
        kept_bytes(run_once("llama", replace(_ADAPTED, saves_linear_inputs=saves))) for saves in (False, True)
    )
    # What nothing else keeps of 3 x 16 tokens, in 2 bytes: the input of gate and up (32 channels) and of down
    # (48) in 2 layers; of q, k and v (32) in the second, as no gradient flows to the first; of the head (32).
    assert kept - plain == 3 * 16 * 2 * (2 * (32 + 48) + 32 + 32)


def test_without_frozen_weights_the_linear_function_keeps_what_pytorch_does() -> None:
    plain, kept = (
        kept_bytes(run_once("bert", replace(_LOW, saves_linear_inputs=saves))) for saves in (False, True)
    )
    assert plain == kept


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_the_old_softmax_computes_the_same_and_keeps_its_input(name: str) -> None:
    import torch

    modern: Any = getattr(torch.nn.functional, name)
    results = []
    for function in (modern, old_softmaxes()[modern]):
        scores = torch.arange(6.0).reshape(2, 3).requires_grad_()
        out = function(scores, dim=-1)
        is_kept = any(tensor is scores for tensor in getattr(out.grad_fn, "saved_tensors", ()))
        out.square().sum().backward()
        results.append((out.detach(), scores.grad, is_kept))
    (out, gradient, kept), (old_out, old_gradient, old_kept) = results
    torch.testing.assert_close((old_out, old_gradient), (out, gradient))
    assert (kept, old_kept) == (False, True)


def test_with_an_old_pytorch_each_eager_layer_keeps_its_scores_twice() -> None:
    eager = replace(_LOW, weights=Precision.FP32, attention="eager")
    modern, old = (
        kept_bytes(run_once("vit", replace(eager, softmax_saves_input=saves))) for saves in (False, True)
    )
    # ViT: 16 patches and a class token, 4 heads, 2 layers, 3 samples. The loss's logits are held anyway.
    assert old - modern == 2 * 3 * 4 * 17 * 17 * 4


@pytest.mark.parametrize("keeps_outputs", [True, False])
def test_what_the_graph_holds_past_the_backward_pass_lives_as_long_as_the_outputs(
    keeps_outputs: bool,
) -> None:
    """A loop that holds `outputs` holds the cache of keys and values, and what a Function's context keeps."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    config, build = tiny("llama", 2)
    request = TraceRequest(sequence_length=16, is_padded=False, keeps_outputs=keeps_outputs)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = prepare_model(build, config, request)
        model.config.use_cache = True
        log = run_micro_batch(model, describe(model), 3, request)
    held = sum(size for size, kind in zip(log.num_bytes, log.kinds, strict=True) if kind is TensorKind.OUTPUT)
    width = config.hidden_size // config.num_attention_heads * config.num_key_value_heads
    cached = 2 * 2 * 3 * 16 * width * 4  # keys and values in two layers, fp32
    logits = 3 * 16 * config.vocab_size * 4
    assert held == pytest.approx(logits + (cached if keeps_outputs else 0), rel=0.01)
