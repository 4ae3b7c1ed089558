"""Scripts that write in every way that we know: their captures change nothing, with Landlock and without."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
from pathlib import Path
from typing import Any

import pytest

from zerofit.core.errors import UserError
from zerofit.scripts.capture.child.confinement import LANDLOCK, kernel_version

_KEEPS = ""
"""The script is captured, and what it wrote is undone."""
_LOSES = "capture-would-overwrite"
_SPAWNS = "capture-spawns"
_RAISES = "capture-no-training"
"""As the process that stands in says of any exception."""
_SCRIPTS: dict[str, tuple[str, str, str]] = {
    "append": ("open('log.txt', 'a').write('more')", _KEEPS, _KEEPS),
    "truncate": ("open('log.txt', 'w').close(); os.truncate('data.bin', 3)", _KEEPS, _KEEPS),
    "pathlib": ("pathlib.Path('log.txt').write_text('x'); pathlib.Path('new').touch()", _KEEPS, _KEEPS),
    "mmap": (
        "file = open('data.bin', 'r+b'); m = mmap.mmap(file.fileno(), 0); m[0:2] = b'zz'; m.flush()",
        _KEEPS,
        _KEEPS,
    ),
    "memmap": ("import numpy; a = numpy.memmap('data.bin', mode='r+'); a[:] = 7; a.flush()", _KEEPS, _KEEPS),
    "times kept": (
        "before = os.stat('log.txt'); open('log.txt', 'r+').write('L'); "
        "os.utime('log.txt', ns=(before.st_atime_ns, before.st_mtime_ns))",
        _KEEPS,
        _KEEPS,
    ),
    "raw file": ("io.FileIO('log.txt', 'r+').write(b'raw')", _KEEPS, _KEEPS),
    "dir_fd": (
        "sub = os.open('sub', os.O_RDONLY); file = os.open('in.txt', os.O_WRONLY | os.O_TRUNC, dir_fd=sub); "
        "os.write(file, b'x'); os.close(os.open('new', os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=sub))",
        _KEEPS,
        _KEEPS,
    ),
    "replace": ("open('t', 'w').write('t'); os.replace('t', 'log.txt')", _KEEPS, _KEEPS),
    "write, replace, write": (
        "open('log.txt', 'w').write('a'); open('t', 'w').write('t'); os.replace('t', 'log.txt'); "
        "open('log.txt', 'a').write('b')",
        _KEEPS,
        _KEEPS,
    ),
    "replace by dir_fd": (
        "sub = os.open('sub', os.O_RDONLY); open('t', 'w').close(); "
        "os.replace('t', 'in.txt', dst_dir_fd=sub)",
        _KEEPS,
        _KEEPS,
    ),
    "unlink": ("os.unlink('log.txt')", _LOSES, _LOSES),
    "unlink by dir_fd": ("os.unlink('in.txt', dir_fd=os.open('sub', os.O_RDONLY))", _LOSES, _LOSES),
    "rmtree": ("shutil.rmtree('sub')", _LOSES, _LOSES),
    "mkdir": ("os.makedirs('out/deep'); open('out/deep/x', 'w').close(); os.rmdir('empty')", _KEEPS, _KEEPS),
    "chmod": (
        "os.chmod('log.txt', 0o600); os.chmod('sub', 0o700); "
        "data = open('data.bin'); os.fchmod(data.fileno(), 0o600)",
        _KEEPS,
        _KEEPS,
    ),
    "chown": ("os.chown('log.txt', 1, 1); os.chown('sub', 1, 1)", _KEEPS, _KEEPS),
    "utime": ("os.utime('log.txt', (1, 1)); os.utime('sub', (1, 1))", _KEEPS, _KEEPS),
    "xattr": ("os.setxattr('log.txt', 'user.x', b'1')", _LOSES, _LOSES),
    "symlink": ("os.symlink('log.txt', 'link'); open('link', 'a').write('through it')", _KEEPS, _KEEPS),
    "hard link": ("os.link('log.txt', 'link'); open('link', 'a').write('through it')", _KEEPS, _KEEPS),
    "pipe": ("open('pipe', 'w')", _LOSES, _LOSES),
    "its own pipe": (
        "os.mkfifo('p'); threading.Thread(target=lambda: open('p', 'w').write('x')).start(); "
        "open('log.txt', 'a').write(open('p').read())",
        _KEEPS,
        _KEEPS,
    ),
    "copy and move": (
        "shutil.copy('data.bin', 'log.txt'); shutil.copy2('data.bin', 'c'); shutil.move('c', 'sub/c')",
        _KEEPS,
        _KEEPS,
    ),
    "sendfile": (
        "to = os.open('log.txt', os.O_RDWR); source = os.open('data.bin', os.O_RDONLY); "
        "os.sendfile(to, source, 0, 4); os.copy_file_range(source, to, 4)",
        _KEEPS,
        _KEEPS,
    ),
    "tmpfile": (
        "file = os.open('.', os.O_TMPFILE | os.O_RDWR, 0o600); os.write(file, b'x'); "
        "os.link(f'/proc/self/fd/{file}', 'linked', src_dir_fd=file)",
        _KEEPS,
        _KEEPS,
    ),
    "tempfile": ("tempfile.NamedTemporaryFile(dir='.', delete=False).write(b'x')", _KEEPS, _KEEPS),
    "deleted tempfile": ("tempfile.NamedTemporaryFile(dir='.').write(b'x')", _KEEPS, _KEEPS),
    "logging": ("logging.FileHandler('log.txt').emit(logging.makeLogRecord({'msg': 'm'}))", _KEEPS, _KEEPS),
    "zipfile": ("zipfile.ZipFile('data.zip', 'a').writestr('b', 'b')", _KEEPS, _KEEPS),
    "sqlite": ("write_rows('data.db')", _KEEPS, _KEEPS),
    "sqlite URI": ("write_rows('file:data.db?mode=rwc', uri=True)", _KEEPS, _KEEPS),
    "sqlite WAL": ("write_rows('data.db', 'pragma journal_mode=wal')", _KEEPS, _KEEPS),
    "sqlite ATTACH": (
        "write_rows(':memory:', \"attach 'data.db' as main2\", table='main2.t')",
        _KEEPS,
        _KEEPS,
    ),
    "shelve": ("import shelve; s = shelve.open('shelf'); s['a'] = 2; s.close()", _LOSES, _LOSES),
    "dbm": ("import dbm; d = dbm.open('shelf', 'c'); d['b'] = 'x'; d.close()", _LOSES, _LOSES),
    "torch": ("import torch; torch.save(torch.ones(2), 'data.bin'); torch.save(1, 'm.pt')", _KEEPS, _KEEPS),
    "C library": (
        "libc = ctypes.CDLL(None); f = libc.open(b'log.txt', os.O_WRONLY | os.O_TRUNC); assert f >= 0",
        _RAISES,
        _LOSES,
    ),
    "chmod of the C library": ("ctypes.CDLL(None).chmod(b'log.txt', 0o600)", _LOSES, _LOSES),
    "shell": ("subprocess.run('echo x >> log.txt', shell=True)", _SPAWNS, _SPAWNS),
    "posix_spawn": ("os.posix_spawn('/bin/rm', ['rm', 'log.txt'], os.environ)", _SPAWNS, _SPAWNS),
    "mkdir and touch": ("os.system('mkdir -p out/a && touch out/a/b log.txt')", _KEEPS, _KEEPS),
    "process": (
        "p = multiprocessing.get_context('fork').Process(target=lambda: open('log.txt', 'a').write('x')); "
        "p.start(); p.join(); assert p.exitcode == 0",
        _KEEPS,
        _KEEPS,
    ),
    "cache": ("open(os.environ['HOME'] + '/.cache/mine/state.txt', 'a').write('x')", _KEEPS, _KEEPS),
    "new in a cache": ("open(os.environ['HOME'] + '/.cache/mine/new.txt', 'a').write('x')", _KEEPS, _KEEPS),
    "elsewhere": ("open(os.environ['HOME'] + '/other.txt', 'a').write('x')", _KEEPS, _KEEPS),
    "shared memory": ("multiprocessing.RawArray('i', 4); multiprocessing.Lock()", _KEEPS, _KEEPS),
}
"""Each with the rule of the error by which its capture ends, with Landlock and without."""
_HEAD = """
import ctypes, io, logging, mmap, multiprocessing, os, pathlib, shutil, sqlite3, subprocess, tempfile
import threading, zipfile
import training

def write_rows(name, *first, table="t", **options):
    database = sqlite3.connect(name, **options)
    for line in first:
        database.execute(line)
    database.execute(f"delete from {table}")
    database.commit()
    print("wrote rows")

"""
_QUICK_WITHOUT = {
    *("dir_fd", "pipe", "sqlite ATTACH", "replace", "C library"),
}
"""Scripts that a quick test captures without Landlock, too."""
_LIKE_ANOTHER = {
    *("torch", "pathlib", "memmap", "raw file", "write, replace, write", "replace by dir_fd", "zipfile"),
    *("unlink by dir_fd", "copy and move", "deleted tempfile", "logging", "sqlite URI", "sqlite WAL", "dbm"),
    *("its own pipe", "new in a cache", "utime", "chmod of the C library"),
    *("process", "sqlite", "shell", "times kept", "truncate", "hard link", "mkdir and touch", "sendfile"),
    *("elsewhere", "chmod", "shared memory"),
}
"""Scripts that write by the calls by which another one does."""


def _is_quick(name: str, *, is_confined: bool) -> bool:
    return name in _QUICK_WITHOUT or (is_confined and name not in _LIKE_ANOTHER)


_CASES = [
    pytest.param(name, is_confined, id=f"{name}, {'confined' if is_confined else 'unconfined'}", marks=marks)
    for name in _SCRIPTS
    for is_confined in (True, False)
    for marks in [() if _is_quick(name, is_confined=is_confined) else pytest.mark.slow]
]


def _fill(cwd: Path, home: Path) -> None:
    """Make the files that the scripts write to."""
    for path in (cwd / "sub", cwd / "empty", home / ".cache" / "mine"):
        path.mkdir(parents=True)
    for path in (cwd / "log.txt", cwd / "sub" / "in.txt", home / ".cache" / "mine" / "state.txt"):
        path.write_text("Lines of old\n")
    (home / "other.txt").write_text("other")
    (cwd / "data.bin").write_bytes(bytes(range(64)))
    os.mkfifo(cwd / "pipe")
    with contextlib.closing(sqlite3.connect(cwd / "data.db")) as database:
        database.executescript("create table t (x); insert into t values (1);")
    (cwd / "shelf.dat").write_bytes(b"")  # as dbm.dumb, which each Python has, begins
    (cwd / "shelf.dir").write_bytes(b"")
    for path in cwd.rglob("*"):
        os.utime(path, ns=(10**18, 10**18))


def _state(*folders: Path) -> dict[str, tuple[Any, ...]]:
    """Return all that a capture could change; a folder's time changes with what is made in it."""
    found: dict[str, tuple[Any, ...]] = {}
    for path in (path for folder in folders for path in folder.rglob("*")):
        status = path.lstat()
        is_file = stat.S_ISREG(status.st_mode)
        facts = [status.st_mode, status.st_uid, status.st_gid, status.st_ino, status.st_nlink]
        if is_file:
            facts += [status.st_mtime_ns, path.read_bytes()]
        if stat.S_ISDIR(status.st_mode):
            facts = facts[:3]
        found[str(path)] = tuple(facts)
    return found


def _prepare(workplace: Any, text: str, *, home: Path, is_confined: bool) -> None:
    workplace.write(f"{_HEAD}{text}\ntraining.begin()\n")
    workplace.environment |= {
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "HF_HOME": str(home / ".cache" / "huggingface"),
        LANDLOCK: "1" if is_confined else "0",
    }


@pytest.mark.parametrize(("name", "is_confined"), _CASES)
def test_a_capture_changes_nothing(workplace, tmp_path: Path, name: str, is_confined: bool) -> None:
    if is_confined and not kernel_version():
        pytest.skip("the kernel has no Landlock")
    text, *rules = _SCRIPTS[name]
    home = tmp_path / "home"
    _fill(workplace.cwd, home)
    _prepare(workplace, text, home=home, is_confined=is_confined)
    before = _state(workplace.cwd, home)
    rule = said = ""
    try:
        with workplace.capture():
            pass
    except UserError as error:
        rule, said = error.rule, str(error)
    after = _state(workplace.cwd, home)
    differing = {path: (before.get(path), after.get(path)) for path in before.keys() | after.keys()}
    assert {path: facts for path, facts in differing.items() if facts[0] != facts[1]} == {}
    assert rule == rules[0 if is_confined else 1], said


_COMPILED = "import ssl; ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).keylog_filename = {name!r}"
"""OpenSSL appends a line to an empty file, and nothing in Python says so."""


@pytest.mark.skipif(not kernel_version(), reason="the kernel has no Landlock")
@pytest.mark.parametrize(
    "name",
    [
        "log.txt",
        pytest.param("new.txt", marks=pytest.mark.slow),
        pytest.param("sub/new.txt", marks=pytest.mark.slow),
    ],
)
def test_compiled_code_writes_once_the_file_is_recorded(workplace, tmp_path: Path, name: str) -> None:
    _fill(workplace.cwd, tmp_path / "home")
    (workplace.cwd / "log.txt").write_bytes(b"")
    text = f"{_COMPILED.format(name=name)}; assert os.path.getsize({name!r}) > 0"
    _prepare(workplace, text, home=tmp_path / "home", is_confined=True)
    before = _state(workplace.cwd)
    with workplace.capture() as script:
        assert _state(workplace.cwd) != before
    assert _state(workplace.cwd) == before
    done = "restored" if name == "log.txt" else "removed"
    said = f"after the capture, what the script wrote was undone: {done} {workplace.cwd / name}"
    assert script.left == (said,)


@pytest.mark.slow
def test_compiled_code_that_writes_everywhere_ends_by_name(workplace, tmp_path: Path) -> None:
    if not kernel_version():
        pytest.skip("the kernel has no Landlock")
    text = "\n".join(_COMPILED.format(name=f"{n}/log.txt") for n in range(6))
    for number in range(6):
        workplace.write("", name=f"{number}/log.txt")
    _prepare(workplace, text, home=tmp_path / "home", is_confined=True)
    before = _state(workplace.cwd)
    with pytest.raises(UserError) as caught:
        workplace.capture()
    assert (caught.value.rule, _state(workplace.cwd)) == ("capture-confined", before)


def test_a_change_that_nobody_saw_is_an_error(workplace, tmp_path: Path) -> None:
    workplace.write("", name="log.txt")
    text = f"open('log.txt').read(); {_COMPILED.format(name='log.txt')}"
    _prepare(workplace, text, home=tmp_path / "home", is_confined=False)
    script = workplace.capture()
    with pytest.raises(UserError) as caught:
        script.close()
    assert caught.value.rule == "capture-changed-unseen"
    assert caught.value.found == str(workplace.cwd / "log.txt")
    script.close()
