"""The allocation logs of the measured models as they run on the CPU: recorded once, read without torch."""

from __future__ import annotations

import json
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from zerofit.core.allocation_log import (
    AllocationLog,
    TraceRequest,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memory.cases import Case

_ADAPTER = TypeAdapter(AllocationLog)
LOGS = Path(__file__).parents[1] / "measured" / "engine_logs.json"


def log_key(case: Case, stage: int = 0) -> str:
    """Return the name of the log that a rank of a case runs: what of it decides the model's own allocations.

    Args:
        stage: of a pipeline, which the rank holds.
    """
    marks = (
        "bf16" if case.bf16 else "fp32",
        "frozen" * case.frozen,
        "lora" * case.lora,
        "fp32-adapters" * (case.lora and case.zero_init),
        "checkpointing" * case.checkpointing,
        f"tp{case.tensor}" * (case.tensor > 1),
        f"sp{case.sequence}" * (case.sequence > 1),
        f"pp{case.pipeline}-stage{stage}" * (case.pipeline > 1),
        "two-stages" * (case.stages_per_rank > 1),
    )
    return "-".join((case.model, *filter(None, marks)))


def record_log(case: Case, stage: int = 0) -> AllocationLog:
    """Run one micro-batch of a case's model in its number format, without any engine, and return its log."""
    import torch

    from memory.models import make_inputs, make_model
    from zerofit.models.changes.stages import keep_stages
    from zerofit.models.trace.entry import describe
    from zerofit.models.trace.layer_parts import cut_layers
    from zerofit.models.trace.parts import Absent, as_one_rank, received_by_stage
    from zerofit.models.trace.recorder import Recorder, watching
    from zerofit.models.trace.run import _backward, hooked

    model = make_model(case)
    for parameter in model.parameters():
        if not (case.lora and case.zero_init and parameter.requires_grad):  # DeepSpeed casts no such adapters
            parameter.data = parameter.data.to(torch.bfloat16 if case.bf16 else torch.float32)
    if case.tensor > 1:
        cut_layers(model, Absent(case.tensor))
    if case.pipeline > 1:
        blocks = (1,) * case.pipeline * case.stages_per_rank if case.stages_per_rank > 1 else ()
        keep_stages(model, stage, case.pipeline, blocks)
    skeleton = describe(model)
    skeleton.parameters = tuple(replace(one, shape=(), is_embedding=False) for one in skeleton.parameters)
    recorder = Recorder(is_padded=True, as_on_cuda=False)
    for tensor in (*model.parameters(), *model.buffers()):
        recorder.ignore(tensor)
    request = TraceRequest(
        sequence_length=case.length,
        sequence_parallel_size=case.sequence,
        pipeline_parallel_size=case.pipeline,
        pipeline_place=stage,
    )
    with ExitStack() as stack:
        stack.enter_context(as_one_rank(model, request))
        stack.enter_context(hooked(model, skeleton, recorder))
        stack.enter_context(watching(recorder))
        inputs = make_inputs(case, torch.device("cpu"))
        if case.pipeline > 1:
            with recorder.ignoring():
                inputs["received"] = received_by_stage(inputs["input_ids"], model, request)
        loss = model(**inputs)["loss"]
        recorder.begin_backward()
        _backward(loss, recorder.ignoring() if case.pipeline > 1 else nullcontext())
        del loss, inputs
        recorder.close()
    return _frozen(recorder.log, skeleton, by_module=case.stages_per_rank > 1)


def _frozen(raw: Any, skeleton: Any, *, by_module: bool) -> AllocationLog:
    from zerofit.models.trace.affine import exact, to_allocation_log

    log, zeros = to_allocation_log(exact(raw), skeleton, 1), (0,) * len(raw.kinds)
    modules = log.storages.modules if by_module else zeros
    storages = replace(log.storages, modules=modules, operators=zeros)
    return replace(log, storages=storages, operators=("any",), costs=())


def write_logs(cases: Iterable[Case], path: Path = LOGS) -> None:
    """Record the log of every model among the cases, and write them, one line each."""
    logs = {log_key(case, stage): (case, stage) for case in cases for stage in range(case.pipeline)}
    lines = [
        f' "{key}": {_ADAPTER.dump_json(record_log(*which)).decode()}' for key, which in sorted(logs.items())
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def read_logs(path: Path = LOGS) -> dict[str, AllocationLog]:
    """Return the logs by their keys."""
    written = json.loads(path.read_text(encoding="utf-8"))
    return {key: _ADAPTER.validate_python(values) for key, values in written.items()}
