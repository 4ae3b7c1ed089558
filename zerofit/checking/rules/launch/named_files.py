"""Rules of files that another file, a flag or an argument names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checking.rule import Evidence, Example, Hit, Outcome, Rule, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.situation import Situation


def _missing(situation: Situation) -> Iterator[Hit]:
    for said in situation.missing:
        yield Hit(found=said.text, place=said.place, confidence=said.confidence)


def _example(name: str) -> Example:
    return Example(
        deepspeed={"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}},
        accelerate={
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {"deepspeed_config_file": name},
            "num_processes": 2,
        },
    )


RULES = (
    Rule(
        id="named-file-missing",
        severity=Severity.ERROR,
        summary="a configuration that is named is not there",
        why="accelerate and Trainer look for it in the folder in which the command runs, and end without it",
        fix="write the path as it is from that folder, or check in the folder in which the command will run",
        see="https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/deepspeed.py#L154-L156",
        find=_missing,
        bad=_example("ds_zero2.json"),
        good=_example("ds_config.json"),
        evidence=Evidence(
            outcome=Outcome.FAILS, says="Expected a string path to an existing deepspeed config"
        ),
    ),
)
