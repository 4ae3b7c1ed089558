"""Measurements and predictions of one machine, in one JSON file."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from measuring.ladder import Ladder
from measuring.results import TrialOutcome, TrialPrediction

from zerofit.core.facts import Versions
from zerofit.core.rates import Calibration
from zerofit.core.strategy import Precision, Strategy
from zerofit.core.validation import parse_strictly

SCHEMA_VERSION = 1
"""Raised whenever older files can no longer be read correctly."""


class Section(StrEnum):
    """The parts of the harness, in the order in which they run."""

    CONTEXT = "context"
    """CUDA context, kernels and workspaces alone; achieved rates."""
    ACCURACY = "accuracy"
    """One process on one GPU against its prediction."""
    RANKS = "ranks"
    """Rank 0 of many under the engines themselves: FSDP2 and DeepSpeed."""
    REGRET = "regret"
    """The plan's choice against all others, under artificial limits of memory."""
    LADDER = "ladder"
    """The published ladder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRecord:
    """The machine that was measured."""

    device: str
    """Name of the GPU as the driver has it, or CPU."""
    memory_bytes: int
    """Of the GPU, without what the driver keeps; of the host on the CPU."""
    compute_capability: tuple[int, int] | None
    driver: str | None
    num_cpu_cores: int
    cpu: str
    """Its name; empty where the kernel does not say it."""
    host_memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run that is measured and predicted."""

    key: str
    """Its name in the table, unique within its section: "bert-large-32x128-adamw"."""
    group: str
    """What its error is summed up with: a family of models, a ZeRO stage, or FSDP2."""
    model: str
    """A name of the catalog, or of a config beside the cases."""
    task: str
    strategy: Strategy
    """With micro-batch and accumulation filled in."""
    sequence_length: int
    """Tokens of a sample; 1 for images."""
    weights: Precision = Precision.FP32
    """Format in which the loop makes the model."""
    num_ranks: int = 1
    num_steps: int = 5
    """Steps that are timed, after the warm-up."""
    calibrates: bool = False
    """True if it may be used to set a number of the catalog; the accuracy is stated without it."""
    again: str = ""
    """Why it is measured once more: what has changed since the results that there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """The result of a case."""

    case: Case
    outcome: TrialOutcome
    predicted: TrialPrediction | None
    """None where the estimator refuses it; the outcome's reason says nothing of that, no_prediction does."""
    no_prediction: str = ""
    """Why there is none."""
    predicted_by: str = ""
    """Which estimator said or refused it, and on which day: "zerofit 0.1.0, 2026-01-02"; empty while it is
    not computed."""
    took_s: float
    """Of the process, imports ahead of its turn left out."""
    date: str
    """ISO 8601, UTC."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextMeasured:
    """What a process holds of the GPU beside tensors, in bytes."""

    context_bytes: int
    """Once CUDA has started, before the first tensor."""
    with_kernels_bytes: int
    """The same after a training step of a small model, torch's reserved memory taken off."""
    cublas_workspace_bytes: int
    """What torch's allocator holds more after the first matrix product, its tensors taken off."""
    cublaslt_workspace_bytes: int
    """What a product with a bias, which goes to cuBLASLt, adds to that."""
    backward_workspace_bytes: int
    """What the products of a backward pass add: its thread has its own handle."""


class Rule(StrEnum):
    """Why a strategy is left out of what is measured of a grid."""

    FAR = "far over the limit by prediction"
    HOST = "over the host's memory by prediction"
    BUCKETS = "in the size of its buckets alone unlike another"
    SLOW = "far slower than the choice by prediction"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One strategy under a limit of memory."""

    name: str
    """Short and unique within its question: "micro-batch 8, checkpointing"."""
    strategy: Strategy | None
    """None where another tool chose what ran."""
    outcome: TrialOutcome
    samples_per_s: float | None
    """Of its first run; None where that did not come to its end."""
    repeats_samples_per_s: tuple[float, ...] = ()
    """Of its repeats, which alternate with those of the strategy it is compared with."""
    predicted_bytes: int | None = None
    """What torch's allocator is predicted to hold at its peak; None where that was not asked."""
    left_out: Rule | None = None
    """The rule that keeps it out of what is measured of the grid; it may have run as what is usual."""
    note: str = ""
    """An unrequested change, such as another global batch, or why it ran after all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegretResult:
    """One question: a model, a batch and a limit of memory, with all that was tried."""

    key: str
    model: str
    task: str
    sequence_length: int
    global_batch_size: int
    """Samples of an optimizer step."""
    limit_bytes: int
    """What torch might allocate."""
    choice: Tried | None
    """What zerofit's plan took; None where it said that nothing fits."""
    grid: tuple[Tried, ...]
    """All other strategies with the same mathematics and number formats, those too that a rule leaves out."""
    usual: tuple[Tried, ...]
    """What a user would take otherwise."""
    date: str
    """Of the last measurement."""
    runs: int = 1
    """Of the harness: above 1 it was not measured in one go, but began where an earlier one was cut off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionFailure:
    """A section with failures."""

    section: Section
    num_failed: int
    num_ended: int
    """Cases that ended, failures included; those that the budget left out are not counted."""
    first_error: str
    """The case and its error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """All that was measured on one machine."""

    failed: tuple[SectionFailure, ...] = ()
    """Sections with failures; empty until the end of the run."""

    machine: MachineRecord
    versions: Versions
    date: str
    """Of the last measurement, ISO 8601, UTC."""
    context: ContextMeasured | None = None
    """None on the CPU."""
    calibration: Calibration | None = None
    accuracy: tuple[CaseResult, ...] = ()
    ranks: tuple[CaseResult, ...] = ()
    regret: tuple[RegretResult, ...] = ()
    ladder: Ladder | None = None
    not_run: tuple[str, ...] = ()
    """What the budget left out, by section and key."""
    schema_version: int = SCHEMA_VERSION


def results_to_json(results: Results) -> str:
    """Return the text of a file."""
    return json.dumps(dataclasses.asdict(results), indent=1) + "\n"


def results_from_json(text: str) -> Results:
    """Return what results_to_json() wrote.

    Raises:
        ValueError: it is of another schema, or broken.
    """
    document = json.loads(text)
    found = document.get("schema_version") if isinstance(document, dict) else None
    if found != SCHEMA_VERSION:
        raise ValueError(f"schema version {found!r}, and this harness reads {SCHEMA_VERSION}")
    return parse_strictly(Results, text)


def file_of(folder: Path, machine: MachineRecord) -> Path:
    """Return where a machine's results belong: folder/nvidia-h200.json, folder/cpu.json."""
    words = "".join(letter if letter.isalnum() else " " for letter in machine.device.lower()).split()
    return folder / f"{'-'.join(words)}.json"
