"""Measures all cases on real ranks, and continues a stopped run."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kept_measurements import KeptAnswers, digest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from evaluations.cases import Case

_HERE = Path(__file__).parent
_DECIDES = (
    *("real.py", "trainers.py", "../sharded/real.py"),
    *(f"../memory/{name}.py" for name in ("collectives", "devices", "track")),
)
_AT_ONCE = 12
"""Cases of one start of the ranks."""


def run_evaluations(cases: Sequence[Case], folder: Path, *, anew: bool = False) -> dict[str, list[Any]]:
    """Return what each rank held, by the keys of the cases that could be measured.

    Args:
        folder: keeps measurements, so that a run that was stopped goes on, and the ranks' output.
        anew: forget earlier measurements.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept = KeptAnswers(folder / "evaluations", _HERE, _DECIDES, anew=anew)
    names = {case.key: f"{case.key} {digest(asdict(case))}" for case in cases}
    missing = [case for case in cases if names[case.key] not in kept.known]
    for start in _starts(missing):
        for key, ranks in _run_ranks(start, folder).items():
            kept.keep(names[key], ranks)
    return {key: kept.known[name] for key, name in names.items() if name in kept.known}


def _starts(cases: Sequence[Case]) -> list[list[Case]]:
    """Return the cases of each start of ranks: under one engine, on as many ranks."""

    def kind(case: Case) -> tuple[bool, int]:
        return case.stage is None, case.num_ranks

    groups = [list(group) for _, group in itertools.groupby(sorted(cases, key=kind), key=kind)]
    return [group[at : at + _AT_ONCE] for group in groups for at in range(0, len(group), _AT_ONCE)]


def _run_ranks(cases: list[Case], folder: Path) -> dict[str, list[Any]]:
    output = folder / f"evaluations-{os.getpid()}.jsonl"
    output.unlink(missing_ok=True)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += [f"--nproc_per_node={cases[0].num_ranks}", str(_HERE / "real.py"), str(output)]
    environment = {
        **os.environ,
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "PYTHONPATH": os.pathsep.join((str(_HERE.parent), str(_HERE.parents[2]))),
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with (folder / "evaluations.log").open("ab") as log:
        command = [*launcher, *(case.key for case in cases)]
        subprocess.run(command, env=environment, stdout=log, stderr=log, check=False)
    lines = output.read_text(encoding="utf-8").splitlines() if output.exists() else []
    output.unlink(missing_ok=True)
    return dict(json.loads(line) for line in lines)
