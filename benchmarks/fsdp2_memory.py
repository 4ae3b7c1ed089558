"""Measures what real FSDP2 holds on 2 and 4 CPU ranks, and compares it with its trace.

torch's own FSDPMemTracker runs beside them, over the same model on fake tensors. A stopped run goes on where
it was: measurements are kept until a file that decides them changes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "evidence")]
from kept_measurements import KeptAnswers, digest, measured_here  # noqa: E402
from sharded.cases import CASES  # noqa: E402
from sharded.results import LIMIT, RESULTS, decides, write_results  # noqa: E402

from tools.fsdp2_page import BY_TORCH, PHASES, fsdp2_table  # noqa: E402

if TYPE_CHECKING:
    from sharded.cases import Case

_FOLDER = ROOT / "tests" / "evidence" / "sharded"
_AT_ONCE = 12
"""Cases of one start of the ranks."""


def main() -> None:
    """Measure, estimate, write and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, default=Path.home() / ".cache" / "zerofit-evidence" / "fsdp2")
    parser.add_argument("--only", nargs="*", help="keys of cases; nothing is written")
    parser.add_argument("--real-only", action="store_true", help="measure, and estimate nothing")
    given = parser.parse_args()
    cases = [case for case in CASES if not given.only or case.key in given.only]
    real = _measured(cases, given.keep)
    if given.real_only:
        return
    estimated = _estimated(cases, given.keep)
    found = {
        case.key: {"real": real[case.key], "estimated": estimated[case.key]}
        for case in cases
        if case.key in real and case.key in estimated
    }
    print(fsdp2_table(found))
    if not given.only:
        write_results(measured_here(found))
        print(
            f"wrote {RESULTS.relative_to(ROOT)}: {len(found)} of {len(cases)} cases, "
            f"limit {LIMIT:.0%} in {', '.join(PHASES)}"
        )


def _name(case: Case) -> str:
    return f"{case.key} {digest(asdict(case))}"


def _measured(cases: list[Case], folder: Path) -> dict[str, Any]:
    """Return each rank's peaks by case, from real ranks."""
    kept = KeptAnswers(folder / "real", _FOLDER, ("real.py", "models.py"), anew=False)
    for num_ranks in (2, 4):
        missing = [case for case in cases if case.num_ranks == num_ranks and _name(case) not in kept.known]
        for start in range(0, len(missing), _AT_ONCE):
            some = missing[start : start + _AT_ONCE]
            output = folder / f"of-{os.getpid()}.jsonl"
            _run_ranks(num_ranks, output, some)
            lines = output.read_text(encoding="utf-8").splitlines() if output.exists() else []
            answers = dict(json.loads(line) for line in lines)
            output.unlink(missing_ok=True)
            for case in some:
                if case.key in answers:
                    kept.keep(_name(case), answers[case.key])
                else:
                    print(f"{case.key}: not measured", file=sys.stderr)
    return {case.key: kept.known[_name(case)] for case in cases if _name(case) in kept.known}


def _run_ranks(num_ranks: int, output: Path, cases: list[Case]) -> None:
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={num_ranks}",
    ]
    command = [*launcher, str(_FOLDER / "real.py"), str(output), *(case.key for case in cases)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, env=environment, check=False)


def _estimated(cases: list[Case], folder: Path) -> dict[str, Any]:
    """Return the estimated peaks by case, and those of torch's own tracker."""
    from sharded.estimated import estimated, told_by_torch

    known = KeptAnswers(folder / "estimated", ROOT, decides(), anew=False)
    for case in cases:
        if _name(case) not in known.known:
            known.keep(_name(case), {**estimated(case), BY_TORCH: told_by_torch(case)})
    # The tracker counts what is on the host too.
    without = {case.key: {BY_TORCH: None} if case.offload else {} for case in cases}
    return {case.key: {**known.known[_name(case)], **without[case.key]} for case in cases}


if __name__ == "__main__":
    main()
