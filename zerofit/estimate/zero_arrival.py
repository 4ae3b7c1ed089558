"""How a model arrives at ZeRO stage 3: in parts, made under zero.Init, or whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.script_words import ModelSource

if TYPE_CHECKING:
    from zerofit.script_facts import Model, ScriptFacts

_UNDER_ZERO_INIT = (ModelSource.PRETRAINED, ModelSource.CONFIG)
"""What transformers itself makes under zero.Init; a class that is called makes its model whole."""


def makes_model_first(script: ScriptFacts | None) -> bool:
    """Return whether a script's model comes to stage 3 whole.

    transformers makes a model under zero.Init where an HfDeepSpeedConfig of stage 3 is alive: an Accelerator
    or TrainingArguments made before holds one, whatever zero3_init_flag says, and deepspeed.initialize()
    does not. A model that is made earlier lies whole on the host, or on the GPU if the script moved it there,
    and the engine moves it to the GPU whole before it is partitioned. Left out: a script that moves it there
    itself, in a type wider than the one that it trains in, needs that type's bytes for a while.
    Source: transformers 5.23, modeling_utils.py:1435, :3811; accelerate 1.15, utils/dataclasses.py:1459
    (set_deepspeed_weakref); deepspeed 0.19.8, runtime/engine.py:2092.

    Args:
        script: None where there is no script to read; the model is then taken to be made after.
    """
    return script is not None and any(_comes_whole(model) for model in script.models if model.is_trained)


def _comes_whole(model: Model) -> bool:
    if model.is_in_zero_init:
        return False
    return model.is_before_all or model.source not in _UNDER_ZERO_INIT
