"""The loss over large vocabularies: live tensors of a Trainer's step on the CPU against the trace's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from allocator_counts import composed, counted_in
from transformers import Trainer, TrainingArguments

from zerofit.core.allocation_log import TraceRequest
from zerofit.core.strategy import Precision
from zerofit.models.trace.entry import describe
from zerofit.models.trace.live import copy_without_values, prepare_live
from zerofit.models.trace.live_batch import live_batch
from zerofit.models.trace.run import run_micro_batch
from zerofit.models.trace.script_loss import ScriptLoss

if TYPE_CHECKING:
    from pathlib import Path


_SAMPLES, _LENGTH = 2, 32
_SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
_GEMMA = {**_SIZES, "vocab_size": 256_000, "num_key_value_heads": 1, "head_dim": 16}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**_SIZES, "vocab_size": 128_256}),
    "bert": ("Bert", {**_SIZES, "vocab_size": 128_000}),
    "gemma2": ("Gemma2", _GEMMA),
    "gemma3": ("Gemma3", _GEMMA),
    "qwen3": ("Qwen3", {**_SIZES, "vocab_size": 151_936, "num_key_value_heads": 1, "head_dim": 16}),
    "gpt2": ("GPT2", {"vocab_size": 128_000, "n_embd": 32, "n_layer": 1, "n_head": 2}),
}
_HEADS = {"bert": "ForMaskedLM", "gpt2": "LMHeadModel"}
_CONFIGS = {"gemma3": "Gemma3TextConfig"}


class _Selecting(Trainer):
    """A loss on some positions of each row."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        logits = model(input_ids=inputs["input_ids"]).logits
        return logits.index_select(1, torch.arange(3, 10)).log_softmax(-1).amax(-1).sum()


def _model(name: str, dtype: torch.dtype) -> Any:
    family, sizes = _MODELS[name]
    config = getattr(transformers, _CONFIGS.get(name, f"{family}Config"))(use_cache=False, **sizes)
    return getattr(transformers, family + _HEADS.get(name, "ForCausalLM"))(config).to(dtype).train()


def _batch(vocab_size: int, samples: int = _SAMPLES, length: int = _LENGTH) -> dict[str, Any]:
    ids = torch.randint(0, vocab_size, (samples, length))
    return {"input_ids": ids, "labels": ids.clone()}


def _check(trainer: Trainer, weights: Precision) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model: Any = trainer.model
    vocab_size = model.config.vocab_size
    real, _ = counted_in(lambda: trainer.compute_loss(model, _batch(vocab_size)).backward(), model)
    request = TraceRequest(sequence_length=_LENGTH, is_padded=False, weights=weights, keeps_outputs=False)
    given = live_batch(
        ((_batch(vocab_size),), {}), has_tokens=True, has_decoder=False, micro_batch_size=_SAMPLES
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        copied = prepare_live(model, request)
        loss = ScriptLoss(trainer=trainer, model=model)
        loss.bind(copied, copy_without_values)
        log = run_micro_batch(
            copied, describe(copied), _SAMPLES, request, feed=given.feed, loss=loss, as_on_cuda=False
        )
    assert composed(log, 1)[0] == pytest.approx(real, rel=0.02)  # one more tensor of logits would be 0.2
    assert real > 4 * _SAMPLES * _LENGTH * vocab_size  # the loss makes the peak


_FAST = [("llama", Precision.BF16, 0.0), ("gemma2", Precision.BF16, 0.0), ("bert", Precision.FP32, 0.1)]
# In 16 bit the CPU's sum() of LabelSmoother copies its input to fp32; CUDA's reads 16 bit as it sums in fp32
# (aten/src/ATen/native/ReduceOpsUtils.h, make_reduction_from_ty), and that is what a trace counts.
_REST = [
    *((name, Precision.FP32, factor) for name in _MODELS for factor in (0.0, 0.1)),
    *((name, Precision.BF16, 0.0) for name in _MODELS),
]


@pytest.mark.parametrize(
    ("name", "weights", "factor"),
    [
        *(pytest.param(*case, marks=() if case[0] == "bert" else pytest.mark.slow) for case in _FAST),
        *(pytest.param(*case, marks=pytest.mark.evidence) for case in _REST),
    ],
)
def test_a_loss_over_a_large_vocabulary_holds_what_its_trace_holds(
    tmp_path: Path, name: str, weights: Precision, factor: float
) -> None:
    arguments = TrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", label_smoothing_factor=factor
    )
    dtype = torch.bfloat16 if weights is Precision.BF16 else torch.float32
    _check(Trainer(model=_model(name, dtype), args=arguments), weights)


def test_a_loss_that_selects_positions_adds_its_gradient_in_place(tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    _check(_Selecting(model=_model("llama", torch.float32), args=arguments), Precision.FP32)
