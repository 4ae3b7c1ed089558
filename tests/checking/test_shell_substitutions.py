"""Findings on launch lines in shell scripts: words as they were written, each at its own line, and --fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerofit.checking.check_run import check
from zerofit.checking.fix_files import find_fixes

_SCRIPT = "import argparse\n\nparser = argparse.ArgumentParser()\nparser.parse_args()\n"
_RULE = "script-argument-unknown"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "none"))
    Path("train.py").write_text(_SCRIPT)


def _found(text: str) -> tuple[str, int]:
    """Return fix and line of the finding on a flag behind the script."""
    Path("run.sh").write_text(text)
    finding = next(found for found in check("run.sh").findings if found.rule == _RULE)
    assert finding.place is not None
    return finding.fix, finding.place.line


@pytest.mark.parametrize(
    ("before", "value", "shown"),
    [
        ("HEAD=$(hostname -s | head -n 1)\n", "$HEAD", "$HEAD"),
        ("HEAD=`scontrol show hostnames $LIST | head -1`\n", '"${HEAD}"', "$HEAD"),
        ("", '"$(hostname -I | cut -d " " -f 1)"', '$(hostname -I | cut -d " " -f 1)'),
        ("", "$(head -n 1  hosts.txt)", "$(head -n 1 hosts.txt)"),
        ("HEAD=$(hostname -s).cluster\nMAIN=$HEAD\n", "$MAIN", "$HEAD"),
        ("HEAD=node7\n", "$HEAD", "node7"),
        ("HEAD=10.0.0.$((1 + 3))\n", "$HEAD", "10.0.0.4"),
    ],
)
def test_a_fix_repeats_the_output_of_a_command_as_it_was_written(before: str, value: str, shown: str) -> None:
    line = f"accelerate launch --main_process_ip {value} train.py --mixed_precision bf16\n"
    fix, _ = _found(f"#!/bin/bash\n{before}{line}")
    assert fix == f"write accelerate launch --main_process_ip {shown} --mixed_precision bf16 train.py"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("srun bash -c 'accelerate launch \\\n  train.py \\\n  --mixed_precision bf16'\n", 4),
        ('bash -c "accelerate launch \\\n  train.py \\\n  --mixed_precision bf16"\n', 4),
        ("srun \\\n  -N 2 \\\n  bash -c 'cd .\naccelerate launch train.py --mixed_precision bf16'\n", 5),
        (
            'N=2\nbash -c "accelerate launch --num_processes $N \\\n  train.py --mixed_precision bf16"\n',
            4,
        ),
        ("accelerate launch \\\n  train.py \\\n  --mixed_precision bf16\n", 4),
        ("bash <<'END'\naccelerate launch train.py --mixed_precision bf16\nEND\n", 3),
        # The lines of a value are not those of the file.
        ("X='a\nb'\nbash -c \"echo $X; accelerate launch train.py --mixed_precision bf16\"\n", 4),
    ],
)
def test_a_flag_in_a_quoted_command_has_its_own_line(text: str, line: int) -> None:
    assert _found(f"#!/bin/bash\n{text}")[1] == line


def _fixed(text: str, name: str = "run.sh") -> str | None:
    Path(name).write_text(text)
    fixes = find_fixes(lambda overlay: check(name, overlay=overlay))
    return fixes[0].after if fixes else None


_TAB = "\t"
_LINE = "accelerate launch --num_processes 2 \\{}\n  --mixed_precision bf16 \\{}\n  train.py\n"


@pytest.mark.parametrize(
    "text",
    [
        f"#!/bin/bash\n{_LINE.format(' ', '')}",
        f"#!/bin/bash\n{_LINE.format('', _TAB)}",
        f"#!/bin/bash\nset -e\n{_LINE.format('  ', f' {_TAB} ')}echo done\n",
        "#!/bin/bash\ntorchrun --nproc_per_node 2 \\   \n  train.py\n",
        "#!/bin/bash\nsrun bash -c 'accelerate launch \\ \n  --mixed_precision bf16 train.py'\n",
        "#!/bin/bash\nif true; then\n  accelerate launch \\ \n    --num_processes 2 train.py\nfi\n",
    ],
)
def test_a_blank_behind_a_backslash_is_removed(text: str) -> None:
    lines = [line.rstrip() if line.rstrip().endswith("\\") else line for line in text.split("\n")]
    assert _fixed(text) == "\n".join(lines)
    Path("run.sh").write_text("\n".join(lines))
    assert check("run.sh").findings == ()


@pytest.mark.parametrize(
    "text",
    [
        f"#!/bin/bash\n{_LINE.format('', '')}",
        "#!/bin/bash\naccelerate launch --num_processes 2\n  --mixed_precision bf16 train.py\n",
        "#!/bin/bash\naccelerate launch --num_processes 2 \\\n\n  --mixed_precision bf16 train.py\n",
        "#!/bin/bash\r\naccelerate launch --num_processes 2 \\\r\n  --mixed_precision bf16 train.py\r\n",
        "#!/bin/bash\necho a \\ \nls\n",
    ],
)
def test_other_lines_are_left_alone(text: str) -> None:
    assert _fixed(text) is None
