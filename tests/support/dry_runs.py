"""Command lines of `zerofit generate`: what they would write, what they refuse, what an earlier run left."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from zerofit.cli.generate import generate
from zerofit.core.errors import UserError
from zerofit.generation.results import RankFile

LINE = "--model gpt2 --prompts prompts.jsonl --out out.jsonl --max-new-tokens 8 --cpu"


def dry_run(line: str, *more: str, stdin: str | None = None) -> Result:
    """Return how a dry run of a command line ended."""
    arguments = [*line.split(), "--dry-run", *more]
    return CliRunner().invoke(generate, arguments, input=stdin, standalone_mode=False)


def written(result: Result) -> dict[str, str]:
    """Return the files that a dry run shows, by their names; its last line is the command."""
    if result.exception is not None:
        raise result.exception
    shown, _, _ = result.stdout.rstrip("\n").rpartition("\n")
    parts = re.split(r"^# (/.*)\n", shown, flags=re.MULTILINE)
    return {Path(name).name: text for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def job_of(line: str, *more: str, stdin: str | None = None) -> dict[str, Any]:
    """Return what the ranks would be told."""
    job: dict[str, Any] = json.loads(written(dry_run(line, *more, stdin=stdin))["generation.json"])
    return job


def leave_unfinished(job: dict[str, Any], *, fingerprint: str | None = None) -> None:
    """Leave what a killed run leaves that had done the second prompt."""
    completion = {"text": "kept", "finish_reason": "stop", "num_new_tokens": 1, "tokens": [5]}
    run = fingerprint or job["fingerprint"]
    with RankFile(Path(job["out"]), run=run, rank=0, resume=True, batch_size=job["batch_size"]) as file:
        file.write([{"index": 1, "num_prompt_tokens": 8, "completions": [completion]}])


def error_of(line: str, *more: str) -> UserError:
    """Return what a command line is refused with."""
    result = CliRunner().invoke(generate, [*line.split(), *more], standalone_mode=False)
    assert isinstance(result.exception, UserError), result.exception
    return result.exception
