"""Baselines of a user without a plan: plain bf16, the preset that offloads all, Trainer's own search."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from measuring.trial import TrialFiles, start_trial

from gpu_truth.results import Case, Tried
from gpu_truth.runner import spec_of
from zerofit.core.presets import find_preset
from zerofit.core.strategy import Precision, Strategy

if TYPE_CHECKING:
    from measuring.results import TrialOutcome
    from measuring.trial import RunningTrial

    from gpu_truth.grid import Question

PLAIN = "plain bf16"
PRESET = "z3-offload"
"""The preset of zerofit/core/presets.py with ZeRO-3, and optimizer and parameters on the CPU."""
TRAINER = "auto_find_batch_size"
NUM_STEPS = 4
"""Steps of each run that are timed. ASSUMPTION: enough to tell strategies apart that differ by more than a
tenth; the two that the ratio is made of are measured again."""
_TRAINER_PROGRAM = ("-P", str(Path(__file__).with_name("trainer_program.py")))
"""-P keeps the program's folder off sys.path, where modules of ours would hide others of the same name."""


def usual_strategies(question: Question) -> dict[str, Strategy]:
    """Return, by name, what is run in the ladder's loop: each takes the whole batch at once."""
    plain = Strategy(
        precision=Precision.BF16,
        micro_batch_size=question.global_batch_size,
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
    )
    preset = find_preset(PRESET).strategy
    names = ("engine", "zero_stage", "optimizer_offload", "param_offload", "buckets")
    return {PLAIN: plain, PRESET: replace(plain, **{name: getattr(preset, name) for name in names})}


def case_of(question: Question, strategy: Strategy, *, key: str) -> Case:
    """Return the run of a strategy, whose process's files are named by the key."""
    return Case(
        key=key,
        group=question.key,
        model=question.model,
        task=question.task,
        strategy=strategy,
        sequence_length=question.sequence_length,
        num_steps=NUM_STEPS,
    )


def start_trainer(question: Question, *, folder: Path, on_cpu: bool) -> RunningTrial:
    """Start the Trainer process, which imports everything and waits for its turn.

    Args:
        question: what it trains, and within which limit.
        folder: where the process's files go.
        on_cpu: whether it runs on the CPU.
    """
    case = case_of(question, usual_strategies(question)[PLAIN], key="trainer")
    spec = spec_of(case, on_cpu=on_cpu, memory_limit_bytes=question.limit_bytes)
    return start_trial(spec, TrialFiles(folder=folder, name=case.key), program=_TRAINER_PROGRAM)


def tried_trainer(outcome: TrialOutcome, question: Question) -> Tried:
    """Return what Trainer came to, by samples that it really trained on, and the batch that it ended with."""
    measured, asked = outcome.measured, question.global_batch_size
    if measured is None:
        return Tried(name=TRAINER, strategy=None, outcome=outcome, samples_per_s=None)
    samples_per_s = measured.tokens_per_s / question.sequence_length
    batch_size = round(samples_per_s * measured.step_time_s)
    note = "" if batch_size == asked else f"global batch {batch_size} in place of {asked}"
    return Tried(name=TRAINER, strategy=None, outcome=outcome, samples_per_s=samples_per_s, note=note)
