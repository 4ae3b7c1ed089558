"""What a captured script does to files is undone, byte for byte; what can't be undone is not done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from zerofit.scripts.capture.child.confinement import kernel_version
from zerofit.scripts.capture.journal import read_entries, read_paths
from zerofit.scripts.capture.restore_files import UndoResult
from zerofit.scripts.capture.restore_files import undo as undo_until

_CHILD = """
import sys
from pathlib import Path
from zerofit.scripts.capture.child.files import guard
guard(Path(sys.argv[1]))
exec(compile(Path(sys.argv[2]).read_text(), sys.argv[2], "exec"))
"""


def undo(folder: Path) -> UndoResult:
    """Undo a capture that ends now."""
    return undo_until(folder, ended_ns=time.time_ns())


class Place:
    """A user's folder, a cache and a capture's folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.work, self.folder, self.cache = root / "work", root / "folder", root / "work" / "cache"
        for path in (self.work, self.folder, self.cache):
            path.mkdir()
        spec = {"roots": [str(self.work)], "caches": [str(self.cache), str(root)]}
        (self.folder / "spec.json").write_text(json.dumps(spec))

    def run(self, script: str, *, before: str = "") -> subprocess.CompletedProcess[str]:
        (self.root / "script.py").write_text(textwrap.dedent(script))
        command = (
            sys.executable,
            "-c",
            textwrap.dedent(before) + _CHILD,
            str(self.folder),
            str(self.root / "script.py"),
        )
        return subprocess.run(command, cwd=self.work, capture_output=True, text=True)

    def seen(self) -> dict[str, tuple[object, ...]]:
        """Every path with its kind, rights, time and content; folders without their time."""
        found: dict[str, tuple[object, ...]] = {}
        for path in sorted(self.work.rglob("*")):
            status = path.lstat()
            name = str(path.relative_to(self.work))
            if path.is_symlink():
                found[name] = ("link", os.readlink(path))
            elif path.is_dir():
                found[name] = ("folder", status.st_mode)
            else:
                found[name] = (
                    "file",
                    status.st_mode,
                    status.st_mtime_ns,
                    path.read_bytes() if status.st_size < 1000 else status.st_size,
                )
        return found


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


_EVERYTHING = """
import multiprocessing, os, pathlib, shutil, sqlite3, tempfile
open("written.txt", "w").write("new")
with open("log.txt", "a") as log:
    log.write("more")
with open("log.txt", "a") as log:
    log.truncate(0)
with open("changed.bin", "r+b") as file:
    file.write(b"xx")
open(b"bytes.txt", "w").close()
open(pathlib.Path("path.txt"), "w").close()
os.truncate("cut.txt", 1)
os.close(os.open("opened.txt", os.O_WRONLY | os.O_TRUNC))
pathlib.Path("touched.txt").touch()
os.chmod("rights.txt", 0o600)
open("linked.txt", "w").write("through the link")
with open("atomic.tmp", "w") as file:
    file.write("whole")
os.replace("atomic.tmp", "atomic.txt")
database = sqlite3.connect("runs.db")
database.execute("create table more (x)")
database.close()
os.rmdir("empty")
os.makedirs("empty")
os.rmdir("gone")
os.makedirs("out/run-1/deep")
open("out/run-1/deep/state.txt", "w").write("state")
os.rename("out/run-1", "out/run-2")
open("out/run-2/more.txt", "w").close()
shutil.copytree("out/run-2", "out/copy")
shutil.rmtree("out/copy")
shutil.copy("log.txt", "copied.txt")
shutil.move("copied.txt", "moved.txt")
os.remove("moved.txt")
os.symlink("log.txt", "out/link")
os.link("log.txt", "out/hard")
os.link("hard.txt", "out/harder")
os.rename("out/harder", "out/hardest")
os.link("out/hardest", "again.txt")
open("again.txt", "w").write("through a hard link")
here = os.open("out", os.O_RDONLY)
os.mkdir("inside", dir_fd=here)
open("made.txt", "w").close()
open("made.txt", "w").write("twice")
with open("big.txt", "w") as file:
    file.truncate(3 << 30)
open("big.txt", "r+").close()

def work(number):
    open(f"shard-{number}.txt", "w").close()
    open("written.txt", "a").write("from a worker")

with multiprocessing.get_context("fork").Pool(2) as pool:
    pool.map(work, range(4))
"""


def test_everything_is_put_back(place: Place) -> None:
    names = "written log changed.bin bytes path cut opened touched rights atomic target hard"
    for name in names.split():
        (place.work / (name if "." in name else f"{name}.txt")).write_text(f"what {name} holds\n")
    (place.work / "linked.txt").symlink_to("target.txt")
    (place.work / "empty").mkdir()
    (place.work / "gone").mkdir(mode=0o700)
    (place.work / "runs.db").write_bytes(b"")
    os.utime(place.work / "log.txt", ns=(1, 2))
    before = place.seen()
    done = place.run(_EVERYTHING)
    assert done.stderr == ""
    assert done.returncode == 0
    assert place.seen() != before
    undone = undo(place.folder)
    assert (undone.left, undone.lost, undone.newer) == ((), (), ())
    assert place.seen() == before
    undone = undo(place.folder)
    assert (undone.left, undone.lost, undone.newer) == ((), (), ())
    assert place.seen() == before


def test_caches_stay_as_the_script_leaves_them(place: Place) -> None:
    (place.work / "data").mkdir()
    (place.cache / "old.arrow").write_text("old")
    done = place.run(
        """
        import os
        open("cache/new.arrow", "w").close()
        os.remove("cache/old.arrow")
        open("data/tmp1", "w").close()
        os.rename("data/tmp1", "data/cache-0123.arrow")
        os.makedirs("__pycache__", exist_ok=True)
        open("__pycache__/train.cpython-311.pyc", "w").close()
        open("../beside.txt", "w").close()
        """
    )
    assert done.returncode == 0, done.stderr
    assert undo(place.folder) == UndoResult()
    assert sorted(str(path.relative_to(place.work)) for path in place.work.rglob("*")) == [
        "__pycache__",
        "__pycache__/train.cpython-311.pyc",
        "cache",
        "cache/new.arrow",
        "data",
        "data/cache-0123.arrow",
    ]
    assert (place.root / "beside.txt").exists()


_REFUSED = [
    ("pathlib.Path('log.txt').unlink()", "it would remove {work}/log.txt"),
    ("os.rename('runs', 'old')", "it would rename {work}/runs"),
    ("shutil.rmtree('runs')", "it would remove {work}/runs/1.txt"),
    ("shutil.move('runs/1.txt', '2.txt')", "it would rename {work}/runs/1.txt"),
    ("open('huge.bin', 'ab')", "it would overwrite {work}/huge.bin, of 1073741825 bytes"),
    ("os.remove('link')", "it would remove {work}/link"),
]


@pytest.mark.parametrize(("line", "message"), _REFUSED, ids=[line for line, _ in _REFUSED])
def test_what_would_lose_a_file_is_not_done(place: Place, line: str, message: str) -> None:
    (place.work / "log.txt").write_text("log")
    (place.work / "link").symlink_to("log.txt")
    (place.work / "runs").mkdir()
    (place.work / "runs" / "1.txt").write_text("1")
    with (place.work / "huge.bin").open("wb") as file:
        file.truncate((1 << 30) + 1)
    names = sorted(path.name for path in place.work.rglob("*"))
    done = place.run(
        f"import os, pathlib, shutil\ntry:\n    {line}\nexcept BaseException:\n    pass\nprint('on')"
    )
    assert (done.returncode, done.stdout, done.stderr) == (70, "", "")
    assert json.loads((place.folder / "refused.json").read_text()) == {
        "kind": "would-overwrite",
        "message": message.format(work=place.work),
        "where": "script.py:3",
    }
    undo(place.folder)
    assert sorted(path.name for path in place.work.rglob("*")) == names
    assert (place.work / "huge.bin").stat().st_size == (1 << 30) + 1


def test_a_program_that_is_not_known_to_be_harmless_is_not_started(place: Place) -> None:
    (place.work / "log.txt").write_text("log")
    line = "os.system('ls && rm log.txt')"
    done = place.run(f"import os, subprocess, sys\nsys.stdout = object()\nos.system('ls')\n{line}")
    assert (done.returncode, done.stderr) == (70, "")
    told = json.loads((place.folder / "refused.json").read_text())
    assert (told["kind"], told["message"]) == ("spawns", "it starts another program: ls && rm log.txt")
    assert (place.work / "log.txt").exists()


@pytest.mark.skipif(not kernel_version(), reason="the kernel has no Landlock")
@pytest.mark.parametrize(
    "start",
    [
        "os.system(shlex.join(command))",
        "subprocess.run(command)",
        "subprocess.run(command, close_fds=False)",
        "os.waitpid(os.posix_spawn(sys.executable, command, os.environ), 0)",
    ],
)
def test_a_program_that_is_allowed_unexamined_loses_no_file(place: Place, start: str) -> None:
    (place.work / "log.txt").write_text("log")
    done = place.run(
        f"""
        import os, shlex, subprocess, sys
        command = [sys.executable, "-c", "open('cache/a', 'w'), __import__('os').remove('log.txt')"]
        {start}
        open("own.txt", "w").close()
        os.remove("own.txt")
        """
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert "PermissionError: [Errno 13] Permission denied: 'log.txt'" in done.stderr
    assert {path.name for path in place.work.iterdir()} == {"cache", "log.txt"}
    assert (place.cache / "a").exists()


def test_a_file_that_the_script_did_not_make_is_not_taken_for_its_own(place: Place) -> None:
    done = place.run(
        """
        try:
            open("later.txt", "r+")
        except FileNotFoundError:
            pass
        """
    )
    assert done.returncode == 0, done.stderr
    (place.work / "later.txt").write_text("by somebody else")
    undo(place.folder)
    assert (place.work / "later.txt").exists()


def test_modules_of_a_project_are_read_and_installed_ones_are_not(place: Place) -> None:
    """A project may lie below the interpreter's prefix, and its environment in the project."""
    (place.work / "helper.py").write_text("x = 1")
    packages = place.work / "venv" / "lib" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "package.py").write_text("y = 1")
    done = place.run(
        f"""
        import sys
        sys.path[:0] = [{str(place.work)!r}, {str(packages)!r}]
        import helper, package
        """,
        before=f"""
        import sys, sysconfig
        sys.prefix = sys.base_prefix = {str(place.root)!r}
        paths = sysconfig.get_paths() | {{"purelib": {str(packages)!r}, "data": sys.prefix}}
        sysconfig.get_paths = lambda: paths
        """,
    )
    assert done.returncode == 0, done.stderr
    assert [*read_paths(place.folder)] == [str(place.work / "helper.py")]


def test_a_made_folder_with_something_nobody_noted_stays_and_is_told(place: Place) -> None:
    done = place.run("import os\nos.mkdir('out')\nopen('out/a', 'w').close()\nos.system('cd out; touch b')")
    assert done.returncode == 0, done.stderr
    assert undo(place.folder).left == (str(place.work / "out"),)
    assert [path.name for path in (place.work / "out").iterdir()] == ["b"]


_NATIVE = """
import numpy, pyarrow, pyarrow.csv, pyarrow.feather, pyarrow.parquet, torch
import safetensors.numpy, safetensors.torch
from tokenizers import Tokenizer, models
for name in ("old", "new"):
    torch.save({"a": torch.ones(3)}, f"{name}.pt")
    safetensors.torch.save_file({"a": torch.ones(3)}, f"{name}.torch")
    safetensors.numpy.save_file({"a": numpy.ones(3)}, filename=f"{name}.numpy")
    Tokenizer(models.BPE()).save(f"{name}.json")
    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), f"{name}.parquet")
    pyarrow.feather.write_feather(pyarrow.table({"a": [1]}), f"{name}.feather")
    pyarrow.csv.write_csv(pyarrow.table({"a": [1]}), f"{name}.csv")
    with pyarrow.OSFile(f"{name}.os", "wb") as file:
        file.write(b"new")
    with pyarrow.output_stream(f"{name}.stream") as file:
        file.write(b"new")
    torch.from_file(f"{name}.mapped", shared=True, size=8, dtype=torch.uint8).fill_(7)
    torch.UntypedStorage.from_file(f"{name}.storage", True, 8).fill_(7)
"""


@pytest.mark.slow
def test_what_native_code_writes_is_put_back_too(place: Place) -> None:
    kinds = "pt torch numpy json parquet feather csv os stream mapped storage"
    ends = kinds.split()
    for end in ends:
        (place.work / f"old.{end}").write_text(f"the old {end}")
    before = place.seen()
    done = place.run(_NATIVE)
    assert done.returncode == 0, done.stderr
    assert len(place.seen()) == len(before) + len(ends)
    undo(place.folder)
    assert place.seen() == before


_H5PY = """
import ctypes, os
class File:
    def __init__(self, name, mode="r"):
        if mode == "w":
            libc = ctypes.CDLL(None)
            file = libc.open(name.encode(), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            assert libc.write(file, b"new", 3) == 3
            libc.close(file)
"""
"""A package that is not there in tests; what writes is compiled code, unseen."""


def test_what_a_package_writes_that_is_not_here_is_put_back_too(place: Place) -> None:
    (place.root / "h5py" / "_hl").mkdir(parents=True)
    (place.root / "h5py" / "_hl" / "files.py").write_text(_H5PY)
    for name in ("old.h5", "read.h5"):
        (place.work / name).write_text("the old one")
    before = place.seen()
    done = place.run(
        f"""
        import sys
        sys.path.insert(0, {str(place.root)!r})
        from h5py._hl.files import File
        File("old.h5", "w"), File("new.h5", mode="w"), File("read.h5")
        """
    )
    assert done.returncode == 0, done.stderr
    assert len(place.seen()) == len(before) + 1
    assert [entry.path for entry in read_entries(place.folder)[0] if "read.h5" in entry.path] == []
    undo(place.folder)
    assert place.seen() == before
