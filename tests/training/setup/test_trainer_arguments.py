"""A plan in TrainingArguments: as they are made, changed by the script, and read again; and their batches."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from accelerators import quiet, settings
from refusals import refusal

from zerofit.core.errors import UserError
from zerofit.core.strategy import OptimizerName, Precision
from zerofit.core.upstream.transformers import field_names
from zerofit.training.setup.trainer_arguments import (
    Batches,
    _take_deepspeed,
    apply,
    batches_under,
    install_arguments,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings


ACCUMULATED = [
    # (batch, accumulation) of the script; (micro-batch, accumulation, asked global batch) of the plan; runs
    ((8, 1), (2, 4), (2, 4)),
    ((8, 1), (2,), (2, 4)),
    ((8, 4), (4, 8), (4, 8)),
    ((2, 8), (8, 2), (8, 2)),
    ((8, 1), (8, 1), (8, 1)),
    ((8, 1), (4, 8, 64), (4, 8)),
    ((8, 2), (None, 4), (8, 4)),
    ((8, 2), (), (8, 2)),
]
SPLIT = [
    ((8, 1), (2, 4), (8, 1)),
    ((8, 2), (2, 8), (8, 2)),
    ((8, 1), (3, 3), (8, 1)),
    ((8, 2), (3,), (8, 2)),
    ((8, 2), (None, 4), (8, 4)),
    ((8, 1), (2, 16, 64), (32, 1)),
    ((8, 4), (2, 16, 64), (8, 4)),
    ((8, 3), (2, 16, 64), (32, 1)),
    ((8, 1), (8, 4, 64), (8, 4)),
]


def batches(script: tuple[int, int], *plan: Any, accumulates: bool = False) -> tuple[int, int]:
    """Return (batch, accumulation) of each of two ranks, under (micro-batch, accumulation, asked batch)."""
    own = Batches(batch_size=script[0], gradient_accumulation_steps=script[1])
    names = ("micro_batch_size", "gradient_accumulation_steps", "global_batch_size")
    wanted = settings(**dict(zip(names, plan, strict=False)), trainer_accumulates=accumulates)
    found = batches_under(wanted, own, world_size=2)
    return found.batch_size, found.gradient_accumulation_steps


@pytest.mark.parametrize(
    ("accumulates", "script", "plan", "runs"),
    [(True, *case) for case in ACCUMULATED] + [(False, *case) for case in SPLIT],
)
def test_the_samples_of_a_step_stay_unless_others_are_asked_for(
    accumulates: bool, script: tuple[int, int], plan: tuple[int, ...], runs: tuple[int, int]
) -> None:
    assert batches(script, *plan, accumulates=accumulates) == runs


def test_a_pipeline_gets_the_samples_of_a_step_as_one_batch_which_it_splits_itself() -> None:
    own = Batches(batch_size=8, gradient_accumulation_steps=2)
    wanted = settings(micro_batch_size=2, gradient_accumulation_steps=8, trainer_accumulates=True)
    topology = replace(wanted.plan.topology, world_size=4, pipeline_parallel_size=2)
    wanted = replace(wanted, plan=replace(wanted.plan, topology=topology))
    found = batches_under(wanted, own, world_size=2)
    assert found == Batches(batch_size=16, gradient_accumulation_steps=1)


@pytest.mark.parametrize(
    ("accumulates", "script", "plan", "rule"),
    [
        (True, (8, 1), (2, 8), "micro-batch-differs"),
        (True, (8, 1), (3,), "micro-batch-differs"),
        (True, (16, 1), (2, 4), "micro-batch-differs"),
        (False, (8, 1), (2, 8), "micro-batch-differs"),
        (False, (2, 8), (8, 2), "micro-batch-too-large"),
    ],
)
def test_another_global_batch_is_refused(
    accumulates: bool, script: tuple[int, int], plan: tuple[int, ...], rule: str
) -> None:
    assert refusal(batches, script, *plan, accumulates=accumulates).rule == rule


@pytest.mark.parametrize(
    ("asked", "fix"), [(65, "a global batch size of 64 or 66"), (1, "a global batch size of 2")]
)
@pytest.mark.parametrize("accumulates", [True, False])
def test_a_global_batch_that_does_not_divide_over_the_ranks_is_refused(
    accumulates: bool, asked: int, fix: str
) -> None:
    refused = refusal(batches, (8, 1), 1, None, asked, accumulates=accumulates)
    assert (refused.rule, refused.fix) == ("global-batch-not-divisible", f"use {fix}")


def test_the_message_names_both_sides() -> None:
    assert refusal(batches, (8, 1), 2, 8).found == (
        "2 samples x 8 forward passes on each of 2 ranks in the plan, and 8 x 1 in the script"
    )


Made = tuple[Any, "Changes", "AppliedSettings"]
"""A class of TrainingArguments under a plan, what was changed, and the plan's settings."""


@pytest.fixture
def under(tmp_path: Path) -> Callable[..., Made]:
    """Return a function that makes a class of TrainingArguments that a plan applies to."""
    from transformers import TrainingArguments

    def make(base: Any = TrainingArguments, **plan: Any) -> Made:
        changes = quiet()
        wanted = settings(**{"precision_is_default": False, "trainer_accumulates": True, **plan})

        class Planned(base):
            def __init__(self, **kwargs: Any) -> None:
                super().__init__(
                    **{"output_dir": str(tmp_path), "report_to": "none", "use_cpu": True, **kwargs}
                )

        install_arguments(Planned, wanted, changes)
        return Planned, changes, wanted

    return make


CASES = [
    # plan, script, field, what it becomes
    ({"micro_batch_size": 2, "gradient_accumulation_steps": 4}, {}, "per_device_train_batch_size", 2),
    ({"micro_batch_size": 2, "gradient_accumulation_steps": 4}, {}, "gradient_accumulation_steps", 4),
    ({"micro_batch_size": 2}, {"auto_find_batch_size": True}, "auto_find_batch_size", False),
    ({}, {"auto_find_batch_size": True}, "auto_find_batch_size", True),
    ({"recovers": True}, {"auto_find_batch_size": True}, "auto_find_batch_size", False),
    ({"gradient_clipping": 0.3}, {}, "max_grad_norm", 0.3),
    ({"gradient_checkpointing": True}, {}, "activation_checkpointing_kwargs", {"use_reentrant": False}),
    ({"gradient_checkpointing": False}, {"gradient_checkpointing": True}, "activation_checkpointing", False),
    ({"gradient_checkpointing": True}, {}, "gradient_checkpointing", True),
    (
        {"gradient_checkpointing": True, "checkpoint_every": 2},
        {},
        "activation_checkpointing_kwargs",
        {"use_reentrant": False, "every_n_layers": 2},
    ),
    (
        {"checkpoint_every": 2},
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}},
        "activation_checkpointing_kwargs",
        {"use_reentrant": True, "every_n_layers": 2},
    ),
    (
        {"checkpoint_every": 2},
        {},
        "activation_checkpointing_kwargs",
        {"use_reentrant": False, "every_n_layers": 2},
    ),
    ({"checkpoint_every": 2}, {}, "activation_checkpointing", True),
    ({"activation_offload": True}, {}, "activation_checkpointing", True),
    ({"activation_offload": True}, {}, "activation_checkpointing_kwargs", {"use_reentrant": False}),
    (
        {"activation_offload": True},
        {"activation_checkpointing_kwargs": {"use_reentrant": True}},
        "activation_checkpointing_kwargs",
        {"use_reentrant": True},
    ),
    (
        {"activation_offload": True, "gradient_checkpointing": False},
        {},
        "activation_checkpointing_kwargs",
        None,
    ),
    ({"checkpoint_every": 2, "gradient_checkpointing": False}, {}, "activation_checkpointing_kwargs", None),
    (
        {"gradient_checkpointing": True},
        {"activation_checkpointing_kwargs": {"use_reentrant": True}},
        "activation_checkpointing_kwargs",
        {"use_reentrant": True},
    ),
    ({"precision": Precision.BF16}, {}, "bf16", True),
    ({"precision": Precision.FP32}, {"bf16": True}, "bf16", False),
    ({"precision": Precision.FP32, "precision_is_default": True}, {"bf16": True}, "bf16", True),
    ({"optimizer": OptimizerName.ADAFACTOR}, {}, "optim", "adafactor"),
    ({"optimizer": OptimizerName.ADAMW}, {"optim": "adamw_torch"}, "optim", "adamw_torch"),
    ({"optimizer": OptimizerName.ADAMW}, {"optim": "sgd"}, "optim", "adamw_torch_fused"),
    ({"optimizer": OptimizerName.ADAMW_8BIT}, {"optim": "paged_adamw_8bit"}, "optim", "paged_adamw_8bit"),
]


@pytest.mark.parametrize("given", ["dict", "text", "file"])
@pytest.mark.parametrize(
    ("config", "plan", "recomputes"),
    [
        ({"activation_checkpointing": True}, None, True),
        ({"fsdp_activation_checkpointing": "true"}, None, True),
        ({"activation_checkpointing": True}, False, False),
        ({"activation_checkpointing": False}, None, False),
        ({"reshard_after_forward": True}, None, False),
    ],
)
def test_checkpointing_of_fsdps_own_stays_as_the_models_own(
    config: dict[str, Any],
    plan: bool | None,
    recomputes: bool,
    given: str,
    under: Callable[..., Made],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FSDP_STATE_DICT_TYPE", raising=False)
    file = tmp_path / "fsdp.json"
    file.write_text(json.dumps(config))
    made, changes, _ = under(uses_fsdp2=True, gradient_checkpointing=plan)
    forms = {"dict": config, "text": json.dumps(config), "file": str(file)}
    arguments = made(fsdp="full_shard", fsdp_config=forms[given])
    assert not arguments.fsdp
    field, *_ = field_names(arguments, "activation_checkpointing")
    assert getattr(arguments, field) is recomputes
    assert any("TrainingArguments.fsdp" in line for line in changes.lines)
    assert any("as fsdp_config says" in line for line in changes.lines) is recomputes


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize(("plan", "script", "field", "runs"), CASES)
def test_a_plan_is_in_the_arguments(
    plan: dict[str, Any], script: dict[str, Any], field: str, runs: Any, under: Callable[..., Made]
) -> None:
    made, changes, _ = under(**plan)
    field = field_names(made, field)[0]  # as the installed transformers calls it
    script = {field_names(made, name)[0]: value for name, value in script.items()}
    arguments = made(**script)
    assert getattr(arguments, field) == runs
    said = script.get(field, made().__dataclass_fields__[field].default)
    mentions = any(f"TrainingArguments.{field} is {runs}; " in line for line in changes.lines)
    aliases = field_names(made, "activation_checkpointing")[1:]
    assert mentions == (said != runs and field not in aliases)


def test_what_is_changed_is_said() -> None:
    from transformers import TrainingArguments

    changes = quiet()
    own = {"optim": "sgd", "learning_rate": 0.1, "auto_find_batch_size": True}
    arguments = TrainingArguments(use_cpu=True, report_to="none", **own)
    plan = settings(micro_batch_size=4, trainer_accumulates=True, optimizer=OptimizerName.ADAMW)
    apply(arguments, plan, changes)
    assert changes.lines == (
        "TrainingArguments.per_device_train_batch_size is 4; the script says 8",
        "TrainingArguments.gradient_accumulation_steps is 2; the script says 1",
        "TrainingArguments.optim is adamw_torch_fused; the script says sgd",
        "TrainingArguments.auto_find_batch_size is False; the script says True, which would change the "
        "global batch",
        "the learning rate of 0.1 is the script's, for sgd; at the same rate adamw_torch_fused takes steps "
        "of another size, and may need another",
    )


OWN_BETAS = {"adam_beta1": 0.95, "adam_beta2": 0.98}


@pytest.mark.parametrize(
    ("optim", "name", "betas"),
    [
        ("adamw_torch", OptimizerName.LION, (0.9, 0.99)),
        ("adamw_torch", OptimizerName.ADAMW_8BIT, (0.95, 0.98)),
        ("lion_32bit", OptimizerName.LION_8BIT, (0.95, 0.98)),
        ("lion_32bit", OptimizerName.LION, (0.95, 0.98)),
        ("lion_32bit", OptimizerName.ADAMW, (0.9, 0.999)),
    ],
)
def test_betas_go_to_an_optimizer_of_their_own_kind(
    optim: str, name: OptimizerName, betas: tuple[float, float], under: Callable[..., Made]
) -> None:
    """As in a loop, where the swap decides: test_lions_betas_are_no_adamws."""
    made, _, wanted = under(optimizer=name)
    arguments = made(optim=optim, **OWN_BETAS)
    apply(arguments, wanted, quiet())
    assert (arguments.adam_beta1, arguments.adam_beta2) == betas


def test_copies_are_not_planned_twice(under: Callable[..., Made]) -> None:
    made, changes, wanted = under(micro_batch_size=2, gradient_accumulation_steps=4)
    arguments = made()
    lines = changes.lines
    for copied in (dataclasses.replace(arguments, learning_rate=1.0), copy.deepcopy(arguments), arguments):
        apply(copied, wanted, changes)
        assert (copied.per_device_train_batch_size, copied.gradient_accumulation_steps) == (2, 4)
    assert changes.lines == lines


def test_subclasses_that_set_fields_around_super_are_planned(under: Callable[..., Made]) -> None:
    from transformers import Seq2SeqTrainingArguments

    @dataclasses.dataclass
    class Sft(Seq2SeqTrainingArguments):
        seen: int = 0

        def __post_init__(self) -> None:
            self.bf16 = not (self.fp16) if self.bf16 is None else self.bf16
            super().__post_init__()
            self.seen = self.per_device_train_batch_size

    base, _, _ = under(Sft, micro_batch_size=2, precision=Precision.FP32)
    assert (base().seen, base(bf16=None).bf16) == (2, False)


def test_a_field_that_the_script_changes_later_is_planned_again(under: Callable[..., Made]) -> None:
    made, changes, wanted = under(micro_batch_size=2, gradient_accumulation_steps=4, gradient_clipping=0.3)
    arguments = made(per_device_train_batch_size=4, gradient_accumulation_steps=2)
    arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps = 8, 1
    arguments.max_grad_norm = 5.0
    apply(arguments, wanted, changes)
    assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == (2, 4)
    assert arguments.max_grad_norm == 0.3
    assert "TrainingArguments.max_grad_norm is 0.3; the script says 5.0" in changes.lines
    arguments.per_device_train_batch_size = 16
    with pytest.raises(UserError, match="do not make the script's global batch"):
        apply(arguments, wanted, changes)


def test_arguments_from_a_command_line_and_from_files_are_planned(
    under: Callable[..., Made], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import HfArgumentParser, TrainingArguments

    monkeypatch.setattr(TrainingArguments, "__post_init__", TrainingArguments.__post_init__)
    install_arguments(TrainingArguments, settings(micro_batch_size=2, trainer_accumulates=True), quiet())
    file = tmp_path / "args.yaml"
    file.write_text(
        f"output_dir: {tmp_path}\nper_device_train_batch_size: 6\nuse_cpu: true\nreport_to: none\n"
    )
    monkeypatch.setattr(sys, "argv", ["train.py", "--per_device_train_batch_size=4", "--use_cpu"])
    parser = HfArgumentParser(TrainingArguments)
    for arguments, steps in (
        (parser.parse_args_into_dataclasses()[0], 2),
        (parser.parse_yaml_file(str(file))[0], 3),
    ):
        assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == (2, steps)


def test_a_batch_of_all_ranks_together_is_planned_as_such(
    under: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _, _ = under()
    arguments = made(accelerator_config={"split_batches": True}, per_device_train_batch_size=16)
    monkeypatch.setenv("WORLD_SIZE", "2")
    apply(
        arguments, settings(precision_is_default=False, trainer_accumulates=True, micro_batch_size=4), quiet()
    )
    assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == (8, 2)


_ON_DEEPSPEED = "DeepSpeed is configured as the plan says; the script says TrainingArguments.deepspeed"


@pytest.mark.parametrize(
    ("config", "plan", "said"),
    [
        ({}, {}, _ON_DEEPSPEED),
        ({"optimizer": {}}, {}, f"{_ON_DEEPSPEED}, whose optimizer stay"),
        ({"optimizer": {}, "scheduler": {}}, {}, f"{_ON_DEEPSPEED}, whose optimizer and scheduler stay"),
        (
            {"optimizer": {}, "scheduler": {}},
            {"optimizer": OptimizerName.SGD},
            f"{_ON_DEEPSPEED}, whose scheduler stay",
        ),
    ],
)
def test_of_a_scripts_deepspeed_config_the_optimizer_and_the_scheduler_stay(
    config: dict[str, Any], plan: dict[str, Any], said: str
) -> None:
    changes, arguments = quiet(), SimpleNamespace(deepspeed={"zero_optimization": {"stage": 1}, **config})
    _take_deepspeed(arguments, settings(uses_deepspeed=True, **plan), changes)
    assert arguments.deepspeed is None
    assert changes.lines == (said,)
