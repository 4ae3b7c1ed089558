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
    from zerofit.models.trace.run import Batch


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
    function: Callable[[Any, Batch], Any] | None = None
    """Returns the loss of a model on a batch; filled in by bind()."""

    def bind(self, model: Any, copied: Callable[..., Any]) -> None:
        """Make the loss one of a copy of the model.

        Args:
            model: the copy.
            copied: copies another module without its values; known= is what stands for objects in it, by id.
        """
        stand_in = copy.copy(self.trainer)
        others = []
        for name, value in vars(self.trainer).items():
            if name in ("model", "model_wrapped"):
                setattr(stand_in, name, model)
            elif hasattr(value, "named_parameters"):
                other = copied(value, known={id(self.model): model})
                setattr(stand_in, name, other)
                others.append(other)
        self.others = tuple(others)
        self.function = lambda model, batch: stand_in.compute_loss(model, batch[0][0])

    @contextmanager
    def autocast(self, model: Any, request: TraceRequest) -> Iterator[None]:
        """Let every model run under autocast, with outputs in fp32, as accelerate prepares them."""
        prepared = [one for one in self.others if all(inner is not model for inner in one.modules())]
        with ExitStack() as stack:
            for one in (model, *prepared) if request.autocast is not None else ():
                stack.enter_context(_autocasting(one, request))
            yield


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
