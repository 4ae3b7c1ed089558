"""`zerofit runs report`: what it says of a run, and that no name, path or argument is in it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from captures import LOOP, MODEL
from run_folders import NAME, OUT_OF_MEMORY, PID, PLAN, RECOVERY, on_cpu, write_run

from zerofit.core.plan import Plan, plan_to_json
from zerofit.core.run_report import plain_count, plain_number, plain_version, report_from_json
from zerofit.core.units import GIB, MIB
from zerofit.core.validation import parse_known
from zerofit.launching.run_report import transformers_class

_SCHEMA = json.loads(
    (Path(__file__).parents[2] / "docs" / "reference" / "run-report.schema.json").read_text("utf-8")
)
_RunZerofit = Callable[..., subprocess.CompletedProcess[str]]


def _report(run_zerofit: _RunZerofit, cwd: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    done = run_zerofit("runs", "report", *arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    jsonschema.validate(report, _SCHEMA)
    report_from_json(done.stdout)
    return done.stdout, report


def test_a_report_has_the_shape_the_strategy_and_both_sides(tmp_path: Path, run_zerofit: _RunZerofit) -> None:
    write_run(tmp_path / "zerofit-runs" / NAME)
    _, report = _report(run_zerofit, tmp_path)
    model, strategy, measured = report["model"], report["strategy"], report["measured"]
    assert (model["class_name"], model["num_layers"], model["hidden_size"]) == ("GPT2LMHeadModel", 12, 768)
    assert (model["vocab_size"], model["num_trained"], model["num_frozen"]) == (50_257, 124_439_808, 0)
    assert (strategy["engine"], strategy["zero_stage"], strategy["world_size"]) == ("deepspeed", 2, 2)
    assert (strategy["precision"], strategy["attention"]) == ("bf16", "sdpa")
    assert strategy["script_optimizer"] == "torch.AdamW"
    assert report["versions"]["torch"] == "2.9.1+cu128"
    assert report["gpus"] == [
        {"name": "RTX4090", "count": 2, "memory_bytes": PLAN.machine.gpus[0].memory_bytes}
    ]
    predicted = report["predicted"]
    assert predicted["step_time_s"] == 0.4
    assert predicted["phases"][2] == {
        "phase": "backward",
        "tensors_bytes": 5 * GIB,
        "reserved_bytes": 5 * GIB + 256 * MIB,
        "total_bytes": 5 * GIB + 768 * MIB,
    }
    assert measured["phases"] == [
        {"phase": "forward", "allocated_bytes": 4 * GIB + 64 * MIB, "reserved_bytes": 5 * GIB + 64 * MIB},
        {"phase": "backward", "allocated_bytes": 5 * GIB + 64 * MIB, "reserved_bytes": 6 * GIB + 64 * MIB},
    ]
    assert (measured["num_ranks"], measured["num_steps"], measured["step_time_s"]) == (2, 20, 0.45)
    assert report["end"] == {"exit_code": 0, "kind": None, "phase": None, "cause": None}
    assert report["recoveries"] == []


def test_a_run_out_of_memory_has_its_recovery_and_its_cause(tmp_path: Path, run_zerofit: _RunZerofit) -> None:
    record = {
        "exit_code": 1,
        "cause": "rank 0 was out of GPU memory",
        "kind": "gpu-out-of-memory",
        "phase": "backward",
        "recoveries": [RECOVERY],
    }
    write_run(tmp_path / "zerofit-runs" / NAME, record=record, log=OUT_OF_MEMORY)
    _, report = _report(run_zerofit, tmp_path)
    assert report["end"] == {
        "exit_code": 1,
        "kind": "gpu-out-of-memory",
        "phase": "backward",
        "cause": "gpu-out-of-memory",
    }
    assert report["recoveries"] == [{"step": 7, "lost_steps": 2, "resumed": True}]


def test_a_rehearsal_on_the_cpu_is_compared_with_no_gpu(tmp_path: Path, run_zerofit: _RunZerofit) -> None:
    write_run(tmp_path / "zerofit-runs" / NAME, plan=on_cpu())
    _, report = _report(run_zerofit, tmp_path)
    assert (report["predicted"], report["gpus"], report["strategy"]["on_cpu"]) == (None, [], True)


def test_a_run_that_is_not_over_has_no_end(tmp_path: Path, run_zerofit: _RunZerofit) -> None:
    run = write_run(tmp_path / "zerofit-runs" / NAME)
    (run / "run.json").unlink()
    _, report = _report(run_zerofit, tmp_path)
    assert report["end"] is None
    assert report["measured"]["step_time_s"] == round(900 / 19, 2)  # the mean since the first step


_HOSTILE = (
    "acme",
    "/home/acme/secret.py",
    "<script>acme</script>",
    "transformers.models.acme.modeling_acme.AcmeForCausalLM",
    "2.9.1+acme.corp",
    "NVIDIA GeForce RTX 4090 acme",
    "hf_acmeacmeacmeacmeacmeacmeacmeacme",
    'acme"\n\u202e',
)
"""What names, paths, versions, tokens and users may look like; each has "acme" in it."""


def _leaves(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the places of all strings in a JSON document."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, (*place, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _leaves(inner, (*place, number))
    elif isinstance(value, str):
        yield place


def _set(document: Any, place: tuple[str | int, ...], value: str) -> None:
    for key in place[:-1]:
        document = document[key]
    document[place[-1]] = value


def _hostile(document: dict[str, Any], text: str, is_valid: Callable[[str], object]) -> int:
    """Put a text in the place of every string for which a document stays valid; return how many."""
    changed = 0
    for place in list(_leaves(document)):
        before = json.dumps(document)
        _set(document, place, text)
        try:
            is_valid(json.dumps(document))
        except ValueError:  # one of a few words, such as an engine
            document.clear()
            document.update(json.loads(before))
        else:
            changed += 1
    document["acme_field"] = {text: [text]}
    return changed


def _filled_plan() -> dict[str, Any]:
    """Return a plan with something in each of its free texts."""
    model = replace(MODEL, config={"_name_or_path": "x", "architectures": ["X"]}, adapters=("LORA",))
    capture = replace(LOOP, model=model, trainer_arguments={"output_dir": "x", "run_name": "x"}, notes=("x",))
    strategy = replace(PLAN.strategy, nvme_path="x", freeze=("x",), attention="x")
    plan = replace(PLAN, capture=capture, strategy=strategy, resume_from="x")
    found: dict[str, Any] = json.loads(plan_to_json(plan))
    return found


@pytest.mark.parametrize("text", _HOSTILE)
def test_nothing_of_a_run_full_of_secrets_is_in_its_report(
    tmp_path: Path, run_zerofit: _RunZerofit, text: str
) -> None:
    run = write_run(
        tmp_path / "zerofit-runs" / f"{NAME}-acme",
        checkpoint=f"/home/acme/{text}",
        log=f"{text}\nHF_TOKEN={text}\n{OUT_OF_MEMORY}RuntimeError: {text}\n",
        record={"exit_code": 1, "kind": "gpu-out-of-memory", "recoveries": [RECOVERY]},
    )
    plan = _filled_plan()
    assert _hostile(plan, text, lambda changed: parse_known(Plan, changed)) > 60
    (run / "plan.json").write_text(json.dumps(plan))
    for file in (run / "run.json", *run.glob("ranks/*.json")):
        document = json.loads(file.read_text())
        kept = {name: document.get(name) for name in ("kind", "phase") if name in document}
        _hostile(document, text, lambda changed: changed)
        file.write_text(json.dumps({**document, **kept}))
    (run / "launcher.json").write_text(json.dumps({"host": text, "pid": PID, "started_at": 1.0}))
    (run / "command.sh").write_text(f"{text}\n")
    printed, report = _report(run_zerofit, tmp_path)
    assert "acme" not in printed.lower()
    assert str(PID) not in printed
    assert "train" not in [*_strings(report)]
    assert report["model"]["class_name"] is None
    assert (report["gpus"][0]["name"], report["strategy"]["attention"]) == (None, "other")
    assert set(report["versions"].values()) == {"other"}


def _strings(report: dict[str, Any]) -> Iterator[str]:
    for place in _leaves(report):
        value: Any = report
        for key in place:
            value = value[key]
        yield value


def test_the_text_fields_of_a_report_are_words_that_zerofit_knows(
    tmp_path: Path, run_zerofit: _RunZerofit
) -> None:
    """A field that is added has to be listed here, so that someone asks what it may contain."""
    write_run(tmp_path / "zerofit-runs" / NAME, record={"exit_code": 1, "kind": "hang"}, log=OUT_OF_MEMORY)
    _, report = _report(run_zerofit, tmp_path)
    places = {".".join(str(key) for key in place if isinstance(key, str)) for place in _leaves(report)}
    assert places == {
        "model.class_name",
        "model.weight_dtype",
        *(f"strategy.{name}" for name in ("engine", "optimizer_offload", "param_offload", "precision")),
        *(f"strategy.{name}" for name in ("script_optimizer", "attention", "state_dict_type")),
        *(f"versions.{name}" for name in ("python", "zerofit", "torch", "transformers")),
        "gpus.name",
        "predicted.phases.phase",
        "measured.phases.phase",
        "end.kind",
        "end.cause",
    }


def test_a_report_is_shown_before_it_is_written(tmp_path: Path, run_zerofit: _RunZerofit) -> None:
    write_run(tmp_path / "zerofit-runs" / NAME)
    done = run_zerofit("runs", "report", "--output", "report.json", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout == (tmp_path / "report.json").read_text()
    assert done.stderr == "zerofit: all of report.json is shown above\n"


def test_a_report_overwrites_no_file_unless_told(tmp_path: Path, run_zerofit: _RunZerofit) -> None:
    write_run(tmp_path / "zerofit-runs" / NAME)
    (tmp_path / "report.json").write_text("mine")
    done = run_zerofit("runs", "report", "--output", "report.json", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "error[file-exists]: the file exists and differs\n"
        "  found: report.json\n"
        "  why:   it may contain your work\n"
        "  fix:   write elsewhere with --output FILE, or overwrite with --force\n"
    )
    assert (tmp_path / "report.json").read_text() == "mine"
    assert run_zerofit("runs", "report", "--output", "report.json", "--force", cwd=tmp_path).returncode == 0
    assert "acme" not in (tmp_path / "report.json").read_text()


@pytest.mark.parametrize(
    ("file", "text"), [("plan.json", "{"), ("plan.json", "[]"), ("run.json", '{"exit_code": "0"}')]
)
def test_a_damaged_record_is_an_error(tmp_path: Path, run_zerofit: _RunZerofit, file: str, text: str) -> None:
    run = write_run(tmp_path / "zerofit-runs" / NAME)
    (run / file).write_text(text)
    done = run_zerofit("runs", "report", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error[run-record-broken]: a record of the run can't be read\n  found: ")
    assert f"{NAME}/{file})" in done.stderr


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("2.9.1", "2.9.1"),
        ("2.9.1+cu128", "2.9.1+cu128"),
        ("2.9.1+cpu", "2.9.1+cpu"),
        ("2.8.0+rocm6.4", "2.8.0+rocm6.4"),
        ("5.0.0.dev0", "5.0.0.dev0"),
        ("5.0.0rc1", "5.0.0rc1"),
        ("2.9.1+git1234abc", "other"),
        ("2.9.1+acme", "other"),
        ("2.9.1\n", "other"),
        ("", "other"),
    ],
)
def test_versions_of_releases_alone_are_reported(text: str, plain: str) -> None:
    assert plain_version(text) == plain


def test_numbers_out_of_range_are_not_reported() -> None:
    assert [plain_number(number) for number in (float("nan"), float("inf"), -1.0, 1e16)] == [None] * 4
    assert plain_number(0.123456789) == 0.1235
    assert [plain_count(number) for number in (-1, 10**16, None)] == [None] * 3


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("transformers.models.gpt2.modeling_gpt2.GPT2LMHeadModel", "GPT2LMHeadModel"),
        ("transformers.models.gpt2.modeling_gpt2.AcmeModel", None),
        ("acme.GPT2LMHeadModel", None),
        ("__main__.GPT2LMHeadModel", None),
        ("transformers_modules.acme.modeling_gpt2.GPT2LMHeadModel", None),
        ("", None),
    ],
)
def test_only_classes_of_transformers_are_named(path: str, name: str | None) -> None:
    assert transformers_class(path) == name
