"""prepare() under FSDP2 returns what the script gave it, in its order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerators import quiet, settings, wrap_all

from zerofit.training.setup import sharded_prepare

pytestmark = pytest.mark.usefixtures("no_earlier_optimizers")


class _Accelerator:
    """Shards one model with its optimizers in a call, as accelerate's does."""

    def __init__(self) -> None:
        self._optimizers: list[Any] = []
        self.calls: list[int] = []

    def prepare(self, *objects: Any) -> Any:
        self.calls.append(len(objects))
        return [SimpleNamespace(optimizer=item, param_groups=()) for item in objects]


def test_two_models_are_sharded_each_with_its_optimizer_and_come_back_in_order() -> None:
    kind = type("Accelerator", (_Accelerator,), {})
    wanted = settings(uses_fsdp2=True)
    own = {"prepare": sharded_prepare.wrappers(kind, wanted, quiet())["prepare"]}
    wrap_all(kind, own)
    models = [torch.nn.Linear(2, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    given = (models[0], *optimizers, models[1])
    accelerator: Any = kind()
    prepared = accelerator.prepare(*given)
    assert [item.optimizer for item in prepared] == list(given)
    assert accelerator.calls == [2, 2]
