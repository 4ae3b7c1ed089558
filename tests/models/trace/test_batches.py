"""The batches that models are fed, and those that can't be made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from zerofit.core.allocation_log import TraceRequest
from zerofit.core.errors import UserError
from zerofit.models.trace.batches import make_batch

_REQUEST = TraceRequest(sequence_length=8)


class BertForMultipleChoice:
    """Has the name and the arguments of a model."""

    main_input_name = "input_ids"
    config = SimpleNamespace(type_vocab_size=2)

    def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any, labels: Any) -> None:
        """Never called."""


class LlavaForConditionalGeneration:
    """Takes images beside its tokens."""

    main_input_name = "input_ids"
    config = SimpleNamespace(vision_config=SimpleNamespace(image_size=336))

    def forward(self, input_ids: Any, pixel_values: Any, labels: Any) -> None:
        """Never called."""


def test_a_multiple_choice_has_four_answers() -> None:
    batch = make_batch(BertForMultipleChoice(), 3, _REQUEST)
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == {
        **dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), (3, 4, 8)),
        "labels": (3,),
    }


def test_a_model_of_images_and_text_is_not_traced_without_its_images() -> None:
    with pytest.raises(UserError) as caught:
        make_batch(LlavaForConditionalGeneration(), 3, _REQUEST)
    assert caught.value.rule == "trace-unknown-inputs"
    assert "pixel_values" in caught.value.found
