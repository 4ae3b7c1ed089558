"""True if a script steps its optimizer under DeepSpeed is seen in its source."""

import linecache
import sys
from pathlib import Path
from types import FrameType, ModuleType

import pytest

from zerofit.training.step import step_calls
from zerofit.training.step.step_calls import steps_optimizer

MAKES = "import torch\noptimizer = torch.optim.AdamW(model.parameters())\n"


@pytest.mark.parametrize(
    ("source", "steps"),
    [
        (MAKES + "optimizer.step()\n", True),
        (MAKES + "if step % 4 == 0:\n    optimizer.step()\n", True),
        (MAKES + "optimizer.zero_grad()\n", False),
        (MAKES + "scheduler.step()\nlr_sched.step()\n", False),
        ("def train(self):\n    self.opt.step()\n", True),
        ("def train(self):\n    self.lr_scheduler.step()\n", False),
        ("not python (\n", True),
    ],
)
def test_source(source: str, steps: bool) -> None:
    assert steps_optimizer(source) is steps


def test_a_step_without_deepspeed_only_is_none() -> None:
    source = (
        "import torch\nfrom accelerate import Accelerator\naccelerator = Accelerator()\n"
        "model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))\n"
        "for batch in data:\n"
        "    accelerator.backward(model(batch))\n"
        "    if accelerator.state.deepspeed_plugin is None:\n"
        "        optimizer.step()\n"
    )
    assert not steps_optimizer(source)


ASKS = "def ask():\n    return step_calls.script_steps(), step_calls.script_clips()\n"
STEPS = ASKS + "def train():\n    clip_grad_norm_(parameters, 1.0)\n    optimizer.step()\n"


def _asked(source: str, monkeypatch: pytest.MonkeyPatch, *, file: Path | str, name: str) -> tuple[bool, bool]:
    """Return what code of such a file and module hears, called by no other of the script's."""
    if isinstance(file, Path):
        file.parent.mkdir(parents=True)
        file.write_text(source)
    module = ModuleType(name)
    module.__file__ = str(file)
    module.step_calls = step_calls  # type: ignore[attr-defined]
    exec(compile(source, str(file), "exec"), module.__dict__)
    walk_stack = step_calls.walk_stack

    def own_frames(frame: FrameType | None) -> list[tuple[FrameType, int]]:
        return [one for one in walk_stack(frame) if one[0].f_globals is module.__dict__]

    monkeypatch.setattr(step_calls, "walk_stack", own_frames)
    monkeypatch.setattr(step_calls, "_script_files", set)
    return module.ask()


@pytest.mark.parametrize(
    ("source", "heard"),
    [(STEPS, (True, True)), (ASKS + "scheduler.step\n".replace("scheduler.step", "pass"), (False, False))],
)
@pytest.mark.parametrize("folder", ["code", "site-packages/mypkg"])
def test_code_that_runs_is_read_wherever_it_is(
    source: str, heard: tuple[bool, bool], folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _asked(source, monkeypatch, file=tmp_path / folder / "train.py", name="mypkg.train") == heard


def test_code_without_a_source_is_taken_to_step(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _asked(ASKS, monkeypatch, file="<string>", name="__main__") == (True, True)


def test_a_notebooks_cell_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = "/tmp/ipykernel_1/2.py"
    monkeypatch.setitem(linecache.cache, cell, (len(ASKS), None, ASKS.splitlines(keepends=True), cell))
    assert _asked(ASKS, monkeypatch, file=cell, name="__main__") == (False, False)


def test_modules_of_the_script_are_read_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("loops")
    module.__file__ = str(tmp_path / "loops.py")
    monkeypatch.setitem(sys.modules, "loops", module)
    assert module.__file__ in step_calls._script_files()
