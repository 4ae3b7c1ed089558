"""Errors of the system that no verb answers by itself, in the form of all other errors."""

from __future__ import annotations

import errno
import os
import traceback

from zerofit.core.errors import UserError

_FIX_OF_ERRNO = {
    errno.ENAMETOOLONG: "use a shorter name: file systems allow 255 bytes, and 4,096 for a whole path",
    errno.ENOSPC: "free space there, or use a folder on another disk",
    errno.EDQUOT: "free space there, or use a folder on another disk",
    errno.EACCES: "ls -ld the path; use one that this user may read and write",
    errno.EPERM: "ls -ld the path; use one that this user may read and write",
    errno.EROFS: "use a folder that can be written",
    errno.EMFILE: "raise the limit of open files: ulimit -n 65535",
    errno.ENFILE: "close other programs: the system's limit of open files is reached",
    errno.ELOOP: "ls -l the path: its links lead in a circle",
    errno.EIO: "df -h and dmesg show the state of the disk; use another one",
    errno.ENOMEM: "free memory shows what is left; end other programs",
}
"""What helps against errors of the system that no verb answers by itself."""


def refused_by_system(error: Exception) -> UserError | None:
    """Return the answer to an error of files, processes or encodings that no verb answers by itself.

    Returns:
        None for any other error, which is our own.
    """
    if isinstance(error, RuntimeError) and _is_of_pathlib(error):  # a circle of links, or no home folder
        error = OSError(errno.ELOOP if "loop" in str(error) else errno.ENOENT, str(error), "")
    elif isinstance(error, ValueError) and str(error).startswith("embedded null"):
        error = OSError(errno.EINVAL, "a name has a null byte", "")
    if isinstance(error, UnicodeError):
        return UserError(
            "not-utf-8",
            "a text or a name is not UTF-8",
            found=str(error),
            why="zerofit reads and writes UTF-8; names of other encodings are passed on where possible",
            fix="rename the file, or write it as UTF-8: iconv -f latin1 -t utf-8 FILE",
        )
    if not isinstance(error, OSError):
        return None
    if error.errno == errno.ENOENT and error.filename is None:
        return UserError(
            "folder-gone",
            "the current folder no longer exists",
            found=error.strerror or str(error),
            why="it was removed or moved after this shell went there",
            fix="cd into a folder that exists",
        )
    names = (name for name in (error.filename, error.filename2) if name and isinstance(name, str | bytes))
    return UserError(
        "refused-by-system",
        "the system refuses what this command needs",
        found=": ".join((error.strerror or str(error), *(os.fsdecode(name) for name in names))),
        why="a file, a folder or a process can't be used; --debug shows by which step",
        fix=_FIX_OF_ERRNO.get(error.errno or 0, "check that the path exists and is what the command expects"),
    )


def _is_of_pathlib(error: RuntimeError) -> bool:
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(modules) and modules[-1].partition(".")[0] == "pathlib"
