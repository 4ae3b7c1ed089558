"""Rules of "auto" in ds_config.json: on each route somebody else replaces it, and for other keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checking.rule import Evidence, Example, Hit, Outcome, Rule, Severity
from zerofit.checking.rules.deepspeed.entries import entries_of
from zerofit.checking.situation import known
from zerofit.configs.quote import say
from zerofit.core.command import Route

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.situation import Situation
    from zerofit.configs.schemas.walk import Found

_ACCELERATE_SOURCE = (
    "https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/dataclasses.py"
)

# accelerate/accelerator.py, _prepare_deepspeed; accelerate/utils/dataclasses.py, DeepSpeedPlugin
_BY_ACCELERATE = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "steps_per_print",
        "fp16.enabled",
        "bf16.enabled",
        "zero_optimization.stage",
        "zero_optimization.offload_optimizer.device",
        "zero_optimization.offload_optimizer.nvme_path",
        "zero_optimization.offload_param.device",
        "zero_optimization.offload_param.nvme_path",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.stage3_param_persistence_threshold",
        "optimizer.params.lr",
        "optimizer.params.weight_decay",
        "scheduler.params.warmup_min_lr",
        "scheduler.params.warmup_max_lr",
        "scheduler.params.warmup_num_steps",
        "scheduler.params.total_num_steps",
    }
)
# transformers/integrations/deepspeed.py, HfTrainerDeepSpeedConfig; accelerate does the rest
_BY_TRAINER = _BY_ACCELERATE | {"optimizer.params.betas", "optimizer.params.eps"}
_FILLED = {Route.ACCELERATE: _BY_ACCELERATE, Route.TRAINER: _BY_TRAINER}
_A_VALUE_OF_ITS_OWN = frozenset(
    {
        "data_types.keep_in_fp32_modules",
        "pipeline.stages",
        *(f"expert_parallel.{name}" for name in ("score_apply", "combine_impl", "row_weighting_impl")),
        *(f"expert_parallel.{name}" for name in ("score_func", "top_k", "routed_scaling_factor")),
    }
)
"""DeepSpeed itself knows the word there."""
_SWITCHES = ("stage", "enabled", "device")
"""What decides over whole features; for sizes and the like the default is as good as any "auto"."""


def _unresolved(situation: Situation) -> Iterator[Hit]:
    stuck = [(found, _stuck_on(found)) for found in _autos(situation)]
    for found, routes in stuck:
        if routes == set(Route):
            yield _hit(situation, found)
    for found, routes in stuck:
        if routes and routes != set(Route) and known(situation.route, "who reads the file") in routes:
            yield _hit(situation, found)


def _stuck_on(found: Found) -> set[Route]:
    """Return the routes on which nobody replaces an "auto"."""
    return {route for route in Route if not _is_resolved(found, route)}


def _is_resolved(found: Found, route: Route) -> bool:
    path = ".".join(found.path)
    if route is Route.NATIVE:
        return found.section.drops_auto or path in _A_VALUE_OF_ITS_OWN
    return path in _FILLED[route]


def _natively_default(situation: Situation) -> Iterator[Hit]:
    for found in _autos(situation):
        is_switch = found.section.drops_auto and found.path[-1] in _SWITCHES
        if is_switch and known(situation.route, "who reads the file") is Route.NATIVE:
            yield _hit(situation, found)


def _autos(situation: Situation) -> Iterator[Found]:
    for _, found in entries_of(situation):
        if found.key is not None and found.value == "auto":
            yield found


def _hit(situation: Situation, found: Found) -> Hit:
    document = known(situation.deepspeed, "the DeepSpeed configuration")
    return Hit(found=say(document, *found.path), place=document.place(found.entry.key_span))


RULES = (
    Rule(
        id="deepspeed-auto-unresolved",
        severity=Severity.ERROR,
        summary='nobody replaces "auto" for this key',
        why="accelerate and Trainer fill in a few keys each; DeepSpeed itself takes the word for the value",
        fix="write the value",
        see=_ACCELERATE_SOURCE,
        find=_unresolved,
        bad=Example(
            deepspeed={
                "train_micro_batch_size_per_gpu": 4,
                "zero_optimization": {"stage": 2, "overlap_comm": "auto"},
            },
            route=Route.ACCELERATE,
        ),
        good=Example(
            deepspeed={
                "train_micro_batch_size_per_gpu": 4,
                "zero_optimization": {"stage": 2, "overlap_comm": True},
            },
            route=Route.ACCELERATE,
        ),
        evidence=Evidence(outcome=Outcome.FAILS, says="not found in kwargs"),
    ),
    Rule(
        id="deepspeed-auto-switches-off",
        severity=Severity.ERROR,
        summary='without accelerate or Trainer, "auto" switches the feature off',
        why="DeepSpeed itself treats the key as missing: stage 0, enabled false, device none",
        fix="write the value",
        see="https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/config_utils.py",
        find=_natively_default,
        bad=Example(
            deepspeed={"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": "auto"}},
            route=Route.NATIVE,
        ),
        good=Example(
            deepspeed={"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}},
            route=Route.NATIVE,
        ),
        evidence=Evidence(outcome=Outcome.IGNORED, observed=(("zero_stage", 0),)),
    ),
)
