"""Mistakes on the command line, as users make them: the whole message, exit code 2, nothing written.

Each file in tests/cli/messages holds command lines and, below each, all that stderr says.
"""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest
from runs import RunZerofit
from small_runs import PLAN

from zerofit.core.plan import plan_to_json

_HOST = socket.gethostname()
_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
_PLAN = plan_to_json(PLAN)
_FILES = {
    # Whoever runs or imports the script leaves a trace, which these tests find.
    "train.py": "from pathlib import Path\nPath('trained').touch()\n",
    "package/__init__.py": "from pathlib import Path\nPath('imported').touch()\n",
    "half.json": _PLAN[:38],
    "later.json": _PLAN.replace('"version": 1', '"version": 2'),
    "unknown.json": json.dumps({**json.loads(_PLAN), "notes": ""}),
    "no_nodes.json": _PLAN.replace('"num_nodes": 1', '"num_nodes": 0'),
    "bad_line.txt": "# two nodes\nnode0 slots=2\nnode1\n",
    "option.txt": "-oProxyCommand=reboot slots=2\n",
    "shell.txt": "$(reboot) slots=2\n",
    "unlike.txt": "node0 slots=2\nnode1 slots=4\n",
    "strangers.txt": "node0.example slots=2\nnode1.example slots=2\n",
    "no_slots.txt": f"{_HOST} slots=0\n",
    "twice.txt": f"{_HOST} slots=2\n{_HOST} slots=2\n",
    "two_nodes.txt": f"{_HOST} slots=2\nnode1.example slots=2\n",
    "empty.txt": "\n# none yet\n",
    "reviews.csv": "id,sentence,label\n1,good enough,0\n",
    "numbers.csv": "id,label\n1,0\n",
    "header.csv": "id,sentence,label\n",
    "pairs.jsonl": '{"query": "a b", "answer": "c d"}\n',
    "broken.jsonl": '{"text": "a"}\n' * 6 + '{"text": "a" "b"}\n',
    "broken.json": '[{"text": "a"},\n {"text": "b"}\n',
    "nested.jsonl": '{"messages": [{"role": "user"}]}\n',
    "broken.parquet": "PAR1, and nothing else that parquet has",
    "broken.jsonl.gz": '{"text": "a"}\n',
    "table.xlsx": "",
    "empty.jsonl": "",
    "folder/reviews.csv": "id,sentence\n",
    "tokenizer.json": "{}",
    "splits/dataset_dict.json": '{"splits": ["validation", "test"]}',
    "splits/validation/state.json": "{}",
    "splits/test/state.json": "{}",
    "no_splits/dataset_dict.json": '{"splits": ["train", "../splits/test"]}',
    "surrogate.jsonl": '{"text": "a"}\n{"text": "\\ud800"}\n',
    "deep.json": "[" * 100_000,
}


def _transcripts() -> dict[str, str]:
    """Return all that stderr says, by command line."""
    files = sorted((Path(__file__).parent / "messages").glob("*.txt"))
    blocks = "\n\n".join(file.read_text("utf-8") for file in files).split("$ zerofit ")
    return {
        line: text.strip("\n") + "\n" for line, _, text in (block.partition("\n") for block in blocks[1:])
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a script, and one file for each way in which a file can be wrong."""
    for name, text in _FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    return tmp_path


def _tree(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def _as_written(text: str, folder: Path) -> str:
    """Return the text with what differs from run to run by its name in the transcripts."""
    text = text.replace(str(folder.resolve()), "CWD")
    return re.sub(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", "TIME", text)


@pytest.mark.parametrize("line", _transcripts())
def test_mistake(run_zerofit: RunZerofit, folder: Path, line: str) -> None:
    message = re.sub(r"\bHOST\b(?! slots=N)", _HOST, _transcripts()[line])
    before = _tree(folder)
    done = run_zerofit(*line.split(), cwd=folder, environment=_NO_GPU)
    assert (_as_written(done.stderr, folder), done.stdout, done.returncode) == (message, "", 2)
    assert _tree(folder) == before


def test_every_mistake_is_written_with_hyphens_and_some_with_underscores_too() -> None:
    lines = list(_transcripts())
    assert len(lines) == len(set(lines))
    assert {"launch --zero-stage 5 train.py", "launch --zero_stage 5 train.py"} <= set(lines)


def test_a_port_that_is_taken_on_the_first_of_several_nodes(run_zerofit: RunZerofit, folder: Path) -> None:
    before = _tree(folder)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        line = f"launch --cpu --nnodes 2 --node_rank 0 --master_addr localhost --master_port {port} train.py"
        finished = run_zerofit(*line.split(), cwd=folder, environment=_NO_GPU)
    assert finished.stderr == (
        "error[port-taken]: the port for the nodes' rendezvous can't be used\n"
        f"  found: --main-process-port {port}\n"
        "  why:   another process listens on it\n"
        "  fix:   set a free port, the same on every node\n"
    )
    assert (finished.returncode, finished.stdout) == (2, "")
    assert _tree(folder) == before


def test_flags_behind_the_script_are_its_own(run_zerofit: RunZerofit, folder: Path) -> None:
    (folder / "train.py").write_text("import sys\nprint(sys.argv)\n", encoding="utf-8")
    line = "launch --cpu --dry-run --num-processes 1 train.py --num_processes 9 --zero-stag --help -m x"
    finished = run_zerofit(*line.split(), cwd=folder, environment=_NO_GPU)
    assert finished.returncode == 0
    assert finished.stdout.endswith("plan.json train.py --num_processes 9 --zero-stag --help -m x\n")


@pytest.mark.parametrize(
    ("flags", "rows"),
    [
        ("", []),
        ("--micro-batch-size 4", ["batch on each rank  its own  pieces of 4  --micro-batch-size says so"]),
        (
            "--gradient-checkpointing",
            ["gradient checkpointing  its own  on  --gradient-checkpointing says so"],
        ),
        ("--optimizer adafactor", ["optimizer  its own  Adafactor  --optimizer says so"]),
        ("--attention eager", ["attention  its own  eager  --attention says so"]),
    ],
)
def test_what_a_flag_changes_in_the_script_is_said(
    run_zerofit: RunZerofit, folder: Path, flags: str, rows: list[str]
) -> None:
    finished = run_zerofit("launch", "--cpu", "--dry-run", *flags.split(), "train.py", cwd=folder)
    said = [re.sub(r"  +", "  ", line) for line in finished.stderr.splitlines() if "  its own  " in line]
    default = "precision  its own  fp32, where it names none  the ranks run on the CPU"
    assert said == [*([rows[0]] if "batch" in flags else []), default, *([] if "batch" in flags else rows)]


def test_dry_run_writes_nothing(run_zerofit: RunZerofit, folder: Path) -> None:
    before = _tree(folder)
    finished = run_zerofit(
        *("launch", "--dry-run", "--gpus", "8xH100", "--preset", "z3", "train.py"),
        cwd=folder,
        environment=_NO_GPU,
    )
    assert finished.returncode == 0
    assert "strategy: DeepSpeed ZeRO-3, bf16 on 8 GPU ranks\n" in finished.stderr
    assert " --num_processes 8 " in finished.stdout
    assert _tree(folder) == before


def test_debug_shows_every_error(run_zerofit: RunZerofit, folder: Path) -> None:
    line = "--debug config --zero-stage 2 --offload-optimizer nvme --offload-param cpu"
    finished = run_zerofit(*line.split(), cwd=folder, environment=_NO_GPU)
    rules = re.findall(r"error\[([a-z0-9-]+)\]", finished.stderr)
    assert rules == ["nvme-needs-path", "nvme-offload-needs-zero3", "param-offload-needs-zero3"]
    assert "ExceptionGroup: combinations that don't work" in finished.stderr


def test_debug_shows_the_traceback_of_an_error(run_zerofit: RunZerofit, folder: Path) -> None:
    finished = run_zerofit("--debug", "launch", "trian.py", cwd=folder)
    assert finished.stderr.startswith("Traceback (most recent call last):\n")
    assert "error[script-missing]: there is no such script" in finished.stderr
    assert finished.returncode != 0
