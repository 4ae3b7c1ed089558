"""Names of optimizers to ids of the optimizer table."""

from __future__ import annotations

import pytest

from zerofit.checking.rules.optimizer.table import OPTIMIZERS
from zerofit.configs.schemas.catalog import load_schemas
from zerofit.core.optimizers.lookup import TRAINER_OPTIMIZERS, optimizer_of_class, optimizer_of_deepspeed


def test_every_name_of_trainer_has_an_id() -> None:
    key = load_schemas().training_arguments.find("optim")
    assert key is not None
    assert set(key.choices) == set(TRAINER_OPTIMIZERS)


def test_ids_are_in_the_table_or_marked_as_others() -> None:
    known = {*OPTIMIZERS}
    assert {name for name in TRAINER_OPTIMIZERS.values() if not name.startswith("other:")} <= known


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("adamw_torch", "torch.AdamW"),
        ("adamw_bnb_8bit", "bitsandbytes.AdamW8bit"),
        ("paged_adamw_32bit", "bitsandbytes.AdamW"),
        ("galore_adamw", "galore_torch.GaLoreAdamW"),
        ("adamw", None),
    ],
)
def test_optimizer_of_trainer(name: str, expected: str | None) -> None:
    assert TRAINER_OPTIMIZERS.get(name) == expected


@pytest.mark.parametrize(
    ("optimizer_type", "expected"),
    [
        ("AdamW", "config.AdamW"),
        ("adamw", "config.AdamW"),
        ("LION", "config.Lion"),
        ("SGD", "config.SGD"),
        ("sgd", "config.sgd"),
        ("OneBitAdam", "config.OneBitAdam"),
    ],
)
def test_deepspeed_ignores_the_case_of_its_own_types_alone(optimizer_type: str, expected: str) -> None:
    assert optimizer_of_deepspeed(optimizer_type) == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("torch.optim.AdamW", "torch.AdamW"),
        ("torch.optim.adamw.AdamW", "torch.AdamW"),
        ("transformers.Adafactor", "transformers.Adafactor"),
        ("transformers.optimization.Adafactor", "transformers.Adafactor"),
        ("bitsandbytes.optim.PagedAdamW8bit", "bitsandbytes.PagedAdamW8bit"),
        ("deepspeed.ops.adam.DeepSpeedCPUAdam", "deepspeed.DeepSpeedCPUAdam"),
        ("accelerate.utils.DummyOptim", "accelerate.DummyOptim"),
        ("galore_torch.adamw.AdamW", "galore_torch.GaLoreAdamW"),
        ("torchao.optim.adam.AdamW8bit", "torchao.AdamW8bit"),
        ("schedulefree.adamw_schedulefree.AdamWScheduleFree", "schedulefree.AdamWScheduleFree"),
        ("transformers.AdamW", "other:transformers.AdamW"),
        ("lion_pytorch.Lion", "other:lion_pytorch.Lion"),
        ("my_optimizers.AdamW", "other:my_optimizers.AdamW"),
    ],
)
def test_optimizer_of_class(path: str, expected: str) -> None:
    assert optimizer_of_class(path) == expected
