"""DeepSpeedStage0: DeepSpeed without partitioning, in 16 bit with master weights, or in fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.planning.estimate.device_memory.optimizers import STATES, TEMPORARIES
from zerofit.planning.estimate.engines.zero_engine import (
    COPY,
    FP32,
    GRADIENTS,
    MASTER,
    WEIGHTS,
    DeepSpeedEngine,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

MESSAGE_ELEMENTS = 500_000_000
"""Gradients are reduced as soon as more than these are together (deepspeed 0.19.8, runtime/engine.py:151)."""

_UNFUSED = "deepspeed 0.19.8, runtime/fp16/unfused_optimizer.py"


class DeepSpeedStage0(DeepSpeedEngine):
    """FP16_UnfusedOptimizer around the script's optimizer in 16 bit; the script's optimizer alone in fp32."""

    EXPLANATIONS: Mapping[str, tuple[str, str]] = {
        WEIGHTS: ("c P_all", "deepspeed 0.19.8, runtime/engine.py:2093 (module.to)"),
        MASTER: ("4 P in 16 bit", f"{_UNFUSED}:78"),
        GRADIENTS: ("c P", "autograd, param.grad"),
        COPY: (
            "c min(P, 5e8 elements) at the all-reduce; 4 P at the step in 16 bit",
            f"deepspeed 0.19.8, runtime/engine.py:3796; {_UNFUSED}:191",
        ),
        STATES: ("what the optimizer keeps of P elements", "the optimizer's first step"),
        TEMPORARIES: ("what the optimizer's step makes of P elements", "the optimizer's step"),
    }

    @property
    def _has_masters(self) -> bool:
        return self.unit < FP32

    @property
    def _sizes(self) -> list[int]:
        return [self.elements[number] for number in self.trained]

    def initialise(self) -> None:
        """The model moves to the GPU; in 16 bit a first step on zeros makes the states."""
        self.take_whole()
        if not self._has_masters or not self.trained:
            return
        for number in self.trained:
            clone = self.take(self.bytes_of(number), COPY)
            self.take(self.elements[number] * FP32, MASTER)
            self.drop(clone)
        zeros = [block for number in self.trained for block in self.take(self.bytes_of(number), GRADIENTS)]
        zeros += [block for size in self._sizes for block in self.take(size * FP32, COPY)]
        self.run_optimizer(self._sizes)
        self.drop(zeros)

    def gradient_ready(self, parameter: int, block: int) -> None:
        """The gradient stays on the parameter."""
        self.keep_gradient(parameter, block)

    def backward_ends(self, *, is_boundary: bool) -> None:
        """Before a step the gradients are reduced, in copies of many of them in one."""
        if not is_boundary:
            return
        together: list[int] = []
        elements = 0
        for number in self.trained:
            if number not in self._gradients:  # a parameter that the loss does not reach
                self._gradients[number] = self.tape.allocate(self.bytes_of(number), GRADIENTS)
            together.append(self.bytes_of(number))
            elements += self.elements[number]
            if elements > MESSAGE_ELEMENTS:
                self._reduce(together)
                together, elements = [], 0
        self._reduce(together)

    def _reduce(self, together: list[int]) -> None:
        if len(together) > 1:  # a single tensor is reduced where it lies
            self.flash(sum(together), COPY)

    def step(self) -> None:
        """In 16 bit the gradients are copied to fp32; the norm of each takes an fp32 copy too."""
        copies: list[int] = []
        if self._has_masters:
            for number in self.trained:
                self.flash(self.elements[number] * FP32, COPY)
            copies = [block for size in self._sizes for block in self.take(size * FP32, COPY)]
        self.run_optimizer(self._sizes)
        self.drop(copies)
        self.drop(self._gradients.values())
        self._gradients = {}
