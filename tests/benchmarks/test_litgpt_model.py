"""The model that stands in for LitGPT's: what trains in it is what LitGPT printed."""

from __future__ import annotations

import pytest
import torch
from litgpt_model import make_model, sizes_of

from zerofit.core.allocation_log import TraceRequest
from zerofit.core.strategy import Lora, Precision
from zerofit.models.find import probe_model
from zerofit.models.task import Task


@pytest.mark.parametrize(
    ("name", "adapter", "num_trained"),
    [
        ("phi-1.5", 0, 1_572_864),
        ("stablelm-base-alpha-3b", 0, 2_097_152),
        ("llama-2-7b", 0, 4_194_304),
        ("llama-2-13b", 0, 6_553_600),
        ("falcon-40b", 0, 12_042_240),
        ("stablelm-base-alpha-3b", 1, 573_888),
        ("llama-2-7b", 1, 1_229_760),
        ("stablelm-base-alpha-3b", 2, 2_125_248),
        ("llama-2-7b", 2, 4_279_744),
    ],
)
def test_as_many_parameters_train_as_litgpts_table_says(name: str, adapter: int, num_trained: int) -> None:
    """Source: https://github.com/Lightning-AI/litgpt/blob/26857050fe3f/tutorials/resource-tables.md"""
    source = probe_model(name, task=Task.CAUSAL_LM)
    request = TraceRequest(
        sequence_length=64, lora=None if adapter else Lora(rank=8), weights=Precision.BF16, is_padded=False
    )
    with torch.device("meta"):
        model = make_model(sizes_of(source.config), request, adapter=adapter)
    assert sum(one.numel() for one in model.parameters() if one.requires_grad) == num_trained


def test_a_family_that_is_not_written_down_is_refused() -> None:
    with pytest.raises(ValueError, match="how LitGPT builds bert is not written down here"):
        sizes_of(probe_model("bert-base-uncased", task=Task.MASKED_LM).config)
