"""ScriptLoss: the loss that a Trainer of a script's own computes, with every forward pass that it makes."""

from __future__ import annotations

import copy
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerofit.models.trace.prepare import autocast, upcast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerofit.core.allocation_log import TraceRequest


@dataclass(slots=True)
class ScriptLoss:
    """A Trainer's compute_loss(), run on copies without values of all models that the Trainer holds.

    A preference loss calls a frozen reference model beside the one that trains, and keeps its own tensors up
    to the backward pass. Neither shows in the trained model's forward pass.
    """

    trainer: Any
    """transformers' Trainer, or an object with its compute_loss()."""
    model: Any
    """Of the Trainer, unwrapped: the one that trains."""
    others: tuple[Any, ...] = ()
    """Copies of the modules that the Trainer holds beside it; filled in by bind()."""
    stand_in: Any = None
    """The Trainer's copy that holds copies of its models; filled in by bind()."""

    def bind(self, model: Any, copied: Callable[..., Any]) -> None:
        """Make the loss one of a copy of the model.

        Args:
            model: the copy.
            copied: copies another module without its values; known= is what stands for objects in it, by id.
        """
        self.stand_in = copy.copy(self.trainer)
        others = []
        for name, value in vars(self.trainer).items():
            if name in ("model", "model_wrapped"):
                setattr(self.stand_in, name, model)
            elif hasattr(value, "named_parameters"):
                other = copied(value, known={id(self.model): model})
                setattr(self.stand_in, name, other)
                others.append(other)
        self.others = tuple(others)

    def compute(self, model: Any, inputs: Any, request: TraceRequest) -> Any:
        """Return the loss; under autocast each model runs as accelerate prepares it, with outputs in fp32."""
        prepared = [one for one in self.others if all(inner is not model for inner in one.modules())]
        with ExitStack() as stack:
            for one in (model, *prepared) if request.autocast is not None else ():
                stack.enter_context(_autocasting(one, request))
            return self.stand_in.compute_loss(model, inputs)


@contextmanager
def _autocasting(module: Any, request: TraceRequest) -> Iterator[None]:
    own = vars(module).get("forward")
    forward = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        with autocast(request):
            outputs = forward(*args, **kwargs)
        return upcast(outputs)

    module.forward = run
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
