"""The run's optimizer and placement, looked up in the optimizer table, for the rules of optimizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.checking.rule import Hit
from zerofit.checking.rules.optimizer.table import verdict
from zerofit.checking.situation import known, stage_of
from zerofit.core.command import Route
from zerofit.core.strategy import Engine, OffloadDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerofit.checking.rules.optimizer.row import Cause, Row
    from zerofit.checking.situation import Situation
    from zerofit.core.setting import Said
    from zerofit.core.strategy import ZeroStage

UNTESTED_KEY = "zero_allow_untested_optimizer"
FORCE_KEY = "zero_force_ds_cpu_optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One run's optimizer, where it is placed, and what the table says of that."""

    row: Row
    optimizer: Said[str | None]
    zero_stage: Said[ZeroStage]
    optimizer_offload: Said[OffloadDevice]
    forces_cpu_optimizer: bool

    @property
    def offloads(self) -> bool:
        """Whether the optimizer's states leave the GPU."""
        return self.optimizer_offload.value is not OffloadDevice.NONE

    @property
    def texts(self) -> str:
        """The optimizer and what it is combined with, in the user's words."""
        other = self.optimizer_offload if self.offloads else self.zero_stage
        return f"{self.optimizer.text} with {other.text}"


def place(situation: Situation) -> Placed | None:
    """Return the run's optimizer with its row of the table; None where DeepSpeed steps nothing.

    Raises:
        Lacking: the optimizer, its placement or who hands it to DeepSpeed is not known, and matters.
    """
    settings = situation.settings
    if settings.engine is not None and settings.engine.value is not Engine.DEEPSPEED:
        return None
    stage = stage_of(situation)
    offload = known(settings.optimizer_offload, "the optimizer offload")
    optimizer = known(settings.optimizer, "the optimizer, which the script makes")
    if optimizer.value is None:
        return None
    forces = known(settings.force_cpu_optimizer, FORCE_KEY).value
    file = situation.deepspeed
    rows = {
        verdict(
            optimizer.value,
            zero_stage=stage.value,
            optimizer_offload=offload.value,
            param_offload=OffloadDevice.NONE,
            forces_cpu_optimizer=forces,
            route=route,
            allows_untested=file is not None and file.value(UNTESTED_KEY) is True,
        )
        for route in _routes(situation)
    }
    row = rows.pop() if len(rows) == 1 else known(None, "who hands the optimizer to DeepSpeed")
    return Placed(
        row=row,
        optimizer=optimizer,
        zero_stage=stage,
        optimizer_offload=offload,
        forces_cpu_optimizer=forces,
    )


def _routes(situation: Situation) -> tuple[Route, ...]:
    if situation.route is not None:
        return (situation.route,)
    if situation.is_of_flags:
        return (Route.ACCELERATE,)  # what a strategy puts in goes through prepare()
    return tuple(Route)


def because_of(*causes: Cause, on_gpus: bool = False) -> Callable[[Situation], Iterator[Hit]]:
    """Return a predicate that finds the combinations to which the table gives one of these causes.

    Args:
        causes: the table's.
        on_gpus: whether it does not hold for ranks on the CPU, where all memory is the host's.
    """

    def find(situation: Situation) -> Iterator[Hit]:
        if on_gpus and situation.topology is not None and situation.topology.on_cpu:
            return
        placed = place(situation)
        if placed is not None and placed.row.cause in causes:
            yield hit(placed)

    return find


def hit(placed: Placed, *, fix: str | None = None) -> Hit:
    """Return the finding of an optimizer and its placement."""
    return Hit(
        found=placed.texts,
        place=placed.optimizer.place or placed.optimizer_offload.place,
        fix=fix,
        confidence=placed.optimizer.confidence,
    )


def optimizer_script(optimizer: str, *, imports: str = "torch") -> str:
    """Return a small script with Accelerator that trains with an optimizer, for examples.

    Args:
        optimizer: how the script makes it, from `model`.
        imports: the module that it comes from, beside torch.
    """
    modules = "\n".join(f"import {name}" for name in sorted({"torch", imports}))
    return (
        f"{modules}\n"
        "from accelerate import Accelerator\n"
        "\n"
        "accelerator = Accelerator()\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.Linear(32, 32)\n"
        f"optimizer = {optimizer}\n"
        "data = torch.utils.data.DataLoader(torch.randn(32, 32), batch_size=4)\n"
        "model, optimizer, data = accelerator.prepare(model, optimizer, data)\n"
        "for batch in data:\n"
        "    accelerator.backward(model(batch).square().mean())\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
