"""What is said where results can't be written, continued or put together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.core.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_MOST_NAMED = 5
"""ASSUMPTION: so many prompts show which are missing; more would hide what to do."""


def out_exists(out: Path, *, whole_beside: Path | None = None) -> UserError:
    """Return what is said where there is something at the place of the results.

    Args:
        out: the place.
        whole_beside: the folder of the parts from which an earlier run, killed after that, wrote it whole.
    """
    if whole_beside is not None:
        return UserError(
            "generate-out-exists",
            "all results are there already",
            found=f"{out}: whole; the run that wrote it was killed at its very end",
            why="nothing is left to do, and results are never written over",
            fix=f"rm -r {whole_beside}, which holds the same in parts; to do all anew, name another file",
        )
    return UserError(
        "generate-out-exists",
        "the file for the results is there already",
        found=f"{out}: {_kind(out)}",
        why="it may hold results of yours, and they are never written over",
        fix="write to another file, or move that one away",
    )


def _kind(path: Path) -> str:
    if path.is_dir():
        return "a folder"
    return "a link to nothing" if path.is_symlink() and not path.exists() else "a file"


def not_ours(parts: Path) -> UserError:
    """Return what is said where a folder of the user's has the name of the one for unfinished results."""
    return UserError(
        "generate-parts-not-zerofits",
        "the folder for unfinished results is another's",
        found=f"{parts}: it holds no job.json of `zerofit generate`",
        why="results are kept there until all are done, and the folder is removed then",
        fix="write the results to another file, or move that folder away",
    )


def other_job(parts: Path, *, why: str) -> UserError:
    """Return what is said where unfinished results are those of another job.

    Args:
        parts: their folder.
        why: in what they differ.
    """
    return UserError(
        "generate-other-parts",
        "the unfinished results there are those of another run",
        found=f"{parts}: {why}",
        why="a file would get results of two kinds",
        fix=f"write the results to another file, or, if you don't need the unfinished ones: rm -r {parts}",
    )


def unfinished(parts: Path) -> UserError:
    """Return what is said where a run that was not asked to resume finds unfinished results."""
    return UserError(
        "generate-parts-exist",
        "there are unfinished results of an earlier run",
        found=str(parts),
        why="they would be continued with resume=True only",
        fix=f"pass resume=True, write to another file, or, if you don't need them: rm -r {parts}",
    )


def in_use(parts: Path) -> UserError:
    """Return what is said where another run is writing the same results."""
    return UserError(
        "generate-out-in-use",
        "another run is writing these results",
        found=f"{parts / 'job.json'} is locked by a living process",
        why="two runs would do each prompt twice",
        fix="wait for it, end it, or write the results to another file",
    )


def not_writable(path: Path, error: OSError) -> UserError:
    """Return what is said where the system refuses to write.

    Args:
        path: what was to be written.
        error: the system's.
    """
    return UserError(
        "generate-out-not-writable",
        "the results can't be written",
        found=f"{error.strerror}: {path}",
        why="each result is written as it comes, beside the file that all go into at the end",
        fix="name a file in a folder that is there, can be written and has room; what was written is kept, "
        "and the same command goes on from it",
    )


def not_shared(parts: Path, *, rank: int) -> UserError:
    """Return what is said where a rank does not see the folder that rank 0 made.

    Args:
        parts: the folder.
        rank: the one that does not see it.
    """
    return UserError(
        "generate-out-not-shared",
        "not every rank sees the folder of the results",
        found=f"{parts}: rank 0 made it, rank {rank} does not see it as rank 0 does",
        why="each rank writes its results there, and rank 0 puts them together",
        fix="name a file on a file system that all nodes share",
    )


def incomplete(parts: Path, *, missing: Sequence[int], num_prompts: int) -> UserError:
    """Return what is said where results are missing though all ranks have ended.

    Args:
        parts: the folder with what there is.
        missing: indices of the prompts without results.
        num_prompts: all of them.
    """
    named = ", ".join(map(str, missing[:_MOST_NAMED])) + (", ..." if len(missing) > _MOST_NAMED else "")
    return UserError(
        "generate-results-missing",
        "not every prompt has its result on this file system",
        found=f"{len(missing)} of {num_prompts} results are not in {parts}: of prompts {named}",
        why="rank 0 puts the results of all ranks together, and does not see those of some",
        fix="name a file on a file system that all nodes share; what is there is kept, and the same command "
        "does the rest",
        exit_code=1,
    )
