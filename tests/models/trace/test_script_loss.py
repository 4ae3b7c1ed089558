"""The loss of a Trainer of a script's own: what it holds beside its model, and how many rows a sample is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from allocator_counts import composed, counted_in
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from zerofit.core.allocation_log import TraceRequest
from zerofit.core.strategy import Precision
from zerofit.models.trace.entry import describe
from zerofit.models.trace.live import copy_without_values, prepare_live, trace_live
from zerofit.models.trace.live_batch import live_batch
from zerofit.models.trace.run import run_micro_batch
from zerofit.models.trace.script_loss import ScriptLoss

if TYPE_CHECKING:
    from pathlib import Path

SAMPLES, LENGTH = 8, 512
REQUEST = TraceRequest(sequence_length=LENGTH, is_padded=False, keeps_outputs=False)
TOLERANCE = 0.01
"""Relative, of the live tensors' largest sum."""


def language_model() -> Any:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, use_cache=False, **sizes))


class Preferences(Trainer):
    """A preference loss as TRL's: of a sample's two rows, on the tokens that count, beside a frozen model."""

    def __init__(self, *args: Any, reference: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reference = reference.eval()
        self.losses: list[float] = []

    def scores(self, model: Any, inputs: Any) -> Any:
        logits = model(input_ids=inputs["input_ids"]).logits[inputs["completion_mask"].bool()]
        of_tokens = logits.log_softmax(-1).amax(-1)
        rows = of_tokens.new_zeros(inputs["input_ids"].shape)
        return rows.masked_scatter(inputs["completion_mask"].bool(), of_tokens).sum(-1)

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        chosen, rejected = self.scores(model, inputs).chunk(2)
        with torch.no_grad():
            other_chosen, other_rejected = self.scores(self.reference, inputs).chunk(2)
        margins = (chosen - rejected) - (other_chosen - other_rejected)
        loss = -torch.nn.functional.logsigmoid(margins).mean()
        self.losses.append(loss.item())
        return loss


@pytest.fixture
def trainer(tmp_path: Path) -> Preferences:
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    return Preferences(model=language_model(), args=arguments, reference=language_model())


def pairs(samples: int = SAMPLES, length: int = LENGTH) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 128, (2 * samples, length))
    return {"input_ids": ids, "completion_mask": torch.ones_like(ids)}


def test_live_tensors_of_a_step_are_those_of_the_real_one(trainer: Preferences) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model: Any = trainer.model
    real, _ = counted_in(lambda: trainer.compute_loss(model, pairs()).backward(), model)
    given = live_batch(((pairs(2, 16),), {}), has_tokens=True, has_decoder=False, micro_batch_size=2)
    with FakeTensorMode(allow_non_fake_inputs=True):
        copied = prepare_live(model, REQUEST)
        loss = ScriptLoss(trainer=trainer, model=model)
        loss.bind(copied, copy_without_values)
        log = run_micro_batch(
            copied, describe(copied), SAMPLES, REQUEST, feed=given.feed, loss=loss, as_on_cuda=False
        )
    traced, _ = composed(log, 1)
    assert traced == pytest.approx(real, rel=TOLERANCE)


@pytest.mark.parametrize("autocast", [pytest.param(None, marks=pytest.mark.slow), Precision.BF16])
def test_the_trace_of_a_loss_holds_more_than_its_models(
    trainer: Preferences, autocast: Precision | None
) -> None:
    request = TraceRequest(sequence_length=32, is_padded=False, keeps_outputs=False, autocast=autocast)
    known = {"has_tokens": True, "micro_batch_size": 2}
    whole = trace_live(
        trainer.model,
        ((pairs(2, 16),), {}),
        request,
        loss=ScriptLoss(trainer=trainer, model=trainer.model),
        **known,
    )
    alone = trace_live(trainer.model, ((), {"input_ids": pairs(2, 16)["input_ids"]}), request, **known)
    with_reference = _matrix_flops(alone) * 4 / 3  # one more forward pass
    assert _matrix_flops(whole) == pytest.approx(with_reference, rel=0.02)


def _matrix_flops(trace: Any) -> int:
    return sum(one.count * one.flops_per_sample for one in trace.log_for(8).costs if "mm" in one.operator)


@pytest.mark.parametrize(("micro_batch_size", "rows"), [(4, 2), (8, 1), (3, 1), (None, 1), (16, 1)])
def test_rows_grow_with_the_samples(micro_batch_size: int | None, rows: int) -> None:
    batch = live_batch(
        ((), pairs(4, 16)), has_tokens=True, has_decoder=False, micro_batch_size=micro_batch_size
    )
    fed = batch.feed(None, 5, TraceRequest(sequence_length=24))[1]
    assert fed["input_ids"].shape == (5 * rows, 24)
