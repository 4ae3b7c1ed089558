"""Errors of a failed trace, and refusals before one starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_traces import tiny

from zerofit.core.allocation_log import TraceRequest
from zerofit.core.errors import UserError
from zerofit.models.find import probe_model
from zerofit.models.trace import entry, trace_model

_REQUEST = TraceRequest(sequence_length=8)


def test_what_fails_in_a_model_is_told_as_the_models() -> None:
    config, _ = tiny("bert", 1)

    def build(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such layer\nat all")

    with pytest.raises(UserError) as caught:
        entry.trace_config(config, build, _REQUEST)
    assert (caught.value.rule, caught.value.found) == ("trace-failed", "bert: RuntimeError: no such layer")


def test_what_fails_in_zerofit_is_no_error_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    config, build = tiny("bert", 1)
    monkeypatch.setattr(entry, "_STARTS", ())
    monkeypatch.setattr(entry.Tracing, "_affine", lambda self: 1)  # what _logs takes apart is no pair
    with pytest.raises(TypeError, match="cannot unpack"):
        entry.trace_config(config, build, _REQUEST)


def test_samples_beyond_a_models_positions_are_refused_before_the_cache_is_asked(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="longer than the model's positions"):
        trace_model(probe_model("gpt2"), replace(_REQUEST, sequence_length=1025), cache_folder=tmp_path)
