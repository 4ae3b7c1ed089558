"""What stands in for the CPU's functions: CUDA autocast's lists, and what softmax and its like keep."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from zerofit.core.allocation_log import TraceRequest
from zerofit.models.trace.cuda_like import cuda_like, fp32_by_dtype, fp32_functions

_REQUEST = TraceRequest(sequence_length=8)
_LEFT_OUT = {"frobenius_norm", "nuclear_norm", "linalg_vector_norm", "linalg_matrix_norm"}
"""Norms of matrices: no model of transformers takes them."""
_WITHIN = {"native_layer_norm": "layer_norm", "nll_loss2d": "nll_loss"}
"""Operators that no Python function is named after, and the function that calls them."""


def _on_the_list(macro: str) -> set[str]:
    """Return what PyTorch's own header names in a list of CUDA autocast's."""
    import torch

    header = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    body = re.search(rf"#define {macro}\(_\)(.*?)[^\\]\n\n", header.read_text(), re.DOTALL)
    assert body is not None
    names = set(re.findall(r"_\((\w+)", body[1])) - _LEFT_OUT
    return {
        _WITHIN.get(name, "interpolate" if name.lstrip("_").startswith("upsample") else name)
        for name in names
    }


@pytest.mark.parametrize("macro", ["AT_FORALL_FP32", "AT_FORALL_FP32_SET_OPT_DTYPE"])
def test_autocasts_lists_are_those_of_pytorchs_header(macro: str) -> None:
    functions = fp32_functions() if macro == "AT_FORALL_FP32" else fp32_by_dtype()
    ours = {function.__name__ for function in functions}
    listed = _on_the_list(macro)
    assert len(listed) > 5
    assert listed <= ours
    assert {name.strip("_") for name in ours} - {"rpow"} <= listed


def _kept(dtype: str, call: Any, autocast: bool) -> tuple[dict[str, int], str, str]:
    """Return the formats that a function keeps of 6 x 10 scores, and those of its result and gradient."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    kept: Counter[str] = Counter()

    def keep(tensor: Any) -> Any:
        if tensor.numel() == 60:
            kept[str(tensor.dtype).removeprefix("torch.")] += 1
        return tensor

    gradients = []
    with FakeTensorMode():
        scores = torch.zeros(6, 10, dtype=getattr(torch, dtype), requires_grad=True)
        scores.register_hook(gradients.append)
        keeping = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with torch.autocast("cpu", scores.dtype, enabled=autocast), cuda_like(_REQUEST), keeping:
            out = call(torch.nn.functional, scores, torch.zeros(6, dtype=torch.int64))
        out.sum().backward()
    return dict(kept), str(out.dtype).removeprefix("torch."), str(gradients[0].dtype).removeprefix("torch.")


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize(
    ("dtype", "autocast", "kept"),
    [
        ("float16", True, {"float32": 1}),  # read by the fp32 kernel itself
        ("bfloat16", True, {"float32": 1}),
        ("bfloat16", False, {"bfloat16": 1}),
    ],
)
def test_softmax_answers_in_fp32_under_autocast(
    name: str, dtype: str, autocast: bool, kept: dict[str, int]
) -> None:
    result = "float32" if autocast else dtype
    call = lambda functional, scores, _: getattr(functional, name)(scores, dim=1)  # noqa: E731
    assert _kept(dtype, call, autocast) == (kept, result, dtype)


@pytest.mark.parametrize(("dtype", "copies"), [("float16", 0), ("bfloat16", 1)])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_only_fp16_scores_need_no_fp32_copy(name: str, dtype: str, copies: int) -> None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    called = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(func._overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with FakeTensorMode():
        scores = torch.zeros(6, 10, dtype=getattr(torch, dtype))
        with Watching(), cuda_like(_REQUEST):
            getattr(torch, name)(scores, 1, dtype=torch.float32)
    assert called.count("_to_copy") == copies


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_cross_entropy_under_autocast_keeps_16_bit_and_fp32_logarithms(dtype: str) -> None:
    call = lambda functional, scores, labels: functional.cross_entropy(scores, labels)  # noqa: E731
    assert _kept(dtype, call, True) == ({dtype: 1, "float32": 1}, "float32", dtype)
    assert _kept(dtype, call, False) == ({dtype: 2}, dtype, dtype)


def test_pytorchs_cross_entropy_names_log_softmax_its_inputs_format() -> None:
    import torch

    told = []

    def log_softmax(scores: Any, dim: int, dtype: Any = None) -> Any:
        told.append(dtype)
        return torch.ops.aten._log_softmax(scores, dim, False)

    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("log_softmax.int", log_softmax, "CPU")
        torch.nn.functional.cross_entropy(
            torch.zeros(6, 10, dtype=torch.bfloat16), torch.zeros(6, dtype=torch.int64)
        )
    finally:
        library._destroy()
    assert told == [torch.bfloat16]
