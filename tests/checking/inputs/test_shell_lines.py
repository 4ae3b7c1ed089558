"""The words of a script's launch lines are those that bash hands on; a line breaks off where bash's does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest

from zerofit.checking.inputs.line_files import has_lines, lines_of_file
from zerofit.checking.inputs.programs import is_launch_line
from zerofit.checking.inputs.shell_lines import shell_lines
from zerofit.checking.inputs.shell_words import BreakCause

_STUB = """#!{python}
import json, os, sys
with open(os.environ["SEEN"], "a") as file:
    print(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]), file=file)
"""


def _bash(script: str, folder: Path) -> tuple[list[list[str]], str]:
    """Run a script with stubs for the launchers; return the words that each got, and bash's complaints."""
    programs = folder / "bin"
    programs.mkdir()
    for name in ("accelerate", "torchrun", "deepspeed"):
        (programs / name).write_text(_STUB.format(python=sys.executable))
        (programs / name).chmod(0o755)
    (folder / "run.sh").write_bytes(script.encode())
    (folder / "seen").touch()
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SEEN": str(folder / "seen"),
        "HOME": str(folder),
    }
    run = subprocess.run(
        ["bash", "run.sh"], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return [json.loads(line) for line in (folder / "seen").read_text().splitlines()], run.stderr


def _read(script: str) -> list[list[str]]:
    lines = shell_lines(script, name="run.sh")
    return [list(line.words) for line in lines if is_launch_line(line.words)]


_SCRIPTS = [
    "M=a\nread -r -d '' CMD <<EOF\ntrain.py \\\n  --model $M \\\n  --bf16\nEOF\ndeepspeed $CMD\n",
    "accelerate launch --num_processes 4 \\\n  train.py --lr 1e-4\n",
    "export NP=4 MODEL=gpt2\ntorchrun --nproc_per_node $NP train.py --model ${MODEL}-medium\n",
    "ARGS='--lr 1  --bf16'\nARGS+=' --out a'\ndeepspeed train.py $ARGS --name \"$ARGS\"\n",
    "A=(--lr 1 # why\n  --name 'a b')\nA+=(--bf16)\ntorchrun train.py \"${A[@]}\"\n",
    'CMD="accelerate launch \\\n  --num_processes 2 \\\n  train.py"\neval $CMD --lr 1\n$CMD --lr 2\n',
    'CMD="deepspeed --num_gpus 2\ntrain.py\n --lr 3"\neval $CMD\n',
    "N=${NUM_NODES:-2}\nbash -c \"torchrun --nnodes $N train.py --name 'a b'\"\n",
    "if true; then\n  N=2\n  accelerate launch --num_processes $N a.py\nfi\n",
    "cat > ds.json <<EOF\ntorchrun no.py\nEOF\ndeepspeed train.py --deepspeed ds.json 2>&1 | tee log\n",
    'run() {\n  torchrun --nproc_per_node 2 train.py --x "it\'s"\n}\nrun\n',
    'OUT=out; mkdir -p $OUT && deepspeed --num_gpus 2 train.py --out="$OUT"/a > log.txt &\nwait\n',
    'DS=\'{"a": 3}\'\nEMPTY=""\ndeepspeed train.py $EMPTY --deepspeed "$DS" --text \\"x\\"\n',
    "export A=0,1; accelerate launch train.py --a $A;# b\n",
    "bash <<'EOF'\ntorchrun --nnodes 1 train.py\nEOF\n",
    "for i in 1; do :; done\nX=a\n( X=b; deepspeed train.py --x $X )\ndeepspeed train.py --x $X\n",
]


@pytest.mark.parametrize("script", _SCRIPTS)
def test_words_are_those_that_bash_hands_on(script: str, tmp_path: Path) -> None:
    seen, complaints = _bash(script, tmp_path)
    assert seen
    assert not complaints
    assert _read(script) == seen


_BROKEN = [
    (
        "accelerate launch --num_processes 2 \\ \n  train.py --lr 1\n",
        [(1, "train.py --lr 1", "BLANK_BEHIND")],
    ),
    ("torchrun train.py \\\n  --a 1 \\\t\n  --b 2\n", [(2, "--b 2", "BLANK_BEHIND")]),
    ("torchrun train.py \\\n  --a 1\n  --b 2 \\\n  --c 3\n", [(2, "--b 2 --c 3", "MISSING")]),
    ("deepspeed train.py \\\n  --a 1 \\\n  # --b 2 \\\n  --c 3\n", [(3, "--c 3", "COMMENT")]),
    ("deepspeed train.py --a 1 # why \\\n  --c 3\n", [(1, "--c 3", "COMMENT")]),
    ("deepspeed train.py --a 1 \\ # why\n  --c 3\n", [(1, "--c 3", "BLANK_BEHIND")]),
    ("accelerate launch train.py \\\n\n  --a 1\n", [(2, "--a 1", "EMPTY_LINE")]),
    ("accelerate launch --num_processes 2\n  train.py --a 1\n", [(1, "train.py --a 1", "MISSING")]),
    ("torchrun train.py \\\n -a 1\n -b 2\n --c 3\n", [(2, "-b 2", "MISSING"), (3, "--c 3", "MISSING")]),
    (
        "torchrun train.py --a 1\n  --b 2 \\\n  --c \\\n  --d x y\necho done\n",
        [(1, "--b 2 --c --d x y", "MISSING")],
    ),
    (
        "deepspeed train.py \\ \n  --a 1 \\\n  --b\n  --c 3 \\\n  --d\n",
        [(1, "--a 1 --b", "BLANK_BEHIND"), (3, "--c 3 --d", "MISSING")],
    ),
    (
        "accelerate launch \\ \n  train.py \\\n  --a $A && echo done\n",
        [(1, "train.py --a $A", "BLANK_BEHIND")],
    ),
    ("torchrun train.py \\\n  # why\n  --a 1 \\\n  --b && echo done\n", [(2, "--a 1 --b", "COMMENT")]),
    ("if true; then\n torchrun \\\n  --nnodes 1 \\  \n  train.py\nfi\n", [(3, "train.py", "BLANK_BEHIND")]),
]


@pytest.mark.parametrize(("script", "expected"), _BROKEN)
def test_a_line_breaks_off_where_that_of_bash_does(
    script: str, expected: list[tuple[int, str, str]], tmp_path: Path
) -> None:
    seen, complaints = _bash(script, tmp_path)
    (line,) = (line for line in shell_lines(script, name="run.sh") if is_launch_line(line.words))
    assert [(found.place.line, found.lost, found.cause.name) for found in line.breaks] == expected
    assert "command not found" in complaints
    kept = list(takewhile(lambda word: not word[0].isspace(), seen[0]))
    assert list(line.words)[: len(kept)] == kept
    assert not {"\\", " "} & set(line.words)


_WHOLE = [
    "accelerate launch train.py \\\n  --a 1\n\ntorchrun train.py --b 2\n",
    "# accelerate launch \\\n#   train.py\ndeepspeed train.py --a 1   # why\necho done\n",
    "torchrun train.py --a 1 \\\n  2>&1 | tee log\n",
    "torchrun train.py --a 1 \\\n  > log \\\n  2>&1 &\nPID=$!\nwait $PID\n",
    "deepspeed train.py \\\n  --a 1 \\\n\n\necho done\n",
    'ARGS="\n  --a 1\n  --b 2\n"\ntorchrun train.py $ARGS\n',
    "ARGS=(\n  --a 1\n\n  # why\n  --b 2\n)\ntorchrun train.py ${ARGS[@]}\n",
    "case $1 in\n  -a) torchrun a.py;;\n  --b) torchrun b.py;;\nesac\n",
    "cat <<EOF\ntorchrun x.py\n  --a 1\nEOF\ntorchrun train.py\n",
]


@pytest.mark.parametrize("script", _WHOLE)
def test_a_whole_line_is_no_broken_one(script: str) -> None:
    assert [found for line in shell_lines(script, name="run.sh") for found in line.breaks] == []


def test_a_blank_at_the_very_end_becomes_an_argument(tmp_path: Path) -> None:
    script = "torchrun train.py \\\n  --a 1 \\ \n\necho done\n"
    seen, _ = _bash(script, tmp_path)
    assert seen == [["torchrun", "train.py", "--a", "1", " "]]
    line, _ = shell_lines(script, name="run.sh")
    assert [(found.place.line, found.lost) for found in line.breaks] == [(2, "")]
    assert line.words == ("torchrun", "train.py", "--a", "1")


def test_windows_line_ends_break_every_line() -> None:
    (line,) = shell_lines("torchrun \\\r\n  --nnodes 1 \\\r\n  train.py\r\n", name="run.sh")
    expected = (1, "--nnodes 1 train.py", BreakCause.CARRIAGE_RETURN)
    assert [(found.place.line, found.lost, found.cause) for found in line.breaks] == [expected]
    assert line.words == ("torchrun", "--nnodes", "1", "train.py")


_UNKNOWN = [
    ("torchrun --nnodes $SLURM_NNODES train.py\n", "torchrun --nnodes $SLURM_NNODES train.py"),
    ("if [ $1 ]; then\n N=1\nelse\n N=2\nfi\ntorchrun --n $N train.py\n", "torchrun --n $N train.py"),
    ("for N in 1 2; do\n torchrun --n $N train.py\ndone\n", "torchrun --n $N train.py"),
    ("read N\ntorchrun --n $N train.py\n", "torchrun --n $N train.py"),
    ("[ $1 ] && N=1\ntorchrun --n $N train.py\n", "torchrun --n $N train.py"),
    ("f() {\n N=1\n}\ntorchrun --n $N train.py\n", "torchrun --n $N train.py"),
    ('torchrun train.py "$@" ${EXTRA:-} ${A[@]}\n', "torchrun train.py $@ $EXTRA ${A[@]}"),
]


def test_what_a_command_prints_is_one_word_as_it_is_written() -> None:
    line = "torchrun --x=$(hostname -s | head -1) train.py\n"
    assert _read(line) == [["torchrun", "--x=$(hostname -s | head -1)", "train.py"]]


@pytest.mark.parametrize(("script", "expected"), _UNKNOWN)
def test_what_only_the_run_knows_stays_as_it_is_written(script: str, expected: str) -> None:
    assert _read(script) == [expected.split(" ")]


def test_positions_are_those_of_each_word() -> None:
    line, after = shell_lines(
        "# x\n\ntorchrun --nnodes 1 \\\n  train.py \\\n  --lr 1\ncd a; torchrun b.py\n", name="run.sh"
    )
    assert [place.line for place in line.places] == [3, 3, 3, 4, 5, 5]
    assert str(line.place_of("--lr 1 with no --x")) == "run.sh:5"
    assert str(line.place_of("nothing of it")) == "run.sh:3"
    assert after.folder == "a"


def _notebook(*cells: str) -> str:
    kinds = [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells]
    return json.dumps({"cells": [{"cell_type": "markdown", "source": "!torchrun no.py"}, *kinds]})


_CELLS = [
    ("import x\n!torchrun train.py --lr 1\n", [("n.ipynb, cell 2:2", "torchrun train.py --lr 1")]),
    ("!accelerate launch \\\n  train.py\ny = 1\n", [("n.ipynb, cell 2:1", "accelerate launch train.py")]),
    ("%%bash\nN=2\ntorchrun --n $N train.py\n", [("n.ipynb, cell 2:3", "torchrun --n 2 train.py")]),
    ("if 1:\n    !deepspeed train.py --x {x}\n", [("n.ipynb, cell 2:2", "deepspeed train.py --x {x}")]),
    ("out = !torchrun train.py\n", [("n.ipynb, cell 2:1", "torchrun train.py")]),
    ("x = a != b\n!pip install deepspeed\n", []),
]


@pytest.mark.parametrize(("cell", "expected"), _CELLS)
def test_cells_of_a_notebook(cell: str, expected: list[tuple[str, str]]) -> None:
    lines = [line for line in lines_of_file("n.ipynb", _notebook(cell)) if is_launch_line(line.words)]
    assert [(str(line.places[0]), " ".join(line.words)) for line in lines] == expected


def test_a_cell_that_writes_a_file_and_one_that_changes_the_folder() -> None:
    cells = ("%%writefile ds.json\n{}\n", "%cd work\n", "!torchrun train.py\n --lr 1\n")
    (line,) = lines_of_file("n.ipynb", _notebook(*cells))
    assert (line.folder, line.written["ds.json"].text) == ("work", "{}\n")
    assert [(str(found.place), found.lost) for found in line.breaks] == [("n.ipynb, cell 4:1", "--lr 1")]


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("run.sh", b"", True),
        ("job.sbatch", b"", True),
        ("a.ipynb", b"{}", True),
        ("run", b"#!/usr/bin/env bash\n", True),
        ("job.job", b"#!/bin/sh -l\n", True),
        ("train.yaml", b"a: 1", False),
        ("run", b"#!/usr/bin/env python\n", False),
    ],
)
def test_which_files_have_lines(name: str, data: bytes, expected: bool) -> None:
    assert has_lines(name, data) is expected


_POSITIONAL = """\
set -euo pipefail
CONFIG=recipes/$1/${2}.yaml
accelerate launch --num_processes ${3:-4} $1.py $CONFIG $5
"""


@pytest.mark.parametrize(
    ("started", "words"),
    [
        ("bash run.sh a b 2", ("--num_processes", "2", "a.py", "recipes/a/b.yaml")),
        ("sbatch --nodes 2 run.sh a b", ("--num_processes", "4", "a.py", "recipes/a/b.yaml")),
        ("zsh run.sh fit cfg 8 x y", ("--num_processes", "8", "fit.py", "recipes/fit/cfg.yaml", "y")),
        ("bash run.sh", ("--num_processes", "4", "$1.py", "recipes/$1/${2}.yaml", "$5")),
        ("", ("--num_processes", "4", "$1.py", "recipes/$1/${2}.yaml", "$5")),
    ],
)
def test_the_words_behind_a_script_are_its_arguments(started: str, words: tuple[str, ...]) -> None:
    lines = shell_lines(_POSITIONAL, name="run.sh", started=started.split())
    assert lines[-1].words == ("accelerate", "launch", *words)


@pytest.mark.parametrize(
    "before",
    ["shift", "set -- x y", "while [ $# -gt 0 ]; do\n  shift\ndone", "f() {\n  echo $1\n}\nshift 2", "set a"],
)
def test_arguments_that_a_script_changes_stay_unknown(before: str) -> None:
    lines = shell_lines(
        f"{before}\ntorchrun train.py $1\n", name="run.sh", started=["bash", "run.sh", "word"]
    )
    assert lines[-1].words == ("torchrun", "train.py", "$1")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("GPUS=8\nN=2\ntorchrun --nproc $((GPUS * N)) t.py\n", "16"),
        ("GPUS=8\nN=$(($GPUS-1))\ntorchrun --nproc $N t.py\n", "7"),
        ("A=9\ntorchrun --nproc $((${A} / 2 + 1)) t.py\n", "5"),
        ("A=9\ntorchrun --nproc $(( (A + 1) % 4 )) t.py\n", "2"),
        ("#SBATCH --nodes=3\nW=$(($SLURM_NNODES*4))\ntorchrun --nproc $W t.py\n", "12"),
        ("torchrun --nproc $((UNSET * 4)) t.py\n", "$((UNSET * 4))"),
        ("A=x\ntorchrun --nproc $((A * 4)) t.py\n", "$((A * 4))"),
        ("A=1\ntorchrun --nproc $((A / 0)) t.py\n", "$((A / 0))"),
        ("A=2\ntorchrun --nproc $((A ** 999999)) t.py\n", "$((A ** 999999))"),
        ("A=2\ntorchrun --nproc $((A++)) t.py\n", "$((A++))"),
    ],
)
def test_sums_of_known_numbers(text: str, number: str) -> None:
    assert shell_lines(text, name="run.sh")[-1].words == ("torchrun", "--nproc", number, "t.py")


def test_options_of_sbatch_take_the_place_of_the_header() -> None:
    text = "#!/bin/bash\n#SBATCH --nodes=4\n#SBATCH --gres=gpu:8\ntorchrun --nnodes $SLURM_NNODES t.py\n"
    (line,) = shell_lines(text, name="job.sh", started=["sbatch", "-N", "2", "job.sh"])
    assert line.words == ("torchrun", "--nnodes", "2", "t.py")
    assert line.job is not None
    assert (line.job.nodes, line.job.gpus_per_node is not None) == (2, True)
