"""Scripts that work with ZeRO-3's empty weights fail by name; those that fail for another reason, don't."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import pytest
from runs import ROOT, run_command

if TYPE_CHECKING:
    from pathlib import Path

_SCRIPT = ROOT / "tests" / "semantics" / "scripts" / "sharded_weights.py"
_LAUNCH = ("launch", "--cpu", "--no-capture", "--mixed-precision", "no", "--num-processes", "1")
_ZERO3 = ("--zero-stage", "3", "--offload-optimizer", "none")
_PLACEHOLDER = "a weight was used while ZeRO-3 or FSDP holds it in shards"
_FAILED, _REFUSED = 1, 2
"""Exit codes: torch failed, and zerofit named why; or zerofit refused before torch came to it."""
_SHAPES = "shapes of tensors do not fit each other"


@pytest.mark.usefixtures("built_comm")
@pytest.mark.parametrize(
    ("case", "named", "cause"),
    [
        ("clones", "new", _PLACEHOLDER),
        pytest.param("clones-of-prepared", "own", _PLACEHOLDER, marks=pytest.mark.slow),
        pytest.param("averaged", "p_model", _PLACEHOLDER, marks=pytest.mark.slow),
        pytest.param("averaged-by-foreach", "p_model", _PLACEHOLDER, marks=pytest.mark.slow),
        pytest.param("averaged-prepared", "p_averaged", _PLACEHOLDER, marks=pytest.mark.slow),
        pytest.param("deepcopy", "new", _PLACEHOLDER, marks=pytest.mark.slow),
        pytest.param("deepcopy-of-prepared", "own", _PLACEHOLDER, marks=pytest.mark.slow),
        pytest.param("clip-text", "self.token_embedding.weight", _PLACEHOLDER, marks=pytest.mark.slow),
        pytest.param("clip-vision", "weight", _PLACEHOLDER, marks=pytest.mark.slow),
        pytest.param("bert", "weight", _PLACEHOLDER, marks=pytest.mark.slow),
        pytest.param("rows", "net[0].weight", _PLACEHOLDER, marks=pytest.mark.slow),
        pytest.param("view", "net[0].weight", _PLACEHOLDER, marks=pytest.mark.slow),
        pytest.param("singular-values", "net[0].weight", _PLACEHOLDER, marks=pytest.mark.slow),
        pytest.param("helper", "weight", _PLACEHOLDER, marks=pytest.mark.slow),
        pytest.param("other-shape", "", _SHAPES, marks=pytest.mark.slow),
        (
            "other-empty",
            "",
            "a tensor is empty: a weight that ZeRO-3 or FSDP holds in shards, or data without samples",
        ),
    ],
)
def test_an_empty_weight_is_named_where_it_is_the_cause(
    case: str, named: str, cause: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "zerofit", *_LAUNCH, *_ZERO3, str(_SCRIPT), "--case", case]
    run = run_command(command, tmp_path)
    assert run.exit_code in (_FAILED, _REFUSED), run.stderr
    found = re.findall(r"error\[weight-sharded-by-zero3\].*\n(?:\[rank0\]: )?  found: (\S+) in ", run.stderr)
    if run.exit_code == _FAILED:
        assert found == ([named] if named else [])
    else:  # refused at the script's line, by the name that the model gives the weight
        assert named
        assert re.fullmatch(r"[\w.]*(weight|bias)", found[0])
    assert f"  cause: {cause} (confidence high)" in run.stderr
