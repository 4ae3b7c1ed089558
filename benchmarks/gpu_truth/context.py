"""Measures the GPU memory that a process holds beside tensors; this file is also the measuring program.

It prints one line of JSON on stdout, an object with the fields of ContextMeasured, or null without a GPU; all
that torch prints goes to stderr. A program, because CUDA, once started, can't be undone, and because what ran
before would have loaded kernels.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measuring.memory import read_gpu

from zerofit.machine.programs import output_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_truth.results import ContextMeasured

PROGRAM = (sys.executable, "-P", __file__)
"""-P keeps the program's folder off sys.path, where modules of ours would hide others of the same name."""

_SIZE = 256
"""Rows and columns of the products that ask for workspaces: their bytes are whole blocks of the allocator."""
_LENGTH, _HIDDEN, _HEADS, _VOCABULARY = 128, 512, 8, 1024
"""ASSUMPTION: a small transformer loads the kernels that a large one does, or others as large."""


def measure_context(
    *, limit_s: float, tell: Callable[[str], None], program: tuple[str, ...] = PROGRAM
) -> ContextMeasured | None:
    """Return what a separate process measured, or None without a GPU.

    A program that fails, or does not end in time, gives None too: the rest of the harness goes on.

    Args:
        limit_s: after so many seconds the program is ended.
        tell: told why there is nothing, where there is a GPU.
        program: the program that measures.
    """
    output, why = output_of(program, limit_s=limit_s, environ=_environment())
    if why:
        tell(f"the CUDA context was not measured: {why}")
        return None
    from gpu_truth.results import ContextMeasured

    found = json.loads(output)
    return None if found is None else ContextMeasured(**found)


def _environment() -> dict[str, str]:
    """Return the environment of the program, with these benchmarks and the zerofit beside them."""
    benchmarks = Path(__file__).parents[1]
    places = [str(benchmarks), str(benchmarks.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}


def main() -> None:
    """Measure and print."""
    report_to = os.dup(1)
    os.dup2(2, 1)
    os.write(report_to, (json.dumps(_measured()) + "\n").encode())


def _measured() -> dict[str, int] | None:
    import torch

    before = read_gpu()
    if not torch.cuda.is_available():
        return None
    torch.cuda.init()
    torch.cuda.synchronize()
    context = read_gpu().held_since(before)
    workspaces = _workspaces()
    has_bf16 = torch.cuda.get_device_capability() >= (8, 0)
    for precision in (torch.float32, torch.bfloat16 if has_bf16 else torch.float16):
        _train(precision)
    held = read_gpu().held_since(before)
    if context is None or held is None:
        raise SystemExit("NVML does not say what this GPU has in use")
    kernels = held - torch.cuda.memory_reserved()
    return {"context_bytes": context, "with_kernels_bytes": kernels, **workspaces}


def _workspaces() -> dict[str, int]:
    """Return what the allocator holds after products of each kind, their own tensors taken off."""
    import torch

    weight = torch.ones(_SIZE, _SIZE, device="cuda", requires_grad=True)
    bias = torch.ones(_SIZE, device="cuda")
    held = torch.cuda.memory_allocated()
    product = weight @ weight
    first = torch.cuda.memory_allocated() - held - product.nbytes
    with torch.no_grad():
        held = torch.cuda.memory_allocated()
        with_bias = torch.nn.functional.linear(weight, weight, bias)
        of_lt = torch.cuda.memory_allocated() - held - with_bias.nbytes
    held = torch.cuda.memory_allocated()
    product.backward(torch.ones_like(product))
    of_backward = torch.cuda.memory_allocated() - held - _bytes(weight.grad)
    return {
        "cublas_workspace_bytes": first,
        "cublaslt_workspace_bytes": of_lt,
        "backward_workspace_bytes": of_backward,
    }


def _bytes(tensor: Any) -> int:
    return 0 if tensor is None else int(tensor.nbytes)


def _train(precision: Any) -> None:
    """Take two steps of a small transformer: the first makes the optimizer's states, both load kernels."""
    import torch

    model = torch.nn.Sequential(
        torch.nn.Embedding(_VOCABULARY, _HIDDEN),
        torch.nn.TransformerEncoderLayer(_HIDDEN, _HEADS, activation="gelu", batch_first=True),
        torch.nn.Linear(_HIDDEN, _VOCABULARY),
    ).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(_VOCABULARY, (2, _LENGTH), device="cuda")
    for _ in range(2):
        with torch.autocast("cuda", dtype=precision, enabled=precision is not torch.float32):
            scores = model(tokens).flatten(0, 1).float()
            loss = torch.nn.functional.cross_entropy(scores, tokens.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
