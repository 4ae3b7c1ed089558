"""Trains one case, or its unsharded reference, for a few steps, and tells how far the two are apart."""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from measuring_ranks import fresh_state

from optimizer_matrix.cases import MICRO_BATCH_SIZE, NUM_STEPS, Case, deepspeed_config
from optimizer_matrix.makers import maker_of
from zerofit.core.command import Route

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

_WIDTHS = (32, 128, 64, 16)
"""The two larger matrices exceed the 4096 elements below which bitsandbytes keeps states in 32 bit."""


def make_model() -> torch.nn.Module:
    """Return matrices only: Muon takes nothing else."""
    import torch

    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for width, next_width in itertools.pairwise(_WIDTHS):
        layers += [torch.nn.Linear(width, next_width, bias=False), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers[:-1])


def groups_of(model: torch.nn.Module, case: Case) -> list[Any]:
    """Return the parameters as recipes group them: the first ones without weight decay.

    Trainer makes groups of its own, and here decays all; L-BFGS takes no groups; of Adagrad's two ZeRO would
    make one, and fail, so that it has one with a setting of its own.
    """
    params = list(model.parameters())
    if case.route is Route.TRAINER or case.optimizer in ("torch.LBFGS", "config.LBFGS"):
        return params
    if case.optimizer in ("torch.Adagrad", "config.Adagrad"):
        return [{"params": params, "weight_decay": 0.0}]
    return [{"params": params[:1], "weight_decay": 0.0}, {"params": params[1:]}]


def make_data(num_ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of shape (step, rank, sample, features)."""
    import torch

    generator = torch.Generator().manual_seed(1)
    shape = (NUM_STEPS, num_ranks, MICRO_BATCH_SIZE)
    return (
        torch.randn(*shape, _WIDTHS[0], generator=generator),
        torch.randn(*shape, _WIDTHS[-1], generator=generator),
    )


def train_reference(case: Case, *, num_ranks: int) -> list[torch.Tensor]:
    """Return the weights after training in one process, in fp32, on what all ranks see together."""
    import torch

    model = make_model()
    inputs, targets = make_data(num_ranks)
    stepper = maker_of(case.optimizer).make_reference(groups_of(model, case))
    for step in range(NUM_STEPS):

        def closure(step: int = step) -> torch.Tensor:
            stepper.zero_grad()
            loss = torch.nn.functional.mse_loss(
                model(inputs[step].flatten(0, 1)), targets[step].flatten(0, 1)
            )
            loss.backward()
            return loss

        closure()
        if isinstance(stepper, torch.optim.LBFGS):
            stepper.step(closure)
        else:
            stepper.step()
    return [param.detach().clone() for param in model.parameters()]


def relative_error(weights: list[torch.Tensor], reference: list[torch.Tensor]) -> float:
    """Return how far weights are from the reference's, relative to how far the reference moved."""
    start = [param.detach() for param in make_model().parameters()]
    off = sum(float((a.double() - b.double()).pow(2).sum()) for a, b in zip(weights, reference, strict=True))
    moved = sum(float((a.double() - b.double()).pow(2).sum()) for a, b in zip(reference, start, strict=True))
    return (off / moved) ** 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Weights and states that a run left."""

    stepped: str
    """The class of the optimizer inside the engine."""
    is_own: bool
    """True if that optimizer is the one that was asked for, and none put in its place."""
    weights: list[torch.Tensor]
    """Whole, in the order of the parameters."""


def train_case(case: Case, *, rank: int, num_ranks: int) -> Trained:
    """Train a case in this rank."""
    # Rank by rank: a shared folder would name each rank's swap files alike.
    with tempfile.TemporaryDirectory(prefix=f"nvme{rank}-") as nvme_path, fresh_state():
        if case.route is Route.NATIVE:
            return _train_native(case, nvme_path, rank, num_ranks)
        if case.route is Route.TRAINER:
            from optimizer_matrix.with_trainer import train_with_trainer

            return train_with_trainer(case, nvme_path=nvme_path, num_ranks=num_ranks)
        return _train_accelerate(case, nvme_path, rank, num_ranks)


def config_of(case: Case, nvme_path: str) -> dict[str, Any]:
    """Return the case's DeepSpeed configuration, with an optimizer section where DeepSpeed makes it."""
    made_by_deepspeed = case.optimizer.startswith("config.")
    params = maker_of(case.optimizer).arguments if made_by_deepspeed else None
    return deepspeed_config(case, params=params, nvme_path=nvme_path)


def _train_accelerate(
    case: Case, nvme_path: str, rank: int, num_ranks: int
) -> tuple[str, list[torch.Tensor]]:
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, DummyOptim

    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config_of(case, nvme_path)))
    assert accelerator.num_processes == num_ranks
    model = make_model()
    if case.optimizer.startswith("config.") or case.optimizer == "accelerate.DummyOptim":
        asked = DummyOptim(groups_of(model, case))
    else:
        asked = maker_of(case.optimizer).make(groups_of(model, case))
    engine, optimizer = accelerator.prepare(model, asked)
    try:
        for loss in _losses(engine, rank, num_ranks):
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return trained(engine, asked)
    finally:
        engine.destroy()


def _train_native(case: Case, nvme_path: str, rank: int, num_ranks: int) -> Trained:
    import deepspeed

    model = make_model()
    made_by_deepspeed = case.optimizer.startswith("config.")
    asked = None if made_by_deepspeed else maker_of(case.optimizer).make(groups_of(model, case))
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=groups_of(model, case) if made_by_deepspeed else None,
        optimizer=asked,
        config=config_of(case, nvme_path),
    )
    try:
        for loss in _losses(engine, rank, num_ranks):
            engine.backward(loss)
            engine.step()
        return trained(engine, asked)
    finally:
        engine.destroy()


def _losses(engine: Any, rank: int, num_ranks: int) -> Iterator[torch.Tensor]:
    import torch

    inputs, targets = make_data(num_ranks)
    for step in range(NUM_STEPS):
        yield torch.nn.functional.mse_loss(engine(inputs[step, rank]), targets[step, rank])


def trained(engine: Any, asked: Any) -> Trained:
    """Return what an engine holds after training.

    Args:
        engine: DeepSpeed's.
        asked: the optimizer that the script made; one that is no optimizer leaves the choice to DeepSpeed.
    """
    import torch

    inside = engine.basic_optimizer
    return Trained(
        stepped=type(inside).__name__,
        is_own=inside is asked or not isinstance(asked, torch.optim.Optimizer),
        weights=_whole_weights(engine),
    )


def _whole_weights(engine: Any) -> list[torch.Tensor]:
    """Return the engine's parameters, gathered."""
    import deepspeed

    params = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(params, enabled=hasattr(params[0], "ds_id")):
        return [param.detach().float().cpu().clone() for param in params]
