"""Flags and keyword arguments as values: overrides, options of planning, machine, nodes and the base."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from zerofit.core.bounded_read import read_bounded_text
from zerofit.core.errors import UserError, bad_value, nearest
from zerofit.core.overrides import FLAGS, IMPLY_CHECKPOINTING, OTHER_FLAGS, Overrides, flag_of
from zerofit.core.plan import LARGEST_PLAN, Plan, plan_from_json
from zerofit.core.setting import Said
from zerofit.core.strategy import (
    Engine,
    Lora,
    OffloadDevice,
    OptimizerName,
    Precision,
    Quantization,
    StateDictType,
    ZeroStage,
)
from zerofit.core.units import parse_bytes
from zerofit.models.task import Task
from zerofit.planning.options import Allow, Loop, MachineFlags, ModelFlags, Reserve
from zerofit.planning.sources.nodes import Nodes
from zerofit.planning.sources.typed_line import TypedLine

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


_OF_A_MODEL = {
    "sequence_length": "--seq-len",
    "target_length": "--target-len",
    "task": "--task",
    "is_padded": "--padded or --no-padded",
    "loop": "--loop",
    "dtype": "--dtype",
    "trust_remote_code": "--trust-remote-code",
}
"""Flags for facts that a capture finds by itself, by field of ModelFlags."""
_OF_PLANNING = _OF_A_MODEL | {
    "allow": "--allow",
    "reserve": "--reserve",
    "expandable_segments": "--expandable-segments",
    "is_fast": "--fast",
    "prefers_speed": "--prefer-speed",
}
"""Flags without effect if no plan is made."""


def _given(flags: ModelFlags, names: Mapping[str, str]) -> list[str]:
    unsaid = ModelFlags()
    return [flag for name, flag in names.items() if getattr(flags, name) != getattr(unsaid, name)]


def check_model_flags(flags: ModelFlags) -> None:
    """Check that no flag sets what the capture of a script finds by itself.

    Raises:
        UserError: one does.
    """
    if given := _given(flags, _OF_A_MODEL):
        raise UserError(
            "model-flag-without-model",
            "a flag sets a model property that the capture finds itself",
            found=f"{', '.join(given)} without --model",
            why="the plan uses what the script trains, which the flag could contradict",
            fix=f"leave out {given[0]}, or name the model too: --model MODEL",
        )


def check_none_ignored(flags: ModelFlags, *, because: str, instead: str) -> None:
    """Check that no planning flag is given if no plan is made.

    Args:
        because: why no plan is made.
        instead: the alternative to leaving the flag out.

    Raises:
        UserError: one was given.
    """
    if given := _given(flags, _OF_PLANNING):
        raise UserError(
            "planning-flag-without-planning",
            "a planning flag would be ignored, as no plan is made",
            found=f"{', '.join(given)} with {because}",
            why="it affects planning, but here a preset, a plan file or other flags decide what runs",
            fix=f"leave out {', '.join(given)}, or {instead}",
        )


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
    "state_dict_type": StateDictType,
}
_BY_FLAG = {
    **{flag.removeprefix("--").replace("-", "_"): name for name, flag in FLAGS.items()},
    "cpu": "on_cpu",
}
"""Fields by the names of their flags: offload_optimizer (--offload-optimizer) is optimizer_offload."""
_QLORA = {
    "lora": Said(value=Lora(), text="--qlora"),
    "quantization": Said(value=Quantization.NF4, text="--qlora"),
}
"""What qlora=True sets, as --qlora does."""
_OF_MODEL = frozenset(ModelFlags.__dataclass_fields__)
_OF_MACHINE = frozenset(MachineFlags.__dataclass_fields__)
_OF_NODES = frozenset(Nodes.__dataclass_fields__)
_OVERRIDES = (FLAGS.keys() | OTHER_FLAGS.keys()) - {"world_size", "num_nodes"}
_OTHERS = frozenset({"preset", "plan", "on_cpu", "typed"})
_NO_LINE = TypedLine()
_OF_COMMAND_LINE = frozenset({"plan", "typed"})
"""What a keyword argument of its own, or the command line, sets."""
SETTINGS = tuple(sorted((_OF_MODEL | _OF_MACHINE | _OF_NODES | _OVERRIDES | _OTHERS) - _OF_COMMAND_LINE))
"""Keyword arguments of zerofit.plan and zerofit.launch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Flags or keyword arguments as values."""

    overrides: Overrides
    """Fields of Strategy, parallel groups and the global batch."""
    options: ModelFlags
    described: MachineFlags
    nodes: Nodes
    preset: str | None = None
    plan: Plan | None = None
    on_cpu: bool = False
    typed: TypedLine = _NO_LINE
    """The command line; empty if there was none."""

    def without(self, names: Collection[str]) -> Settings:
        """Return the settings without some overrides and their flags."""
        return replace(self, overrides=self.overrides.without(names), typed=self.typed.without(names))


def by_field(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by the names of fields, for those named as their flags: mixed_precision is precision.

    Raises:
        UserError: a field is given by both names.
    """
    named: dict[str, Any] = {}
    if "qlora" in settings:
        others = {name: value for name, value in settings.items() if name != "qlora" and value is not None}
        settings = {**_QLORA, **others} if settings["qlora"] else others
    for name, value in settings.items():
        if (field := _BY_FLAG.get(name, name)) in named:
            raise bad_value(field, str(value), why=f"{field} is given twice", fix=f"leave out {name}")
        named[field] = value
    return named


def settings_of(settings: Mapping[str, Any]) -> Settings:
    """Return flags or keyword arguments as values.

    Args:
        settings: by name; enums may be given by value ("bf16", 3), `lora` as True, `allow` and `freeze` as
            sequences of strings, `reserve` as bytes or as a share below 1, `plan` as a path. A Said has a
            place of its own; the others' place is their flag.

    Raises:
        UserError: a name or a value is unknown, or the plan file can't be read.
    """
    values, said = {}, {}
    for name, given in by_field(settings).items():
        value = _value(name, given.value if isinstance(given, Said) else given)
        if value is None:
            continue
        values[name] = value
        if name in _OVERRIDES:
            default = Said(value=value, text=flag_of(name, value))
            said[name] = replace(given, value=value) if isinstance(given, Said) else default

    def of(names: frozenset[str]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if name in names}

    return Settings(
        overrides=Overrides(said={**_recomputing(said), **said}),
        options=ModelFlags(**of(_OF_MODEL)),
        described=MachineFlags(**of(_OF_MACHINE)),
        nodes=Nodes(**of(_OF_NODES)),
        **of(_OTHERS),
    )


def _recomputing(said: Mapping[str, Said[Any]]) -> dict[str, Said[Any]]:
    """Return gradient checkpointing as a setting, if another one implies it.

    Raises:
        UserError: it is switched off beside one.
    """
    implied = [name for name in IMPLY_CHECKPOINTING if name in said and said[name].value is not False]
    if not implied:
        return {}
    first, switch = said[implied[0]], said.get("gradient_checkpointing")
    if switch is not None and not switch.value:
        raise UserError(
            f"{first.text.removeprefix('--')}-without-checkpointing",
            "blocks can't be recomputed without gradient checkpointing",
            found=f"{first.text} with {switch.text}",
            why=f"{first.text} {IMPLY_CHECKPOINTING[implied[0]]}",
            fix="leave one of the two out",
        )
    return {"gradient_checkpointing": replace(first, value=True)}


def _value(name: str, value: Any) -> Any:
    if name not in SETTINGS and name not in _OF_COMMAND_LINE:
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
    if name == "plan":
        value = getattr(value, "plan", value)  # an Answer has one
        return value if isinstance(value, Plan) else plan_from_file(Path(value))
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
    """Return the plan in a plan file.

    Raises:
        UserError: the file can't be read, or contains no plan.
    """
    try:
        text = read_bounded_text(path, most_bytes=LARGEST_PLAN)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            "plan-file-missing",
            "the plan file can't be opened",
            found=f"--plan {path}: {getattr(error, 'strerror', None) or 'it is no text'}",
            why="a plan file is JSON text, such as plan.json in a run folder",
            fix="name a plan file that is there, or leave out --plan",
        ) from None
    return plan_from_json(text, name=str(path))
