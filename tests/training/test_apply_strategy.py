"""A strategy in a plain loop: what it changes, and what it leaves to the loop with a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refusals import refusal
from transformers import BertConfig, BertForSequenceClassification

import zerofit
from zerofit.core.strategy import (
    Engine,
    Lora,
    OffloadDevice,
    OptimizerName,
    Precision,
    Quantization,
    Strategy,
    ZeroStage,
)
from zerofit.core.upstream.checkpointing import is_checkpointing

TOKENS = torch.arange(24).reshape(2, 12)
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def bert() -> Any:
    return BertForSequenceClassification(BertConfig(vocab_size=32, **SMALL))


def test_a_model_and_its_optimizer_under_a_strategy() -> None:
    model = bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    strategy = Strategy(
        lora=Lora(rank=2), optimizer=OptimizerName.SGD, attention="eager", gradient_checkpointing=True
    )
    model, swapped = zerofit.apply_strategy(strategy, model, optimizer)
    model.train()
    model(input_ids=TOKENS, labels=torch.tensor([0, 1])).loss.backward()
    assert isinstance(swapped, torch.optim.SGD)
    assert swapped.param_groups[0] is optimizer.param_groups[0]
    held = {id(one) for one in swapped.param_groups[0]["params"]}
    assert held == {id(one) for one in model.parameters() if one.grad is not None}
    assert model.config._attn_implementation == "eager"
    assert is_checkpointing(model.get_base_model())


def test_what_was_done_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    model = bert()
    assert zerofit.apply_strategy(Strategy(freeze=("all-but-head",)), model) == (model, None)
    assert capsys.readouterr().err == (
        "zerofit: 13,488 of 13,522 parameters of BertForSequenceClassification are frozen (all-but-head)\n"
    )


@pytest.mark.parametrize(
    ("strategy", "found"),
    [
        (Strategy(engine=Engine.DEEPSPEED), "Strategy(engine=Engine.DEEPSPEED)"),
        (Strategy(zero_stage=ZeroStage.PARAMETERS), "Strategy(zero_stage=ZeroStage.PARAMETERS)"),
        (
            Strategy(optimizer_offload=OffloadDevice.CPU),
            "Strategy(optimizer_offload=OffloadDevice.CPU)",
        ),
        (Strategy(micro_batch_size=2), "Strategy(micro_batch_size=2)"),
        (Strategy(precision=Precision.BF16), "Strategy(precision=Precision.BF16)"),
        (Strategy(compile=True), "Strategy(compile=True)"),
        (Strategy(gradient_clipping=0.0), "Strategy(gradient_clipping=0.0)"),
        (Strategy(group_by_length=True), "Strategy(group_by_length=True)"),
    ],
)
def test_what_a_loop_must_see_to_itself_is_refused(strategy: Strategy, found: str) -> None:
    refused = refusal(zerofit.apply_strategy, strategy, bert())
    assert (refused.rule, refused.found) == ("not-in-a-plain-loop", found)


@pytest.mark.parametrize(
    ("strategy", "rule"),
    [
        (Strategy(optimizer=OptimizerName.SGD), "no-optimizer-given"),
        (Strategy(lora=Lora(), quantization=Quantization.NF4), "quantization-without-checkpoint"),
        (Strategy(freeze=("nothing.*",)), "freeze-matches-nothing"),
    ],
)
def test_what_the_model_can_not_take_is_refused(strategy: Strategy, rule: str) -> None:
    assert refusal(zerofit.apply_strategy, strategy, bert()).rule == rule


def test_a_swap_is_told_as_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    model = bert()
    own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert zerofit.apply_strategy(Strategy(optimizer=OptimizerName.SGD), model, own)[1] is own
    assert capsys.readouterr().err == ""
    zerofit.apply_strategy(Strategy(optimizer=OptimizerName.ADAMW), model, own)
    assert capsys.readouterr().err == (
        "zerofit: the optimizer is torch's AdamW; the loop makes torch's SGD; momentum=0.9 of the script's "
        "has no place in it\n"
        "zerofit: the learning rate of 0.1 is the script's, for SGD; at the same rate AdamW takes steps of "
        "another size, and may need another\n"
    )


def stepped(model: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=TOKENS, labels=torch.tensor([0, 1])).loss.backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("make", "name", "rule"),
    [
        (stepped, OptimizerName.SGD, "optimizer-has-stepped"),
        (stepped, OptimizerName.ADAMW, None),
        (stepped, None, None),
        (lambda _: torch.optim.SGD(bert().parameters()), None, "optimizer-of-another-model"),
    ],
)
def test_an_optimizer_that_can_not_be_taken_over_is_refused(
    make: Any, name: OptimizerName | None, rule: str | None
) -> None:
    model = bert()
    optimizer = make(model)
    if rule is None:
        assert zerofit.apply_strategy(Strategy(optimizer=name), model, optimizer)[1] is optimizer
        return
    strategy = Strategy(optimizer=name, freeze=("embeddings",))
    assert refusal(zerofit.apply_strategy, strategy, model, optimizer).rule == rule
    assert all(one.requires_grad for one in model.parameters())
