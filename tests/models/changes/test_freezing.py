"""What is frozen gets no gradient; what would freeze nothing, or all, is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
)

from zerofit.core.errors import UserError
from zerofit.models.changes.freezing import base_prefix_of, freeze

TOKENS = torch.arange(24).reshape(2, 12)


def bert(kind: Any = BertForSequenceClassification) -> Any:
    return kind(
        BertConfig(
            vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
        )
    )


def gpt2() -> Any:
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, bos_token_id=0, eos_token_id=0, **sizes))


class OwnClass(torch.nn.Module):
    """A model of a script's own class, made of one of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = bert(BertModel)
        self.top = torch.nn.Linear(16, 2)


def test_frozen_parameters_get_no_gradient() -> None:
    model = bert()
    assert freeze(model, ("embeddings+1",)) == (
        "10,992 of 13,522 parameters of BertForSequenceClassification are frozen (embeddings+1)",
    )
    model(TOKENS, labels=torch.tensor([0, 1])).loss.backward()
    with_gradient = {name for name, one in model.named_parameters() if one.grad is not None}
    assert with_gradient == {
        name for name, _ in model.named_parameters() if "embeddings" not in name and ".layer.0." not in name
    }


@pytest.mark.parametrize(
    ("make", "trains"),
    [
        (bert, ["classifier.weight", "classifier.bias"]),
        (OwnClass, ["top.weight", "top.bias"]),
        (
            lambda: bert(BertForMaskedLM),
            [
                "cls.predictions.bias",
                "cls.predictions.transform.dense.weight",
                "cls.predictions.transform.dense.bias",
                "cls.predictions.transform.LayerNorm.weight",
                "cls.predictions.transform.LayerNorm.bias",
            ],
        ),
    ],
)
def test_all_but_the_head(make: Any, trains: list[str]) -> None:
    model = make()
    freeze(model, ("all-but-head",))
    assert [name for name, one in model.named_parameters() if one.requires_grad] == trains


def test_a_tied_parameter_goes_by_each_of_its_names() -> None:
    model = gpt2()
    freeze(model, ("lm_head.*",))
    assert not model.transformer.wte.weight.requires_grad


@pytest.mark.parametrize(
    ("make", "pattern", "message"),
    [
        (
            gpt2,
            "all-but-head",
            "error[freeze-leaves-nothing]: nothing would be left to train\n"
            "  found: freezing of all-but-head, and GPT2LMHeadModel\n"
            "  why:   its head lm_head.weight is tied to transformer.wte.weight, which is "
            "part of the base model\n"
            "  fix:   freeze less, such as embeddings+1",
        ),
        (
            lambda: bert(BertModel),
            "all-but-head",
            "error[freeze-leaves-nothing]: nothing would be left to train\n"
            "  found: freezing of all-but-head, and BertModel\n"
            "  why:   BertModel has no head: it is a base model\n"
            "  fix:   freeze less, such as embeddings+1",
        ),
        (
            gpt2,
            "transformer.h",
            "error[freeze-matches-nothing]: no parameter has such a name\n"
            "  found: freezing of 'transformer.h', and GPT2LMHeadModel\n"
            "  why:   its parameters are transformer.wte.*, transformer.wpe.*, transformer.h.*, "
            "transformer.ln_f.*, lm_head.*\n"
            "  fix:   give 'transformer.h.*', or one of the keywords embeddings, embeddings+N, blocks, "
            "all-but-head",
        ),
        (
            gpt2,
            "embeddings+3",
            "error[freeze-too-many-blocks]: the model has fewer blocks than should be frozen\n"
            "  found: freezing of embeddings+3, and GPT2LMHeadModel with 2 blocks\n"
            "  why:   the number counts the blocks of each stack, starting at the input\n"
            "  fix:   use embeddings+2 or less, or all-but-head",
        ),
    ],
)
def test_what_can_not_be_frozen_is_refused(make: Any, pattern: str, message: str) -> None:
    model = make()
    with pytest.raises(UserError) as refused:
        freeze(model, (pattern,))
    assert str(refused.value) == message
    assert all(one.requires_grad for one in model.parameters())


def test_all_parameters_are_never_what_is_recommended() -> None:
    with pytest.raises(UserError) as refused:
        freeze(torch.nn.ParameterDict({"one": torch.nn.Parameter(torch.zeros(2))}), ("embeddings",))
    assert refused.value.fix.startswith("give a pattern such as 'one'")
    with pytest.raises(UserError) as refused:
        freeze(torch.nn.Linear(4, 4), ("embeddings",))
    assert "'*'" not in refused.value.fix


@pytest.mark.parametrize(
    ("make", "prefix"),
    [(bert, "bert"), (lambda: bert(BertModel), ""), (OwnClass, None), (gpt2, "transformer")],
)
def test_where_the_base_stands(make: Any, prefix: str | None) -> None:
    assert base_prefix_of(make()) == prefix
