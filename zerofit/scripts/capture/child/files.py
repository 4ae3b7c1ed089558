"""Guards the user's files during a capture: changes are recorded, and files copied, beforehand.

Python raises audit events when a file is about to be opened, removed, renamed or created
(https://docs.python.org/3/library/audit_events.html), also in processes forked by the script. Writes of C++
and Rust code are reported if native_files.py knows them, those of SQLite here. Where the kernel has Landlock,
nothing else can write: confinement.py confines the process and the programs that it starts, and
file_calls.py makes recorded calls outside of that. A write that the kernel would deny ends the capture, and
its parent starts it again with that path allowed.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import json
import os
import re
import shutil
import site
import stat
import sys
import sysconfig
import threading
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from zerofit.core.atomic_file import write_whole
from zerofit.scripts.capture.child.confinement import Confinement
from zerofit.scripts.capture.child.file_calls import WILL_MAKE, WRITE_FLAGS, wrap_file_calls
from zerofit.scripts.capture.child.meta_weights import chain_of
from zerofit.scripts.capture.child.native_files import report_native_files
from zerofit.scripts.capture.child.outcome import place_in_script
from zerofit.scripts.capture.child.processes import guard_processes
from zerofit.scripts.capture.journal import (
    COPIES,
    MAX_FILES_READ,
    REFUSED,
    SPEC,
    UNCONFINED,
    Change,
    JournalEntry,
    Stamp,
    append,
    append_read,
    read_entries,
    stamp_of,
)
from zerofit.scripts.on_import import around, when_imported

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

EXIT_REFUSED = 70
"""Exit code of a script that was ended here (EX_SOFTWARE of sysexits.h); REFUSED says why."""
_MAX_COPY_BYTES = 1 << 30
"""The largest user file that is copied before a change. ASSUMPTION: seconds of disk time."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_CACHES_ANYWHERE = ("cache-*.arrow",)
"""Cache files that datasets writes beside a dataset on disk (datasets/arrow_dataset.py,
_get_cache_file_path)."""
_C_TOUCHES = (
    "chmod",
    "chown",
    "fchmod",
    "fchmodat",
    "fchown",
    "fchownat",
    "futimens",
    "lchown",
    "setxattr",
    "utime",
    "utimensat",
    "utimes",
)
"""Functions of the C library that Landlock does not confine."""
_C_WRITES = (
    "creat",
    "creat64",
    "fopen",
    "fopen64",
    "freopen",
    "freopen64",
    "link",
    "linkat",
    "mkdir",
    "mkdirat",
    "mkfifo",
    "mknod",
    "open",
    "open64",
    "openat",
    "openat64",
    "remove",
    "rename",
    "renameat",
    "renameat2",
    "rmdir",
    "symlink",
    "symlinkat",
    "truncate",
    "truncate64",
    "unlink",
    "unlinkat",
)
"""Those that it confines."""
_KERNEL_FOLDERS = ("/dev", "/proc", "/sys")
_SHARED_MEMORY = "/dev/shm"
"""A folder of /dev that may contain users' files."""
_ATTACH = 24
"""SQLITE_ATTACH (https://www.sqlite.org/c3ref/c_alter_table.html)."""
_SQLITE = ("sqlite3.dbapi2", "sqlite3")
"""Modules with a function connect(), each with its own name for it."""
_BESIDE_DATABASE = ("-journal", "-wal", "-shm")
"""Endings of the files beside a database (https://www.sqlite.org/tempfiles.html)."""
_SYSCONFIG_PATHS = ("purelib", "platlib", "stdlib", "platstdlib", "scripts")
"""Of sysconfig; its other paths contain the whole prefix, below which a project may be."""
_SYSTEM_FOLDERS = (
    "/etc",
    "/bin",
    "/sbin",
    "/lib",
    "/usr/bin",
    "/usr/sbin",
    "/usr/lib",
    "/usr/share",
    "/usr/local/bin",
)
"""https://refspecs.linuxfoundation.org/FHS_3.0/fhs/index.html; /usr/src and /usr/local may contain users'
files."""
_QUOTED = re.compile(r"""(?<=['"])[^'"\n]{1,4096}(?=['"])""")
_ZEROFIT = str(Path(__file__).parents[3])


def guard(folder: Path) -> Callable[[BaseException], str]:
    """Record from now on what this process and those forked from it are about to do to files.

    A user's file is copied before it is opened for writing. An irreversible loss ends the process: a file too
    large to copy, or one to be removed or renamed. So does a program that is not known to be harmless.

    Args:
        folder: the capture's own; its spec.json lists under "roots" the folders and files that belong to the
            user, and under "caches" the folders that may change. "allowed", if it is there, lists paths where
            this process may write unseen; "made_caches" those caches that are made if missing.

    Returns:
        A function that returns the path which an error names because this process was kept from writing it,
        or "".
    """
    spec = json.loads((folder / SPEC).read_text(encoding="utf-8"))
    (folder / COPIES).mkdir(exist_ok=True)
    allowed = spec.get("allowed")
    files = _FileGuard(folder.resolve(), roots=spec["roots"], caches=spec["caches"], allowed=allowed or [])
    files.make_caches(spec.get("made_caches", ()))
    files.begin(is_confined=allowed is not None)
    if allowed is not None and (allowed or not files.is_confined):
        (folder / UNCONFINED).touch()
    return files.denied_path


class _FileGuard:
    def __init__(self, folder: Path, *, roots: list[str], caches: list[str], allowed: list[str]) -> None:
        self._folder = folder
        self._roots = [os.path.realpath(path) for path in roots]
        self._caches = [os.path.realpath(path) for path in caches] + [str(folder)]
        self._allowed = [os.path.realpath(path) for path in allowed]
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
        self._confinement: Confinement
        self._events: dict[str, Callable[..., None]] = {
            "open": self._open,
            "os.remove": self._remove,
            "os.rename": self._rename,
            "os.mkdir": self._mkdir,
            "os.rmdir": self._rmdir,
            "os.truncate": self._truncate,
            "os.chmod": lambda path, mode, folder: self._touch(path, folder),
            "os.chown": lambda path, user, group, folder: self._touch(path, folder),
            "os.utime": lambda path, times, ns, folder: self._touch(path, folder),
            "os.setxattr": lambda path, *_: self._before_loss(_resolved(path), "change attributes of"),
            "os.removexattr": lambda path, *_: self._before_loss(_resolved(path), "change attributes of"),
            "os.link": self._link,
            "os.symlink": self._symlink,
            "sqlite3.connect": self._connect,
            WILL_MAKE: self._make,
        }

    def make_caches(self, caches: Sequence[str]) -> None:
        """Make caches that are missing: the kernel only allows to write in folders that exist."""
        for cache in caches:
            folder = Path(cache)
            missing = [path for path in (folder, *folder.parents) if not path.exists()]
            for path in missing:
                append(self._folder, JournalEntry(change=Change.MADE_CACHE, path=os.path.realpath(path)))
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)

    def begin(self, *, is_confined: bool) -> None:
        """Record from now on what is about to happen, and confine the process if asked."""
        places = [path if os.path.exists(path) else _nearest_folder(path) for path in self._allowed]
        self._confinement = Confinement(self._roots, self._caches, places)
        for path in self._allowed:
            if not os.path.isdir(path):
                self._before_write(path)
        sys.addaudithook(self.on_event)
        wrap_file_calls(self._confinement, is_guarding=self._is_busy)
        report_native_files(self._confinement)
        for module in _SQLITE:
            when_imported(module, lambda module: around(module, "connect")(self._watch_attached))
        guard_processes(self.refuse, self._confinement)
        if is_confined:
            self._events["ctypes.dlsym"] = self._find_function
            self._confinement.begin()

    @property
    def is_confined(self) -> bool:
        return self._confinement.is_begun

    def _is_busy(self) -> bool:
        return getattr(self._here, "is_busy", False)

    def on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Handle an audit event, unless the handling of another one caused it."""
        handler = self._events.get(event)
        if handler is None or self._is_busy():
            return
        self._here.is_busy = True
        try:
            handler(*arguments)
        finally:
            self._here.is_busy = False

    def refuse(self, kind: str, message: str, *, path: str = "") -> NoReturn:
        """Record why, and end this process before the event happens."""
        where = place_in_script(self._confinement.caller())
        told = {"kind": kind, "message": message, "where": where} | ({"path": path} if path else {})
        self._here.is_busy = True
        with contextlib.suppress(OSError):  # no room: the parent sees that the folder takes no more
            write_whole(self._folder / REFUSED, json.dumps(told))
        with contextlib.suppress(Exception):  # the script may have replaced it by anything
            sys.stdout.flush()
        os._exit(EXIT_REFUSED)

    def _before_loss(self, path: str, verb: str) -> None:
        """Refuse to remove or rename a user's file or folder; links are not followed."""
        self._check_reach(path)
        if os.path.lexists(path) and self._is_guarded(path) and not self._is_made(path):
            self.refuse("would-overwrite", f"it would {verb} {path}")

    def denied_path(self, error: BaseException) -> str:
        """Return the path that an error names and that only the confinement denies to write, or ""."""
        for step in chain_of(error):
            quoted = _QUOTED.findall(str(step)) if "ermission denied" in str(step) else []
            named = [step.filename, step.filename2] if isinstance(step, PermissionError) else []
            for name in (*named, *quoted):
                path = os.path.realpath(os.fsdecode(name)) if isinstance(name, (str, bytes)) else ""
                place = path if os.path.exists(path) else os.path.dirname(path)
                is_free = os.path.isdir(os.path.dirname(path)) and os.access(place, os.W_OK)
                if path and is_free and self._confinement.is_denied(path):
                    return path
        return ""

    def _check_reach(self, path: str) -> None:
        """End this process if the kernel would deny a write: by compiled code, or in a forked process."""
        is_known = "/__pycache__" in path or not os.path.isdir(os.path.dirname(path))
        if not is_known and self._confinement.is_denied(path):
            self.refuse("confined", f"it would write to {path}", path=path)

    def _open(self, path: Any, mode: str | None, flags: int) -> None:
        if isinstance(path, int):
            return
        named = os.path.abspath(os.fsdecode(path))
        if flags & WRITE_FLAGS:
            if flags & os.O_TMPFILE != os.O_TMPFILE:  # a file without a name; it may get one by os.link()
                self._check_pipe(named)
                self._before_write(os.path.realpath(named), makes=bool(flags & os.O_CREAT))
            return
        if named in self._read or self._num_read > MAX_FILES_READ:
            return
        self._read.add(named)
        self._check_pipe(named)
        whole = os.path.realpath(named)
        self._note_read(whole, is_of_hub=_affects_result(named))
        if whole != named:
            self._note_read(named, is_of_hub=_affects_result(named))

    def _check_pipe(self, path: str) -> None:
        """Refuse to open a user's pipe: the process at its other end would lose or get data."""
        try:
            is_pipe = stat.S_ISFIFO(os.stat(path).st_mode) and os.path.lexists(path)
        except OSError:
            return
        if is_pipe and self._is_guarded(path) and not self._is_made(path):
            self.refuse("would-overwrite", f"it would open {path}, a pipe to another process")

    def _truncate(self, path: Any, length: int) -> None:
        self._before_write(_resolved(path), makes=False)

    def _connect(self, database: Any) -> None:
        name = os.fsdecode(database)
        path, mode = _database_file(name)
        if path is None:
            return
        for place in {path, name} if name.startswith("file:") else {path}:
            file = _resolved(place)
            is_denied = self._confinement.is_denied(os.path.dirname(file))
            if mode == "ro":
                self._note_read(file, is_of_hub=False)
            elif is_denied:
                message = f"it would write to the database {file}"
                self.refuse("confined", message, path=os.path.dirname(file))
            else:
                self._before_write(file)
            for end in () if is_denied else _BESIDE_DATABASE:
                self._before_write(f"{file}{end}")

    def _find_function(self, library: Any, name: Any) -> None:
        """Refuse the C library's functions that change files, where the kernel does not confine them."""
        is_confined = self._confinement.is_begun and not self._allowed
        if name in (_C_TOUCHES if is_confined else {*_C_TOUCHES, *_C_WRITES}):
            self.refuse("would-overwrite", f"it would call {name}() of the C library, unseen by zerofit")

    def _watch_attached(self, connect: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Open a database, and record those that the connection attaches, before it does."""

        def check(action: int, name: str | None, *_: Any) -> int:
            if action == _ATTACH and name is None:
                self.refuse("would-overwrite", "it attaches a database whose name SQLite gets as a parameter")
            if action == _ATTACH and name:
                self.on_event("sqlite3.connect", (name,))
            return 0  # SQLITE_OK

        connection = connect(*args, **kwargs)
        connection.set_authorizer(check)
        return connection

    def _remove(self, path: Any, folder: int) -> None:
        self._before_loss(_unfollowed(path, folder), "remove")

    def _rename(self, path: Any, to: Any, folder: int, to_folder: int) -> None:
        source, target = _unfollowed(path, folder), _unfollowed(to, to_folder)
        self._before_loss(source, "rename")
        if source in self._links:
            self._links[target] = self._links[source]
        if os.path.isfile(target) and not os.path.islink(target):
            self._before_replacement(target)
        elif os.path.lexists(target) and not os.path.isdir(target):
            self._before_loss(target, "replace")
        elif os.path.isdir(source) and not os.path.islink(source):
            self._note_tree(source, target)
        else:
            self._note(Change.MADE, target)

    def _before_replacement(self, path: str) -> None:
        """Keep a user's file, by a hard link, that another one is about to replace; else a copy of it."""
        self._check_reach(path)
        if (path, Change.REPLACED) in self._known or not self._is_guarded(path) or self._is_made(path):
            return
        status = os.stat(path)
        link = self._new_copy()
        try:
            os.link(path, self._folder / COPIES / link)
        except OSError as error:  # another file system, usually
            if status.st_nlink > 1:
                self.refuse("would-overwrite", f"it would replace {path}, which has hard links: {error}")
            self._before_write(path)
            return
        self._note(Change.REPLACED, path, status=status, copy=link)

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

    def _make(self, path: str) -> None:
        """Record a file that may be made once its folder is, or written if it is there."""
        place = _unfollowed(path, -1)
        if os.path.lexists(place):
            self._before_write(os.path.realpath(place))
        else:
            self._note(Change.MADE, place)

    def _rmdir(self, path: Any, folder: int) -> None:
        place = _unfollowed(path, folder)
        if os.path.isdir(place) and not os.listdir(place) and not self._is_made(place):
            self._note(Change.REMOVED_FOLDER, place, status=os.stat(place))

    def _touch(self, path: Any, folder: int) -> None:
        """Record times, permissions and owner that are about to change."""
        place = _resolved(path) if isinstance(path, int) else os.path.realpath(_unfollowed(path, folder))
        if os.path.exists(place) and self._is_guarded(place) and not self._is_made(place):
            self._note(Change.TOUCHED, place, status=os.stat(place))

    def _link(self, source: Any, target: Any, source_folder: int, folder: int) -> None:
        file = os.path.realpath(_unfollowed(source, source_folder))
        self._links[_unfollowed(target, folder)] = self._links.get(file, file)
        self._symlink(source, target, folder)

    def _symlink(self, source: Any, target: Any, folder: int) -> None:
        place = _unfollowed(target, folder)
        if not os.path.lexists(place):
            self._note(Change.MADE, place)

    def _before_write(self, path: str, *, makes: bool = True) -> None:
        """Copy a user's file that is about to be written, or record that it is about to be made."""
        path = self._links.get(path, path)
        self._check_reach(path)
        is_kept = any((path, change) in self._known for change in (Change.KEPT, Change.REPLACED))
        if path in self._made or is_kept or not self._is_guarded(path):
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
        copy = self._new_copy()
        try:
            shutil.copyfile(path, self._folder / COPIES / copy)
        except PermissionError:
            return  # then it can't be written either, or not by its name
        except OSError as error:
            self._drop_copy(copy)
            kind = "no-room" if error.errno in _NO_ROOM else "would-overwrite"
            self.refuse(kind, f"it would overwrite {path}, which can't be copied: {error.strerror}")
        self._note(Change.KEPT, path, status=status, copy=copy)

    def _drop_copy(self, copy: str) -> None:
        """Remove the copy of a file that will not be changed: it takes the room for saying so."""
        with contextlib.suppress(OSError):
            (self._folder / COPIES / copy).unlink()

    def _new_copy(self) -> str:
        self._copies += 1
        return f"{os.getpid()}-{threading.get_ident()}-{self._copies}"

    def _note(
        self, change: Change, path: str, *, status: os.stat_result | None = None, copy: str = ""
    ) -> None:
        if change is not Change.TOUCHED:
            self._check_reach(path)
        if (path, change) in self._known or not self._is_guarded(path):
            return
        entry = JournalEntry(
            change=change, path=path, copy=copy, stamp=stamp_of(status) if status else Stamp()
        )
        try:
            append(self._folder, entry)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            self._drop_copy(copy)
            self.refuse("no-room", f"it would change {path}, which can't be recorded: {error.strerror}")
        self._remember(entry)

    def _remember(self, entry: JournalEntry) -> None:
        self._known.add((entry.path, entry.change))
        was_there = any((entry.path, change) in self._known for change in (Change.KEPT, Change.REPLACED))
        if entry.change in (Change.MADE, Change.MADE_FOLDER) and not was_there:
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
        is_kernels = _innermost(path, _KERNEL_FOLDERS) and not _innermost(path, (_SHARED_MEMORY,))
        if "/__pycache__" in path or is_kernels:
            return False
        if any(fnmatch.fnmatch(name, pattern) for pattern in _CACHES_ANYWHERE):
            return False
        cache = _innermost(path, self._caches)
        return cache == 0 or _innermost(path, self._roots) > cache

    def _note_read(self, path: str, *, is_of_hub: bool) -> None:
        """Record a file that may affect what the script trains, except installed ones."""
        is_code = "/__pycache__/" in path
        if is_code:
            path = _source_of(path)
        installed = _innermost(path, self._installed)
        if installed and installed >= _innermost(path, self._roots):
            return
        if os.path.isfile(path) and (is_code or is_of_hub or self._is_guarded(path)):
            self._num_read += 1
            append_read(self._folder, path, stamp_of(os.stat(path)))


def _affects_result(path: str) -> bool:
    """Return True if a cached file affects the script's result: a configuration, or a hub revision."""
    return os.path.basename(path) == "config.json" or "/refs/" in path


def _source_of(path: str) -> str:
    """Return the module of a bytecode file: a/b.py of a/__pycache__/b.cpython-311.pyc."""
    folder, _, name = path.rpartition("/__pycache__/")
    return os.path.join(folder, name.partition(".")[0] + ".py")


def _resolved(path: Any) -> str:
    """Return the real path of a path or a descriptor."""
    return os.path.realpath(f"/proc/self/fd/{path}" if isinstance(path, int) else os.fsdecode(path))


def _nearest_folder(path: str) -> str:
    return next(str(folder) for folder in Path(path).parents if folder.is_dir())


def _database_file(name: str) -> tuple[str | None, str]:
    """Return the file that SQLite opens for a name or URI, None for one in memory, and the URI's mode.

    Source: https://www.sqlite.org/uri.html
    """
    if not name.startswith("file:"):
        return (None if name in ("", ":memory:") else name), ""
    parts = urllib.parse.urlsplit(name)
    values = dict(urllib.parse.parse_qsl(parts.query))
    path = urllib.parse.unquote(parts.path)
    if path in ("", ":memory:") or values.get("mode") == "memory" or values.get("vfs") == "memdb":
        return None, ""
    return path, "ro" if "immutable" in values else values.get("mode", "")


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
    return max(
        (len(folder) for folder in folders if f"{path}/".startswith(folder.rstrip("/") + "/")), default=0
    )
