"""Which command lines would train, lose files or upload where nothing is seen of it."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import pytest

from zerofit.scripts.capture.child.command_lines import programs_in
from zerofit.scripts.capture.child.processes import trains
from zerofit.scripts.capture.child.programs import is_upload, lost_by, overwritten_by

_PACKAGES = sysconfig.get_paths()["purelib"]
_TRAINS = [
    "accelerate launch train.py",
    "/opt/venv/bin/accelerate launch --num_processes 2 train.py",
    "torchrun --nproc_per_node 2 train.py",
    "deepspeed train.py",
    "sbatch job.sh",
    "zerofit launch train.py",
    "python -m zerofit launch train.py",
    "python train.py",
    "python3.11 -u train.py --lr 1",
    "python -W ignore train.py",
    "python -X dev -Wignore train.py",
    "python --check-hash-based-pycs never train.py",
    "python -m mypkg.train",
    "python -um mypkg.train",
    "python -mnotinstalled",
    "python folder",
    f"python {os.path.dirname(sys.executable)}/torchrun train.py",
    f"{sys.executable} -m torch.distributed.run train.py",
    "python -m accelerate.commands.launch train.py",
    "sh -c 'cd runs && python train.py'",
    "bash -lc 'torchrun train.py'",
    "bash train.sh",
    "bash -e train.sh",
    "source train.sh",
    "./train.sh",
    "env A=1 python train.py",
    "env -u A -C runs python train.py",
    "A=1 python train.py",
    "nohup mpirun -np 2 python -m train",
    "nice -n 5 timeout -k 5 60 python train.py &",
    "timeout 60 bash -c 'exec python train.py'",
    "cd /tmp; python train.py > log.txt 2>&1",
    "echo $(python train.py)",
    "if true; then python train.py; fi",
    "cat names | xargs -n 1 python train.py",
]
_TRAINS_NOT = [
    "git rev-parse HEAD",
    "nvidia-smi",
    "gcc -o train train.c",
    "accelerate env",
    "which deepspeed",
    "which torchrun python",
    "pip show deepspeed",
    "echo python train.py",
    "grep -r torchrun train.py",
    "python -c 'print(1)'",
    "python --version",
    "python -V",
    "python -m pip freeze",
    "python -W ignore -m pip show torchrun",
    "python -m json.tool data.json",
    "python -m zerofit plan train.py",
    f"{sys.executable} {_PACKAGES}/torch/_inductor/compile_worker/__main__.py",
    "sh -c 'git status'",
    "sh",
    "./program",
    "env",
    "",
]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "train.sh").write_text("python train.py\n")
    (tmp_path / "program").write_bytes(b"\x7fELF\0")
    (tmp_path / "mypkg").mkdir()
    (tmp_path / "mypkg" / "__init__.py").touch()
    for name in ("a.txt", "b.txt", "out/a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return Path(os.path.realpath(tmp_path))


@pytest.mark.parametrize("line", _TRAINS)
def test_a_launcher_or_code_that_no_package_brings_trains(place: Path, line: str) -> None:
    assert any(trains(program) for program in programs_in(line, cwd=str(place)))


@pytest.mark.parametrize("line", _TRAINS_NOT)
def test_other_programs_do_not(place: Path, line: str) -> None:
    assert not any(trains(program) for program in programs_in(line, cwd=str(place)))


_UPLOADS = [
    "git push",
    "git -C runs push origin main",
    "aws s3 sync out s3://bucket/out",
    "aws s3 rm s3://bucket/out",
    "gsutil -m cp -r out gs://bucket",
    "gcloud storage cp out gs://bucket",
    "rclone copy out remote:out",
    "rsync -a out/ host:out/",
    "scp out/a.txt host:",
    "hf upload me/model out",
    "huggingface-cli upload me/model out",
    "ssh host rm -r out",
    "curl -X POST https://example.org",
    "curl -T a.txt https://example.org",
    "wandb sync out",
    "cd out && git add . && git push",
]
_UPLOADS_NOT = [
    "git status",
    "git log --grep push",
    "aws s3 sync s3://bucket/data data",
    "aws s3 ls",
    "aws s3 ls s3://bucket/out",
    "gsutil ls gs://bucket",
    "rclone ls remote:out",
    "gsutil cp gs://bucket/data data",
    "rsync -a host:data/ data/",
    "scp host:a.txt .",
    "hf download me/model",
    "curl -L -o data.zip https://example.org/data.zip",
    "wget https://example.org/data.zip",
]


@pytest.mark.parametrize("line", _UPLOADS)
def test_what_sends_or_removes_elsewhere_is_told(place: Path, line: str) -> None:
    assert any(is_upload(program) for program in programs_in(line, cwd=str(place)))


@pytest.mark.parametrize("line", _UPLOADS_NOT)
def test_what_only_fetches_is_not(place: Path, line: str) -> None:
    assert not any(is_upload(program) for program in programs_in(line, cwd=str(place)))


_LOSSES = [
    ("rm -rf out", {("out", "remove")}),
    ("rm -f *.txt", {("a.txt", "remove"), ("b.txt", "remove")}),
    ("cd out && rm a.txt", {("out/a.txt", "remove")}),
    ("sudo -u me rm -- a.txt", {("a.txt", "remove")}),
    ("mv a.txt c.txt", {("a.txt", "rename"), ("c.txt", "overwrite")}),
    ("mv a.txt out", {("a.txt", "rename"), ("out/a.txt", "overwrite")}),
    ("find out -name a -delete", {("out", "let find remove files in")}),
    ("find . -exec rm {} +", {(".", "let find remove files in")}),
    ("cat names | xargs rm", {(".", "remove")}),
    ("rsync -a --delete out/ b/", {("out", "let rsync remove files in"), ("b", "let rsync remove files in")}),
    ("git checkout main", {(".", "let git checkout change")}),
    ("git -C out reset --hard", {(".", "let git reset change")}),
    ("find . -name a.txt", set()),
    ("find . -exec cat {} +", set()),
    ("git status", set()),
    ("rsync -a out/ b/", set()),
    ("ls out", set()),
]


@pytest.mark.parametrize(("line", "expected"), _LOSSES, ids=[line for line, _ in _LOSSES])
def test_what_loses_files_is_told(place: Path, line: str, expected: set[tuple[str, str]]) -> None:
    lost = {pair for program in programs_in(line, cwd=str(place)) for pair in lost_by(program)}
    assert {(os.path.relpath(path, place), verb) for path, verb in lost} == expected


_WRITES = [
    ("echo 1 > a.txt", {"a.txt"}),
    ("> a.txt", {"a.txt"}),
    ("ls 2> a.txt", {"a.txt"}),
    ("ls >> a.txt", set()),
    ("ls 2>&1", set()),
    ("ls < a.txt", set()),
    ("ls | tee -i a.txt c.txt", {"a.txt", "c.txt"}),
    ("cp a.txt b.txt", {"b.txt"}),
    ("cp a.txt b.txt out", {"out/a.txt"}),
    ("sed -i s/a/b/ a.txt", {"a.txt"}),
    ("sed s/a/b/ a.txt", set()),
    ("dd if=a.txt of=b.txt", {"b.txt"}),
]


@pytest.mark.parametrize(("line", "expected"), _WRITES, ids=[line for line, _ in _WRITES])
def test_what_overwrites_files_is_told(place: Path, line: str, expected: set[str]) -> None:
    written = {path for program in programs_in(line, cwd=str(place)) for path in overwritten_by(program)}
    assert {os.path.relpath(path, place) for path in written} == expected
