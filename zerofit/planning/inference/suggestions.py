"""suggestions: the smallest change of each sort that makes a generation fit where nothing does."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.core.strategy import OffloadDevice, Precision, ZeroStage
from zerofit.generation.generation_job import Gather
from zerofit.planning.inference.request import FLAGS
from zerofit.planning.suggestions import GPUS_OF_A_NODE, with_more_host_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerofit.planning.inference.search import Question

_MAX_NODES = 16
"""ASSUMPTION: what is looked at; who has more knows."""
_LEAST_TOKENS = 32
"""ASSUMPTION: nobody wants shorter completions in place of none."""
_NVME_PATH = "FOLDER"


def suggestions(question: Question, *, fits: Callable[[Question], bool]) -> tuple[str, ...]:
    """Return a phrase for each sort of change that helps.

    Args:
        question: one in which nothing fits.
        fits: whether something fits in a changed one.
    """
    found = []
    for changes in (
        _without_pins(question),
        _narrower(question),
        _nvme(question),
        _shorter(question),
        _more_gpus(question),
        _more_host_memory(question),
        _on_cpu(question),
    ):
        found += [next((words for words, changed in changes if fits(changed)), None)]
    return tuple(words for words in found if words is not None)


def _without_pins(question: Question) -> Iterator[tuple[str, Question]]:
    request = question.request
    for name, changed in (
        ("batch_size", replace(request, batch_size=None)),
        ("gather", replace(request, gather=Gather.AUTO)),
        ("zero_stage", replace(request, zero_stage=None)),
        ("param_offload", replace(request, param_offload=None)),
        ("num_processes", replace(request, num_processes=None)),
        ("on_cpu", replace(request, on_cpu=False)),
    ):
        if changed != request:
            yield f"leave out {FLAGS[name]}", replace(question, request=changed)


def _narrower(question: Question) -> Iterator[tuple[str, Question]]:
    if question.precision is Precision.FP32:
        request = replace(question.request, precision=Precision.BF16)
        yield "--dtype bfloat16", replace(question, request=request, precision=Precision.BF16)


def _nvme(question: Question) -> Iterator[tuple[str, Question]]:
    request = question.request
    may_offload = request.zero_stage is not ZeroStage.NOTHING and request.param_offload is None
    if request.nvme_path is None and may_offload:
        words = "--nvme-path with a folder on a local NVMe disk"
        yield words, replace(question, request=replace(request, nvme_path=_NVME_PATH))


def _shorter(question: Question) -> Iterator[tuple[str, Question]]:
    tokens = question.workload.max_new_tokens // 2
    while tokens >= _LEAST_TOKENS:
        workload = replace(question.workload, max_new_tokens=tokens)
        yield f"--max-new-tokens {tokens}", replace(question, workload=workload)
        tokens //= 2


def _more_gpus(question: Question) -> Iterator[tuple[str, Question]]:
    machine = question.machine
    if question.gpu is None:
        return
    present, nodes = len(machine.gpus), question.request.num_nodes or 1
    sizes = [(nodes, number) for number in range(present + 1, GPUS_OF_A_NODE + 1)]
    sizes += [
        (factor * nodes, max(present, GPUS_OF_A_NODE)) for factor in (2, 4, 8) if factor * nodes <= _MAX_NODES
    ]
    for num_nodes, number in sizes:
        request = replace(question.request, num_nodes=num_nodes, num_processes=None)
        gpus = (question.gpu,) * number
        where = f" on {num_nodes} nodes" if num_nodes > 1 else ""
        changed = replace(question, machine=replace(machine, gpus=gpus), request=request)
        yield f"{num_nodes * number} x {question.gpu.name}{where}", changed


def _more_host_memory(question: Question) -> Iterator[tuple[str, Question]]:
    for words, machine in with_more_host_memory(question.machine):
        yield words, replace(question, machine=machine)


def _on_cpu(question: Question) -> Iterator[tuple[str, Question]]:
    request = question.request
    is_free = request.param_offload in (None, OffloadDevice.NONE)
    if question.gpu is not None and is_free:
        changed = replace(request, on_cpu=True, num_processes=None)
        yield "--cpu, far slower", replace(question, request=changed)
