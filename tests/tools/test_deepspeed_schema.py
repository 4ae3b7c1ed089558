"""The committed catalog is what the installed DeepSpeed reads: keys, types, and what it takes for them."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tools.schemas.new_release import with_release
from tools.schemas.render import render_schema
from zerofit.configs.schema import Key, OnUnknown, Section, ValueKind, is_in_range, is_right_type
from zerofit.configs.schemas.catalog import load_history, load_schema

_SCHEMA = load_schema("deepspeed")
pytestmark = pytest.mark.skipif(
    importlib.metadata.version("deepspeed") != _SCHEMA.version,
    reason=f"the catalog is of deepspeed {_SCHEMA.version}",
)


@pytest.fixture(scope="module", autouse=True)
def _cpu() -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setenv("DS_ACCELERATOR", "cpu")
    yield
    patch.undo()


def test_the_catalog_is_what_deepspeed_declares() -> None:
    from tools.schemas.deepspeed_schema import probe_deepspeed_schema

    committed = Path(__file__).parents[2] / "zerofit" / "catalog" / "deepspeed.json"
    schema = probe_deepspeed_schema()
    assert committed.read_text(encoding="utf-8") == render_schema(
        with_release(load_history("deepspeed"), schema)
    )
    assert replace(_SCHEMA, other_releases=()) == schema


def _source_files() -> list[Path]:
    import deepspeed

    package = Path(deepspeed.__file__).parent
    assert package.is_dir()
    # What reads ds_config.json; the rest of the package has dictionaries of its own.
    folders = ("runtime", "monitor", "comm", "compile", "profiling", "autotuning", "utils", "datastates")
    files = [path for folder in folders for path in sorted((package / folder).rglob("*.py"))]
    return [package / "__init__.py", *files]


_CONFIGS = {"param_dict", "ds_config", "_param_dict"}
"""How the sources call the whole configuration."""


def _constants() -> dict[str, str]:
    """Return NAME = "key" of every module that holds names of keys."""
    names: dict[str, str] = {}
    for path in _source_files():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                for target in node.targets:
                    if isinstance(target, ast.Name) and isinstance(node.value.value, str):
                        names[target.id] = node.value.value
    return names


def _read_keys(tree: ast.Module, constants: dict[str, str]) -> Iterator[str]:
    """Yield each key read of the whole configuration: d[K], d.get(K), K in d, get_scalar_param(d, K)."""

    def is_config(node: ast.AST) -> bool:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "keys":
            node = node.func.value
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
        return name in _CONFIGS

    def key_of(node: ast.AST) -> str | None:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        return constants.get(node.id) if isinstance(node, ast.Name) else None

    for node in ast.walk(tree):
        key: str | None = None
        if isinstance(node, ast.Subscript) and is_config(node.value):
            key = key_of(node.slice)
        elif isinstance(node, ast.Compare) and is_config(node.comparators[0]):
            key = key_of(node.left)
        elif isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name == "get" and isinstance(node.func, ast.Attribute) and is_config(node.func.value):
                key = key_of(node.args[0])
            elif name in ("get_scalar_param", "get_dict_param") and is_config(node.args[0]):
                key = key_of(node.args[1])
        if key is not None:
            yield key


def test_no_key_that_the_source_reads_of_the_whole_file_is_forgotten() -> None:
    import deepspeed

    constants = _constants()
    package = Path(deepspeed.__file__).parent
    readers = ("runtime/config.py", "runtime/precision_config.py", "runtime/zero/config.py", "comm/config.py")
    readers += ("monitor/config.py", "profiling/config.py", "autotuning/config.py", "utils/config.py")
    readers += (
        "datastates/config.py",
        "runtime/swap_tensor/aio_config.py",
        "runtime/zero/partition_parameters.py",
    )
    readers += (
        "runtime/tensor_parallel/config.py",
        "runtime/activation_checkpointing/config.py",
        "__init__.py",
    )
    read = {
        key
        for name in readers
        for key in _read_keys(ast.parse((package / name).read_text(encoding="utf-8")), constants)
    }
    known = {name for key in _SCHEMA.root.keys for name in (key.name, *key.aliases)}
    assert len(read) > 40
    # get_model_info_config calls a section of autotuning by the same name.
    assert read - known == {"model_info"}


def test_every_constant_of_runtime_constants_is_a_key_somewhere() -> None:
    from deepspeed.runtime import constants

    path = Path(constants.__file__)
    source = path.read_text(encoding="utf-8")
    names = dict(re.findall(r"^([A-Z_]+)\s*=\s*['\"]([a-z_0-9]+)['\"]", source, flags=re.MULTILINE))
    no_keys = {name for name in names if name.startswith(("ROUTE_", "GRADIENT_ALLREDUCE_OP_"))}
    no_keys |= {
        "PIPE_REPLICATED",  # an attribute of a parameter
        "DATA_PARALLEL_GROUP",  # entries of a checkpoint
        "GLOBAL_RANK",
        "DDP_BFLOAT16",  # an optimizer's name inside the engine
        "CHECK_OVERFLOW",  # no longer read
        "SEQ_PARALLEL_COMMUNICATION_DATA_TYPE_DEFAULT",  # a value
        "KEEP_IN_FP32_MODULES_DEFAULT",
    }
    known = {name for _, key in _SCHEMA.walk() for name in (key.name, *key.aliases)}
    known |= {removed.path[-1] for removed in _SCHEMA.removed}
    assert {names[name] for name in names.keys() - no_keys} - known == set()


_SAMPLES: list[Any] = [
    *(True, False, None, 0, 1, 2, 3, -1, 7, 0.5, 1.0, 2.0, 5e8, 1.5, "", "x", "auto", "cpu", "CPU", "nvme"),
    *("true", "False", "yes", "n", "on", "1", "0", "2", "2.0", "5e8", "1_000", " 4 ", "-3", "0.5", "2.5"),
    *("torch", "asymmetric", "epoch", [], ["z1"], ["a", "b"], {}, "1__0", "_1", "+1", "1.", "٣"),
]


def _modelled() -> Iterator[tuple[str, Any, Section]]:
    """Yield each pydantic model of the installed DeepSpeed with its section in the catalog."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.config import HybridEngineConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    models = {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.zenflow": ZenFlowConfig,
        "zero_optimization.leaf_module": DeepSpeedZeroLeafModuleConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
        "tensorboard": TensorBoardConfig,
        "wandb": WandbConfig,
        "csv_monitor": CSVConfig,
        "comet": CometConfig,
        "comms_logger": CommsLoggerConfig,
        "compile": CompileConfig,
        "hybrid_engine": HybridEngineConfig,
        "tensor_parallel": TPTrainingConfig,
        "timers.throughput": DeepSpeedThroughputTimerConfig,
    }
    for path, model in models.items():
        key = _SCHEMA.find(*path.split("."))
        assert key is not None
        assert key.section is not None
        yield path, model, key.section


_DECIDED_BY_VALIDATORS = (
    # Their own validators refuse booleans, which are integers to pydantic.
    ("fp16.loss_scale", True),
    ("fp16.loss_scale", False),
    ("fp16.loss_scale_window", True),
    ("fp16.loss_scale_window", False),
    ("fp16.min_loss_scale", True),
    ("fp16.min_loss_scale", False),
    *((f"fp16.{name}", "2.0") for name in ("loss_scale_window", "min_loss_scale")),
    # "auto" or a number: of texts nothing is made there, of booleans still a number.
    *((f"zero_optimization.zenflow.{name}_interval", True) for name in ("select", "update")),
    ("zero_optimization.zenflow.select_interval", False),
    # Names of passes, which the catalog does not hold.
    ("compile.passes", ["a", "b"]),
    # A switch that another key decides about; checking/rules/deepspeed/switches.py has it.
    *(("zero_optimization.compute_grad_norm", value) for value in (False, 0, "False", "n", "0")),
)


def test_values_fit_a_key_exactly_where_its_model_takes_them() -> None:
    wrong = []
    for path, model, section in _modelled():
        for key in section.keys:
            for value in _SAMPLES:
                where = f"{path}.{key.name}"
                if (
                    not key.kinds
                    or value == "auto"
                    or (value == {} and key.section)
                    or _is_decided_by_validators(where, value)
                ):
                    continue
                fits = is_right_type(key, value) and is_in_range(key, value)
                if fits is not _is_taken(model, key, value):
                    wrong.append((where, value, _is_taken(model, key, value)))
    assert not wrong, wrong


def _is_decided_by_validators(where: str, value: Any) -> bool:
    return any(
        where == path and value == narrow and type(value) is type(narrow)
        for path, narrow in _DECIDED_BY_VALIDATORS
    )


def _is_taken(model: Any, key: Key, value: Any) -> bool:
    try:
        model(**{key.name: value})
    except (ValueError, TypeError, AssertionError):
        return False
    return True


def test_raw_keys_with_a_type_fail_with_another_one(tmp_path: Path) -> None:
    from deepspeed import DeepSpeedConfig

    # These fail later, in the engine; the evidence of their rules runs it.
    later = {"gradient_clipping", "steps_per_print", "log_level", "optimizer.type", "scheduler.type"}
    later |= {"optimizer.params", "scheduler.params"}
    later |= {"data_types.grad_accum_dtype", "data_types.param_dtype", "data_types.buffer_dtype"}
    modelled = {path.partition(".")[0] for path, _, _ in _modelled()} | {"weight_quantization"}
    silent = []
    for path, key in _SCHEMA.walk():
        where = ".".join(path)
        if path[0] in modelled - {"timers"} or not key.kinds or key.kinds == (ValueKind.BOOL,) or key.reader:
            continue
        parent = _SCHEMA.find(*path[:-1])
        if where in later or (parent and parent.section and parent.section.on_unknown is OnUnknown.ACCEPTS):
            continue
        value: Any = {} if ValueKind.SECTION not in key.kinds else 5
        for name in reversed(path):
            value = {name: value}
        file = tmp_path / "ds_config.json"
        file.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, **value}))
        try:
            DeepSpeedConfig(str(file))
        except Exception:  # any error at all will do
            continue
        silent.append(where)
    assert not silent, silent
