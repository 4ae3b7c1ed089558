"""The catalog's rates, and the file in which this machine's own are kept."""

from __future__ import annotations

import importlib.metadata
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zerofit.core.facts import GpuSpec, Machine
from zerofit.core.rates import Basis, Rate, RateName, Unit
from zerofit.machine.gpu_catalog import load_gpus
from zerofit.machine.rates import (
    calibration_file,
    catalog_rates,
    probe_rates,
    read_calibration,
    write_calibration,
)

_MACHINE = Machine(gpus=(), num_cpu_cores=2, host_memory_bytes=2**30, host_memory_available_bytes=2**30)
_MEASURED = Rate(
    name=RateName.HOST_MEMORY, value=2e10, unit=Unit.BYTES_PER_S, basis=Basis.MEASURED, source="copy"
)


def test_the_catalog_has_a_rate_of_every_name_for_the_oldest_gpu() -> None:
    assert [catalog_rates().of(name).name for name in RateName] == list(RateName)


def test_a_rate_of_one_gpu_names_all_that_the_driver_calls_it() -> None:
    known = {(), *(gpu.driver_names for gpu in load_gpus())}
    assert {rate.gpus for rate in catalog_rates().rates} <= known


def test_each_rate_of_the_catalog_is_plausible_and_says_where_it_is_from() -> None:
    for rate in catalog_rates().rates:
        assert rate.value > 0, rate
        assert rate.unit is not Unit.FRACTION or rate.value < 1, rate
        assert rate.basis is not Basis.MEASURED, rate
        is_cited = "https://" in rate.source or rate.source.startswith("measured: benchmarks/measured/")
        assert is_cited or rate.basis is Basis.ASSUMPTION, rate


def test_a_calibration_is_read_as_it_was_written_and_goes_first(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    assert read_calibration(_MACHINE, environ=environ) == ()
    path = write_calibration(_MACHINE, (_MEASURED,), environ=environ)
    assert list((tmp_path / "zerofit").iterdir()) == [path]
    assert read_calibration(_MACHINE, environ=environ) == (_MEASURED,)
    assert probe_rates(_MACHINE, environ=environ).of(RateName.HOST_MEMORY) == _MEASURED
    assert probe_rates(_MACHINE, environ=environ).of(RateName.CPU_ADAM) in catalog_rates().rates


def test_a_machine_with_other_gpus_has_a_calibration_of_its_own(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    other = replace(_MACHINE, gpus=(GpuSpec(name="T4", memory_bytes=2**34),))
    assert calibration_file(_MACHINE, environ=environ) != calibration_file(other, environ=environ)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        '{"machine": {}, "rates": [{"name": "no such rate"}]}',
        "\xff",
    ],
)
def test_a_broken_calibration_counts_as_none_aloud(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    path = write_calibration(_MACHINE, (_MEASURED,), environ=environ)
    path.write_text(text, encoding="latin-1")
    assert read_calibration(_MACHINE, environ=environ) == ()
    told = capsys.readouterr().err
    assert told.startswith(f"zerofit: {path} is ignored: ")
    assert told.endswith("; zerofit doctor --calibrate measures anew\n")


@pytest.mark.parametrize(
    "changed",
    [
        {"value": -5.0},
        {"value": 0.0},
        {"value": math.nan},
        {"value": math.inf},
    ],
)
def test_a_calibration_of_what_no_machine_achieves_counts_as_none(
    tmp_path: Path, changed: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    write_calibration(_MACHINE, (_MEASURED, replace(_MEASURED, **changed)), environ=environ)
    assert read_calibration(_MACHINE, environ=environ) == ()
    assert " is ignored: " in capsys.readouterr().err


def test_another_torch_has_a_calibration_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    here = calibration_file(_MACHINE, environ=environ)
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.1")
    assert calibration_file(_MACHINE, environ=environ) != here


def test_a_write_that_fails_leaves_the_old_calibration_and_no_rest(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    path = write_calibration(_MACHINE, (_MEASURED,), environ=environ)
    unwritable = replace(_MEASURED, source=b"no text")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        write_calibration(_MACHINE, (unwritable,), environ=environ)
    assert list(path.parent.iterdir()) == [path]
    assert read_calibration(_MACHINE, environ=environ) == (_MEASURED,)
