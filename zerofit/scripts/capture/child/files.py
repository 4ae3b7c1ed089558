"""Guards the user's files during a capture: changes are recorded, and files copied, beforehand.

Python raises audit events when a file is about to be opened, removed, renamed or created
(https://docs.python.org/3/library/audit_events.html), also in processes forked by the script. Writes of C++
and Rust code are reported if native_files.py knows them. Other programs are not observed: processes.py only
allows harmless ones, and confinement.py confines them where the kernel has Landlock.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import shutil
import site
import stat
import sys
import sysconfig
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from zerofit.core.atomic_file import write_whole
from zerofit.scripts.capture.child.confinement import Confinement
from zerofit.scripts.capture.child.native_files import report_native_files
from zerofit.scripts.capture.child.outcome import place_in_script
from zerofit.scripts.capture.child.processes import guard_processes
from zerofit.scripts.capture.journal import (
    COPIES,
    MAX_FILES_READ,
    REFUSED,
    SPEC,
    Change,
    JournalEntry,
    append,
    append_read,
    read_entries,
)

if TYPE_CHECKING:
    from collections.abc import Callable

EXIT_REFUSED = 70
"""Exit code of a script that was ended here (EX_SOFTWARE of sysexits.h); REFUSED says why."""
_MAX_COPY_BYTES = 1 << 30
"""The largest user file that is copied before a change. ASSUMPTION: seconds of disk time."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CACHES_ANYWHERE = ("cache-*.arrow",)
"""Cache files that datasets writes beside a dataset on disk (datasets/arrow_dataset.py,
_get_cache_file_path)."""
_KERNEL_FOLDERS = ("/dev", "/proc", "/sys")
_SYSCONFIG_PATHS = ("purelib", "platlib", "stdlib", "platstdlib", "scripts")
"""Of sysconfig; its other paths contain the whole prefix, below which a project may be."""
_SYSTEM_FOLDERS = (
    *("/etc", "/bin", "/sbin", "/lib", "/usr/bin", "/usr/sbin", "/usr/lib", "/usr/share", "/usr/local/bin"),
)
"""https://refspecs.linuxfoundation.org/FHS_3.0/fhs/index.html; /usr/src and /usr/local may contain users'
files."""
_ZEROFIT = str(Path(__file__).parents[3])


def guard(folder: Path) -> None:
    """Record from now on what this process and those forked from it are about to do to files.

    A user's file is copied before it is opened for writing. An irreversible loss ends the process: a file too
    large to copy, or one to be removed or renamed. So does a program that is not known to be harmless.

    Args:
        folder: the capture's own; its spec.json lists under "roots" the folders and files that belong to the
            user, and under "caches" the folders that may change.
    """
    spec = json.loads((folder / SPEC).read_text(encoding="utf-8"))
    (folder / COPIES).mkdir(exist_ok=True)
    files = _FileGuard(folder.resolve(), roots=spec["roots"], caches=spec["caches"])
    confinement = Confinement(files.roots, files.caches)
    sys.addaudithook(files.on_event)
    report_native_files()
    guard_processes(files.refuse, confinement)


class _FileGuard:
    def __init__(self, folder: Path, *, roots: list[str], caches: list[str]) -> None:
        self._folder = folder
        self.roots = [os.path.realpath(path) for path in roots]
        self.caches = [os.path.realpath(path) for path in caches] + [str(folder)]
        self._installed = (*_installed_folders(), *_KERNEL_FOLDERS)
        self._made: set[str] = set()
        self._links: dict[str, str] = {}
        """Hard links made by the script, and the file of each."""
        self._known: set[tuple[str, Change]] = set()
        self._read: set[str] = set()
        self._num_read = 0
        self._offset = 0
        self._copies = 0
        self._here = threading.local()
        self._events: dict[str, Callable[..., None]] = {
            "open": self._open,
            "os.remove": self._remove,
            "os.rename": self._rename,
            "os.mkdir": self._mkdir,
            "os.rmdir": self._rmdir,
            "os.truncate": self._truncate,
            "os.chmod": self._touch,
            "os.utime": self._touch,
            "os.link": self._link,
            "os.symlink": self._symlink,
            "sqlite3.connect": self._connect,
        }

    def on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Handle an audit event, unless the handling of another one caused it."""
        handler = self._events.get(event)
        if handler is None or getattr(self._here, "is_busy", False):
            return
        self._here.is_busy = True
        try:
            handler(*arguments)
        finally:
            self._here.is_busy = False

    def refuse(self, kind: str, message: str) -> NoReturn:
        """Record why, and end this process before the event happens."""
        told = {"kind": kind, "message": message, "where": place_in_script(sys._getframe())}
        self._here.is_busy = True
        write_whole(self._folder / REFUSED, json.dumps(told))
        with contextlib.suppress(Exception):  # the script may have replaced it by anything
            sys.stdout.flush()
        os._exit(EXIT_REFUSED)

    def _before_loss(self, path: str, verb: str) -> None:
        """Refuse to remove or rename a user's file or folder; links are not followed."""
        if os.path.lexists(path) and self._is_guarded(path) and not self._is_made(path):
            self.refuse("would-overwrite", f"it would {verb} {path}")

    def _open(self, path: Any, mode: str | None, flags: int) -> None:
        if isinstance(path, int):
            return
        if flags & _WRITES:
            self._before_write(_resolved(path), makes=bool(flags & os.O_CREAT))
            return
        named = os.path.abspath(os.fsdecode(path))
        if named in self._read or self._num_read > MAX_FILES_READ:
            return
        self._read.add(named)
        whole = os.path.realpath(named)
        self._note_read(whole, is_of_hub=_affects_result(named))
        if whole != named:
            self._note_read(named, is_of_hub=_affects_result(named))

    def _truncate(self, path: Any, length: int) -> None:
        self._before_write(
            os.path.realpath(f"/proc/self/fd/{path}") if isinstance(path, int) else _resolved(path),
            makes=False,
        )

    def _connect(self, database: Any) -> None:
        if database not in ("", ":memory:") and not str(database).startswith("file:"):
            self._before_write(_resolved(database))

    def _remove(self, path: Any, folder: int) -> None:
        self._before_loss(_unfollowed(path, folder), "remove")

    def _rename(self, path: Any, to: Any, folder: int, to_folder: int) -> None:
        source, target = _unfollowed(path, folder), _unfollowed(to, to_folder)
        self._before_loss(source, "rename")
        if source in self._links:
            self._links[target] = self._links[source]
        if os.path.lexists(target) and not os.path.isdir(target):
            self._before_write(target)
        elif os.path.isdir(source) and not os.path.islink(source):
            self._note_tree(source, target)
        else:
            self._note(Change.MADE, target)

    def _note_tree(self, source: str, target: str) -> None:
        """Record the contents of a folder created by the capture under their future names."""
        for here, _, names in os.walk(source):
            there = target + here.removeprefix(source)
            self._note(Change.MADE_FOLDER, there)
            for name in names:
                self._note(Change.MADE, os.path.join(there, name))

    def _mkdir(self, path: Any, mode: int, folder: int) -> None:
        place = _unfollowed(path, folder)
        if not os.path.lexists(place):
            self._note(Change.MADE_FOLDER, place)

    def _rmdir(self, path: Any, folder: int) -> None:
        place = _unfollowed(path, folder)
        if os.path.isdir(place) and not os.listdir(place) and not self._is_made(place):
            self._note(Change.REMOVED_FOLDER, place, status=os.stat(place))

    def _touch(self, path: Any, *_: Any) -> None:
        """Back up a file whose times or permissions change; one too large to copy loses only these."""
        if not isinstance(path, int) and os.path.isfile(path) and os.path.getsize(path) <= _MAX_COPY_BYTES:
            self._before_write(_resolved(path))

    def _link(self, source: Any, target: Any, source_folder: int, folder: int) -> None:
        file = os.path.realpath(_unfollowed(source, source_folder))
        self._links[_unfollowed(target, folder)] = self._links.get(file, file)
        self._symlink(source, target, folder)

    def _symlink(self, source: Any, target: Any, folder: int) -> None:
        place = _unfollowed(target, folder)
        if not os.path.lexists(place):
            self._note(Change.MADE, place)

    def _before_write(self, path: str, *, makes: bool = True) -> None:
        path = self._links.get(path, path)
        if path in self._made or (path, Change.KEPT) in self._known or not self._is_guarded(path):
            return
        try:
            status = os.stat(path)
        except OSError:
            if makes and os.path.isdir(os.path.dirname(path)):
                self._note(Change.MADE, path)
            return
        if not stat.S_ISREG(status.st_mode) or self._is_made(path):
            return
        if status.st_size > _MAX_COPY_BYTES:
            self.refuse("would-overwrite", f"it would overwrite {path}, of {status.st_size} bytes")
        self._copies += 1
        copy = f"{os.getpid()}-{threading.get_ident()}-{self._copies}"
        try:
            shutil.copyfile(path, self._folder / COPIES / copy)
        except PermissionError:
            return  # then it can't be written either, or not by its name
        except OSError as error:
            self.refuse(
                "would-overwrite", f"it would overwrite {path}, which can't be copied: {error.strerror}"
            )
        self._note(Change.KEPT, path, status=status, copy=copy)

    def _note(
        self, change: Change, path: str, *, status: os.stat_result | None = None, copy: str = ""
    ) -> None:
        if (path, change) in self._known or not self._is_guarded(path):
            return
        entry = JournalEntry(
            change=change,
            path=path,
            copy=copy,
            size=status.st_size if status else 0,
            mtime_ns=status.st_mtime_ns if status else 0,
            mode=stat.S_IMODE(status.st_mode) if status else 0,
        )
        append(self._folder, entry)
        self._remember(entry)

    def _remember(self, entry: JournalEntry) -> None:
        self._known.add((entry.path, entry.change))
        if entry.change in (Change.MADE, Change.MADE_FOLDER) and (entry.path, Change.KEPT) not in self._known:
            self._made.add(entry.path)

    def _is_made(self, path: str) -> bool:
        """Return True if the capture created a path or one of its parents, possibly in another process."""
        entries, self._offset = read_entries(self._folder, offset=self._offset)
        for entry in entries:
            self._remember(entry)
        return path in self._made or any(str(parent) in self._made for parent in Path(path).parents)

    def _is_guarded(self, path: str) -> bool:
        """Return True if a path belongs to the user; the innermost listed folder around it decides."""
        name = os.path.basename(path)
        if "/__pycache__" in path or path.startswith(_KERNEL_FOLDERS):
            return False
        if any(fnmatch.fnmatch(name, pattern) for pattern in _CACHES_ANYWHERE):
            return False
        cache = _innermost(path, self.caches)
        return cache == 0 or _innermost(path, self.roots) > cache

    def _note_read(self, path: str, *, is_of_hub: bool) -> None:
        """Record a file that may affect what the script trains, except installed ones."""
        is_code = "/__pycache__/" in path
        if is_code:
            path = _source_of(path)
        installed = _innermost(path, self._installed)
        if installed and installed >= _innermost(path, self.roots):
            return
        if os.path.isfile(path) and (is_code or is_of_hub or self._is_guarded(path)):
            self._num_read += 1
            append_read(self._folder, path)


def _affects_result(path: str) -> bool:
    """Return True if a cached file affects the script's result: a configuration, or a hub revision."""
    return os.path.basename(path) == "config.json" or "/refs/" in path


def _source_of(path: str) -> str:
    """Return the module of a bytecode file: a/b.py of a/__pycache__/b.cpython-311.pyc."""
    folder, _, name = path.rpartition("/__pycache__/")
    return os.path.join(folder, name.partition(".")[0] + ".py")


def _resolved(path: Any) -> str:
    return os.path.realpath(os.fsdecode(path))


def _unfollowed(path: Any, folder: int) -> str:
    """Return the absolute path of a path in a folder, -1 for the current one, without following it."""
    text = os.fsdecode(path)
    if folder >= 0:
        text = os.path.join(os.path.realpath(f"/proc/self/fd/{folder}"), text)
    parent, name = os.path.split(text.rstrip("/") or "/")
    return os.path.join(os.path.realpath(parent), name)


def _installed_folders() -> tuple[str, ...]:
    """Return the folders of installed packages, as named and with links resolved."""
    paths = sysconfig.get_paths()
    named = {*(paths[kind] for kind in _SYSCONFIG_PATHS), *site.getsitepackages(), *_SYSTEM_FOLDERS, _ZEROFIT}
    if user := site.getusersitepackages():
        named.add(user)
    return tuple(sorted(named | {os.path.realpath(path) for path in named}))


def _innermost(path: str, folders: tuple[str, ...] | list[str]) -> int:
    """Return the length of the innermost folder that contains a path; 0 if none does."""
    return max((len(one) for one in folders if f"{path}/".startswith(one.rstrip("/") + "/")), default=0)
