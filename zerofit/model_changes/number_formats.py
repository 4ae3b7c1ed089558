"""Sets whether fp32 matrix products round their inputs to tf32."""

from __future__ import annotations

_AMPERE = 8
"""The first major compute capability with tf32
(https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices)."""


def set_tf32(wanted: bool) -> tuple[str, ...]:
    """Allow or forbid tf32 in the matrix products of this process; convolutions are left alone.

    It is torch's own setting for them. transformers' TrainingArguments.tf32 sets
    torch.backends.fp32_precision, after which torch.get_float32_matmul_precision(), which torch.compile asks,
    raises an error (torch 2.13).

    Args:
        wanted: whether fp32 products may round their inputs.

    Returns:
        What was changed, in words.
    """
    import torch

    torch.set_float32_matmul_precision("high" if wanted else "highest")
    if not wanted:
        return ("fp32 matrix products keep full precision (tf32 is off)",)
    has_it = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= _AMPERE
    where = "" if has_it else ", which changes nothing here: no GPU of this process has tf32"
    return (f"fp32 matrix products round their inputs to tf32{where}",)
