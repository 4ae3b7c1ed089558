"""Why each value of a plan of inference was chosen, and why each other layout lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.core.plan import Origin, Reason
from zerofit.core.strategy import OffloadDevice, Precision, ZeroStage, show
from zerofit.planning.inference.planned import duration, layout_words
from zerofit.planning.inference.request import FLAGS
from zerofit.planning.inference.search import MAX_BATCH, is_close

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerofit.planning.inference.planned import Candidate
    from zerofit.planning.inference.search import Question

_LATER = {
    OffloadDevice.NONE: "fits; gathers every layer from all ranks for each token",
    OffloadDevice.CPU: "fits; brings every layer from host memory for each token",
    OffloadDevice.NVME: "fits; reads every layer from the disk for each token",
}


def why_it_loses(candidate: Candidate, chosen: Candidate) -> str:
    """Return one phrase on why a layout was not chosen."""
    if candidate.lacks:
        return candidate.lacks
    is_whole = candidate.strategy.zero_stage is ZeroStage.NOTHING
    words = "fits" if is_whole else _LATER[candidate.strategy.param_offload]
    if candidate.seconds is None or not chosen.fits:
        return words
    return f"{words}: about {duration(candidate.seconds)}"


def reasons_of(chosen: Candidate, candidates: Sequence[Candidate], question: Question) -> tuple[Reason, ...]:
    """Return the reason of each value, those that a flag says with the flag."""
    strategy, request = chosen.strategy, question.request
    found = [
        _reason(
            question,
            "zero_stage",
            show(strategy.zero_stage),
            _why_layout(chosen, candidates),
        )
    ]
    if strategy.param_offload is not OffloadDevice.NONE or request.param_offload is not None:
        others = (one for one in candidates if one.strategy.param_offload is OffloadDevice.NONE)
        is_faster = any(one.fits for one in others)
        why = "larger batches fit" if is_faster else "nothing that stays on the GPUs fits"
        why = why if chosen.fits else "this lacks least"
        found.append(_reason(question, "param_offload", show(strategy.param_offload), why))
    if strategy.nvme_path is not None:
        found.append(_reason(question, "nvme_path", strategy.nvme_path, "the disk that takes the weights"))
    world_size = str(chosen.topology.world_size)
    found.append(_reason(question, "num_processes", world_size, _why_ranks(chosen, question)))
    if chosen.topology.on_cpu:
        why = "there is no GPU on this machine"
        found.append(_reason(question, "on_cpu", "on", why, is_said=request.on_cpu))
    found.append(_reason(question, "precision", str(question.precision), _why_precision(question)))
    found.append(_reason(question, "batch_size", str(chosen.batch_size), _why_batch(chosen, question)))
    return tuple(found)


_FIELDS = {"num_processes": "world_size", "batch_size": "micro_batch_size"}
"""Names of Strategy and Topology, where the request has others."""


def _reason(question: Question, name: str, value: str, why: str, *, is_said: bool | None = None) -> Reason:
    if is_said is None:
        is_said = getattr(question.request, name) is not None
    return Reason(
        field=_FIELDS.get(name, name),
        value=value,
        origin=Origin.FLAG if is_said else Origin.PLANNER,
        why=f"{FLAGS[name]} says so" if is_said else why,
    )


def _why_layout(chosen: Candidate, candidates: Sequence[Candidate]) -> str:
    if not chosen.fits:
        return "nothing fits; this lacks least"
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
    return f"{layout_words(last.strategy, last.topology)} {last.lacks}"


def _why_ranks(chosen: Candidate, question: Question) -> str:
    topology, num_prompts = chosen.topology, question.workload.num_prompts
    if topology.on_cpu:
        return "one process computes with all cores"
    if chosen.strategy.zero_stage is ZeroStage.PARAMETERS:
        return "every GPU holds a part of the model"
    if not topology.on_cpu and topology.ranks_per_node < len(question.machine.gpus):
        return f"{num_prompts} prompt{'s' * (num_prompts != 1)}: another rank would have none"
    return "each GPU generates for its own share of the prompts"


def _why_precision(question: Question) -> str:
    said = question.model.checkpoint_dtype
    if not said:
        return "neither config.json nor the weights name a type"
    gpu = question.gpu
    is_slow = gpu is not None and gpu.compute_capability is not None and not gpu.has_bf16
    if question.precision is Precision.BF16 and is_slow:
        return "the checkpoint's; this GPU computes bf16 slowly, and --dtype float16 where the model bears it"
    return "the checkpoint's"


def _why_batch(chosen: Candidate, question: Question) -> str:
    size = chosen.batch_size
    if not chosen.fits:
        return "the smallest there is"
    each = -(-question.workload.num_prompts // chosen.topology.world_size)
    if size >= each:
        return "all prompts that a rank has"
    calls = -(-each // size)
    even = f"{calls} even calls for the {each} prompts of a rank"
    stays = chosen.topology.on_cpu or chosen.strategy.zero_stage is ZeroStage.NOTHING
    if stays and calls == -(-each // MAX_BATCH):
        return f"{even}; more than {MAX_BATCH} prompts would lose more in a kill"
    if size == 1 and is_close(chosen, question):
        return "the smallest there is, and closely"
    return f"{even}; the next larger batch that was tried does not fit"
