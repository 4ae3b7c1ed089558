"""Traces of models that a script made: those of transformers as from their configuration, and any other."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tiny_traces import run_once, tiny
from torch import nn

from zerofit.core.allocation_log import AllocationLog, Pass, TraceRequest
from zerofit.core.errors import UserError
from zerofit.core.strategy import Precision
from zerofit.core.upstream.checkpointing import enable_checkpointing, is_checkpointing
from zerofit.models.trace.entry import describe, trace_config
from zerofit.models.trace.live import copy_without_values, prepare_live, trace_live
from zerofit.models.trace.live_batch import live_batch
from zerofit.models.trace.run import run_micro_batch

_PLAIN = TraceRequest(sequence_length=24, target_length=12)
_LOW = TraceRequest(
    sequence_length=24,
    target_length=12,
    is_padded=False,
    weights=Precision.BF16,
    gradient_checkpointing=True,
    keeps_outputs=False,
)
_AUTOCAST = TraceRequest(sequence_length=24, target_length=12, autocast=Precision.BF16)


def _tokens(samples: int = 4, length: int = 16, target: int | None = None, **more: Any) -> Any:
    """Return the arguments of a call with tokens, as a collator makes them."""
    ids = torch.zeros(samples, length, dtype=torch.int64)
    labels = torch.zeros(samples, target or length, dtype=torch.int64)
    return (), {"input_ids": ids, "attention_mask": ids.clone(), **more, "labels": labels}


def _live(name: str, num_layers: int, *, device: str = "meta") -> tuple[Any, Any, Any]:
    """Return a configuration, what builds it, and the model as Trainer has it: without a cache of keys."""
    config, build = tiny(name, num_layers)
    config.use_cache = False
    with torch.device(device):
        return config, build, build(config)


def _given(name: str) -> Any:
    if name == "vit":
        return (), {"pixel_values": torch.zeros(4, 3, 32, 32), "labels": torch.zeros(4, dtype=torch.int64)}
    kinds = {"token_type_ids": torch.zeros(4, 16, dtype=torch.int64)} if name == "bert" else {}
    return _tokens(target=9 if name == "t5" else None, **kinds)


@pytest.mark.parametrize(
    ("name", "num_layers", "request_"),
    [
        # The fewest layers of which one is left out.
        pytest.param("gpt2", 5, _PLAIN, marks=pytest.mark.slow),
        *(
            pytest.param(name, num_layers, request, marks=pytest.mark.evidence)
            for name in ("gpt2", "bert", "llama", "t5", "vit", "mixtral")
            for num_layers in (1, 6)
            for request in (_PLAIN, _LOW, _AUTOCAST)
        ),
    ],
)
def test_a_live_model_of_transformers_has_the_trace_of_its_configuration(
    name: str, num_layers: int, request_: TraceRequest
) -> None:
    config, build, model = _live(name, num_layers)
    live = trace_live(model, _given(name), request_, has_tokens=name != "vit")
    assert live == trace_config(config, build, request_)


_FAST = [("bert", _PLAIN), ("llama", _LOW), ("t5", _AUTOCAST), ("vit", _LOW)]
_REST = [
    (name, request)
    for name in ("bert", "llama", "t5", "vit")
    for request in (_PLAIN, _LOW, _AUTOCAST)
    if (name, request) not in _FAST
]


@pytest.mark.parametrize(
    ("name", "request_"),
    [pytest.param(*case, marks=() if case in _FAST[:2] else pytest.mark.slow) for case in (*_FAST, *_REST)],
)
def test_one_run_of_a_live_model_is_that_of_its_configuration(name: str, request_: TraceRequest) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    _, _, model = _live(name, 1)
    batch = live_batch(_given(name), has_tokens=name != "vit", has_decoder=name == "t5", micro_batch_size=4)
    with FakeTensorMode(allow_non_fake_inputs=True):
        copied = prepare_live(model, request_)
        live = run_micro_batch(copied, describe(copied), 3, request_, feed=batch.feed)
    assert live == run_once(name, request_, num_layers=1)


class _Words(nn.Module):
    """A language model with tied words, tensors beside its parameters, and a batch of its own form."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(16, 50)
        self.head.weight = self.words.weight
        self.register_buffer("scale", torch.ones(16))
        self.shift = torch.zeros(16)

    def forward(self, batch: Any) -> Any:
        hidden = self.encoder(self.words(batch["tokens"]) * self.scale + self.shift)
        return self.head(hidden)


class _Ladder(nn.Module):
    """Two lists of layers that need each other's: none can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.up = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Any, y: Any = None) -> Any:
        seen = []
        for index in range(6):
            x = self.down[index](x)
            seen.append(x)
        for index in range(6):
            x = self.up[index](x + seen[5 - index])
        return {"loss": (x - y).square().mean(), "out": x}


class _Recomputed(nn.Module):
    """Layers under torch.utils.checkpoint, as a script calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 64), nn.GELU()) for _ in range(2))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)[..., :8]
        return (x, x.sum())


def _image_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


def _no_single_sample() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


@pytest.mark.parametrize(
    ("device", "make", "given", "has_tokens"),
    [
        pytest.param("cpu", _image_net, ((torch.zeros(4, 3, 32, 32),), {}), False, id="images"),
        pytest.param(
            "meta",
            _Words,
            (({"tokens": torch.zeros(4, 16, dtype=torch.int64)},), {}),
            True,
            id="a dict as one argument",
        ),
        pytest.param("meta", _Ladder, ((torch.zeros(4, 8),), {"y": torch.zeros(4, 8)}), False, id="a ladder"),
        pytest.param("cpu", _no_single_sample, ((torch.zeros(4, 8),), {}), False, id="BatchNorm of values"),
        pytest.param("cpu", _Recomputed, ((torch.zeros(4, 16, 8),), {}), False, id="its own checkpointing"),
    ],
)
def test_any_module_is_traced_and_left_as_it_is(device: str, make: Any, given: Any, has_tokens: bool) -> None:
    with torch.device(device):
        model = make()
    before = [(name, one.device.type, id(one), one.grad) for name, one in model.named_parameters()]
    trace = trace_live(model, given, _PLAIN, has_tokens=has_tokens)
    assert [(name, one.device.type, id(one), one.grad) for name, one in model.named_parameters()] == before
    assert sum(one.num_elements for one in trace.logs[-1].parameters) == sum(
        one.numel() for one in model.parameters()
    )
    assert trace.request == _PLAIN


def _adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    _, _, model = _live("llama", 1, device="cpu")
    model.to(torch.bfloat16).resize_token_embeddings(80, mean_resizing=False)
    adapter = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    return get_peft_model(model, adapter)


@pytest.mark.parametrize(
    ("request_", "widths"),
    [
        pytest.param(
            TraceRequest(sequence_length=24, weights=Precision.BF16), {2, 4}, id="as the script has it"
        ),
        pytest.param(
            TraceRequest(sequence_length=24, weights=Precision.BF16, adapters=Precision.BF16),
            {2},
            id="all cast, as DeepSpeed does",
        ),
        pytest.param(TraceRequest(sequence_length=24), {4}, id="in fp32"),
    ],
)
def test_adapters_of_the_scripts_own_train_and_nothing_else(request_: TraceRequest, widths: set[int]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = _adapted()
    with FakeTensorMode(allow_non_fake_inputs=True):
        parameters = describe(prepare_live(model, request_)).parameters
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    assert {one.name for one in parameters if one.trains} == trained
    assert {one.bytes_per_element for one in parameters} == widths
    assert next(one.shape for one in parameters if one.is_embedding) == (80, 32)


def test_norms_that_a_script_keeps_in_fp32_stay_so() -> None:
    _, _, model = _live("llama", 1)
    model.to(torch.bfloat16).model.norm.to(torch.float32)
    for weights, expected in ((Precision.BF16, {2, 4}), (Precision.FP16, {2})):
        request = TraceRequest(sequence_length=24, weights=weights)
        with torch.device("meta"):
            copied = copy_without_values(model, request)
        assert {one.element_size() for one in copied.parameters()} == expected


@pytest.mark.parametrize(
    ("switched", "asked"), [(False, True), pytest.param(True, False, marks=pytest.mark.slow)]
)
def test_checkpointing_is_the_requests_and_not_the_scripts(switched: bool, asked: bool) -> None:
    _, _, model = _live("llama", 1)
    if switched:
        enable_checkpointing(model, use_reentrant=False)
    trace = trace_live(model, _tokens(), TraceRequest(sequence_length=24, gradient_checkpointing=asked))
    assert any(cost.during == "recomputation" for cost in trace.logs[-1].costs) is asked
    assert is_checkpointing(model) is switched


def test_what_a_script_put_in_evaluation_mode_stays_there() -> None:
    with torch.device("meta"):
        model = _image_net()
    model[1].eval()
    trace = trace_live(model, ((torch.zeros(4, 3, 32, 32),), {}), _PLAIN, has_tokens=False)
    statistics = [name for name in trace.logs[-1].operators if name.startswith("aten.add_.Tensor")]
    assert statistics == []  # BatchNorm counts its batches in training alone


def _fail(*_: Any) -> None:
    raise AssertionError("a hook of the capture's ran")


def test_neither_zerofits_hooks_nor_accelerates_wrapper_run() -> None:
    from accelerate import Accelerator

    _, _, plain = _live("gpt2", 1, device="cpu")
    expected = trace_live(plain, _tokens(), _PLAIN)
    model = Accelerator(cpu=True, mixed_precision="bf16").prepare(plain)
    _fail.__module__ = "zerofit.scripts.capture.child.loop_hooks"
    model.register_forward_pre_hook(_fail)
    assert trace_live(model, _tokens(), _PLAIN) == expected
    assert list(model._forward_pre_hooks.values()) == [_fail]


def test_a_copy_has_no_values() -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    _, _, model = _live("bert", 1, device="cpu")
    with FakeTensorMode(allow_non_fake_inputs=True):
        copied = copy_without_values(model, _PLAIN)
    tensors = [*copied.parameters(), *copied.buffers()]
    assert all(isinstance(one, FakeTensor) and one.device.type == "cpu" for one in tensors)
    assert copied.bert.embeddings.word_embeddings.weight is copied.cls.predictions.decoder.weight


def test_packed_weights_are_refused() -> None:
    class Packed(nn.Parameter):
        pass

    model = nn.Linear(4, 4)
    model.weight = Packed(torch.zeros(4, 4))
    with pytest.raises(UserError) as caught:
        trace_live(model, ((torch.zeros(2, 4),), {}), _PLAIN, has_tokens=False)
    assert (caught.value.rule, caught.value.found) == ("trace-quantized", "Linear with Packed")


def test_what_fails_in_a_script_s_model_is_told_as_the_models() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(UserError) as caught:
        trace_live(model, ((torch.zeros(2, 5),), {}), _PLAIN, has_tokens=False)
    assert caught.value.rule == "trace-failed"
    assert caught.value.found.startswith("Linear: RuntimeError")


class _Layer(nn.Module):
    """A layer of PyTorch's own, and the mean of its first output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.layer(x)
        return {"loss": (found[0] if isinstance(found, tuple) else found).mean()}


def _log_of_layer(layer: nn.Module) -> AllocationLog:
    given = ((torch.zeros(4, 512, 64),), {})
    return trace_live(_Layer(layer), given, TraceRequest(sequence_length=1), has_tokens=False).logs[0]


def test_pytorchs_own_attention_layer_takes_cudas_kernels() -> None:
    log = _log_of_layer(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True))
    assert "aten._scaled_dot_product_efficient_attention.default" in log.operators
    squares = 4 * 4 * 512 * 512  # the scores of four heads, which the CPU keeps
    assert max(log.storages.bytes_per_sample) < squares


def test_an_lstm_multiplies_by_both_its_weights() -> None:
    found: Counter[Pass] = Counter()
    for cost in _log_of_layer(nn.LSTM(64, 64, batch_first=True)).costs:
        found[cost.during] += cost.count * (cost.fixed_flops + 4 * cost.flops_per_sample)
    forward = 2 * 4 * 512 * (64 + 64) * 4 * 64  # four gates
    assert found == {Pass.FORWARD: forward, Pass.BACKWARD: 2 * forward}
