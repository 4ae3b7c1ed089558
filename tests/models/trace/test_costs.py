"""The operations of an operator call: those that PyTorch's registry of formulas lacks or counts wrongly."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from tiny_traces import run_once, tiny
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from zerofit.core.allocation_log import EXPERT_ROWS, CostKind, Pass, TraceRequest
from zerofit.core.strategy import Lora, Precision
from zerofit.models.trace.batches import make_batch
from zerofit.models.trace.prepare import prepare_model
from zerofit.models.trace.recorder import Recorder, watching

_LENGTH, _SAMPLES, _LAYERS = 16, 3, 1
_EXPERTS, _EXPERTS_PER_TOKEN, _HIDDEN = 4, 2, 32
_ROWS = _SAMPLES * _LENGTH * _EXPERTS_PER_TOKEN + EXPERT_ROWS * _EXPERTS
_PLAIN = TraceRequest(sequence_length=_LENGTH, is_padded=False)


def _operations(name: str, request: TraceRequest, *, of: str = "") -> dict[Pass, int]:
    """Return the operations by pass of the operators with these letters in "kind: name"."""
    log = run_once(name, request, num_layers=_LAYERS, samples=_SAMPLES)
    found: Counter[Pass] = Counter()
    for call in log.calls:
        if of in f"{call.kind.value}: {log.operator_names[call.operator]}":
            found[call.during] += call.flops
    return dict(found)


_REST = ("bert", "deberta", "gpt2", "gemma3", "t5", "bart", "vit", "whisper")


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.evidence) for name in _REST)]
)
def test_other_operations_are_those_that_pytorch_counts_of_a_real_run(name: str) -> None:
    request = replace(_PLAIN, attention="eager", gradient_checkpointing=name != "deberta")
    config, build = tiny(name, _LAYERS)
    model = prepare_model(build, config, request)
    with FlopCounterMode(display=False) as counter:
        model(**make_batch(model, _SAMPLES, request)).loss.backward()
    assert counter.get_total_flops() == sum(_operations(name, request).values()) > 0


@pytest.mark.parametrize(
    ("name", "intermediate"), [("mixtral", 48), pytest.param("qwen3-moe", 24, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("weights", [Precision.BF16, Precision.FP32], ids=["torch's", "transformers'"])
def test_experts_multiply_by_three_matrices_and_twice_again_backward(
    name: str, intermediate: int, weights: Precision
) -> None:
    forward = _LAYERS * 2 * _ROWS * 3 * _HIDDEN * intermediate
    found = _operations(name, replace(_PLAIN, weights=weights), of="grouped:")
    assert found == {Pass.FORWARD: forward, Pass.BACKWARD: 2 * forward}


def test_frozen_experts_multiply_once_backward() -> None:
    lora = Lora(rank=4, target_modules=("q_proj",))
    found = _operations("mixtral", replace(_PLAIN, weights=Precision.BF16, lora=lora), of="grouped:")
    assert found[Pass.BACKWARD] == found[Pass.FORWARD]


def test_the_gradients_of_a_depthwise_convolution_cost_twice_what_it_does() -> None:
    width, kernel = 2 * _HIDDEN, 4
    places = _LENGTH + kernel - 1  # what is padded on the right is cut off afterwards
    forward = _LAYERS * 2 * _SAMPLES * places * width * kernel
    found = _operations("mamba", _PLAIN, of="matmul: aten.convolution")
    assert found == {Pass.FORWARD: forward, Pass.BACKWARD: 2 * forward}


@pytest.mark.parametrize("name", ["llama", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_what_a_checkpointed_function_of_autograd_does_again_is_recomputation(name: str) -> None:
    """Transformers' products of experts in fp32 and ZeRO-3's linear layers are such functions."""
    plain = _operations(name, _PLAIN)
    again = replace(_PLAIN, gradient_checkpointing=True, saves_linear_inputs=True)
    found = _operations(name, again)
    assert found.pop(Pass.RECOMPUTATION) > plain[Pass.FORWARD] / 2
    assert found == plain


@pytest.mark.parametrize(
    ("first", "second", "num_experts", "products"),
    [
        ((48, 16), (4, 16, 32), 4, (48 + 4 * EXPERT_ROWS) * 16 * 32),
        ((16, 48), (48, 32), 4, 16 * (48 + 4 * EXPERT_ROWS) * 32),
        ((4, 16, 32), (32, 48), 4, 16 * 32 * (48 + 4 * EXPERT_ROWS)),
        ((4, 48, 16), (4, 16, 32), None, 4 * 48 * 16 * 32),
    ],
    ids=["rows", "gradient of weights", "columns", "a product each"],
)
def test_every_form_of_a_grouped_product_counts_its_own_rows(
    first: tuple[int, ...], second: tuple[int, ...], num_experts: int | None, products: int
) -> None:
    recorder = Recorder(is_padded=False, as_on_cuda=True)
    with FakeTensorMode():
        left, right = (torch.empty(shape, dtype=torch.bfloat16) for shape in (first, second))
        ends = None if num_experts is None else torch.empty(num_experts, dtype=torch.int32)
        with watching(recorder):
            torch._grouped_mm(left, right.mT.contiguous().mT, ends)
    grouped = [call.flops for call in recorder.log.calls if call.kind is CostKind.GROUPED]
    assert grouped == [2 * products]


def test_a_backward_pass_within_a_scripts_hooks_on_saved_tensors_is_no_recomputation() -> None:
    again = replace(_PLAIN, gradient_checkpointing=True, saves_linear_inputs=True)
    plain = _operations("llama", again)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one):
        assert _operations("llama", again) == plain
