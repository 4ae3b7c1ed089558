"""Which attention kernel CUDA takes, and what it keeps: published formulas for a transformer layer."""

from __future__ import annotations

from typing import Any

import pytest

from zerofit.probe.trace.attention import Kernel, kernel_for

_A100, _H100, _T4, _V100, _RTX_4090 = (8, 0), (9, 0), (7, 5), (7, 0), (8, 9)


@pytest.mark.parametrize(
    ("capability", "bits", "is_bf16", "head_dim", "has_mask", "dropout", "kernel"),
    [
        (_A100, 16, True, 128, False, 0.0, Kernel.FLASH),
        (_A100, 16, True, 128, True, 0.0, Kernel.EFFICIENT),
        (_A100, 16, False, 80, False, 0.1, Kernel.FLASH),
        (_A100, 32, False, 64, False, 0.0, Kernel.EFFICIENT),
        (_A100, 16, True, 288, False, 0.0, Kernel.EFFICIENT),
        (_A100, 16, True, 20, True, 0.0, Kernel.MATH),
        (_RTX_4090, 16, True, 256, False, 0.1, Kernel.EFFICIENT),
        (_RTX_4090, 16, True, 256, False, 0.0, Kernel.FLASH),
        (_H100, 16, True, 128, False, 0.0, Kernel.CUDNN),
        (_H100, 16, True, 128, True, 0.0, Kernel.CUDNN),
        (_H100, 16, True, 64, False, 0.1, Kernel.FLASH),
        (_H100, 16, True, 256, False, 0.0, Kernel.FLASH),
        (_T4, 16, False, 64, False, 0.0, Kernel.EFFICIENT),
        (_V100, 16, True, 64, False, 0.0, Kernel.MATH),
    ],
)
def test_the_kernel_that_cuda_takes(
    capability: tuple[int, int],
    bits: int,
    is_bf16: bool,
    head_dim: int,
    has_mask: bool,
    dropout: float,
    kernel: Kernel,
) -> None:
    taken = kernel_for(
        capability=capability,
        bits=bits,
        is_bf16=is_bf16,
        head_dim=head_dim,
        value_dim=head_dim,
        has_mask=has_mask,
        dropout=dropout,
    )
    assert taken is kernel


def _bytes_a_layer(attention: str) -> float:
    """Return what one more layer of GPT-2's kind keeps for the backward pass: bytes a token and channel."""
    from dataclasses import replace

    import transformers

    from zerofit.allocation_log import Event, TensorKind, TraceRequest
    from zerofit.probe.trace.entry import trace_config
    from zerofit.strategy import Precision

    length, width = 128, 256
    request = TraceRequest(
        sequence_length=length, is_padded=False, weights=Precision.FP16, attention=attention
    )
    kept = []
    for num_layers in (2, 3):
        config = transformers.AutoConfig.for_model(
            "gpt2",
            n_embd=width,
            n_head=4,
            vocab_size=64,
            n_positions=length,
            n_layer=num_layers,
            activation_function="gelu",
        )
        build: Any = transformers.GPT2LMHeadModel._from_config
        log = trace_config(config, build, replace(request), all_layers=True).log_for(2)
        alive: set[int] = set()
        for code, argument in zip(log.codes, log.arguments, strict=True):
            if code == Event.ALLOCATE:
                alive.add(argument)
            elif code == Event.FREE:
                alive.discard(argument)
            elif code == Event.FORWARD_ENDS:
                break
        kept.append(
            sum(
                log.storages.bytes_per_sample[one]
                for one in alive
                if log.storages.kinds[one] is TensorKind.ACTIVATION
            )
        )
    return (kept[1] - kept[0]) / (length * width)


def test_an_eager_layer_keeps_what_korthikanti_and_others_count() -> None:
    """sbh (34 + 5as/h): https://arxiv.org/abs/2205.05198, with a = 4 heads, s = 128, h = 256."""
    assert _bytes_a_layer("eager") == pytest.approx(34 + 5 * 4 * 128 / 256, rel=0.01)


def test_a_layer_with_flash_attention_keeps_no_scores() -> None:
    """34sbh, and 4abs for the sums of each row; two of the 34 are the score's output, kept in both."""
    assert _bytes_a_layer("sdpa") == pytest.approx(34 + 4 * 4 / 256, rel=0.01)
