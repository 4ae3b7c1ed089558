"""The installed DeepSpeed to the schema of ds_config.json: its pydantic models, and what it reads besides."""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from tools.schemas.deepspeed_raw_keys import INSTEAD_OF_REMOVED, RAW_KEYS
from zerofit.configs.schema import Key, OnUnknown, Removed, Schema, Section, ValueKind
from zerofit.core.upstream.deepspeed import refused_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SCALARS: dict[Any, ValueKind] = {
    bool: ValueKind.BOOL,
    int: ValueKind.INTEGER,
    float: ValueKind.NUMBER,
    str: ValueKind.STRING,
    Path: ValueKind.STRING,
    NoneType: ValueKind.NULL,
    list: ValueKind.LIST,
    tuple: ValueKind.LIST,
    dict: ValueKind.SECTION,
}
_BY_VALIDATOR: dict[tuple[str, str], dict[str, Any]] = {
    ("DeepSpeedZeroConfig", "leaf_module"): {"kinds": (ValueKind.SECTION, ValueKind.NULL)},
    ("DeepSpeedZeroLeafModuleConfig", "classes"): {"kinds": (ValueKind.LIST, ValueKind.STRING)},
    ("DeepSpeedZeroLeafModuleConfig", "names"): {"kinds": (ValueKind.LIST, ValueKind.STRING)},
    ("DeepSpeedZeroLeafModuleConfig", "name_suffixes"): {"kinds": (ValueKind.LIST, ValueKind.STRING)},
    ("ZenFlowConfig", "select_strategy"): {"choices": ("auto", "step", "epoch")},
    ("ZenFlowConfig", "select_interval"): {"kinds": (ValueKind.INTEGER,), "converts": False},
    ("ZenFlowConfig", "update_interval"): {"kinds": (ValueKind.INTEGER,), "converts": False, "at_least": 1},
    ("DeepSpeedFP16Config", "loss_scale"): {"at_least": 0},
}
"""Values that a model's validators allow or forbid beyond the declared type."""
_QUOTED = re.compile(r"[\"']([A-Za-z_0-9]+)[\"']")
_NOT_PARAMS = {"self", "params", "model_params", "optimizer", "max_grad_norm"}
"""Keys that the engine passes itself, and keys it refuses."""
_PARAMS = {
    **{name: Key(name=name, kinds=(ValueKind.NUMBER,)) for name in ("lr", "eps", "weight_decay")},
    "betas": Key(name="betas", kinds=(ValueKind.LIST,)),
    # runtime/lr_schedules.py, WarmupLR.__init__
    "warmup_num_steps": Key(name="warmup_num_steps", kinds=(ValueKind.INTEGER,), above=0),
    "total_num_steps": Key(name="total_num_steps", kinds=(ValueKind.NUMBER,)),
}
"""Params whose type was seen to matter; annotations there say little."""


_MODELS = (
    ("comms_logger", "comm.config", "CommsLoggerConfig"),
    ("compile", "compile.config", "CompileConfig"),
    ("hybrid_engine", "runtime.config", "HybridEngineConfig"),
    ("tensor_parallel", "runtime.tensor_parallel.config", "TPTrainingConfig"),
    ("weight_quantization", "inference.config", "WeightQuantConfig"),
)
"""Sections of the root that are a pydantic model: key, module of deepspeed, class."""


_NEVER_OF_THE_ROOT = frozenset({"quantize_training"})
"""Keys that are refused though no release read them: it stood in compression_training (0.18.3, engine.py)."""


def probe_deepspeed_schema() -> Schema:
    """Return the schema that the installed DeepSpeed declares, with what it reads undeclared."""
    import deepspeed

    spelt = _names_spelt(Path(deepspeed.__file__).parent)
    refused = _refused()
    former = tuple(
        Key(name=path[0], section=Section(keys=(), on_unknown=OnUnknown.ACCEPTS))
        for path in (tuple(name.split(".")) for name in INSTEAD_OF_REMOVED)
        if len(path) == 1 and path not in refused and path[0] in spelt - _NEVER_OF_THE_ROOT
    )
    return Schema(
        package="deepspeed",
        version=deepspeed.__version__.strip(),
        root=Section(
            keys=(*_spelt(RAW_KEYS, spelt), *_modelled(), _optimizer(), _scheduler(), *former),
            on_unknown=OnUnknown.IGNORES,
        ),
        removed=tuple(Removed(path=path, instead=INSTEAD_OF_REMOVED[".".join(path)]) for path in refused),
    )


def _refused() -> list[tuple[str, ...]]:
    """Return the paths of the keys that end the run because a former release had them."""
    return [*refused_keys(), ("optimizer", "params", "max_grad_norm")]


def _names_spelt(package: Path) -> frozenset[str]:
    """Return each name that DeepSpeed's source has in quotes: what is not among them, it does not read."""
    sources = (path.read_text(encoding="utf-8") for path in package.rglob("*.py"))
    return frozenset(name for source in sources for name in _QUOTED.findall(source))


def _spelt(keys: tuple[Key, ...], names: frozenset[str]) -> tuple[Key, ...]:
    """Return those of the keys found by reading that this release has, and the keys of another reader."""
    return tuple(
        replace(key, section=replace(key.section, keys=_spelt(key.section.keys, names)))
        if key.section
        else key
        for key in keys
        if key.reader or key.name in names
    )


def _modelled() -> Iterator[Key]:
    """Yield the keys of the root whose section is a pydantic model; a release may lack some."""
    from deepspeed.monitor.config import DeepSpeedMonitorConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    # "zero_optimization": true is a deprecated way to say stage 1.
    yield _of_model("zero_optimization", DeepSpeedZeroConfig, ValueKind.BOOL)
    yield _of_model("bf16", DeepSpeedBF16Config, ValueKind.NULL, aliases=("bfloat16",))
    yield _of_model("fp16", DeepSpeedFP16Config)
    for name, field in DeepSpeedMonitorConfig.model_fields.items():
        yield _of_model(name, field.annotation)
    for name, module, model in _MODELS:
        found = _class(module, model)
        if found is not None:
            yield _of_model(name, found)
    throughput = _of_model("throughput", DeepSpeedThroughputTimerConfig)
    timers = Section(keys=(throughput,), on_unknown=OnUnknown.IGNORES)
    yield Key(name="timers", kinds=(ValueKind.SECTION,), section=timers)


def _class(module: str, name: str) -> Any:
    """Return a class of deepspeed's, or None where this release has none."""
    try:
        return getattr(importlib.import_module(f"deepspeed.{module}"), name, None)
    except ModuleNotFoundError:
        return None


def _of_model(name: str, model: Any, *more: ValueKind, aliases: tuple[str, ...] = ()) -> Key:
    return Key(name=name, kinds=(ValueKind.SECTION, *more), aliases=aliases, section=_section_of(model))


def _section_of(model: Any) -> Section:
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    return Section(
        keys=tuple(
            replace(_key_of(name, field), **_BY_VALIDATOR.get((model.__name__, name), {}))
            for name, field in model.model_fields.items()
        ),
        on_unknown=OnUnknown.REJECTS if model.model_config.get("extra") == "forbid" else OnUnknown.IGNORES,
        drops_auto=issubclass(model, DeepSpeedConfigModel),
    )


def _key_of(name: str, field: Any) -> Key:
    extra = field.json_schema_extra or {}
    limits = {type(limit).__name__: limit for limit in field.metadata}
    model = next((part for part in _parts(field.annotation) if hasattr(part, "model_fields")), None)
    kinds, choices = _kinds(field.annotation)
    return Key(
        # The spelling with "stage3_" is the one that the documentation has, and that accelerate reads.
        name=field.alias or name,
        kinds=kinds,
        converts=bool(kinds),
        choices=choices,
        above=limits["Gt"].gt if "Gt" in limits else None,
        at_least=limits["Ge"].ge if "Ge" in limits else None,
        below=limits["Lt"].lt if "Lt" in limits else None,
        at_most=limits["Le"].le if "Le" in limits else None,
        aliases=(name,) if field.alias else (),
        replaced_by=extra.get("new_param", "") if extra.get("deprecated") else None,
        section=_section_of(model) if model else None,
    )


def _parts(annotation: Any) -> tuple[Any, ...]:
    """Return the alternatives of a type."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _kinds(annotation: Any) -> tuple[tuple[ValueKind, ...], tuple[str | int, ...]]:
    """Return the kinds and choices of a type; no kinds where JSON cannot say what it takes."""
    kinds: list[ValueKind] = []
    choices: list[str | int] = []
    for part in _parts(annotation):
        if get_origin(part) is Literal:
            choices += get_args(part)
            kinds.append(ValueKind.STRING)
        elif isinstance(part, type) and issubclass(part, Enum):
            choices += [member.value for member in part]
            kinds.append(ValueKind.INTEGER if issubclass(part, int) else ValueKind.STRING)
        elif hasattr(part, "model_fields"):
            kinds.append(ValueKind.SECTION)
        elif (kind := _SCALARS.get(get_origin(part) or part)) is not None:
            kinds.append(kind)
        else:
            return (), ()
    return tuple(kinds), tuple(choices)


def _optimizer() -> Key:
    """Return the section "optimizer": runtime/config.py; runtime/engine.py, _configure_basic_optimizer."""
    import torch
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

    adam = (FusedAdam, DeepSpeedCPUAdam, torch.optim.AdamW, torch.optim.Adam)
    by_engine = ("adam_w_mode", "torch_adam", "fp32_optimizer_states")
    params_of = {
        "adam": _params(*adam, more=by_engine),
        "adamw": _params(*adam, more=by_engine),
        "adagrad": _params(DeepSpeedCPUAdagrad, torch.optim.Adagrad),
        "lamb": _params(FusedLamb),
        "lion": _params(DeepSpeedCPULion, FusedLion),
    }
    return _typed("optimizer", params_of, Key(name="legacy_fusion", kinds=(ValueKind.BOOL,)))


def _scheduler() -> Key:
    """Return the section "scheduler": runtime/config.py, and runtime/engine.py, _scheduler_from_config."""
    import torch
    from deepspeed.runtime import lr_schedules

    own = lr_schedules.VALID_LR_SCHEDULES
    torchs = (
        name
        for name, scheduler in vars(torch.optim.lr_scheduler).items()
        if inspect.isclass(scheduler) and issubclass(scheduler, torch.optim.lr_scheduler.LRScheduler)
        if name.strip("_") != "LRScheduler"
    )
    return _typed(
        "scheduler",
        {name: _params(getattr(lr_schedules, name)) for name in own},
        choices=(*own, *sorted(torchs)),
        needs_params=True,
    )


def _typed(
    name: str,
    params_of: dict[str, Section],
    *more: Key,
    choices: tuple[str | int, ...] = (),
    needs_params: bool = False,
) -> Key:
    keys = (
        Key(name="type", kinds=(ValueKind.STRING, ValueKind.NULL), choices=choices),
        Key(
            name="params",
            kinds=(ValueKind.SECTION,),
            required=needs_params,
            section=Section(keys=(), on_unknown=OnUnknown.ACCEPTS),
        ),
        *more,
    )
    return Key(
        name=name,
        kinds=(ValueKind.SECTION,),
        section=Section(keys=keys, on_unknown=OnUnknown.IGNORES, params_of=tuple(params_of.items())),
    )


def _params(*takers: Callable[..., Any], more: tuple[str, ...] = ()) -> Section:
    """Return what one of these callables takes by name; it raises a TypeError for others."""
    signatures = [inspect.signature(taker).parameters for taker in takers]
    names = dict.fromkeys(name for parameters in signatures for name in parameters if name not in _NOT_PARAMS)
    keys = tuple(
        replace(
            _PARAMS.get(name, Key(name=name)),
            required=all(name in parameters and _is_needed(parameters[name]) for parameters in signatures),
        )
        for name in (*names, *more)
    )
    return Section(keys=tuple(dict.fromkeys(keys)), on_unknown=OnUnknown.REJECTS)


def _is_needed(parameter: inspect.Parameter) -> bool:
    is_variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not is_variable
