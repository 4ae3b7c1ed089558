"""The cache: what is written is read back equal, a broken file is none, each change makes another key."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from zerofit.core.allocation_log import (
    AllocationLog,
    CostKind,
    Event,
    OperatorCost,
    Pass,
    Storages,
    TensorKind,
    Trace,
    TracedParameter,
    TraceRequest,
)
from zerofit.core.errors import UserError
from zerofit.core.strategy import Lora, Precision
from zerofit.models.find import probe_model
from zerofit.models.trace import cache
from zerofit.models.trace.cache import default_cache_folder, kept_trace, key_of, read_trace, write_trace

if TYPE_CHECKING:
    from typing import Any

_REQUEST = TraceRequest(sequence_length=16)
_LOG = AllocationLog(
    least_micro_batch_size=2,
    modules=("", "lin"),
    module_parameters=((), (0,)),
    parameters=(
        TracedParameter(
            name="lin.w", num_elements=6, bytes_per_element=2, trains=True, module=1, shape=(2, 3)
        ),
    ),
    buffer_bytes=(4,),
    storages=Storages(
        kinds=(TensorKind.INPUT, TensorKind.GRADIENT),
        fixed_bytes=(0, 12),
        bytes_per_sample=(1 << 40, -8),
        modules=(-1, 1),
        operators=(0, 1),
    ),
    operators=("aten.zeros.default", "aten.mm.default"),
    codes=bytes([Event.ALLOCATE, Event.FORWARD_ENDS, Event.ALLOCATE, Event.GRADIENT_READY, Event.FREE]),
    arguments=(0, 0, 1, 0, 0),
    gradient_storages=(1,),
    costs=(
        OperatorCost(
            operator="aten.mm.default",
            kind=CostKind.MATMUL,
            during=Pass.BACKWARD,
            precision=Precision.BF16,
            count=3,
            fixed_flops=1,
            flops_per_sample=1 << 50,
            fixed_bytes=2,
            bytes_per_sample=3,
        ),
    ),
)
_TRACE = Trace(request=_REQUEST, logs=(_LOG, replace(_LOG, least_micro_batch_size=1, arguments=(0,) * 5)))


def test_a_trace_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "one.trace"
    write_trace(path, _TRACE)
    assert read_trace(path, _REQUEST) == _TRACE
    assert [one.name for one in path.parent.iterdir()] == ["one.trace"]


@pytest.mark.parametrize("content", [b"", b"nonsense", None])
def test_a_broken_file_is_none(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "one.trace"
    write_trace(path, _TRACE)
    path.write_bytes(path.read_bytes()[:-9] if content is None else content)
    assert read_trace(path, _REQUEST) is None


def test_a_folder_that_is_not_there_holds_none(tmp_path: Path) -> None:
    assert read_trace(tmp_path / "none.trace", _REQUEST) is None


def test_a_folder_that_cannot_be_written_to_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    write_trace(tmp_path / "file" / "one.trace", _TRACE)


def test_everything_that_matters_makes_another_key() -> None:
    source = probe_model("bert-base-uncased")
    changed: list[dict[str, Any]] = [
        {"sequence_length": 17},
        {"weights": Precision.BF16},
        {"compute_capability": (9, 0)},
        {"lora": Lora()},
        {"lora": Lora(rank=4)},
        {"keeps_outputs": False},
    ]
    keys = {key_of(source, _REQUEST), key_of(probe_model("gpt2"), _REQUEST)}
    keys |= {key_of(source, replace(_REQUEST, **one)) for one in changed}
    keys.add(key_of(replace(source, config={**source.config, "hidden_size": 1024}), _REQUEST))
    assert len(keys) == len(changed) + 3


def test_the_files_that_decide_a_trace_are_there() -> None:
    assert [pattern for pattern in cache.TRACER_FILES if not [*cache._ZEROFIT.glob(pattern)]] == []


@pytest.mark.parametrize("name", ["core/strategy.py", "models/changes/new.py", "models/trace/recorder.py"])
def test_each_file_that_decides_a_trace_makes_another_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    source = probe_model("bert-base-uncased")
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(cache, "_ZEROFIT", tmp_path)
    path.write_text("one")
    before = key_of(source, _REQUEST)
    path.write_text("two")
    assert key_of(source, _REQUEST) != before


@pytest.mark.parametrize("is_folder", [True, False])
def test_remote_code_that_has_changed_makes_another_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_folder: bool
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    code = tmp_path / ("mine/modeling.py" if is_folder else "models--me--mine/refs/main")
    code.parent.mkdir(parents=True)
    place = str(code.parent) if is_folder else "me/mine"
    source = replace(probe_model("gpt2"), place=place)
    keys = []
    for content in ("one", "two"):
        code.write_text(content)
        keys.append([key_of(replace(source, trust_remote_code=trusts), _REQUEST) for trusts in (True, False)])
    (trusted, without), (changed, still_without) = keys
    assert trusted != changed
    assert without == still_without


def test_code_in_another_repository_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    source = probe_model("gpt2")
    config = {**source.config, "auto_map": {"AutoModel": "you/yours--modeling.Yours"}}
    source = replace(source, config=config, place="me/mine", trust_remote_code=True)
    before = key_of(source, _REQUEST)
    code = tmp_path / "models--you--yours/refs/main"
    code.parent.mkdir(parents=True)
    code.write_text("one")
    assert key_of(source, _REQUEST) != before


def test_the_oldest_traces_go_when_they_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for age in range(4):
        write_trace(tmp_path / f"{age}.trace", _TRACE)
        os.utime(tmp_path / f"{age}.trace", (1000 - age, 1000 - age))
    monkeypatch.setattr(cache, "_MOST_BYTES", 3 * (tmp_path / "0.trace").stat().st_size)
    write_trace(tmp_path / "new.trace", _TRACE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.trace", "1.trace", "new.trace"]


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({}, "/home/me/.cache/zerofit/traces"),
        ({"XDG_CACHE_HOME": "/var/tmp"}, "/var/tmp/zerofit/traces"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/zerofit/traces"),
    ],
)
def test_where_traces_are_kept(environment: dict[str, str], folder: str) -> None:
    assert default_cache_folder(environment, Path("/home/me")) == Path(folder)


def test_reading_a_cached_trace_imports_no_torch(tmp_path: Path) -> None:
    source = probe_model("bert-base-uncased")
    write_trace(tmp_path / f"{key_of(source, _REQUEST)}.trace", _TRACE)
    program = (
        "import sys, pathlib\n"
        "from zerofit.core.allocation_log import TraceRequest\n"
        "from zerofit.models.find import probe_model\n"
        "from zerofit.models.trace import trace_model\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "source, request = probe_model('bert-base-uncased'), TraceRequest(sequence_length=16)\n"
        "assert len(trace_model(source, request, cache_folder=folder).logs) == 2\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)


def test_a_model_that_cannot_be_traced_is_tried_once(tmp_path: Path) -> None:
    tries: list[int] = []

    def fail(rule: str = "trace-failed") -> Trace:
        tries.append(1)
        raise UserError(rule, "no", found="here", why="so", fix="none")

    for _ in range(2):
        with pytest.raises(UserError, match="no") as caught:
            kept_trace(tmp_path / "one.trace", _REQUEST, fail)
        assert (caught.value.rule, caught.value.found, caught.value.fix) == ("trace-failed", "here", "none")
    assert len(tries) == 1
    for _ in range(2):
        with pytest.raises(UserError):
            kept_trace(tmp_path / "other.trace", _REQUEST, partial(fail, "trace-slow"))
    assert len(tries) == 3
    assert read_trace(tmp_path / "one.trace", _REQUEST) is None
