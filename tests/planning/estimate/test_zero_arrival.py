"""How a script's model comes to stage 3, read off source, and what the estimate says of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_logs import layered_log
from zero_plays import peaks, played, setup_of

from zerofit.core.estimates import RunPhase
from zerofit.planning.estimate.device_memory.memory import play_strategy
from zerofit.planning.estimate.model_use import ModelUse
from zerofit.planning.subject import makes_model_first
from zerofit.scripts.source.read_script import read_script

_IMPORTS = """
import deepspeed
from accelerate import Accelerator
from transformers import AutoModel, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.integrations import HfDeepSpeedConfig
"""
_PRETRAINED = "model = AutoModel.from_pretrained('m')"
_ACCELERATE = ("accelerator = Accelerator()", "model = accelerator.prepare(model)")
_TRAINER = ("arguments = TrainingArguments('o')", "Trainer(model, arguments).train()")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ((_ACCELERATE[0], _PRETRAINED, _ACCELERATE[1]), False),
        ((_PRETRAINED, *_ACCELERATE), True),
        ((_PRETRAINED, "model.to('cuda')", *_ACCELERATE), True),
        ((_ACCELERATE[0], _PRETRAINED, "model.cuda()", _ACCELERATE[1]), False),  # there is nothing to move
        ((_TRAINER[0], _PRETRAINED, _TRAINER[1]), False),
        ((_PRETRAINED, *_TRAINER), True),
        ((_ACCELERATE[0], "model = LlamaForCausalLM(config)", _ACCELERATE[1]), True),
        ((_PRETRAINED, "engine, *_ = deepspeed.initialize(model=model)"), True),
        (
            ("c = HfDeepSpeedConfig('f')", _PRETRAINED, "engine, *_ = deepspeed.initialize(model=model)"),
            False,
        ),
        (
            (
                "with deepspeed.zero.Init():",
                f"    {_PRETRAINED}",
                "e, *_ = deepspeed.initialize(model=model)",
            ),
            False,
        ),
        (("print('no model')",), False),
    ],
)
def test_which_scripts_make_their_model_first(lines: tuple[str, ...], expected: bool) -> None:
    assert makes_model_first(read_script(_IMPORTS + "\n".join(lines), name="train.py")) is expected


def test_without_a_script_the_model_is_taken_to_come_after() -> None:
    assert not makes_model_first(None)


def test_the_whole_model_is_in_the_estimate_of_initialise_and_in_its_formula() -> None:
    log = layered_log(bytes_per_element=2)
    setup = setup_of(log, 3, ranks=4)
    first = replace(setup, use=ModelUse(makes_model_first=True))
    whole = 2 * sum(one.num_elements for one in log.parameters)
    held = [peaks(played(one), "weights")[RunPhase.INITIALISE] for one in (setup, first)]
    assert held[0] == whole // 4
    assert held[1] > whole
    said = [play_strategy(one).explain("weights") for one in (setup, first)]
    assert "partitioned as it is made" in (said[0] or ("",))[0]
    assert "c P_all at first" in (said[1] or ("",))[0]
