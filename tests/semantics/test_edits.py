"""Scripts that edit weights, gradients or parameters by hand train as by themselves, or are refused by name.

Four pairs of an edit and a layout run at each change, and 25 more in CI; all are evidence, in fp32 and bf16,
and are a table of the docs (docs/reference/edits.md).
"""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import TYPE_CHECKING

import pytest
from edited_runs import LAYOUTS, SCRIPT, Outcome, outcome_of, train_by_itself, train_under_zerofit
from runs import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MEASURED = ROOT / "tests" / "evidence" / "measured" / "edits.json"
TOLERANCE = 2e-5
"""Of the way, in fp32."""
_MOST_OF_DDP = 2.0
"""In bf16: how many times further from one process than DDP is."""
_MISSING = ("timm-", "pytorch-optimizer-")
"""Optimizers of packages that are not installed with the tests."""
_CI = [
    pytest.param("clamp", "z1", marks=pytest.mark.slow),
    ("clamp-data", "z2"),
    pytest.param("clamp-by-groups", "z3", marks=pytest.mark.slow),
    pytest.param("replace-data", "z2", marks=pytest.mark.slow),
    ("normalize-in-step-hook", "z2"),
    pytest.param("normalize-in-step-hook", "z3-offload", marks=pytest.mark.slow),
    pytest.param("write-by-numpy", "z2", marks=pytest.mark.slow),
    pytest.param("lookahead", "z3-sharded", marks=pytest.mark.slow),
    pytest.param("weight-penalty", "z3-sharded", marks=pytest.mark.slow),
    ("freeze-late", "z3-sharded"),
    ("average-for-evaluation", "z2"),
    pytest.param("average-of-main-process", "z2", marks=pytest.mark.slow),
    pytest.param("main-process-evaluates", "z2", marks=pytest.mark.slow),
    ("narrow-parameters", "split"),
    pytest.param("narrow-parameters", "z3", marks=pytest.mark.slow),
    pytest.param("spectral-norm", "z3", marks=pytest.mark.slow),
    pytest.param("zero-biases", "z2", marks=pytest.mark.slow),
    ("skip-large-norms", "z1"),
    pytest.param("clamp-gradients-by-groups", "z2", marks=pytest.mark.slow),
    pytest.param("clamp-in-tensor-hooks", "split", marks=pytest.mark.slow),
    pytest.param("gradient-penalty", "z2", marks=pytest.mark.slow),
    ("unused-head", "z3"),
    pytest.param("unused-then-used", "z1", marks=pytest.mark.slow),
    pytest.param("zeros-kept", "z3", marks=pytest.mark.slow),
    pytest.param("unfreeze-late", "z2", marks=pytest.mark.slow),
    ("unfreeze-late", "ddp"),
    ("peft-lora-fa", "z2"),
    ("sam", "fsdp2"),
    pytest.param("average-of-main-process", "fsdp2", marks=pytest.mark.slow),
]
_GRADIENTS = "gradients-by-hand-under-zero"
_NOT_ELEMENT_WISE = "optimizer-not-element-wise"
_LATE = "parameter-trains-late-under-zero"
_NOT_SEPARABLE = "forward-not-separable"
_REFUSED_UNDER_ZERO = {
    "zero-biases": _GRADIENTS,
    "clip-adaptively": _GRADIENTS,
    "skip-large-norms": _GRADIENTS,
    "noise-on-gradients": _GRADIENTS,
    "centralize": _GRADIENTS,
    "rates-by-norm": _GRADIENTS,
    "sign-of-gradients": _GRADIENTS,
    "sam": _GRADIENTS,
    "clamp-gradients-by-groups": _GRADIENTS,
    "gradient-penalty": "second-order-gradients-under-zero",
    "unused-then-used": _LATE,
    "auxiliary-every-second-step": _LATE,
    "tie-late": _LATE,
    "unfreeze-late": "unfrozen-under-zero",
    "unfreeze-gradually": "unfrozen-under-zero",
    "add-late": "group-added-under-zero",
    "average-of-main-process": "weights-written-by-one-rank",
    "write-by-numpy": "weights-differ-from-master-copy",
    "own-norm": _NOT_ELEMENT_WISE,
    "adafactor": _NOT_ELEMENT_WISE,
    "torch-adafactor": _NOT_ELEMENT_WISE,
    "peft-lora-fa": _NOT_ELEMENT_WISE,
}
_REFUSED = {
    ("narrow-parameters", "z3"): "own-parameters-under-zero",
    ("narrow-parameters", "z3-offload"): "own-parameters-under-zero",
    ("narrow-parameters", "z3-sharded"): "own-parameters-under-zero",
    ("weight-penalty", "z3"): "weight-sharded-by-zero3",
    ("weight-penalty", "z3-offload"): "weight-sharded-by-zero3",
    ("tie-late", "z3"): "parameter-replaced-under-zero3",
    ("tie-late", "z3-sharded"): "parameter-replaced-under-zero3",
    ("spectral-norm", "z3"): "weight-sharded-by-zero3",
    ("spectral-norm", "z3-offload"): "weight-sharded-by-zero3",
    ("tie-late", "z3-offload"): "parameter-replaced-under-zero3",
    ("unfreeze-late", "ddp"): "parameter-not-averaged",
    ("unfreeze-gradually", "ddp"): "parameter-not-averaged",
    ("add-late", "ddp"): "parameter-not-averaged",
    ("clamp-in-tensor-hooks", "split"): _NOT_SEPARABLE,
}
_MIXED, _NO_SHARDS = "weight-sharded-by-fsdp2", "optimizer-steps-no-shards"
_REFUSED_UNDER_FSDP2 = {
    "average-of-main-process": "weights-written-by-some-ranks",
    "clamp-in-tensor-hooks": "gradient-hook-under-fsdp2",
    "tie-late": "parameter-replaced-under-fsdp2",
    "add-late": "parameter-replaced-under-fsdp2",
    "write-by-numpy": _MIXED,
    "noise-on-weights": _MIXED,
    "noise-on-gradients": _MIXED,
    "vector-to-parameters": _MIXED,
    "gradient-penalty": _MIXED,
    "weight-penalty": _MIXED,
    "peft-lora-fa": _NO_SHARDS,
    "adafactor": _NO_SHARDS,
    "torch-adafactor": _NO_SHARDS,
}
_WRITTEN = "weights-written-under-zero3"
_SHARDED = "weight-sharded-by-zero3"
_REFUSED_WHERE_SHARDED = dict.fromkeys(("clamp-data", "replace-data"), _WRITTEN) | dict.fromkeys(
    (
        *("average-for-evaluation", "average-of-main-process", "clamp", "clamp-by-groups", "decay-by-hand"),
        *("load-by-hand", "lookahead", "main-process-evaluates", "noise-on-weights", "spectral-norm"),
        *("normalize-in-step-hook", "reset-a-layer", "swa", "vector-to-parameters", "weight-penalty"),
        "write-by-numpy",
    ),
    _SHARDED,
)
"""Edits of weights that no rank holds whole."""
_LOCAL = frozenset({"clamp-in-tensor-hooks", "average-of-main-process"})
"""Edits of each rank's own gradients or weights: their data parallelism is compared with accelerate's own."""
_OTHER_ADAM = {"offload-needs-adam", "offload-swap-fails-in-prepare", "offload-swap-fails-in-step"}
"""With offload only Adam trains: other optimizers are refused before their edits are met."""


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, int, bool], Path]:
    """Return a function that gives what a script leaves by itself; each is run once."""
    known: dict[tuple[str, str, int, bool], Path] = {}

    def run(edit: str, precision: str, num_ranks: int, is_wide: bool) -> Path:
        key = (edit, precision, num_ranks, is_wide)
        if key not in known:
            folder = tmp_path_factory.mktemp("edit")
            known[key] = train_by_itself(
                edit, folder, precision=precision, num_ranks=num_ranks, is_wide=is_wide
            )
        return known[key]

    return run


def _outcome(edit: str, layout: str, folder: Path, alone: Callable[..., Path], precision: str) -> Outcome:
    num_ranks = 2 if edit in _LOCAL and layout != "split" else 1
    run = train_under_zerofit(edit, layout, folder, precision=precision)
    return outcome_of(run, alone(edit, precision, num_ranks, layout == "z3-sharded"))


def _refusal(edit: str, layout: str) -> str:
    if (edit, layout) in _REFUSED:
        return _REFUSED[edit, layout]
    if layout == "fsdp2":
        return _REFUSED_UNDER_FSDP2.get(edit, "")
    if layout == "z3-sharded" and edit in _REFUSED_WHERE_SHARDED:
        return _REFUSED_WHERE_SHARDED[edit]
    return _REFUSED_UNDER_ZERO.get(edit, "") if layout.startswith("z") else ""


@pytest.mark.parametrize(("edit", "layout"), _CI)
def test_an_edited_training_is_that_of_the_script_or_refused(
    edit: str, layout: str, tmp_path: Path, alone: Callable[..., Path]
) -> None:
    seen = _outcome(edit, layout, tmp_path, alone, "no")
    assert seen.refused == _refusal(edit, layout)
    assert seen.distance <= TOLERANCE


def _edits() -> list[str]:
    spec = importlib.util.spec_from_file_location("edits", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(SCRIPT.parent))  # as for a script that is run
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(SCRIPT.parent))
    return [edit for edit in module.EDITS if not edit.startswith(_MISSING)]


@pytest.mark.evidence
def test_all_edits(tmp_path_factory: pytest.TempPathFactory, alone: Callable[..., Path]) -> None:
    rows = {}
    for edit in _edits():
        for precision in ("no", "bf16"):
            for layout in LAYOUTS:
                folder = tmp_path_factory.mktemp("under")
                seen = _outcome(edit, layout, folder, alone, precision)
                rows[f"{edit}, {layout}, {precision}"] = {
                    "refused": seen.refused,
                    "distance": float(f"{seen.distance:.1e}"),
                }
    MEASURED.write_text(json.dumps(rows, indent=1) + "\n")


def _measured() -> dict[str, dict[str, object]]:
    rows: dict[str, dict[str, object]] = json.loads(MEASURED.read_text())
    return rows


def test_what_was_measured_has_every_edit() -> None:
    assert {key.split(", ")[0] for key in _measured()} == set(_edits())


def test_in_fp32_each_edit_is_kept_or_refused() -> None:
    wrong = {}
    for key, row in _measured().items():
        edit, layout, precision = key.split(", ")
        expected = {_refusal(edit, layout)} | (_OTHER_ADAM if layout == "z3-offload" else set())
        if precision == "no" and (row["refused"] not in expected or row["distance"] > TOLERANCE):
            wrong[key] = row
    assert wrong == {}
