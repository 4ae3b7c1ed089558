"""A command line typed again with some flags changed."""

from __future__ import annotations

import pytest

from zerofit.planning.sources.typed_line import TypedFlag, TypedLine


def _flag(name: str, words: str) -> TypedFlag:
    return TypedFlag(name=name, words=tuple(words.split()))


_LINE = TypedLine(
    verb=("zerofit", "plan"),
    flags=(
        _flag("gpus", "--gpus 1xL4"),
        _flag("sequence_length", "--seq-len 512"),
        _flag("module", "-m"),
    ),
    script=("package.train", "--name", "a b"),
)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ([], "zerofit plan --gpus 1xL4 --seq-len 512 -m package.train --name 'a b'"),
        (
            [_flag("allow", "--allow lora")],
            "zerofit plan --gpus 1xL4 --seq-len 512 --allow lora -m package.train --name 'a b'",
        ),
        (
            [_flag("gpus", "--gpus 8xL4")],
            "zerofit plan --seq-len 512 --gpus 8xL4 -m package.train --name 'a b'",
        ),
        ([_flag("sequence_length", "")], "zerofit plan --gpus 1xL4 -m package.train --name 'a b'"),
    ],
)
def test_a_change_leaves_the_other_flags_and_the_script(changes: list[TypedFlag], line: str) -> None:
    assert str(_LINE.changed(changes)) == line


def test_without_a_line_there_is_the_flag_alone() -> None:
    assert not TypedLine()
    assert TypedLine().with_capture_limit(90) == "--capture-limit 90"
    assert "--seq-len 512 --capture-limit 90 -m package.train" in _LINE.with_capture_limit(90)
