"""Keyword arguments of zerofit.plan and zerofit.launch, converted to what a plan is made from."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, cast

from zerofit.core.errors import UserError, nearest
from zerofit.core.plan import Plan, plan_from_json
from zerofit.core.request import Request
from zerofit.core.strategy import (
    Engine,
    Lora,
    OffloadDevice,
    OptimizerName,
    Precision,
    Quantization,
    ZeroStage,
)
from zerofit.core.units import parse_bytes
from zerofit.models.task import Task
from zerofit.planning.inputs import DEFAULTS, Loop, MachineFlags, ModelFlags
from zerofit.planning.problem import Allow, Reserve

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_ENUMS: dict[str, type[Enum]] = {
    "engine": Engine,
    "zero_stage": ZeroStage,
    "optimizer_offload": OffloadDevice,
    "param_offload": OffloadDevice,
    "precision": Precision,
    "optimizer": OptimizerName,
    "quantization": Quantization,
    "task": Task,
    "loop": Loop,
    "dtype": Precision,
}
_UNSAID = {"says_qlora", "elsewhere", "plan", "typed"}
"""Fields of Request that are no setting of the user's own."""
_OF_MODEL = frozenset(ModelFlags.__dataclass_fields__)
_OF_MACHINE = frozenset(MachineFlags.__dataclass_fields__)
_OF_REQUEST = frozenset(Request.__dataclass_fields__) - _UNSAID
SETTINGS = tuple(sorted(_OF_MODEL | _OF_MACHINE | _OF_REQUEST))
"""Names that zerofit.plan and zerofit.launch take as keyword arguments."""


def settings_of(settings: Mapping[str, Any]) -> tuple[ModelFlags, MachineFlags, Request]:
    """Return what keyword arguments say of the model, of the machine and of the strategy.

    Args:
        settings: by name; values of enums may be given as their words ("bf16", 3), `lora` as True, `allow` as
            a sequence of words, `freeze` as a sequence of names, `reserve` as bytes or as a share below 1.

    Raises:
        UserError: a name or a value is not known.
    """
    values = {name: _value(name, value) for name, value in settings.items()}
    model: dict[str, Any] = {name: values.get(name, DEFAULTS.get(name)) for name in _OF_MODEL}
    machine: dict[str, Any] = {name: values.get(name) for name in _OF_MACHINE}
    request = {name: value for name, value in values.items() if name in _OF_REQUEST and value is not None}
    return ModelFlags(**model), MachineFlags(**machine), Request(**request)


def _value(name: str, value: Any) -> Any:
    if name not in SETTINGS:
        near = nearest(name, SETTINGS)
        raise UserError(
            "unknown-setting",
            f"there is no setting {name!r}",
            found=f"{name}={value!r}",
            why="keyword arguments are the fields of zerofit.Strategy and what describes model and machine",
            fix=f"did you mean {near}={value!r}?" if near else f"name one of {', '.join(SETTINGS)}",
        )
    try:
        return _converted(name, value)
    except (ValueError, TypeError):
        words = [member.value for member in _ENUMS[name]] if name in _ENUMS else []
        raise UserError(
            "bad-value",
            f"{name} can't be {value!r}",
            found=f"{name}={value!r}",
            why=f"it is one of {', '.join(map(str, words))}" if words else "its type is another one",
            fix=f"write it like {name}={words[-1]!r}" if words else "see the documentation of zerofit.plan",
        ) from None


def _converted(name: str, value: Any) -> Any:
    if value is None:
        return None
    if name in _ENUMS:
        return _ENUMS[name]("fp32" if (name, value) == ("precision", "no") else value)
    if name == "lora" and isinstance(value, bool):
        return Lora() if value else None
    if name == "allow":
        return frozenset(Allow(word) for word in ([value] if isinstance(value, str) else value))
    if name == "freeze":
        return (value,) if isinstance(value, str) else tuple(value)
    if name == "reserve" and not isinstance(value, Reserve):
        if isinstance(value, str):
            return Reserve(num_bytes=parse_bytes(value))
        return Reserve(share=value) if value < 1 else Reserve(num_bytes=int(cast(float, value)))
    return value


def plan_from_file(path: Path) -> Plan:
    """Return the plan that a plan file holds.

    Raises:
        UserError: the file can't be read, or holds no plan.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            "plan-file-missing",
            "the plan file can't be opened",
            found=f"--plan {path}: {getattr(error, 'strerror', None) or 'it is no text'}",
            why="a plan file is JSON text, such as plan.json in a run folder",
            fix="name a plan file that is there, or leave out --plan",
        ) from None
    return plan_from_json(text, name=str(path))
