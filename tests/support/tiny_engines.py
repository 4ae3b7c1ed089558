"""DeepSpeed's engines of tiny models, as the ranks of the tests of generating use them."""

from __future__ import annotations

from typing import Any


def config_of(*, zero: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """Return a configuration of ZeRO-3 in which every weight is partitioned, unless the settings differ."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **(zero or {})},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **settings,
    }


def engine_of(model: Any, *, trains: bool = True, zero: dict[str, Any] | None = None, **settings: Any) -> Any:
    """Return the engine of a model, in training with an optimizer; else in evaluation and without one."""
    import deepspeed
    import torch

    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1) if trains else None
    config = config_of(zero=zero, **settings)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.train(trains)
    return engine
