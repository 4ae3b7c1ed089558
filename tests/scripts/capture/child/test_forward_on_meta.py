"""True if a loss is divided by num_items_in_batch: what is found without values, against values."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from zerofit.scripts.capture.child.forward_on_meta import forward_on_meta

_SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 30,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "Bert": _SMALL,
    "Llama": {**_SMALL, "num_key_value_heads": 1, "pad_token_id": 0},
    "Mixtral": {**_SMALL, "num_key_value_heads": 1, "num_local_experts": 2},
    "T5": {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 16,
        "num_layers": 1,
        "num_heads": 2,
        "vocab_size": 30,
        "decoder_start_token_id": 0,
    },
    "ViT": {**_SMALL, "image_size": 8, "patch_size": 4, "num_labels": 3},
}
_MODELS = {
    "BertForMaskedLM": False,
    "BertForTokenClassification": False,
    "BertForMultipleChoice": False,
    "LlamaForCausalLM": True,
    "LlamaForSequenceClassification": False,
    "LlamaForQuestionAnswering": True,
    "MixtralForCausalLM": True,
    "T5ForConditionalGeneration": False,
    "ViTForImageClassification": True,
}
"""Classes of transformers, and whether each divides its loss."""


def _batch(name: str) -> dict[str, Any]:
    import torch

    if name.startswith("ViT"):
        return {"pixel_values": torch.rand(2, 3, 8, 8), "labels": torch.tensor([0, 1])}
    ids = torch.arange(3, 19).reshape(2, 8)
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    text = {"input_ids": ids, "attention_mask": mask}
    if name.endswith("ForMultipleChoice"):
        return {
            "input_ids": ids[None].repeat(2, 1, 1),
            "attention_mask": mask[None].repeat(2, 1, 1),
            "labels": torch.tensor([0, 1]),
        }
    if name.endswith("ForQuestionAnswering"):
        return {**text, "start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])}
    if name.endswith("ForSequenceClassification"):
        return {**text, "labels": torch.tensor([0, 1])}
    return {**text, "labels": ids % 2 if name.endswith("ForTokenClassification") else ids}


def _divides(model: Any, batch: dict[str, Any]) -> bool:
    """Return True if twice the number gives half the loss."""
    import torch

    with torch.no_grad():
        losses = [float(model(**batch, num_items_in_batch=torch.tensor(n))["loss"]) for n in (5, 10)]
    assert losses[0] != 0
    return losses[0] == pytest.approx(2 * losses[1], rel=1e-4)


@pytest.mark.parametrize("name", _MODELS)
def test_what_is_found_is_what_the_values_say(name: str) -> None:
    import transformers

    config = name.partition("For")[0]
    made = getattr(transformers, f"{config}Config")(**_CONFIGS[config])
    model = getattr(transformers, name)(made).eval()
    batch = _batch(name)
    assert _divides(model, copy.deepcopy(batch)) is _MODELS[name]
    model.train()
    assert forward_on_meta(model, ((), batch)).passes_num_items is _MODELS[name]
    assert all(module.training for module in model.modules())
    assert not any(one.is_meta for one in model.parameters())


def test_gradients_that_begin_inside_the_model_are_no_sign_of_it() -> None:
    import transformers

    model = transformers.BertForTokenClassification(transformers.BertConfig(**_SMALL))
    model.enable_input_require_grads()  # as peft needs it for checkpointing
    assert forward_on_meta(model, ((), _batch("BertForTokenClassification"))).passes_num_items is False


def test_a_model_that_takes_no_such_number_does_not_use_it() -> None:
    import torch

    assert forward_on_meta(torch.nn.Linear(2, 2), ((torch.ones(1, 2),), {})).passes_num_items is False


def test_a_model_that_needs_values_is_left_open() -> None:
    import torch

    class Counting(torch.nn.Module):
        def forward(self, ids: Any, **kwargs: Any) -> Any:
            return {"loss": torch.unique(ids).float().sum()}

    assert forward_on_meta(Counting(), ((torch.ones(3),), {})).passes_num_items is None


@pytest.mark.parametrize(
    ("draws", "found"),
    [
        ("torch.randn_like(x)", ()),
        ("torch.rand(len(x), 1)", ()),
        ("torch.rand(())", ()),
        ("x[torch.randperm(len(x))]", ("randperm",)),
        ("torch.bernoulli(x)", ("bernoulli",)),
        ("torch.rand(2 * len(x), 3)[::2]", ("rand",)),
        ("torch.nn.functional.dropout(x)", ()),
    ],
)
def test_draws_that_are_no_row_for_each_sample_are_found(draws: str, found: tuple[str, ...]) -> None:
    import torch

    class Drawing(torch.nn.Linear):  # its file names the functions
        def forward(self, x: Any) -> Any:
            return super().forward(x + eval(draws, {"torch": torch, "x": x}))

    assert forward_on_meta(Drawing(3, 3), ((torch.ones(4, 3),), {})).draws == found
