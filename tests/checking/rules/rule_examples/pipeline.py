"""Examples of the rules of zerofit/checking/rules/pipeline.py."""

from __future__ import annotations

from typing import Any

from rule_examples.example import EVALUATES, LANGUAGE, TWO_RANKS, Example, Examples, changed, ending
from zerofit.checking.situation import RankCounts
from zerofit.core.plan import Topology
from zerofit.core.strategy import Engine, Lora, Precision, Strategy, ZeroStage

_PIPELINE = Topology(world_size=2, pipeline_parallel_size=2)
_NATIVE = Strategy()
_SAVES = 'accelerator.unwrap_model(model).save_pretrained("out")'
_GENERATES = 'accelerator.unwrap_model(model).generate(batch["input_ids"], max_new_tokens=4, do_sample=False)'
_LOADS = "AutoModelForCausalLM.from_config(config).load_state_dict({})"
_TRAINER = changed(EVALUATES, 'deepspeed="ds_config.json", ', "")


def _in_stages(script: str = LANGUAGE, strategy: Strategy = _NATIVE) -> Example:
    return Example(strategy=strategy, topology=_PIPELINE, script=script)


def _whole(script: str = LANGUAGE, strategy: Strategy = _NATIVE) -> Example:
    return Example(strategy=strategy, topology=TWO_RANKS, script=script)


def _asked(*, world_size: int, **counts: Any) -> Example:
    ranks = RankCounts(world_size=world_size, text=f"--num-processes {world_size}", **counts)
    return Example(ranks=ranks, script=LANGUAGE)


EXAMPLES = {
    "pipeline-needs-pytorch": Examples(
        bad=_in_stages(strategy=Strategy(engine=Engine.DEEPSPEED, zero_stage=ZeroStage.GRADIENTS)),
        good=_whole(),
    ),
    "pipeline-parallel-groups-not-whole": Examples(
        bad=_asked(world_size=4, group_sizes={"pipeline": 3}),
        good=_asked(world_size=4, group_sizes={"pipeline": 2}),
    ),
    "stages-per-rank-without-pipeline": Examples(
        bad=_asked(world_size=2, stages_per_rank=2),
        good=_asked(world_size=2),
    ),
    "pipeline-with-adapters": Examples(
        bad=_in_stages(strategy=Strategy(lora=Lora())),
        good=_whole(),
    ),
    "pipeline-in-fp16": Examples(
        bad=_in_stages(strategy=Strategy(precision=Precision.FP16)),
        good=_whole(strategy=Strategy(precision=Precision.FP16)),
    ),
    "pipeline-saves-on-all-ranks": Examples(
        bad=_in_stages(ending(LANGUAGE, f"if accelerator.is_main_process:\n    {_SAVES}")),
        good=_whole(ending(LANGUAGE, _SAVES)),
    ),
    "pipeline-runs-on-all-ranks": Examples(
        bad=_in_stages(ending(LANGUAGE, f"if accelerator.is_main_process:\n    {_GENERATES}")),
        good=_whole(ending(LANGUAGE, _GENERATES)),
    ),
    "pipeline-generates-by-clock": Examples(
        bad=_in_stages(
            ending(LANGUAGE, changed(_GENERATES, "max_new_tokens=4", "max_new_tokens=4, max_time=9.0"))
        ),
        good=_whole(ending(LANGUAGE, _GENERATES)),
    ),
    "pipeline-state-dict-of-a-stage": Examples(
        bad=_in_stages(ending(LANGUAGE, _LOADS.format("accelerator.unwrap_model(model).state_dict()"))),
        good=_whole(ending(LANGUAGE, _LOADS.format("accelerator.get_state_dict(model)"))),
    ),
    "pipeline-with-label-smoothing": Examples(
        bad=_in_stages(changed(_TRAINER, "max_steps=4", "max_steps=4, label_smoothing_factor=0.1")),
        good=_whole(_TRAINER),
    ),
}
