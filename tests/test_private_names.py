"""Private names of accelerate, transformers and deepspeed are known to zerofit/core/upstream/ alone."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

_PACKAGE = Path(__file__).parents[1] / "zerofit"

# Private names of what has no adapter, and of Python. A name that is written by zerofit is not looked at.
_PYTHON = {"_current_exceptions", "_current_frames", "_exit", "_getframe", "_inheriting"}
_PYTHON |= {"_fork_exec", "_start_method", "_target"}
_TORCH = {"_C", "_autograd", "_call_impl", "_cdata", "_current_autograd_node", "_get_default_store"}
_TORCH |= {"_DDPSink", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks"}
_TORCH |= {"_get_sequence_nr", "_sequence_nr", "_last_lr", "_wrapped_by_lr_sched", "_schedulers", "_metadata"}
_TORCH |= {"_orig_mod", "_overloadpacket", "_schema", "_local_scalar_dense"}
_TORCH |= {"_top_saved_tensors_default_hooks"}
_OPERATORS = {"_fused_rms_norm", "_log_softmax_backward_data", "_softmax_backward_data", "_unsafe_view"}
_OPERATORS |= {"_reshape_alias", "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention"}
_OPERATORS |= {"_scaled_dot_product_efficient_attention", "_grouped_mm"}
_SAVED_BY_AUTOGRAD = "_saved_"
_OTHERS = {"_apply_liger_kernel_to_instance", "_generate_and_score_completions"}  # liger-kernel, trl
_IN_FILES = {"_name_or_path", "_inner_training_loop"}  # of a model's config.json, and of a capture
_ENDINGS = {"_data_files", "_full_eval", "_in_forward"}  # of longer names
_KNOWN = _PYTHON | _TORCH | _OPERATORS | _OTHERS | _IN_FILES | _ENDINGS


class _Names(NamedTuple):
    """The names in a file."""

    written: frozenset[str]
    """Those that it defines or sets."""
    read: tuple[tuple[str, int], ...]
    """Private ones that it reads off something or says as a string, and their lines."""


@cache
def _names(file: Path) -> _Names:
    written: set[str] = set()
    read: list[tuple[str, int]] = []
    pieces: set[int] = set()  # of f-strings, each of which comes after its f-string
    for node in ast.walk(ast.parse(file.read_text())):
        name = ""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            written.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            written |= _set_by(node)
        elif isinstance(node, ast.JoinedStr):
            pieces |= {id(piece) for piece in node.values}
        elif isinstance(node, ast.Attribute):
            name = node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in pieces:
            name = node.value if node.value.isidentifier() else ""
        if len(name) > 1 and name.startswith("_") and not name.startswith("__"):
            read.append((name, node.lineno))
    return _Names(frozenset(written), tuple(read))


def _set_by(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    parts = [part for target in targets for part in ast.walk(target)]
    variables = {part.id for part in parts if isinstance(part, ast.Name)}
    return variables | {
        part.attr
        for part in parts
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self"
    }


def _breaches(package: Path) -> list[str]:
    names = {file: _names(file) for file in sorted(package.rglob("*.py"))}
    allowed = _KNOWN.union(*(found.written for found in names.values()))
    return [
        f"{file.relative_to(package)}:{line}: {name}"
        for file, found in names.items()
        if file.parent.name != "upstream"
        for name, line in found.read
        if name not in allowed and not name.startswith(("_zerofit_", _SAVED_BY_AUTOGRAD))
    ]


def test_private_names_of_libraries_are_read_in_their_adapter_alone() -> None:
    assert _breaches(_PACKAGE) == []


def test_a_planted_private_name_is_caught(tmp_path: Path) -> None:
    (tmp_path / "upstream").mkdir()
    text = "def loaders(accelerator):\n    return accelerator._dataloaders, getattr(accelerator, '_models')\n"
    (tmp_path / "upstream" / "accelerate.py").write_text(text)
    (tmp_path / "watch.py").write_text(text)

    assert _breaches(tmp_path) == ["watch.py:2: _dataloaders", "watch.py:2: _models"]


def test_no_name_is_allowed_that_nothing_reads() -> None:
    read = {name for file in _PACKAGE.rglob("*.py") for name, _ in _names(file).read}

    assert _KNOWN - read == set()
