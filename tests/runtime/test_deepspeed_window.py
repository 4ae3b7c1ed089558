"""When an engine's backward passes run, whether they end the window, and when its optimizer steps."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from accelerators import quiet

from zerofit.errors import UserError
from zerofit.runtime import deepspeed_window
from zerofit.runtime.deepspeed_window import Window

CLIPPED = ["step clipped to 0.5"]


class Engine:
    """Writes down what a DeepSpeedEngine is asked for."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self._config = SimpleNamespace(gradient_clipping=0.0)
        self.optimizer = SimpleNamespace(
            clip_grad=0.0,
            zero_grad=lambda: self.done.append("forget"),
            finalize_gradient_accumulation_boundary=lambda: self.done.append("reduce"),
        )

    def set_gradient_accumulation_boundary(self, *, is_boundary: bool) -> None:
        pass

    def zero_optimization_partition_gradients(self) -> bool:
        return True

    def step(self) -> None:
        norm = self.optimizer.clip_grad
        self.done.append(f"step clipped to {norm:g}" if norm else "step")

    def zero_grad(self) -> None:
        pass


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    def act(actions: str, *, script_steps: bool = True) -> list[str]:
        monkeypatch.setattr(deepspeed_window, "script_steps", lambda: script_steps)
        engine, state = Engine(), SimpleNamespace(sync_gradients=True)
        window = Window(engine, state, quiet())
        numbers = iter(range(1, 10))

        def backward(number: int) -> Callable[[bool], None]:
            return lambda is_boundary: engine.done.append(f"{number}{'!' if is_boundary else ''}")

        known: dict[str, Callable[[], Any]] = {
            "forward": window.go_on,
            "backward": lambda: window.wait(backward(next(numbers))),
            "trainer's-backward": lambda: window.run(backward(next(numbers)), is_boundary=True),
            "inner-backward": lambda: window.run(backward(next(numbers)), is_boundary=False),
            "step": window.step,
            "zero": window.zero_grad,
            "clip": lambda: window.clip(0.5, norm_type=2),
            "save": window.end,
        }
        for action in actions.split():
            state.sync_gradients = not action.startswith("~")
            known[action.removeprefix("~")]()
        return engine.done

    return act


@pytest.mark.parametrize(
    ("actions", "done"),
    [
        ("forward backward step zero forward backward step", ["1!", "step", "2!", "step"]),
        ("zero forward backward step zero forward backward step", ["1!", "step", "2!", "step"]),
        ("forward backward forward backward step", ["1", "2!", "step"]),
        ("forward forward backward backward step", ["1", "2!", "step"]),
        ("forward backward clip step forward backward clip step", ["1!", *CLIPPED, "2!", *CLIPPED]),
        ("forward backward forward backward clip step", ["1", "2!", *CLIPPED]),
        ("forward backward forward step", ["1", "reduce", "step"]),
        ("forward backward save forward backward step", ["1", "2!", "step"]),
        ("forward backward save", []),
        ("forward backward zero forward backward step", ["2!", "step"]),
        ("forward backward forward backward zero forward backward step", ["1", "forget", "3!", "step"]),
        ("forward ~inner-backward ~step ~zero forward backward step zero", ["1", "2!", "step"]),
        ("forward ~inner-backward ~clip ~step forward backward clip step", ["1", "2!", *CLIPPED]),
        ("step zero clip save", []),
        ("forward backward step step", ["1!", "step"]),
    ],
)
def test_a_script_that_steps_itself(actions: str, done: list[str], run: Callable[..., list[str]]) -> None:
    assert run(actions) == done


@pytest.mark.parametrize(
    ("actions", "done"),
    [
        ("forward backward forward backward save", ["1!", "step", "2!", "step"]),
        ("forward backward zero forward backward zero save", ["1!", "step", "2!", "step"]),
        ("forward backward clip forward backward clip save", ["1!", *CLIPPED, "2!", *CLIPPED]),
        ("forward ~inner-backward forward backward save", ["1", "2!", "step"]),
        # A Trainer steps by itself, which its user's source does not show.
        (
            "forward trainer's-backward clip step forward trainer's-backward clip step",
            ["1!", *CLIPPED, "2!", *CLIPPED],
        ),
        ("forward trainer's-backward step forward trainer's-backward step", ["1!", "step", "2!", "step"]),
    ],
)
def test_a_script_that_leaves_the_step_to_accelerate(
    actions: str, done: list[str], run: Callable[..., list[str]]
) -> None:
    assert run(actions, script_steps=False) == done


def test_clipping_without_a_step_is_refused(run: Callable[..., list[str]]) -> None:
    with pytest.raises(UserError) as refused:
        run("forward backward clip forward")
    assert refused.value.rule == "script-clips-between-steps"
