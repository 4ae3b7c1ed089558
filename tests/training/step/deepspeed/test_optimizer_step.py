"""When an engine's backward passes run, whether they end the window, and when its optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerators import quiet, settings, wrap_all
from refusals import refusal

from zerofit.training.step import backward as backward_step
from zerofit.training.step.deepspeed import optimizer_step
from zerofit.training.step.deepspeed.optimizer_step import Window

CLIPPED = ["step clipped to 0.5"]


class Engine:
    """Writes down what a DeepSpeedEngine is asked for."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self._config = SimpleNamespace(gradient_clipping=0.0)
        self.norm, self.device = 3.0, "cpu"
        self.optimizer = SimpleNamespace(
            overflow=False,
            clip_grad=0.0,
            zero_grad=lambda: self.done.append("forget"),
            finalize_gradient_accumulation_boundary=lambda: self.done.append("reduce"),
        )

    def set_gradient_accumulation_boundary(self, *, is_boundary: bool) -> None:
        pass

    def zero_optimization_partition_gradients(self) -> bool:
        return True

    def step(self) -> None:
        self.optimizer.overflow = not math.isfinite(self.norm)
        if self.optimizer.overflow:
            self.done.append("skip")
            return
        norm = self.optimizer.clip_grad
        self.done.append(f"step clipped to {norm:g}" if norm else "step")

    def get_global_grad_norm(self) -> float:
        return self.norm

    def zero_grad(self) -> None:
        pass


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    def act(
        actions: str,
        *,
        script_steps: bool = True,
        script_clips: bool = True,
        settles: bool = False,
        norm: float = 3.0,
    ) -> list[str]:
        monkeypatch.setattr(optimizer_step, "script_steps", lambda: script_steps)
        monkeypatch.setattr(optimizer_step, "script_clips", lambda: script_clips)
        engine, state = Engine(), SimpleNamespace(sync_gradients=True)
        engine.norm = norm

        def settle(loss: Any) -> None:
            if settles:
                engine.done.append("settle" if loss is None else f"settle but {loss}")

        window = Window(engine, state, quiet(), settle=settle)
        numbers, losses = iter(range(1, 10)), iter("abcdefghi")

        def backward(number: int) -> Callable[[bool], None]:
            return lambda is_boundary: engine.done.append(f"{number}{'!' if is_boundary else ''}")

        known: dict[str, Callable[[], Any]] = {
            "forward": window.before_training_pass,
            "backward": lambda: window.delay(backward(next(numbers)), loss=next(losses)),
            "own-backward": window.begin_own_backward,
            "scheduler": window.run_due_step,
            "evaluation": window.run_due_step,
            "trainer's-backward": lambda: window.run(backward(next(numbers)), is_boundary=True),
            "inner-backward": lambda: window.run(backward(next(numbers)), is_boundary=False),
            "step": window.step,
            "zero": window.zero_grad,
            "clip": lambda: window.clip(0.5, norm_type=2),
            "save": window.run_due_step,
            "close": window.close,
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
        ("forward backward forward backward step", ["1", "2!", "step"]),
        ("forward backward clip step forward backward clip step", ["1!", *CLIPPED, "2!", *CLIPPED]),
        ("forward backward forward backward clip step", ["1", "2!", *CLIPPED]),
        ("forward backward forward step", ["1", "reduce", "step"]),
        ("forward backward save forward backward step", ["1", "2!", "step"]),
        ("forward backward zero forward backward step", ["2!", "step"]),
        ("forward backward forward backward zero forward backward step", ["1", "forget", "3!", "step"]),
        ("forward ~inner-backward ~step ~zero forward backward step zero", ["1", "2!", "step"]),
        ("forward ~inner-backward ~clip ~step forward backward clip step", ["1", "2!", *CLIPPED]),
        ("step zero clip save", []),
        ("forward backward step step", ["1!", "step"]),
        ("close", []),
        ("forward backward step forward backward close", ["1!", "step"]),  # an incomplete last window
        # The script's own backward ends the window where a step follows.
        ("forward own-backward step forward own-backward step", ["reduce", "step", "reduce", "step"]),
        ("forward own-backward clip step", ["reduce", *CLIPPED]),
        ("forward own-backward zero step", ["forget"]),
        ("forward own-backward forward backward step", ["1!", "step"]),
    ],
)
def test_a_script_that_steps_itself(actions: str, done: list[str], run: Callable[..., list[str]]) -> None:
    assert run(actions) == done


@pytest.mark.parametrize(
    ("actions", "done"),
    [
        ("forward backward forward backward save", ["1!", "step", "2!", "step"]),
        ("forward backward zero forward backward zero save", ["1!", "step", "2!", "step"]),
        ("forward backward", ["1!", "step"]),
        ("forward backward scheduler forward", ["1!", "step"]),
        ("forward ~inner-backward forward backward save", ["1", "2!", "step"]),
    ],
)
def test_a_step_that_is_left_to_accelerate_is_taken_in_backward(
    actions: str, done: list[str], run: Callable[..., list[str]]
) -> None:
    assert run(actions, script_steps=False, script_clips=False) == done


@pytest.mark.parametrize(
    ("actions", "done"),
    [
        ("forward backward clip forward backward clip save", ["1!", *CLIPPED, "2!", *CLIPPED]),
        ("forward backward scheduler clip", ["1!", "step"]),
        ("forward backward evaluation forward backward clip", ["1!", "step", "2!", *CLIPPED]),
        # A Trainer steps by itself, which its user's source does not show.
        (
            "forward trainer's-backward clip step forward trainer's-backward clip step",
            ["1!", *CLIPPED, "2!", *CLIPPED],
        ),
        ("forward trainer's-backward step forward trainer's-backward step", ["1!", "step", "2!", "step"]),
    ],
)
def test_a_step_that_is_left_to_accelerate_waits_for_clipping(
    actions: str, done: list[str], run: Callable[..., list[str]]
) -> None:
    assert run(actions, script_steps=False) == done


@pytest.mark.parametrize(
    ("actions", "done"),
    [
        # What the waiting loss depends on is to stay: its backward comes.
        ("forward backward step", ["settle but a", "1!", "step"]),
        ("forward backward forward backward step", ["1", "settle but b", "2!", "step"]),
        ("forward backward forward step", ["1", "settle", "reduce", "step"]),
        ("forward backward zero", ["settle"]),
        # Early pieces of the batch whose backward comes next.
        ("forward zero backward step", ["settle but a", "1!", "step"]),
    ],
)
def test_early_pieces_are_taken_back_before_gradients_are_reduced_or_dropped(
    actions: str, done: list[str], run: Callable[..., list[str]]
) -> None:
    assert run(actions, settles=True) == done


@pytest.mark.parametrize(
    "after", ["zero forward backward", "forward backward zero", "step zero forward backward"]
)
@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_a_clipped_step_without_a_norm_is_skipped_and_may_be_dropped(
    norm: float, after: str, run: Callable[..., list[str]]
) -> None:
    assert run(f"forward backward clip {after}", norm=norm) == ["1!", "skip"]


@pytest.mark.parametrize(
    ("actions", "script_steps", "rule"),
    [
        ("forward backward clip forward", True, "script-clips-between-steps"),
        ("forward backward clip zero", True, "script-drops-a-clipped-step"),
        ("forward backward step", False, "step-seen-too-late"),
        ("forward backward close", True, "optimizer-never-steps"),
        ("forward own-backward close", True, "optimizer-never-steps"),
        ("forward backward forward backward close", True, "optimizer-never-steps"),
        (8 * "zero forward backward " + "zero", True, "optimizer-never-steps"),
    ],
)
def test_what_deepspeed_can_not_do_is_refused(
    actions: str, script_steps: bool, rule: str, run: Callable[..., list[str]]
) -> None:
    assert refusal(run, actions, script_steps=script_steps, script_clips=False).rule == rule


def test_clipping_hands_back_a_tensor_and_the_configured_norm_comes_back_after_an_error() -> None:
    engine = Engine()
    window = Window(engine, SimpleNamespace(sync_gradients=True), quiet(), settle=lambda _: None)
    assert torch.equal(window.clip(0.5, norm_type=2), torch.tensor(0.0))
    window.run(lambda _: None, is_boundary=True)
    assert torch.equal(window.clip(0.5, norm_type=2), torch.tensor(3.0))
    window.step()
    window.run(lambda _: None, is_boundary=True)
    engine.step = lambda: 1 / 0  # type: ignore[assignment, method-assign, return-value]
    with pytest.raises(ZeroDivisionError):
        window.clip(0.5, norm_type=2)
    assert (engine._config.gradient_clipping, engine.optimizer.clip_grad) == (0.0, 0.0)


@pytest.mark.parametrize(("norm_type", "words"), [(1, "not 1"), ("inf", "not inf"), (2.0, None)])
def test_another_norm_is_noted(norm_type: Any, words: str | None) -> None:
    changes = quiet()
    window = Window(Engine(), SimpleNamespace(sync_gradients=True), changes, settle=lambda _: None)
    window.clip(0.5, norm_type=norm_type)
    assert [line.split(", ")[-1] for line in changes.lines] == ([words] if words else [])


class PreparedEngine(Engine):
    """An engine without ZeRO, whose backward passes are written down, too."""

    _running_engine_backward = False
    is_boundary = False

    def set_gradient_accumulation_boundary(self, *, is_boundary: bool) -> None:
        self.is_boundary = is_boundary

    def backward(self, loss: float, *, scale_wrt_gas: bool) -> None:
        self.done.append(f"{loss:g}{'!' if self.is_boundary else ''}")

    def _backward_prologue(self) -> None:
        pass

    def register_forward_pre_hook(self, hook: Any) -> None:
        pass

    def fp16_enabled(self) -> bool:
        return False

    zero_optimization = fp16_enabled


class Accelerator:
    """What is asked of accelerate's after prepare()."""

    gradient_accumulation_steps = 2
    _schedulers = ()

    def __init__(self, *, by_script: bool = True, is_last: bool = True) -> None:
        self.engine = PreparedEngine()
        self.optimizer = SimpleNamespace(optimizer=self.engine.optimizer, step=lambda: None)
        self._models, self._optimizers = [self.engine], [self.optimizer]
        self.deepspeed_engine_wrapped = SimpleNamespace(engine=self.engine)
        self._zerofit_by_script, self.sync_gradients = by_script, is_last
        self.gradient_state = SimpleNamespace(sync_gradients=is_last)

    def backward(self, loss: float) -> None:
        raise AssertionError("accelerate's own, which steps")


def test_a_prepared_engine_steps_where_the_script_steps() -> None:
    own = Accelerator()
    optimizer_step.watch(own, [], quiet())
    own.engine._backward_prologue()  # of the script's own loss.backward()
    assert own.engine.done == []
    own.optimizer.step()
    assert own.engine.done == ["reduce", "step"]


@pytest.mark.parametrize(
    ("by_script", "is_last", "done"),
    [(True, True, []), (True, False, ["0.5"]), (False, True, ["0.5!"]), (False, False, ["0.5"])],
)
def test_only_the_last_pass_of_a_scripts_own_window_waits_for_its_step(
    by_script: bool, is_last: bool, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Trainer's loop clips and steps right after its pass."""
    monkeypatch.setattr(optimizer_step, "script_steps", lambda: True)
    kind = type("Accelerator", (Accelerator,), {})
    wrap_all(kind, backward_step.wrappers(kind, settings(uses_deepspeed=True), quiet()))
    own = kind(by_script=by_script, is_last=is_last)
    optimizer_step.watch(own, [], quiet())
    own.backward(1.0)
    assert own.engine.done == done
