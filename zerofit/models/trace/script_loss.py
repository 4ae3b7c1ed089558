"""ScriptLoss: the loss computed by a script's Trainer, with all forward passes in it."""

from __future__ import annotations

import copy
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerofit.models.trace.prepare import attribute_replaced, autocast, upcast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerofit.core.allocation_log import TraceRequest


@dataclass(slots=True)
class ScriptLoss:
    """A Trainer's compute_loss(), run on copies without values of all models that the Trainer has.

    A preference loss calls a frozen reference model beside the trained one, and keeps its own tensors until
    the backward pass. The trained model's forward pass shows neither.
    """

    trainer: Any
    """transformers' Trainer, or an object with its compute_loss()."""
    model: Any
    """The Trainer's trained model, unwrapped."""
    others: tuple[Any, ...] = ()
    """Copies of the Trainer's other modules; set by bind()."""
    stand_in: Any = None
    """A copy of the Trainer that has copies of its models; set by bind()."""

    def bind(self, model: Any, copied: Callable[..., Any]) -> None:
        """Bind the loss to a copy of the model.

        Args:
            model: the copy.
            copied: copies another module without its values; known= maps ids of objects to replacements.
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
        prepared = [other for other in self.others if all(inner is not model for inner in other.modules())]
        with ExitStack() as stack:
            for other in (model, *prepared) if request.autocast is not None else ():
                stack.enter_context(_autocasting(other, request))
            return self.stand_in.compute_loss(model, inputs)


@contextmanager
def _autocasting(module: Any, request: TraceRequest) -> Iterator[None]:
    forward = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        with autocast(request):
            outputs = forward(*args, **kwargs)
        return upcast(outputs)

    with attribute_replaced(module, "forward", run):
        yield
