#!/usr/bin/env python3
"""Coverage-guided fuzzing of zerofit's readers of foreign files, by atheris.

logs: zerofit explain. documents: JSON, HJSON and YAML with places. records: a rank's live record and its
record. plans: plan files. Each reader answers, or refuses by its own error; anything else ends the run, and
its input is in the folder of --out. `pip install atheris` first: it is in no extra, as it has few wheels.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_BYTES = 1 << 16


def _read_log(data: bytes) -> None:
    from zerofit.cli.output.explanation import explanation_json, explanation_text
    from zerofit.launching.explain import explain_bytes
    from zerofit.launching.explain_run import RunExplanation

    found = RunExplanation(explanation=explain_bytes(io.BytesIO(data), "rank0.log"))
    explanation_text(found)
    explanation_json(found)


def _read_document(data: bytes) -> None:
    from zerofit.configs.text.read import decode, read_document, repeated_keys
    from zerofit.core.errors import Unreadable

    try:
        text = decode(data[1:])
        name = ("a.json", "a.yaml", "a.hjson", "a")[data[0] % 4 if data else 0]
        list(repeated_keys(read_document(text, name=name).root))
    except Unreadable as error:
        str(error)


def _read_records(data: bytes) -> None:
    from zerofit.core.rank_observation import live_file, read_observation
    from zerofit.core.rank_record import read_record, record_file

    folder = Path(f"/dev/shm/zerofit-fuzz-{os.getpid()}")
    folder.mkdir(exist_ok=True)
    live_file(folder, 0).write_bytes(data)
    record_file(folder, 0).write_bytes(data)
    read_observation(folder, 0)
    read_record(folder, 0)


def _read_plan(data: bytes) -> None:
    from zerofit.core.errors import UserError
    from zerofit.core.plan import plan_from_json, plan_to_json

    try:
        plan_to_json(plan_from_json(data.decode("utf-8", "replace"), name="plan.json"))
    except UserError as error:
        str(error)


def _seeds(reader: str) -> list[bytes]:
    """Return files of a reader's kind that are whole."""
    if reader == "logs":
        with open(ROOT / "tests" / "launching" / "failure_logs.toml", "rb") as file:
            return [log.encode() for log in tomllib.load(file).values()]
    if reader == "documents":
        files = sorted((ROOT / "ds_configs").iterdir())
        return [bytes([number % 2]) + path.read_bytes() for path in files for number in (0, 1)]
    if reader == "records":
        return _records()
    return [_plan()]


def _plan() -> bytes:
    """Return a plan file."""
    line = "plan --model gpt2 --seq-len 512 --global-batch-size 8 --gpus 1xA100-40G --output"
    with tempfile.TemporaryDirectory() as made:
        file = Path(made, "plan.json")
        subprocess.run([sys.executable, "-m", "zerofit", *line.split(), str(file)], check=True)
        return json.dumps(json.loads(file.read_bytes())).encode()


def _records() -> list[bytes]:
    """Return a live record and a record as ranks write them."""
    from zerofit.core.rank_observation import LiveFile, Phase, PhasePeak, live_file
    from zerofit.core.rank_record import RankRecord

    with tempfile.TemporaryDirectory() as made:
        live = LiveFile(Path(made), 0)
        live.write(Phase.FORWARD, (7, 3, 10, 10, 5, 1 << 30, 2, 1), (1.7e9, 2.5, 1.6e9))
        live.write_peak(Phase.FORWARD, PhasePeak(allocated_bytes=1 << 30, reserved_bytes=2 << 30))
        live.write_checkpoint("/data/checkpoint-2")
        written = live_file(Path(made), 0).read_bytes()
    record = RankRecord(
        rank=0,
        exit_code=1,
        error_type="KeyError",
        error_message="x",
        peak_host_bytes=1 << 30,
        peak_gpu_allocated_bytes=None,
        peak_gpu_reserved_bytes=None,
        changes=("a change",),
    )
    return [written, json.dumps(asdict(record)).encode()]


_READERS: dict[str, Callable[[bytes], None]] = {
    "logs": _read_log,
    "documents": _read_document,
    "records": _read_records,
    "plans": _read_plan,
}


def main() -> None:
    """Fuzz one reader for some seconds of CPU time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reader", choices=_READERS)
    parser.add_argument("--seconds", type=int, default=1200)
    parser.add_argument("--out", type=Path, default=Path(".fuzz"))
    arguments = parser.parse_args()
    import atheris

    corpus = arguments.out / arguments.reader
    corpus.mkdir(parents=True, exist_ok=True)
    with atheris.instrument_imports(include=["zerofit", "yaml", "hjson"]):
        _READERS[arguments.reader](b"{}")
    for number, seed in enumerate(_seeds(arguments.reader)):
        (corpus / f"seed{number}").write_bytes(seed[:MOST_BYTES])
    options = [
        f"-max_total_time={arguments.seconds}",
        f"-max_len={MOST_BYTES}",
        "-timeout=10",
        "-rss_limit_mb=4096",
        f"-artifact_prefix={arguments.out}/{arguments.reader}-",
    ]
    atheris.Setup([sys.argv[0], *options, str(corpus)], _READERS[arguments.reader])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
