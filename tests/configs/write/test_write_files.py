"""Files for the user: where one can't be written, none is, and nothing is left over."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerofit.configs.write.write_files import write_files
from zerofit.core.errors import UserError


def test_a_failure_at_the_last_file_leaves_every_file_as_it_was(tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in ("a.json", "b.json", "c.sh"))
    first.write_text("mine\n")
    (tmp_path / ".c.sh.partial").mkdir()
    with pytest.raises(UserError) as error:
        write_files({first: "new\n", second: "new\n", third: "#!/bin/sh\n"}, force=True)
    assert str(error.value) == (
        "error[not-writable]: a file can't be written\n"
        f"  found: Is a directory: {tmp_path}/.c.sh.partial\n"
        "  why:   the folder or file is not writable\n"
        "  fix:   name a writable folder: --output-dir DIR"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [".c.sh.partial", "a.json"]
    assert first.read_text() == "mine\n"


def test_files_are_written_whole_and_scripts_can_be_run(tmp_path: Path) -> None:
    files = {tmp_path / "new/a.json": "{}\n", tmp_path / "new/c.sh": "#!/bin/sh\n"}
    write_files(files, force=False)
    assert {path: path.read_text() for path in (tmp_path / "new").iterdir()} == files
    assert [path.stat().st_mode & 0o777 for path in files] == [0o644, 0o755]
