"""Which programs a captured script may start: none that could train, lose files or upload."""

from __future__ import annotations

import os
import shlex
import sys
import sysconfig

import pytest

from zerofit.scripts.capture.child.processes import is_harmless

_PACKAGES = sysconfig.get_paths()["purelib"]
_REFUSED = [
    "accelerate launch train.py",
    "torchrun --nproc_per_node 2 train.py",
    "sbatch job.sh",
    "python train.py",
    "python3.11 -u train.py --lr 1",
    "python -W ignore train.py",
    "python -m mypkg.train",
    "python -mtorch.distributed.run train.py",
    "python -m zerofit plan train.py",
    "python",
    f"python {os.path.dirname(sys.executable)}/torchrun train.py",
    "sh -c 'cd runs && python train.py'",
    "sh -c 'ls; torchrun train.py'",
    "sh -c 'ls &\nrm a'",
    "sh -c 'cat names | xargs rm'",
    "sh -c 'echo $(rm a)'",
    "sh -c 'echo `rm a`'",
    "sh -c 'cat <(rm a)'",
    "sh -c 'echo 1 > a.txt'",
    "sh -c 'echo 1 >> a.txt'",
    "sh -c 'ls > /dev/nullified'",
    "sh -c 'A=1 python train.py'",
    "sh -c '(rm a)'",
    "sh -c \"echo ';' a\"",
    "bash train.sh",
    "sh",
    "./train.sh",
    "env A=1 python train.py",
    "nohup python train.py",
    "rm -rf out",
    "mv a b",
    "cp a b",
    "sed -i s/a/b/ a",
    "git push",
    "git checkout main",
    "git",
    "aws s3 sync out s3://bucket",
    "curl -T a https://example.org",
    "hf upload me/model out",
    "numactl --cpunodebind=0 python train.py",
    "numactl",
    "openssl enc -in secrets -out secrets",
    "rpm -i a.rpm",
    "x86_64-linux-gnu-strip a",
]
_HARMLESS = [
    "git rev-parse HEAD",
    "git --version",
    "numactl --hardware",
    "openssl sha512 /tmp/torchinductor/header.i",
    "rpm -q libaio-devel",
    "/usr/bin/x86_64-linux-gnu-gcc-12 -c train.c",
    "clang++-14 -c train.cpp",
    "/usr/bin/nvidia-smi --query-gpu=name --format=csv",
    "gcc -o train train.c",
    "mpirun --version",
    "which torchrun",
    "env",
    "mkdir -p out",
    "python -c 'print(1)'",
    "python -V",
    "python -m pip freeze",
    "python -mjson data.json",
    f"{sys.executable} {_PACKAGES}/torch/_inductor/compile_worker/__main__.py",
    f"{sys.executable} {_PACKAGES}/cpuinfo/cpuinfo.py --json",
    "sh -c 'nvidia-smi -L 2>/dev/null | wc -l'",
    "sh -c 'cd runs && git status > /dev/null 2>&1'",
    "bash -c 'sleep 9 &'",
    "/bin/sh -c ''",
]


@pytest.mark.parametrize("line", _REFUSED)
def test_what_is_not_known_to_be_harmless_is_refused(line: str) -> None:
    assert not is_harmless(shlex.split(line))


@pytest.mark.parametrize("line", _HARMLESS)
def test_what_only_looks_or_compiles_may_run(line: str) -> None:
    assert is_harmless(shlex.split(line))
