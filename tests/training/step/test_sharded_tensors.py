"""Errors of torch about FSDP2's shards get a name; others stay as they are."""

from __future__ import annotations

import pytest

from zerofit.training.step.sharded_tensors import sharded_tensor_error


@pytest.mark.parametrize(
    ("failure", "is_named"),
    [
        (RuntimeError("aten.add_.Tensor got mixed torch.Tensor and DTensor, need to convert"), True),
        (RuntimeError(".numpy() is not supported for tensor subclasses."), True),
        (NotImplementedError("Operator bitsandbytes.x does not have a sharding strategy registered."), True),
        (AssertionError("FSDP does not support deepcopy. Please use state dict for serialization."), True),
        (RuntimeError("This operation would remove or reshape sharded dimension 0, which requires"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x8 and 16x8)"), False),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), False),
        (AssertionError("batch is empty"), False),
        (KeyError("DTensor"), False),
        (ValueError("too many values to unpack"), False),
    ],
)
def test_torchs_messages_about_shards_are_named(failure: Exception, is_named: bool) -> None:
    try:
        raise failure
    except Exception as raised:
        named = sharded_tensor_error(raised)
    assert (named is not None and named.rule == "weight-sharded-by-fsdp2") is is_named
