"""A folder of users' reports: predicted beside measured, and files that are no reports."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from published_reports import comparisons, print_reports, summary
from run_folders import NAME, RECORD, on_cpu, write_run

from zerofit.core.run_report import RunReport, report_from_json, report_to_json
from zerofit.core.units import GIB, MIB
from zerofit.launching.clusters.follow import followed_run
from zerofit.launching.run_report import run_report


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> RunReport:
    return run_report(followed_run(write_run(tmp_path_factory.mktemp("runs") / NAME)))


def test_a_report_is_compared_in_tensors_reserved_memory_and_time(report: RunReport) -> None:
    pairs = comparisons(report)
    assert {name: (pair.predicted, pair.measured) for name, pair in pairs.items()} == {
        "tensors": (5 * GIB, 5 * GIB + 64 * MIB),
        "reserved": (5 * GIB + 256 * MIB, 6 * GIB + 64 * MIB),
        "step": (0.4, RECORD["step_time_s"]),
    }
    told = summary([report])
    assert told["tensors"]["worst"] == round(5 / (5 + 1 / 16) - 1, 4)
    assert [told[name]["share_within_uncertainty"] for name in ("tensors", "reserved", "step")] == [1, 0, 1]


def test_a_run_out_of_memory_or_on_the_cpu_has_no_peak_to_compare(report: RunReport, tmp_path: Path) -> None:
    assert report.end is not None
    out = replace(report, end=replace(report.end, exit_code=1, kind="gpu-out-of-memory"))
    assert list(comparisons(out)) == ["step"]
    rehearsal = run_report(followed_run(write_run(tmp_path / NAME, plan=on_cpu())))
    assert comparisons(rehearsal) == {}


def test_a_folder_of_reports_is_printed_and_what_is_none_is_named(
    report: RunReport, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "from-a-user").mkdir()
    (tmp_path / "from-a-user" / "first.json").write_text(report_to_json(report))
    other = json.loads(report_to_json(report))
    (tmp_path / "unknown-field.json").write_text(json.dumps({**other, "host": "acme"}))
    (tmp_path / "text.json").write_text(json.dumps({**other, "versions": {"torch": "<b>2</b>"}}))
    (tmp_path / "none.json").write_text("[")
    print_reports(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0].rpartition("/")[2] for line in lines[:3]] == [
        "none.json",
        "text.json",
        "unknown-field.json",
    ]
    assert lines[3].split() == ["report", "GPUs", "model", "strategy", "tensors", "reserved", "step"]
    assert " ".join(lines[4].split()) == (
        "from-a-user/first.json 2 x RTX4090 GPT2LMHeadModel, 0.124 B ZeRO-2, 4 x 2 "
        "5.0 GiB ±5% of 5.1 GiB -1.2% 5.2 GiB ±5% of 6.1 GiB -13.4% 400 ms ±30% of 450 ms -11.1%"
    )
    assert json.loads("\n".join(lines[5:]))["step"]["cases"] == 1


def test_a_report_reads_back_the_same(report: RunReport) -> None:
    assert report_from_json(report_to_json(report)) == report
