"""How long a training loop runs, read where its first forward pass is called."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from zerofit.core.capture import CapturedLoop
from zerofit.scripts.capture.child.loop_length import captured_loop

_HEAD = """
import math
from types import SimpleNamespace
args = SimpleNamespace(epochs=3, max_train_steps=None, max_steps=500, limit=None, start=0)
"""


class _Reached(Exception):  # noqa: N818 - it is what a test waits for
    """The first forward pass was called."""


class _Loader(list[int]):
    """Stands for a DataLoader of 40 batches, of which a loop reads the first."""

    dataset = range(80)

    def __init__(self) -> None:
        super().__init__(range(40))


def _read(place: Path, script: str, *, passes: int = 1) -> CapturedLoop | None:
    """Run a script up to its call of model(), and return the length of its loop."""
    file = place / "train.py"
    text = _HEAD + textwrap.dedent(script)
    file.write_text(text)
    found: list[CapturedLoop | None] = []

    def model(*_: Any) -> None:
        caller = sys._getframe(1)
        found.append(captured_loop({str(file): text}, caller, passes_per_step=passes))
        raise _Reached

    def tqdm(iterable: Any, **_: Any) -> Any:
        return iterable

    scope = {"model": model, "loader": _Loader(), "tqdm": tqdm, "__name__": "__main__"}
    with pytest.raises(_Reached):
        exec(compile(text, str(file), "exec"), scope)
    return found[0]


_EPOCHS = """
for epoch in range(args.epochs):
    for batch in loader:
        model(batch)
"""
_IN_FUNCTIONS = """
def train_epoch(model, data, epoch):
    for step, batch in enumerate(tqdm(data, desc="x")):
        model(batch)

class Trainer:
    def __init__(self, epochs):
        self.epochs = epochs

    def fit(self):
        for epoch in tqdm(range(1, self.epochs + 1)):
            train_epoch(model, loader, epoch)

Trainer(7).fit()
"""
_RESUMED = """
start_epoch = 2
for epoch in range(start_epoch, args.epochs):
    for batch in loader:
        model(batch)
"""
_OF_ACCELERATE = """
updates = math.ceil(len(loader) / 1)
if args.max_train_steps is None:
    args.max_train_steps = args.epochs * updates
args.num_train_epochs = math.ceil(args.max_train_steps / updates)
completed_steps = 0
for epoch in range(args.start, args.num_train_epochs):
    for step, batch in enumerate(loader):
        if args.limit:
            pass
        model(batch)
        if accelerator.sync_gradients:
            completed_steps += 1
        if completed_steps >= args.max_train_steps:
            break
"""
_BY_STEPS = """
step = 100
while step < args.max_steps:
    for batch in loader:
        model(batch)
        step += 1
"""
_FOREVER = """
done = 0
while True:
    for batch in loader:
        model(batch)
        done += 1
        if done == args.max_steps:
            raise SystemExit
    if done > args.max_steps:
        break
"""
_FETCHES = """
data = iter(loader)
for step in range(args.max_steps):
    model(next(data))
"""
_SMOKE = """
for epoch in range(2):
    for step, batch in enumerate(loader):
        if step >= 10:
            break
        model(batch)
"""
_EARLY_STOP = """
step, loss = 0, 9.0
for epoch in range(2):
    for batch in loader:
        model(batch)
        step += 1
        if step >= 10 and loss < 0.1:
            break
"""
_MAYBE_LIMITED = """
step = 0
for epoch in range(2):
    for batch in loader:
        model(batch)
        step += 1
        if args.max_steps > 0 and step >= args.max_steps:
            break
        if args.limit is not None and step >= args.limit:
            break
"""
_PER_EPOCH = """
for epoch in range(2):
    step = 0
    for batch in loader:
        model(batch)
        step += 1
        if step >= args.max_steps:
            break
"""
_UNKNOWN = """
def epochs():
    yield 1
for epoch in epochs():
    for batch in loader:
        model(batch)
"""
_MICRO_BATCHES = """
step = 0
while True:
    for micro_step in range(4):
        model(loader[0])
    step += 1
    if step > 600:
        break
"""
_MICRO_BATCHES_OF_A_CLASS = """
class Trainer:
    def __init__(self, steps, every):
        self.step, self.steps, self.every = 0, steps, every

    def train(self):
        data = iter(loader)
        while self.step < self.steps:
            for _ in range(self.every):
                model(next(data)).backward()
            optimizer.step()
            self.step = self.step + 1

Trainer(700, 4).train()
"""
_PARTS_OF_A_BATCH = """
step = 0
while step < args.max_steps:
    loss = 0
    for part in range(8):
        loss += model(part)
    loss.backward()
    step += 1
"""
_PARTS_OF_THE_DATA = """
step = 0
while step < args.max_steps:
    for batch in loader:
        for part in range(8):
            model(part).backward()
        step += 1
"""
_COUNTED_EPOCHS = """
epoch = 1
while epoch <= args.epochs:
    for batch in loader:
        model(batch)
    epoch += 1
"""
_COUNT = """
import itertools
for step in itertools.count():
    if step == 30:
        break
    model(1)
"""
_CYCLE = """
import itertools
for step, batch in enumerate(itertools.cycle(loader)):
    if step >= 70:
        break
    model(batch)
"""
_OWN_CYCLE = """
def cycle(data):
    while True:
        yield from data
stream = cycle(loader)
for batch in stream:
    model(batch)
"""
_SLICED = """
from itertools import islice
for epoch in range(3):
    for batch in tqdm(islice(loader, 5)):
        model(batch)
"""
_ZIPPED = """
for step, batch in zip(range(args.max_steps), loader):
    model(batch)
"""
_LISTED = """
for rate in [1e-3, 1e-4]:
    for epoch in range(args.epochs):
        for batch in loader:
            model(batch)
"""
_BY_TIME = """
import time
start = time.time()
while time.time() - start < 3600:
    for batch in loader:
        model(batch)
"""
_BY_TOKENS = """
tokens = 0
while tokens < 1_000_000:
    for batch in loader:
        model(batch)
        tokens += 4096
"""


@pytest.mark.parametrize(
    ("script", "num_epochs", "max_steps"),
    [
        (_EPOCHS, 3, None),
        (_IN_FUNCTIONS, 7, None),
        (_RESUMED, 1, None),
        (_OF_ACCELERATE, 3, 120),
        (_BY_STEPS, None, 400),
        (_FOREVER, None, 501),
        (_FETCHES, None, 500),
        (_SMOKE, 2, 20),
        (_EARLY_STOP, 2, None),
        (_MAYBE_LIMITED, 2, 500),
        (_PER_EPOCH, 2, None),
        (_COUNTED_EPOCHS, 3, None),
        (_PARTS_OF_A_BATCH, None, 500),
        (_PARTS_OF_THE_DATA, None, 500),
        (_COUNT, None, 30),
        (_CYCLE, None, 70),
        (_SLICED, None, 15),
        (_ZIPPED, None, 500),
        (_LISTED, 6, None),
        ("for batch in loader:\n    model(batch)\n", 1, None),
        ("for _ in range(5):\n    for batch in iter(loader):\n        model(batch)\n", 5, None),
    ],
    ids=range(21),
)
def test_epochs_and_limits_are_read(
    tmp_path: Path, script: str, num_epochs: int | None, max_steps: int | None
) -> None:
    loop = _read(tmp_path, script)
    assert loop is not None
    assert (loop.num_epochs, loop.max_steps) == (num_epochs, max_steps)
    assert loop.where.startswith("train.py:")


@pytest.mark.parametrize("script", [_UNKNOWN, _OWN_CYCLE, _BY_TIME, _BY_TOKENS, "model(loader[0])\n"])
def test_what_the_source_does_not_show_is_unknown(tmp_path: Path, script: str) -> None:
    assert _read(tmp_path, script) is None


@pytest.mark.parametrize(
    ("script", "follows_data", "epochs_follow"),
    [(_OF_ACCELERATE, True, True), (_BY_STEPS, False, False), (_EPOCHS, False, False)],
)
def test_a_limit_that_comes_from_the_data_is_told_apart(
    tmp_path: Path, script: str, follows_data: bool, epochs_follow: bool
) -> None:
    loop = _read(tmp_path, script)
    assert loop is not None
    assert (loop.max_steps_follow_data, loop.epochs_follow_steps) == (follows_data, epochs_follow)


@pytest.mark.parametrize(
    ("passes", "micro_batches"),
    [(1, 4), (4, 1)],  # the capture does not see the window, and sees it
)
def test_micro_batches_of_an_inner_loop_are_one_step(tmp_path: Path, passes: int, micro_batches: int) -> None:
    loop = _read(tmp_path, _MICRO_BATCHES_OF_A_CLASS, passes=passes)
    assert loop is not None
    assert (loop.max_steps, loop.micro_batches) == (700, micro_batches)


@pytest.mark.parametrize(
    ("script", "max_steps"),
    [
        (_BY_STEPS, 100),
        (_FETCHES, 125),
        (_SMOKE, 5),
        (_OF_ACCELERATE, 120),
        (_MICRO_BATCHES, 601),
        (_MICRO_BATCHES_OF_A_CLASS, 700),
        (_CYCLE, 18),
    ],
)
def test_forward_passes_are_no_optimizer_steps(tmp_path: Path, script: str, max_steps: int) -> None:
    loop = _read(tmp_path, script, passes=4)
    assert loop is not None
    assert loop.max_steps == max_steps  # accelerate's loop only counts where gradients are synchronised
