"""Mistakes in what `zerofit generate` is given: the whole message, and nothing written.

tests/cli/generate_mistakes.txt holds command lines and, below each, the error. They run in this process: most
of them come up only when transformers has been imported, which takes seconds.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from zerofit.cli.generate import generate
from zerofit.core.errors import UserError

_TRANSCRIPTS = Path(__file__).with_name("generate_mistakes.txt")


def _transcripts() -> dict[str, str]:
    """Return the message by command line."""
    blocks = re.split(r"^\$ zerofit generate ", _TRANSCRIPTS.read_text("utf-8"), flags=re.MULTILINE)
    return {line: text.strip("\n") for line, _, text in (block.partition("\n") for block in blocks[1:])}


def _tree(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize("line", _transcripts())
def test_mistake(generate_folder: Path, line: str) -> None:
    before = _tree(generate_folder)
    result = CliRunner().invoke(generate, line.split(), standalone_mode=False, prog_name="zerofit generate")
    assert isinstance(result.exception, UserError), result.exception
    message = str(result.exception).replace(str(generate_folder), "CWD")
    message = re.sub(r"[\d.]+ [GT]iB", "SIZE", message)  # what there is differs from machine to machine
    assert (message, result.stdout) == (_transcripts()[line], "")
    assert result.exception.exit_code == (1 if "nothing-fits" in message else 2)
    assert _tree(generate_folder) == before


def test_each_error_has_its_line() -> None:
    """The four parts of an error stand in each transcript."""
    for text in _transcripts().values():
        assert re.fullmatch(
            r"error\[[a-z0-9-]+\]: .+\n  found: .+\n  why:   .+\n  fix:   .+(\n  see:   .+)?", text
        )


_AT_ONCE = (
    "--model gpt2 --prompts empty.jsonl --out out.jsonl",
    "--model no_weights --prompts prompts.jsonl --out out.jsonl",
    "--model no_tokenizer --prompts prompts.jsonl --out out.jsonl",
)
_RUN = """
import sys
from click.testing import CliRunner
from zerofit.cli.generate import generate
ended = [CliRunner().invoke(generate, line.split(), standalone_mode=False) for line in sys.argv[1:]]
print([one.exception.rule for one in ended], {"torch", "transformers"} & sys.modules.keys())
"""


def test_checks_without_the_tokenizer_come_before_slow_imports(generate_folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _RUN, *_AT_ONCE], capture_output=True, text=True)
    rules = ["prompts-empty", "model-folder-without-weights", "tokenizer-missing"]
    assert done.stdout == f"{rules} set()\n", done.stderr
