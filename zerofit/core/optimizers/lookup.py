"""Look-ups in the table of optimizers: by class, Trainer's name, DeepSpeed's type and zerofit's name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.core.optimizers.table import ENTRIES, LIBRARIES
from zerofit.core.strategy import OptimizerName

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from zerofit.core.optimizers.entry import OptimizerEntry, Replacement
    from zerofit.core.optimizers.memory import OptimizerMemory

_BY_ID = {entry.id: entry for entry in ENTRIES}
_BY_CLASS = {path: entry.id for entry in ENTRIES for path in entry.classes}
TRAINER_OPTIMIZERS = {name: entry.id for entry in ENTRIES for name in entry.trainer}
"""The id of the optimizer that Trainer makes for each TrainingArguments.optim."""
REPLACEMENTS: dict[OptimizerName, Replacement] = {
    entry.replacement.name: entry.replacement for entry in ENTRIES if entry.replacement is not None
}
"""What zerofit can put in place of a script's own."""
REPLACEMENT_IDS = {entry.replacement.name: entry.id for entry in ENTRIES if entry.replacement is not None}
_OWN_TYPES = {entry.class_name.lower(): entry.class_name for entry in ENTRIES if entry.ignores_case}


def entry_of(id: str) -> OptimizerEntry | None:  # noqa: A002
    """Return an optimizer's entry; None if it is not in the table."""
    return _BY_ID.get(id)


def ids_with(holds: Callable[[OptimizerEntry], bool]) -> tuple[str, ...]:
    """Return the ids of the entries for which something holds, in the table's order."""
    return tuple(entry.id for entry in ENTRIES if holds(entry))


def trainer_names_of_types() -> dict[str, tuple[str, ...]]:
    """Return Trainer's names of the optimizers that compute the same as a type of DeepSpeed's file."""
    alike = {entry.class_name.lower(): entry.same_as for entry in ENTRIES if entry.same_as}
    return {kind: _BY_ID[same].trainer for kind, same in alike.items()}


def memory_of(path: str, options: Mapping[str, Any]) -> tuple[OptimizerMemory | None, bool]:
    """Return the memory of an optimizer class with these options, and whether a trace can't know it better.

    Args:
        path: dotted name of the class.
        options: of its first parameter group.
    """
    entry = entry_of(optimizer_of_class(path))
    if entry is None:
        return None, False
    memory = entry.memory_with(options)
    is_exact = entry.is_exact and memory is not None and not any(map(options.get, _MORE_TEMPORARIES))
    return memory, is_exact


_MORE_TEMPORARIES = ("maximize", "differentiable")
"""Options that copy gradients: not in the table (torch/optim/adam.py, _multi_tensor_adam)."""


def scripts_libraries() -> tuple[str, ...]:
    """Return the libraries whose classes scripts make themselves."""
    named = (entry.library for entry in ENTRIES if entry.library not in ("config", "accelerate", "other"))
    return tuple(dict.fromkeys(named))


def optimizer_of_class(path: str) -> str:
    """Return the id of an optimizer class, in the table or not.

    Args:
        path: dotted, with imports resolved: "torch.optim.AdamW".
    """
    if path in _BY_CLASS:
        return _BY_CLASS[path]
    name = path.rpartition(".")[2]
    library = library_of(path)
    return f"{library}.{name}" if library else f"other:{path}"


def optimizer_class(optimizer: Any) -> str:
    """Return the dotted class of an optimizer; bitsandbytes' AdamW(optim_bits=8), as Trainer makes it, counts
    as its class with 8 bits."""
    made = type(optimizer)
    is_8_bit = getattr(getattr(optimizer, "args", None), "optim_bits", None) == 8
    bits = "8bit" if is_8_bit and not made.__qualname__.endswith("8bit") else ""
    return f"{made.__module__}.{made.__qualname__}{bits}"


def library_of(path: str) -> str:
    """Return the library whose package of optimizers has a name; empty if none does."""
    for library, packages in LIBRARIES.items():
        if any(path.startswith(f"{package}.") for package in packages):
            return library
    return ""


def optimizer_of_deepspeed(optimizer_type: str) -> str:
    """Return the id for a value of optimizer.type in DeepSpeed's configuration."""
    return f"config.{_OWN_TYPES.get(optimizer_type.lower(), optimizer_type)}"
