"""How much the weights take that were not loaded, and which errors come of their absence."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest

from zerofit.scripts.capture.child import meta_weights
from zerofit.scripts.capture.child.meta_weights import unloaded_bytes
from zerofit.scripts.capture.child.observations import CaptureSpec, Observations
from zerofit.scripts.capture.child.outcome import is_own_code, mark_met_meta, needs_values


class _Parameter:
    def __init__(self, count: int, *, is_meta: bool = True) -> None:
        self.count = count
        self.is_meta = is_meta

    def numel(self) -> int:
        return self.count

    def element_size(self) -> int:
        return 2


class _Model:
    def __init__(self, *parameters: _Parameter) -> None:
        self._all = parameters

    def parameters(self) -> tuple[_Parameter, ...]:
        return self._all


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for transformers, whose models are made in no time."""
    made = types.SimpleNamespace(PreTrainedModel=_Model)
    monkeypatch.setitem(__import__("sys").modules, "transformers.modeling_utils", made)


def test_parameters_without_values_count_once(transformers: None) -> None:
    shared = _Parameter(10)
    models = [_Model(shared, _Parameter(5)), _Model(shared), _Model(_Parameter(7, is_meta=False))]
    assert unloaded_bytes(RuntimeError()) == 30
    assert len(models) == 3


def test_without_a_model_nothing_is_unloaded(transformers: None) -> None:
    assert unloaded_bytes(RuntimeError()) == 0


def test_a_model_that_is_being_made_has_no_known_size(transformers: None) -> None:
    code = compile("def on_meta():\n    raise ValueError('no value')\n", meta_weights.__file__, "exec")
    names: dict[str, Any] = {}
    exec(code, names)
    with pytest.raises(ValueError, match="no value") as caught:
        names["on_meta"]()
    assert unloaded_bytes(caught.value) is None
    outer = RuntimeError()
    outer.__cause__ = caught.value
    assert unloaded_bytes(outer) is None


def test_only_an_error_of_a_model_without_weights_needs_values(tmp_path: Path) -> None:
    seen = Observations(
        folder=tmp_path, target=("train.py",), spec=CaptureSpec(weights="meta", num_batches=8)
    )
    caught, later, led_to = KeyError("shape"), FileNotFoundError("data.json"), RuntimeError("wrapped")
    mark_met_meta(caught)
    led_to.__context__ = caught
    needs = [needs_values(seen, error) for error in (caught, later, led_to, RuntimeError("on meta tensor"))]
    assert needs == [True, False, True, True]


def test_code_of_zerofit_and_of_packages_is_not_the_users() -> None:
    import zerofit.training.apply

    files = (
        zerofit.training.apply.__file__,
        pytest.__file__,
        types.__file__,
        "<string>",
        "/me/train.py",
    )
    assert [is_own_code(file) for file in files] == [False, False, False, False, True]
