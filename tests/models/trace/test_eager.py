"""Fake tensors against real ones: by the CPU's own kernels a model allocates the same in the same order."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tiny_traces import tiny

from zerofit.core.allocation_log import Event, TraceRequest
from zerofit.core.strategy import Lora, Precision
from zerofit.models.trace.entry import describe
from zerofit.models.trace.prepare import prepare_model
from zerofit.models.trace.run import run_micro_batch

if TYPE_CHECKING:
    from zerofit.models.trace.raw import RawLog


_PLAIN = TraceRequest(sequence_length=16, is_padded=False)
_CHECKPOINTED = replace(_PLAIN, gradient_checkpointing=True)
_SECOND = replace(_CHECKPOINTED, checkpoint_every=2)
_LOW = replace(_PLAIN, weights=Precision.BF16)
_ADAPTED = replace(_PLAIN, lora=Lora(rank=4, target_modules=("q_proj", "v_proj")))

_QUICK = ("llama", "vit")
"""Of _FAST; the others are slow."""
_FAST = [("bert", _PLAIN), ("llama", _SECOND), ("vit", _PLAIN), ("gemma2", _LOW)]
_REST = [
    *((name, _PLAIN) for name in ("gpt2", "llama", "mixtral", "t5", "whisper", "roberta", "gemma3", "bart")),
    *((name, _CHECKPOINTED) for name in ("bert", "gpt2", "llama", "t5", "mixtral")),
    ("t5", _SECOND),
    *((name, _PLAIN) for name in ("qwen3-moe", "deepseek-v2", "gpt-oss", "mamba")),
    *((name, _LOW) for name in ("bert", "llama")),
    ("llama", _ADAPTED),
    ("llama", replace(_ADAPTED, gradient_checkpointing=True)),
]


def _sequence(log: RawLog) -> list[tuple[Any, ...]]:
    """Return the events, with what each storage is in place of its number."""
    told = []
    for code, argument in zip(log.codes, log.arguments, strict=True):
        if code == Event.ALLOCATE:
            name = log.operator_names[log.operators[argument]]
            told.append((code, argument, log.num_bytes[argument], log.kinds[argument], name))
        elif code <= Event.FORWARD_ENDS:
            told.append((code, argument))
    return told


def _run(name: str, request_: TraceRequest) -> RawLog:
    config, build = tiny(name, 2)
    model = prepare_model(build, config, request_)
    return run_micro_batch(model, describe(model), 3, request_, as_on_cuda=False)


@pytest.mark.parametrize(
    ("name", "request_"),
    [
        *(pytest.param(*case, marks=() if case[0] in _QUICK else pytest.mark.slow) for case in _FAST),
        *(pytest.param(*case, marks=pytest.mark.evidence) for case in _REST),
    ],
)
def test_a_fake_run_allocates_what_a_real_one_does(name: str, request_: TraceRequest) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = _run(name, request_)
    real = _run(name, request_)
    assert len(fake.kinds) > 100
    assert _sequence(fake) == _sequence(real)


def test_no_layer_is_left_out_by_chance() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    products = []
    for chance in (0.0, 0.5):
        config, build = tiny("whisper", 2)
        config.encoder_layerdrop = config.decoder_layerdrop = chance
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = prepare_model(build, config, _PLAIN)
            log = run_micro_batch(model, describe(model), 3, _PLAIN)
        products.append([one[2:] for one in _sequence(log) if "mm" in str(one[-1])])
    assert products[0] == products[1]
