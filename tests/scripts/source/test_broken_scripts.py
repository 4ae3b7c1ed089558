"""Files that are no script: each gets a clear answer."""

from __future__ import annotations

import contextlib
import random

import pytest

from zerofit.core.errors import Unreadable
from zerofit.scripts.source.read_script import read_script

_SCRIPT = """\
from accelerate import Accelerator
from transformers import AutoModelForCausalLM
accelerator = Accelerator()
model = accelerator.prepare(AutoModelForCausalLM.from_pretrained("gpt2"))
for x in y:
    if accelerator.is_main_process:
        model.save_checkpoint(x)
"""
_DEEP = "the script's expressions or blocks are nested too deep"
_BROKEN = [
    ("x = (\n", "the script is not valid Python: '(' was never closed", 1),
    ("a = 1\n  b = 2\n", "the script is not valid Python: unexpected indent", 2),
    ("x = 1\ny = '\0'\n", "the script contains a NUL character", 2),
    (f"x = {'(' * 3000}{')' * 3000}\n", _DEEP, 1),
    (f"x = {'-' * 100_000}1\n", _DEEP, 1),
    (f"x = a{'.b' * 50_000}\n", _DEEP, 1),
]


@pytest.mark.parametrize(("source", "problem", "line"), _BROKEN, ids=[str(n) for n in range(len(_BROKEN))])
def test_a_broken_script(source: str, problem: str, line: int) -> None:
    with pytest.raises(Unreadable) as caught:
        read_script(source, name="train.py")
    assert (caught.value.problem, caught.value.line) == (problem, line)


@pytest.mark.parametrize(
    "source",
    [
        "",
        "\ufeffx = 1\n",
        f"x = {' + '.join(['1'] * 500)}\n",
        "x = 1\n" * 50_000,
        "if x:\n    pass\n" + "elif y:\n    pass\n" * 40,
        "match x:\n    case {'a': [1, *rest]}:\n        pass\n",
        "async def f():\n    async with a as b:\n        async for c in d:\n            await e\n",
        "x = lambda: (yield)\ntype_ = 1\nglobal x\ndel x\n",
    ],
)
def test_an_unusual_script(source: str) -> None:
    assert read_script(source, name="train.py").calls == ()


def test_pieces_of_a_script_never_end_in_a_traceback() -> None:
    pick = random.Random(0)
    for _ in range(500):
        start, end = sorted(pick.randrange(len(_SCRIPT)) for _ in range(2))
        between = pick.choice(["", "(", "\n", "if ", " ", "é", "=", "x."])
        with contextlib.suppress(Unreadable):
            read_script(_SCRIPT[:start] + between + _SCRIPT[end:], name="train.py")
