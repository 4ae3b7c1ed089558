"""Output of `zerofit generate`: checks of --out, results of earlier runs, standard output."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.configs.write.write_files import not_writable
from zerofit.core.errors import UserError
from zerofit.generation.results import check_free, kept_results

if TYPE_CHECKING:
    from collections.abc import Iterator

STDOUT = "-"
_BROKEN_PIPE = 141
"""A shell's exit code for a process ended by SIGPIPE."""


def check_out(out: str) -> None:
    """Check early that results can be written to --out."""
    if out == STDOUT:
        return
    path = Path(out)
    if out.startswith("/dev/") or (path.exists() and not path.is_file() and not path.is_dir()):
        raise UserError(
            "generate-out-no-file",
            "results must go to a file, or to standard output",
            found=f"--out {out}",
            why="the file is renamed into place at the end, which is impossible for a device or pipe",
            fix="name a new file, or use --out - for standard output",
        )
    check_free(path)
    if not path.parent.is_dir():
        raise UserError(
            "generate-out-folder-missing",
            "the folder for the results does not exist",
            found=f"--out {out}: no folder {path.parent}",
            why="zerofit does not create folders for results, since a typo would hide them",
            fix=f"mkdir -p {path.parent}, or name a file in another folder",
        )
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise not_writable(f"{os.strerror(errno.EACCES)}: {path.parent}", flag="--out FILE")


def kept_batch_size(out: str) -> int | None:
    """Return the prompts per call of unfinished results; None if there are none."""
    try:
        return None if out == STDOUT else kept_results(Path(out).absolute()).batch_size
    except OSError:  # the next check will report it
        return None


def kept_words(out: Path, *, num_prompts: int, is_named: bool) -> str:
    """Return a line on the results of an interrupted run, and how to resume; empty if there are none.

    Args:
        is_named: whether the command line names this file.
    """
    if out.exists():
        return f"all results are in {out}"
    num_done = len(kept_results(out).lines)
    if not num_done:
        return ""
    command = "the same command" if is_named else f"the same command with --out {out}"
    return f"{num_done} of {num_prompts} prompts are done: {command} resumes"


@contextmanager
def stdout_is_stderr() -> Iterator[None]:
    """Redirect output of the ranks and their libraries to stderr: stdout is for results."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(own, 1)
        os.close(own)


def copy_to_stdout(path: Path) -> None:
    """Write a file's content to standard output."""
    try:
        with path.open("rb") as file:
            shutil.copyfileobj(file, sys.stdout.buffer)
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # otherwise Python complains again while closing it
        raise UserError(
            "generate-stdout-not-writable",
            "the results can't be written to standard output",
            found=f"--out -: {error.strerror}",
            why="its reader has exited, or its disk is full",
            fix=f"all results are in {path}",
            exit_code=_BROKEN_PIPE if error.errno == errno.EPIPE else 1,
        ) from None
