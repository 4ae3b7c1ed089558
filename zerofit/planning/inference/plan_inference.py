"""plan_inference: the layout in which a model generates, with reasons and suggestions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.core.plan import Origin, Reason
from zerofit.core.strategy import OffloadDevice, Precision, ZeroStage, show
from zerofit.generation.generation_job import Gather
from zerofit.planning.inference.estimator import MAX_BATCH, InferenceEstimator, layouts
from zerofit.planning.inference.problem import (
    FLAGS,
    InferencePlan,
    InferenceProblem,
    check_request,
    duration,
    layout_words,
)
from zerofit.planning.search import placement_of, search
from zerofit.planning.suggestions import GPUS_OF_A_NODE, first_that_help, with_more_host_memory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zerofit.core.facts import Machine, ModelFacts, Versions
    from zerofit.core.request import Request
    from zerofit.planning.inference.problem import InferenceCandidate, InferenceWorkload
    from zerofit.planning.search import SearchResult


def plan_inference(
    *,
    model: ModelFacts,
    machine: Machine,
    versions: Versions,
    workload: InferenceWorkload,
    request: Request,
) -> InferencePlan:
    """Return the plan of a generation; if nothing fits, that of the nearest layout (`fits` is False).

    Of the layouts that fit, the one with the least time to read and move weights is chosen (seconds_of in
    estimator.py): computed, not measured. If a rate is unknown, it is the first of: the whole model on each
    rank, ZeRO-3 over all ranks, offload to the host, offload to NVMe.

    Raises:
        UserError: the flags contradict each other or the machine.
        ExceptionGroup: of UserErrors, if they break compatibility rules.
    """
    problem = InferenceProblem(
        model=model, machine=machine, versions=versions, workload=workload, request=request
    )
    check_request(problem)
    found = _search(problem)
    chosen = found.chosen or found.nearest
    assert chosen is not None
    order = [placement_of(one) for one in layouts(problem)]
    candidates = sorted({*found.others, chosen}, key=lambda one: order.index(placement_of(one.strategy)))
    return InferencePlan(
        problem=problem,
        chosen=chosen,
        is_close=chosen.fits and problem.is_close(chosen),
        others=tuple((one, why_it_loses(one, chosen)) for one in candidates if one is not chosen),
        reasons=reasons_of(chosen, candidates, problem),
        suggestions=() if chosen.fits else suggestions(problem),
    )


def _search(problem: InferenceProblem, *, compares: bool = True) -> SearchResult[InferenceCandidate]:
    """Return the fastest that fits and the best of each other layout; offload is not penalized."""
    estimator = InferenceEstimator(problem)
    return search(
        estimator.strategies(),
        estimator=estimator,
        device_bytes=problem.device_bytes,
        tier_of=lambda _: 0,
        tie_share=0.0,
        compares=compares,
    )


_LATER = {
    OffloadDevice.NONE: "fits; gathers every layer from all ranks for each token",
    OffloadDevice.CPU: "fits; copies every layer from host memory for each token",
    OffloadDevice.NVME: "fits; reads every layer from the disk for each token",
}


def why_it_loses(candidate: InferenceCandidate, chosen: InferenceCandidate) -> str:
    """Return why a layout was not chosen, in one phrase."""
    if candidate.shortage:
        return candidate.shortage
    is_whole = candidate.strategy.zero_stage is ZeroStage.NOTHING
    words = "fits" if is_whole else _LATER[candidate.strategy.param_offload]
    if candidate.seconds is None or not chosen.fits:
        return words
    return f"{words}: about {duration(candidate.seconds)}"


def reasons_of(
    chosen: InferenceCandidate, candidates: Sequence[InferenceCandidate], problem: InferenceProblem
) -> tuple[Reason, ...]:
    """Return the reason for each value of the strategy and the ranks."""
    strategy, request = chosen.strategy, problem.request
    found = [
        _reason(
            problem,
            "zero_stage",
            show(strategy.zero_stage),
            _why_layout(chosen, candidates),
        )
    ]
    if strategy.param_offload is not OffloadDevice.NONE or request.param_offload is not None:
        others = (one for one in candidates if one.strategy.param_offload is OffloadDevice.NONE)
        is_faster = any(one.fits for one in others)
        why = "larger batches fit" if is_faster else "nothing fits without offload"
        why = why if chosen.fits else "this is the nearest"
        found.append(_reason(problem, "param_offload", show(strategy.param_offload), why))
    if strategy.nvme_path is not None:
        found.append(_reason(problem, "nvme_path", strategy.nvme_path, "the disk that stores the weights"))
    world_size = str(chosen.topology.world_size)
    found.append(_reason(problem, "num_processes", world_size, _why_ranks(chosen, problem)))
    if chosen.topology.on_cpu:
        why = "there is no GPU on this machine"
        found.append(_reason(problem, "on_cpu", "on", why, is_said=request.on_cpu))
    found.append(_reason(problem, "precision", str(problem.precision), _why_precision(problem)))
    found.append(_reason(problem, "micro_batch_size", str(chosen.batch_size), _why_batch(chosen, problem)))
    return tuple(found)


def _reason(
    problem: InferenceProblem, name: str, value: str, why: str, *, is_said: bool | None = None
) -> Reason:
    if is_said is None:
        is_said = getattr(problem.request, name) is not None
    return Reason(
        field="world_size" if name == "num_processes" else name,
        value=value,
        origin=Origin.FLAG if is_said else Origin.PLANNER,
        why=f"{FLAGS[name]} says so" if is_said else why,
    )


def _why_layout(chosen: InferenceCandidate, candidates: Sequence[InferenceCandidate]) -> str:
    if not chosen.fits:
        return "nothing fits; this is the nearest"
    before = candidates[: candidates.index(chosen)]
    fitting = [one for one in before if one.fits and one.seconds is not None]
    if fitting:
        first = fitting[0]
        about = "" if first.seconds is None else f" takes about {duration(first.seconds)}"
        words = layout_words(first.strategy, first.topology)
        return f"{words} with batch {first.batch_size}{about}, as computed"
    if not before:
        is_alone = chosen.topology.world_size == 1 or chosen.strategy.zero_stage is not ZeroStage.NOTHING
        return "it fits" if is_alone else "the model fits whole, so that no rank waits for another"
    last = before[-1]
    return f"{layout_words(last.strategy, last.topology)} {last.shortage}"


def _why_ranks(chosen: InferenceCandidate, problem: InferenceProblem) -> str:
    topology, num_prompts = chosen.topology, problem.workload.num_prompts
    if topology.on_cpu:
        return "one process computes with all cores"
    if chosen.strategy.zero_stage is ZeroStage.PARAMETERS:
        return "every GPU holds a part of the model"
    if not topology.on_cpu and topology.ranks_per_node < len(problem.machine.gpus):
        return f"{num_prompts} prompt{'s' * (num_prompts != 1)}: another rank would have none"
    return "each GPU generates for its own share of the prompts"


def _why_precision(problem: InferenceProblem) -> str:
    said = problem.model.checkpoint_dtype
    if not said:
        return "neither config.json nor the weights name a type"
    gpu = problem.gpu
    is_slow = gpu is not None and gpu.compute_capability is not None and not gpu.has_bf16
    if problem.precision is Precision.BF16 and is_slow:
        return "the checkpoint's; this GPU computes bf16 slowly: try --dtype float16 if the model allows it"
    return "the checkpoint's"


def _why_batch(chosen: InferenceCandidate, problem: InferenceProblem) -> str:
    size = chosen.batch_size
    if not chosen.fits:
        return "the smallest possible"
    each = -(-problem.workload.num_prompts // chosen.topology.world_size)
    if size >= each:
        return "all prompts that a rank has"
    calls = -(-each // size)
    even = f"{calls} even calls for the {each} prompts of a rank"
    stays = chosen.topology.on_cpu or chosen.strategy.zero_stage is ZeroStage.NOTHING
    if stays and calls == -(-each // MAX_BATCH):
        return f"{even}; more than {MAX_BATCH} prompts would lose more if the run is killed"
    if size == 1 and problem.is_close(chosen):
        return "the smallest possible, and it fits closely"
    return f"{even}; the next larger batch that was tried does not fit"


_MAX_NODES = 16
"""ASSUMPTION: larger clusters are no useful suggestion."""
_LEAST_TOKENS = 32
"""ASSUMPTION: shorter completions are useless."""
_NVME_PATH = "FOLDER"


def suggestions(problem: InferenceProblem) -> tuple[str, ...]:
    """Return the smallest change of each kind with which something fits."""
    kinds = (
        _without_pins(problem),
        _narrower(problem),
        _nvme(problem),
        _shorter(problem),
        _more_gpus(problem),
        ((words, replace(problem, machine=one)) for words, one in with_more_host_memory(problem.machine)),
        _on_cpu(problem),
    )
    return tuple(words for words, *_ in first_that_help(kinds, _fits_at_all))


def _fits_at_all(problem: InferenceProblem) -> bool:
    """Return True if any layout fits with the smallest batch."""
    request = replace(problem.request, micro_batch_size=problem.request.micro_batch_size or 1)
    return _search(replace(problem, request=request), compares=False).chosen is not None


def _without_pins(problem: InferenceProblem) -> Iterator[tuple[str, InferenceProblem]]:
    request = problem.request
    without_batch = replace(problem, request=replace(request, micro_batch_size=None))
    for flag, changed in (
        (FLAGS["micro_batch_size"], without_batch),
        ("--gather", replace(problem, workload=replace(problem.workload, gather=Gather.AUTO))),
        (FLAGS["zero_stage"], replace(problem, request=replace(request, zero_stage=None))),
        (FLAGS["param_offload"], replace(problem, request=replace(request, param_offload=None))),
        (FLAGS["num_processes"], replace(problem, request=replace(request, num_processes=None))),
        (FLAGS["on_cpu"], replace(problem, request=replace(request, on_cpu=False))),
    ):
        if changed != problem:
            yield f"leave out {flag}", changed


def _narrower(problem: InferenceProblem) -> Iterator[tuple[str, InferenceProblem]]:
    if problem.precision is Precision.FP32:
        request = replace(problem.request, precision=Precision.BF16)
        yield "--dtype bfloat16", replace(problem, request=request)


def _nvme(problem: InferenceProblem) -> Iterator[tuple[str, InferenceProblem]]:
    request = problem.request
    may_offload = request.zero_stage is not ZeroStage.NOTHING and request.param_offload is None
    if request.nvme_path is None and may_offload:
        words = "--nvme-path with a folder on a local NVMe disk"
        yield words, replace(problem, request=replace(request, nvme_path=_NVME_PATH))


def _shorter(problem: InferenceProblem) -> Iterator[tuple[str, InferenceProblem]]:
    tokens = problem.workload.max_new_tokens // 2
    while tokens >= _LEAST_TOKENS:
        workload = replace(problem.workload, max_new_tokens=tokens)
        yield f"--max-new-tokens {tokens}", replace(problem, workload=workload)
        tokens //= 2


def _more_gpus(problem: InferenceProblem) -> Iterator[tuple[str, InferenceProblem]]:
    machine = problem.machine
    if problem.gpu is None:
        return
    present, nodes = len(machine.gpus), problem.request.num_nodes or 1
    sizes = [(nodes, number) for number in range(present + 1, GPUS_OF_A_NODE + 1)]
    sizes += [
        (factor * nodes, max(present, GPUS_OF_A_NODE)) for factor in (2, 4, 8) if factor * nodes <= _MAX_NODES
    ]
    for num_nodes, number in sizes:
        request = replace(problem.request, num_nodes=num_nodes, num_processes=None)
        gpus = (problem.gpu,) * number
        where = f" on {num_nodes} nodes" if num_nodes > 1 else ""
        changed = replace(problem, machine=replace(machine, gpus=gpus), request=request)
        yield f"{num_nodes * number} x {problem.gpu.name}{where}", changed


def _on_cpu(problem: InferenceProblem) -> Iterator[tuple[str, InferenceProblem]]:
    request = problem.request
    is_free = request.param_offload in (None, OffloadDevice.NONE)
    if problem.gpu is not None and is_free:
        changed = replace(request, on_cpu=True, num_processes=None)
        yield "--cpu, far slower", replace(problem, request=changed)
